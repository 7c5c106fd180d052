"""Elastic SPMD training of PyTorch models. Nothing heavy is imported here: planning needs no torch."""

from __future__ import annotations

__version__ = "0.1.0"
