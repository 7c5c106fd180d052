"""Weights in and out: `model.init_from`, and models in the form of Hugging Face; see README.md."""
