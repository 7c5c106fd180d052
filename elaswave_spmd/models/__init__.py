"""Models in the layer contract, annotated in their own code; see README.md."""

from __future__ import annotations

from elaswave_spmd.models.base import LayeredModel, call_layer, keys_parameter, takes_keys
from elaswave_spmd.models.build import attributes_given, build_model, close_names, freeze_parameters, import_model
from elaswave_spmd.models.construction import constructing
from elaswave_spmd.models.gpt import GPT
from elaswave_spmd.models.llama import Llama
from elaswave_spmd.models.mlp import MLP
from elaswave_spmd.models.objective import Batch, Loss, Metrics, Objective, other_loss
from elaswave_spmd.models.parameter_rules import decays_of, init_of

__all__ = [
    "GPT",
    "MLP",
    "Batch",
    "LayeredModel",
    "Llama",
    "Loss",
    "Metrics",
    "Objective",
    "attributes_given",
    "build_model",
    "call_layer",
    "close_names",
    "constructing",
    "decays_of",
    "freeze_parameters",
    "import_model",
    "init_of",
    "keys_parameter",
    "other_loss",
    "takes_keys",
]
