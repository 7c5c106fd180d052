"""Tiny models in the form of Hugging Face, whose weights follow from the names of their tensors, and their logits.

`published_logits.json` beside this file has what transformers computes with them, recorded by
tests/record_published_logits.py, so that tests need no transformers.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from elaswave_spmd.models import GPT, LayeredModel, Llama

VOCABULARY, TOKENS = 40, 12
LOGITS = Path(__file__).with_name("published_logits.json")


@dataclass(frozen=True)
class Published:
    """One model.

    Args:
        config: its config.json.
        shapes: of its tensors.
        target: `model.target` of ours.
        sizes: arguments of our model's constructor; `vocab_size` and `seq_len` are the same for all.
    """

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    target: str
    sizes: Mapping[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """The weights."""
        return {name: _values(name, shape) for name, shape in self.shapes.items()}

    def write(self, folder: Path, **changes: Any) -> Path:
        """Write config.json and model.safetensors; `changes` are laid over the configuration."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**self.config, **changes}))
        save_file(self.tensors(), folder / "model.safetensors")
        return folder

    def model(self, **changes: Any) -> LayeredModel:
        """Our model, without values."""
        sizes = {"vocab_size": VOCABULARY, **self.sizes, **changes}
        return Llama(**sizes) if self.target == "llama" else GPT(**sizes)


def _values(name: str, shape: tuple[int, ...]) -> Tensor:
    number = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    wave = torch.sin(number * 0.7321 + zlib.crc32(name.encode()) % 1000) * 0.15
    is_norm = any(word in name for word in ("norm", "ln_")) and name.endswith("weight")
    return (wave + is_norm).to(torch.float32).reshape(shape)


def tokens() -> Tensor:
    """Two inputs, int64 [2, TOKENS]."""
    return (torch.arange(2 * TOKENS) * 7 % VOCABULARY).reshape(2, TOKENS)


def _llama(tied: bool) -> Published:
    d, hidden, layers, heads, kv_heads = 16, 24, 2, 4, 2
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": d,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-3,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", **scaling} if tied else None,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, d), "model.norm.weight": (d,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, d)
    for i in range(layers):
        block = f"model.layers.{i}"
        shapes |= {f"{block}.input_layernorm.weight": (d,), f"{block}.post_attention_layernorm.weight": (d,)}
        shapes |= {f"{block}.self_attn.{n}_proj.weight": (d, d) for n in "qo"}
        shapes |= {f"{block}.self_attn.{n}_proj.weight": (d * kv_heads // heads, d) for n in "kv"}
        shapes |= {f"{block}.mlp.{n}_proj.weight": (hidden, d) for n in ("gate", "up")}
        shapes[f"{block}.mlp.down_proj.weight"] = (d, hidden)
    sizes = {"layers": layers, "d_model": d, "heads": heads, "kv_heads": kv_heads, "hidden": hidden}
    more = {"theta": 500000.0, "norm_eps": 1e-3, "tied": tied, "rope_scaling": scaling if tied else None}
    return Published(config, shapes, "llama", {**sizes, **more})


def _gpt2(tied: bool) -> Published:
    d, layers, heads, positions = 16, 2, 4, 20
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_positions": positions,
        "n_embd": d,
        "n_layer": layers,
        "n_head": heads,
        "n_inner": 32,
        "layer_norm_epsilon": 1e-3,
        "activation_function": "gelu_new",
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (VOCABULARY, d),
        "transformer.wpe.weight": (positions, d),
        "transformer.ln_f.weight": (d,),
        "transformer.ln_f.bias": (d,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, d)
    for i in range(layers):
        block = f"transformer.h.{i}"
        linears = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, 32), "mlp.c_proj": (32, d)}
        for name, shape in linears.items():
            shapes |= {f"{block}.{name}.weight": shape, f"{block}.{name}.bias": shape[1:]}
        shapes |= {f"{block}.ln_{n}.{kind}": (d,) for n in (1, 2) for kind in ("weight", "bias")}
    sizes = {"layers": layers, "d_model": d, "heads": heads, "mlp_ratio": 2, "seq_len": TOKENS, "positions": positions}
    return Published(config, shapes, "gpt", {**sizes, "norm_eps": 1e-3, "tied": tied})


MODELS: Mapping[str, Published] = {
    "llama3": _llama(True),
    "llama2": _llama(False),
    "gpt2": _gpt2(True),
    "gpt2_untied": _gpt2(False),
}


def recorded_logits(name: str) -> Tensor:
    """What transformers computes for `tokens`, fp32 [2, TOKENS, VOCABULARY]."""
    return torch.tensor(json.loads(LOGITS.read_text())[name], dtype=torch.float32)
