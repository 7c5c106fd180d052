"""The kinds of devices: a module for each, with its name in `runtime.device` and a `KIND`. None imports torch."""
