"""Models in the layer contract, annotated in their own code; see README.md."""

from __future__ import annotations

from elaswave_spmd.models.base import Batch, LayeredModel, call_layer, takes_keys
from elaswave_spmd.models.build import build_model, freeze_parameters
from elaswave_spmd.models.construction import constructing
from elaswave_spmd.models.gpt import GPT
from elaswave_spmd.models.llama import Llama
from elaswave_spmd.models.mlp import MLP

__all__ = [
    "GPT",
    "MLP",
    "Batch",
    "LayeredModel",
    "Llama",
    "build_model",
    "call_layer",
    "constructing",
    "freeze_parameters",
    "takes_keys",
]
