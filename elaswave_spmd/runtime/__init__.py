"""Processes, links and devices. See README.md in this room; callers import from its modules.

Nothing is imported here: a fork server of its own (`python -m elaswave_spmd.runtime.processes.fork_server`) must not
find itself imported already, and should come up fast.
"""
