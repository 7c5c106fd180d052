"""Layer programs: what runs one layer on one micro-batch. README.md describes the kinds and what they promise."""
