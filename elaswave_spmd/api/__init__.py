"""The Python interface: `import elaswave_spmd as ew`, then `ew.train(...)`. See docs/from_python.md and docs/api.md."""
