"""Families of published models: how Hugging Face names their tensors and sizes, and which our models can express.

A family consists of values and pure functions. It describes a model by *facts*: a mapping from the names of settings to
their values, with defaults filled in. Facts are read from a config.json and from our model, are compared with each
other, and are written to a config.json.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.models import LayeredModel

CONFIG_JSON = "config.json"
VOCABULARY = "model.args.vocab_size"

Facts = Mapping[str, Any]
"""Name of a setting -> the value that a model has for it."""


@dataclass(frozen=True)
class Stored:
    """The form in which a parameter of our model is stored in a published model.

    Args:
        name: the name of the tensor, without the prefix of its file (`stored_name`).
        transposed: True if the tensor is [in, out] (GPT-2's Conv1D), where our parameter is [out, in].
        heads: if not 0, the parameter is a fused q, k, v projection with this number of heads. Our rows are ordered
            (head, q k or v, width), the rows of published models (q k or v, head, width).
    """

    name: str
    transposed: bool = False
    heads: int = 0


class Family(Protocol):
    """One family of published models."""

    @property
    def model_type(self) -> str:
        """The `model_type` of the family in a config.json."""
        ...

    @property
    def target(self) -> str:
        """The `model.target` of our model for this family."""
        ...

    @property
    def prefix(self) -> str:
        """The prefix of all names of tensors but the head's, in files of a model with a head.

        Files of a model that was saved without a head have no prefix.
        """
        ...

    @property
    def class_name(self) -> str:
        """The class of transformers that loads a model of this family."""
        ...

    def facts_of_config(self, config: Mapping[str, Any], file: Path) -> Facts:
        """The facts in a config.json.

        Args:
            config: the fields of the config.json.
            file: its path, for errors.

        Raises:
            ConfigError: it asks for something that our model cannot express, or lacks a size.
        """
        ...

    def facts_of_model(self, model: LayeredModel) -> Facts:
        """The facts of our model, read from its modules and the shapes of its parameters."""
        ...

    def config_of(self, facts: Facts) -> dict[str, Any]:
        """The fields of config.json that these facts determine, without those that all families have."""
        ...

    def context(self, seq_len: int, dropout: float) -> dict[str, Any]:
        """The fields of config.json for the longest input, in tokens, and for the dropout."""
        ...

    def stored(self, name: str, heads: int) -> Stored:
        """The form in which the parameter `name` of our model is stored. `heads`: its number of attention heads."""
        ...

    def is_constant(self, tensor: str) -> bool:
        """True for a tensor that is not a parameter. Old files also hold attention masks and rotary frequencies."""
        ...


@dataclass(frozen=True)
class LlamaFamily:
    """Llama 1 to 3, and other models with the same config.json and tensors."""

    model_type = "llama"
    target = "llama"
    prefix = "model."
    class_name = "LlamaForCausalLM"

    def facts_of_config(self, config: Mapping[str, Any], file: Path) -> Facts:
        heads, d_model = _whole(config, "num_attention_heads", file), _whole(config, "hidden_size", file)
        expected = {
            "hidden_act": ("silu", "silu"),
            "attention_bias": (False, False),
            "mlp_bias": (False, False),
            "head_dim": (d_model // heads, d_model // heads),
        }
        _check_expressible(config, expected, file)
        rope = {**_object(config, "rope_scaling", file), **_object(config, "rope_parameters", file)}
        return {
            VOCABULARY: _whole(config, "vocab_size", file),
            "model.layers": _whole(config, "num_hidden_layers", file),
            "model.d_model": d_model,
            "model.heads": heads,
            "model.args.kv_heads": config.get("num_key_value_heads") or heads,
            "model.args.hidden": _whole(config, "intermediate_size", file),
            "model.args.theta": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
            "model.args.norm_eps": config.get("rms_norm_eps", 1e-6),
            "model.args.rope_scaling": _rope_scaling(rope, file),
            "model.args.tied": bool(config.get("tie_word_embeddings", False)),
        }

    def facts_of_model(self, model: LayeredModel) -> Facts:
        block: Any = model.get_submodule("block0")
        scaling = block.attn.scaling
        vocab_size, d_model = model.get_parameter("embed.weight").shape
        return {
            VOCABULARY: vocab_size,
            "model.layers": len(model.layer_names) - 2,
            "model.d_model": d_model,
            "model.heads": block.attn.heads,
            "model.args.kv_heads": block.attn.kv_heads,
            "model.args.hidden": block.mlp.gate.weight.shape[0],
            "model.args.theta": block.attn.theta,
            "model.args.norm_eps": block.attn_norm.eps,
            "model.args.rope_scaling": None if scaling is None else dataclasses.asdict(scaling),
            "model.args.tied": bool(model.ties),
        }

    def config_of(self, facts: Facts) -> dict[str, Any]:
        # The rotary settings are written in both forms: transformers 5 reads rope_parameters, older versions read
        # rope_theta and rope_scaling.
        theta, scaling = facts["model.args.theta"], facts["model.args.rope_scaling"]
        scaled = None if scaling is None else {"rope_type": "llama3", **scaling}
        return {
            "vocab_size": facts[VOCABULARY],
            "num_hidden_layers": facts["model.layers"],
            "hidden_size": facts["model.d_model"],
            "num_attention_heads": facts["model.heads"],
            "head_dim": facts["model.d_model"] // facts["model.heads"],
            "num_key_value_heads": facts["model.args.kv_heads"],
            "intermediate_size": facts["model.args.hidden"],
            "rope_theta": theta,
            "rope_scaling": scaled,
            "rope_parameters": {"rope_theta": theta, **(scaled or {"rope_type": "default"})},
            "rms_norm_eps": facts["model.args.norm_eps"],
            "tie_word_embeddings": facts["model.args.tied"],
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        }

    def context(self, seq_len: int, dropout: float) -> dict[str, Any]:
        # The Llama of transformers has dropout inside attention only, where ours has none.
        return {"max_position_embeddings": seq_len, "attention_dropout": 0.0}

    def stored(self, name: str, heads: int) -> Stored:
        layer, _, path = name.partition(".")
        if layer == "embed":
            return Stored("embed_tokens.weight")
        if layer == "head":
            return Stored("lm_head.weight" if path == "weight" else "norm.weight")
        return Stored(f"layers.{layer.removeprefix('block')}.{_IN_LLAMA[path]}")

    def is_constant(self, tensor: str) -> bool:
        return re.fullmatch(r".*rotary_emb\.inv_freq", tensor) is not None


@dataclass(frozen=True)
class Gpt2Family:
    """GPT-2, and other models with the same config.json and tensors."""

    model_type = "gpt2"
    target = "gpt"
    prefix = "transformer."
    class_name = "GPT2LMHeadModel"

    def facts_of_config(self, config: Mapping[str, Any], file: Path) -> Facts:
        d_model = _whole(config, "n_embd", file)
        hidden = _whole(config, "n_inner", file) if config.get("n_inner") else 4 * d_model
        activation = config.get("activation_function")
        expected = {
            # gelu_new and gelu_pytorch_tanh are two names of the same approximation by tanh.
            "activation_function": ("gelu_new", activation if activation == "gelu_pytorch_tanh" else "gelu_new"),
            "scale_attn_weights": (True, True),
            "scale_attn_by_inverse_layer_idx": (False, False),
            "add_cross_attention": (False, False),
            "n_inner": (None, hidden if hidden % d_model == 0 else f"a multiple of n_embd={d_model}"),
        }
        _check_expressible({**config, "n_inner": hidden}, expected, file)
        return {
            VOCABULARY: _whole(config, "vocab_size", file),
            "model.layers": _whole(config, "n_layer", file),
            "model.d_model": d_model,
            "model.heads": _whole(config, "n_head", file),
            "model.args.positions": _whole(config, "n_positions", file),
            "model.args.mlp_ratio": hidden // d_model,
            "model.args.norm_eps": config.get("layer_norm_epsilon", 1e-5),
            "model.args.tied": bool(config.get("tie_word_embeddings", True)),
        }

    def facts_of_model(self, model: LayeredModel) -> Facts:
        block: Any = model.get_submodule("block0")
        vocab_size, d_model = model.get_parameter("embed.weight").shape
        return {
            VOCABULARY: vocab_size,
            "model.layers": len(model.layer_names) - 2,
            "model.d_model": d_model,
            "model.heads": block.attn.heads,
            "model.args.positions": model.get_parameter("embed.positions").shape[0],
            "model.args.mlp_ratio": block.mlp.up.weight.shape[0] // d_model,
            "model.args.norm_eps": block.attn_norm.eps,
            "model.args.tied": bool(model.ties),
        }

    def config_of(self, facts: Facts) -> dict[str, Any]:
        return {
            "vocab_size": facts[VOCABULARY],
            "n_layer": facts["model.layers"],
            "n_embd": facts["model.d_model"],
            "n_head": facts["model.heads"],
            "n_positions": facts["model.args.positions"],
            "n_inner": facts["model.args.mlp_ratio"] * facts["model.d_model"],
            "layer_norm_epsilon": facts["model.args.norm_eps"],
            "tie_word_embeddings": facts["model.args.tied"],
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        }

    def context(self, seq_len: int, dropout: float) -> dict[str, Any]:
        return {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": 0.0}

    def stored(self, name: str, heads: int) -> Stored:
        layer, _, path = name.partition(".")
        if layer == "embed":
            return Stored("wte.weight" if path == "weight" else "wpe.weight")
        if layer == "head":
            return Stored("lm_head.weight" if path == "weight" else path.replace("norm", "ln_f"))
        module, _, kind = path.rpartition(".")
        is_matrix = kind == "weight" and not module.endswith("norm")
        theirs = f"h.{layer.removeprefix('block')}.{_IN_GPT2[module]}.{kind}"
        return Stored(theirs, is_matrix, heads if module == "attn.qkv" else 0)

    def is_constant(self, tensor: str) -> bool:
        return re.fullmatch(r".*\.attn\.(masked_)?bias", tensor) is not None


_IN_LLAMA = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn.q.weight": "self_attn.q_proj.weight",
    "attn.k.weight": "self_attn.k_proj.weight",
    "attn.v.weight": "self_attn.v_proj.weight",
    "attn.out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
_IN_GPT2 = {
    "attn_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}

FAMILIES: tuple[Family, ...] = (LlamaFamily(), Gpt2Family())


def family_of_target(target: str) -> Family | None:
    """The family that a `model.target` belongs to; None if it is of no family, as `mlp` or a user's own model."""
    return next((family for family in FAMILIES if family.target == target), None)


def family_of_config(config: Mapping[str, Any], file: Path) -> Family:
    """The family of a config.json.

    Raises:
        ConfigError: its model_type is that of no family here.
    """
    named = config.get("model_type")
    family = next((family for family in FAMILIES if family.model_type == named), None)
    if family is None:
        raise ConfigError(
            f"{file} is of model_type {named!r}",
            rule="weights of Hugging Face are read for the families that the built-in models can express",
            where=str(file),
            exists=", ".join(family.model_type for family in FAMILIES),
            fix="a model of your own with these layers (model.target=my_file.MyModel), and its weights as a "
            "safetensors file with its own names",
        )
    return family


def stored_name(stored: Stored, prefix: str) -> str:
    """The full name of a tensor in a file with this prefix. The head has no prefix in any file."""
    return stored.name if stored.name.startswith("lm_head.") else prefix + stored.name


def _whole(config: Mapping[str, Any], name: str, file: Path) -> int:
    """The field `name` of a config.json, which is a whole number of at least 1. Raises ConfigError if it is not."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{file} has {name}={value!r}",
            rule=f"{name} is a whole number, 1 or more",
            where=str(file),
            fix="download or copy the directory again",
        )
    return value


def _object(config: Mapping[str, Any], name: str, file: Path) -> Mapping[str, Any]:
    """The field `name` of a config.json, an object; empty if there is none. Raises ConfigError if it is no object."""
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"{file} has {name}={value!r}",
            rule=f"{name} is an object, or is left out",
            where=str(file),
            fix="download or copy the directory again",
        )
    return value


def _check_expressible(config: Mapping[str, Any], expected: Mapping[str, tuple[Any, Any]], file: Path) -> None:
    """Refuse a config.json that asks for something else than what our model computes.

    Args:
        config: the fields of the config.json.
        expected: name of a field -> (the value that a missing field stands for, the value that our model computes).
        file: the path of the config.json, for errors.

    Raises:
        ConfigError: a field has another value.
    """
    for name, (default, wanted) in expected.items():
        value = config.get(name, default)
        value = default if value is None else value
        if value != wanted:
            raise ConfigError(
                f"{file} has {name}={value!r}, which the built-in model cannot express",
                rule="published weights give published logits, or are refused",
                where=str(file),
                exists=f"{name}={wanted!r}",
                fix="a model of your own (model.target=my_file.MyModel), and its weights as a safetensors file",
            )


def _rope_scaling(rope: Mapping[str, Any], file: Path) -> dict[str, float] | None:
    """The Llama 3 scaling in the rotary settings of a config.json; None if frequencies are not scaled.

    Raises:
        ConfigError: frequencies are scaled in another way, or a field is missing.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    fields = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if kind != "llama3" or any(field not in rope for field in fields):
        raise ConfigError(
            f"{file} scales rotary positions by {dict(rope)!r}, which the built-in model cannot express",
            rule="published weights give published logits, or are refused",
            where=str(file),
            exists=f"rope_type default, or llama3 with {', '.join(fields)}",
            fix="a model of your own (model.target=my_file.MyModel), and its weights as a safetensors file",
        )
    return {field: rope[field] for field in fields}
