"""Cost models that are computed, not measured: equal layers, and Llama shapes on a device of an assumed speed.

Modelled seconds are floating-point operations over a sustained rate. Tables show ratios, in which the rate cancels out
except against links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from elaswave_spmd.errors import PlanError
from elaswave_spmd.mesh import Mesh
from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.scheduling.cost_model import WEIGHT_SHARE, CostModel, LayerCost
from elaswave_spmd.scheduling.partition import balance_layers
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding import P, Shardings

STATE_SHARDED = Shardings(optim=P("dp"))
"""The specs of modelled placements: optimizer state is shared by the workers of a stage."""

_STATE, _VALUE, _GRADIENT = 12, 2, 4  # bytes of a parameter: fp32 master and two moments; bf16; fp32 sums


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama model: layers, width, width of the feed-forward part, heads of keys over heads, words."""

    layers: int
    width: int
    hidden: int
    key_share: float
    words: int

    @property
    def layer_parameters(self) -> int:
        """Parameters of one transformer layer, without norms."""
        return int(self.width * self.width * (2 + 2 * self.key_share)) + 3 * self.width * self.hidden


LLAMAS: Mapping[str, LlamaShape] = MappingProxyType(
    {
        "7B": LlamaShape(32, 4096, 11008, 1.0, 32000),
        "13B": LlamaShape(40, 5120, 13824, 1.0, 32000),
        "34B": LlamaShape(48, 8192, 22016, 1 / 8, 32000),
        "405B": LlamaShape(126, 16384, 53248, 1 / 16, 128256),
    }
)
"""Touvron et al., 2023 (7B, 13B; 34B as published with Code Llama); Llama 3, 2024 (405B)."""


def alike(
    layers: int,
    *,
    forward_s: float = 0.010,
    backward_s: float = 0.020,
    bandwidth: float = 25e9,
    latency_s: float = 1e-5,
    tokens: int = 4096,
    weight_share: float = WEIGHT_SHARE,
) -> CostModel:
    """Equal layers: the seconds of the emulated accelerator's defaults, the bytes of a layer of Llama 7B.

    Args:
        weight_share: the part of a backward that makes weight gradients, which our workers may put off; 0: backwards
            are whole.

    Raises:
        PlanError: no layer, or a share that is none.
    """
    shape = LLAMAS["7B"]
    one = _layer("", shape.layer_parameters, (forward_s, backward_s), shape.width, tokens, weight_share)
    return CostModel(tuple(replace(one, name=f"layer {i}") for i in range(layers)), bandwidth, latency_s)


def llama(
    name: str | LlamaShape,
    *,
    tokens: int = 4096,
    flops: float = 160e12,
    bandwidth: float = 25e9,
    latency_s: float = 1e-5,
    weight_share: float = WEIGHT_SHARE,
) -> CostModel:
    """Embedding, transformer layers and head of a Llama model.

    Forward takes 2 operations for each parameter and token and 2 x width x tokens for each token of causal attention,
    backward twice that. 24 bytes for each token and micro-batch of width stay between the two (fused attention, norms
    and the product inside the feed-forward part computed again), and as many until the weight gradients of a layer
    whose backward is in two parts: of all but the embedding.

    Args:
        name: a key of LLAMAS, or the sizes themselves.
        tokens: tokens of one micro-batch.
        flops: operations per second that one worker sustains.
        weight_share: as for `alike`.

    Raises:
        PlanError: no such model, or a share that is none.
    """
    if isinstance(name, str) and name not in LLAMAS:
        raise PlanError(f"no Llama shape is called {name}", where="model", exists=", ".join(LLAMAS), fix="llama: 7B")
    shape = LLAMAS[name] if isinstance(name, str) else name
    attention = 2.0 * shape.width * tokens
    inside = (2.0 * shape.layer_parameters + attention) * tokens / flops
    head = 2.0 * shape.width * shape.words * tokens / flops
    words = shape.width * shape.words
    layers = [_layer("embed", words, (0.0, 0.0), shape.width, tokens, kept=0)]
    layers += [
        _layer(f"layer {i}", shape.layer_parameters, (inside, 2 * inside), shape.width, tokens, weight_share)
        for i in range(shape.layers)
    ]
    layers.append(_layer("head", words, (head, 2 * head), shape.width, tokens, weight_share, kept=4))
    return CostModel(tuple(layers), bandwidth, latency_s)


def healthy(mesh: Mesh, costs: CostModel, num_microbatches: int, shardings: Shardings = STATE_SHARDED) -> Placement:
    """The placement of a new mesh: layers balanced over the stages by their seconds, micro-batches assigned evenly.

    Raises:
        PlanError: more stages than layers, or fewer micro-batches than one for each worker of the first stage.
    """
    sizes = [len(members) for members in mesh.stages]
    if len(sizes) > len(costs.layers):
        raise PlanError(
            f"{len(sizes)} stages cannot share {len(costs.layers)} layers",
            rule="every stage has at least one layer",
            where=f"mesh {mesh.shape}",
            fix=f"at most pp{len(costs.layers)}, or model.layers={len(sizes) - 2}",
        )
    if num_microbatches < 1:
        raise PlanError(
            f"microbatches={num_microbatches} is no step",
            rule="a step has at least one micro-batch",
            where=f"microbatches={num_microbatches}",
            fix="microbatches=16",
        )
    cuts = balance_layers([layer.seconds for layer in costs.layers], sizes)
    counts = tuple(even_counts(num_microbatches, size) for size in sizes)
    return Placement(mesh, num_microbatches, cuts, counts, shardings)


def _layer(
    name: str,
    parameters: int,
    seconds: tuple[float, float],
    width: int,
    tokens: int,
    weight_share: float = 0.0,
    kept: int = 24,
) -> LayerCost:
    return LayerCost(
        name,
        *seconds,
        state_bytes=_STATE * parameters,
        value_bytes=_VALUE * parameters,
        gradient_bytes=_GRADIENT * parameters,
        activation_bytes=kept * tokens * width,
        boundary_bytes=_VALUE * tokens * width,
        put_off_bytes=kept * tokens * width,
        weight_share=weight_share,
    )
