"""One worker process: its training loop, its share of the state, and the programs that run layers."""
