"""Layer programs: what runs a layer forward and backward, eagerly, compiled by inductor or XLA, or emulated."""
