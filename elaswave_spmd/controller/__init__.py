"""The controller of a run: starts workers, decides membership, carries out what was decided, and records it."""
