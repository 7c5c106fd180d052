"""Benchmarks: each `python -m benchmarks.NAME` prints a table and, with --json PATH, writes what it measured."""
