"""Cost models that are computed, not measured: equal layers, and Llama shapes on a device of an assumed speed.

Modelled seconds are floating-point operations divided by a sustained rate. Tables show ratios, in which the rate
cancels out, except relative to the speed of links.
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
"""The shardings of modelled placements: optimizer state is sharded over the workers of a stage."""

# Bytes of a parameter: fp32 master and two moments; its bf16 value; its gradient in fp32.
_STATE, _VALUE, _GRADIENT = 12, 2, 4


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama model.

    Args:
        layers: the number of transformer layers.
        width: the model's width, d_model.
        hidden: the width of the feed-forward part.
        key_share: the number of key and value heads divided by the number of heads.
        words: the size of the vocabulary.
    """

    layers: int
    width: int
    hidden: int
    key_share: float
    words: int

    @property
    def layer_parameters(self) -> int:
        """The number of parameters of one transformer layer, without norms."""
        return int(self.width * self.width * (2 + 2 * self.key_share)) + 3 * self.width * self.hidden


LLAMAS: Mapping[str, LlamaShape] = MappingProxyType(
    {
        "7B": LlamaShape(32, 4096, 11008, 1.0, 32000),
        "13B": LlamaShape(40, 5120, 13824, 1.0, 32000),
        "34B": LlamaShape(48, 8192, 22016, 1 / 8, 32000),
        "405B": LlamaShape(126, 16384, 53248, 1 / 16, 128256),
    }
)
"""Sources: Touvron et al., 2023 (7B, 13B; 34B as published with Code Llama); Llama 3, 2024 (405B)."""


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
    """A model of equal layers, with the seconds of the emulated accelerator's defaults and the bytes of Llama 7B.

    Args:
        layers: the number of layers.
        forward_s, backward_s: the seconds of one micro-batch through a layer.
        bandwidth: the bandwidth of a link, in bytes per second.
        latency_s: the latency of a link, in seconds.
        tokens: the number of tokens of one micro-batch, which decides the size of activations.
        weight_share: the fraction of a backward that makes weight gradients, which our workers may put off. 0 if
            backwards are whole.

    Raises:
        PlanError: there is no layer, or `weight_share` is not a valid fraction.
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
    """The cost model of a Llama model: embedding, transformer layers and head.

    A forward takes 2 operations for each parameter and token, and 2 x width x tokens for each token of causal
    attention. A backward takes twice that. For each token of a micro-batch a transformer layer keeps 24 x width bytes
    from the forward to the backward, with fused attention, and with the norms and the product inside the feed-forward
    part computed again. It keeps as many from the backward to the weight gradients, if the backward is in two parts,
    which it may be in all layers but the embedding.

    Args:
        name: a key of LLAMAS, or the sizes themselves.
        tokens: the number of tokens of one micro-batch.
        flops: the operations per second that one worker sustains.
        bandwidth, latency_s, weight_share: as for `alike`.

    Raises:
        PlanError: there is no such model, or `weight_share` is not a valid fraction.
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
    """The placement on a healthy mesh: layers are balanced over the stages by their seconds, micro-batches are even.

    Raises:
        PlanError: there are more stages than layers, or there is no micro-batch.
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
