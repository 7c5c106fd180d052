"""A run on a Ray cluster: `train ... runtime.launcher=ray`. Ray places and watches; it carries no training data."""
