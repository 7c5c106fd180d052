"""An open benchmark of elastic training: the same failures, model, data order and machine for every system.

docs/elastic_benchmark.md has the rules, the form of the trace and of the lines, and how to add a system.
"""
