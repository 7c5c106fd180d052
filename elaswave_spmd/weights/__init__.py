"""Weights in and out of runs: `model.init_from`, and models in the format of Hugging Face. See README.md."""
