"""The programs of the systems, one file each, run in an environment of their own. They share `problem` and `lines`."""
