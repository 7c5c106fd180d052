"""The Python interface: `import elaswave_spmd as ew`, then `ew.train(...)`. See README.md, "From Python"."""
