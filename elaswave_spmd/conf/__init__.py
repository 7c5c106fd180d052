"""The settings of a run. See README.md."""
