"""The demonstration: a run whose worker is killed has the bits of the undisturbed one."""
