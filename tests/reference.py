"""The one-process reference: what every mesh, sharding and fault history must reproduce bit for bit.

It shares the models and the keyed random numbers with the framework and nothing else: one process, micro-batch by
micro-batch, layer by layer, the canonical tree by recursion, the optimizer on whole parameters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.determinism import Keys, materialize, sample_ids
from elaswave_spmd.models import Batch, LayeredModel, call_layer


@dataclass(frozen=True)
class Settings:
    """A run. `optimizer` is adamw or sgd; `clip` 0 means never; `lr_at` maps steps 1, 2, ... to learning rates.

    `groups`: (patterns of names, factor of the learning rate or None, weight decay or None).
    """

    lr_at: Callable[[int], float]
    seed: int = 0
    steps: int = 1
    global_batch: int = 4
    microbatch_size: int = 1
    optimizer: str = "adamw"
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9
    clip: float = 1.0
    dtype: torch.dtype = torch.float32
    page_size: int = 4096
    groups: tuple[tuple[tuple[str, ...], float | None, float | None], ...] = ()
    ema: float | None = None

    def group_of(self, name: str) -> tuple[float, float | None]:
        """The factor of a parameter's learning rate, and its weight decay; None: as the model has it."""
        scale, decay = 1.0, None
        for patterns, group_scale, group_decay in self.groups:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                scale = scale if group_scale is None else group_scale
                decay = decay if group_decay is None else group_decay
        return scale, decay

    def decay_of(self, model: LayeredModel, name: str, shape: torch.Size) -> float:
        """The weight decay of a parameter."""
        decay = self.group_of(name)[1]
        if decay is not None:
            return decay
        return self.weight_decay if model.decays(name, tuple(shape)) else 0.0


@dataclass(frozen=True)
class Result:
    loss_hex: list[str]
    grad_norm_hex: list[str]
    weights: dict[str, Tensor]
    averages: dict[str, Tensor]

    @property
    def weights_sha256(self) -> str:
        parts = (name.encode() + w.numpy().astype("<f4").tobytes() for name, w in sorted(self.weights.items()))
        return hashlib.sha256(b"".join(parts)).hexdigest()


def train(model: LayeredModel, data: Any, s: Settings) -> Result:
    """Train `model`, whose parameters are overwritten; `data.batch(ids)` is (tokens, targets), int64 [B, T] each."""
    owner = {t.reader: t.owner for t in model.ties}
    parameters = dict(model.named_parameters())
    masters = {name: _initial(model, name, p.shape, s.seed) for name, p in parameters.items() if name not in owner}
    averages = {name: m.clone() for name, m in masters.items()} if s.ema is not None else {}
    state = {name: [torch.zeros_like(m), torch.zeros_like(m)] for name, m in masters.items()}
    losses, norms = [], []
    for step in range(1, s.steps + 1):
        for name, p in parameters.items():
            p.data = masters[owner.get(name, name)].to(s.dtype, copy=True)
        *uses, loss = tree(
            lambda microbatch, step=step: microbatch_leaves(model, data, s, step, microbatch),
            0,
            s.global_batch // s.microbatch_size,
        )
        grads: dict[str, Tensor] = {}
        for name, g in zip(parameters, uses, strict=True):  # in layer order, so a tied parameter's uses are too
            if not parameters[name].requires_grad:
                continue  # frozen
            home = owner.get(name, name)
            grads[home] = grads[home] + g if home in grads else g
        norm = gradient_norm(model, grads, s)
        losses, norms = [*losses, float(loss).hex()], [*norms, norm.hex()]
        if math.isfinite(norm):
            divisor = max(1.0, norm / s.clip) if s.clip > 0 else 1.0
            for name, g in grads.items():
                decay, lr = s.decay_of(model, name, g.shape), s.lr_at(step) * s.group_of(name)[0]
                g = g / torch.tensor(divisor) if divisor > 1 else g
                update(masters[name], g, state[name], s, step, lr, decay)
                if s.ema is not None:
                    decay = float(torch.tensor(s.ema))  # as fp32
                    averages[name] = averages[name] * decay + masters[name] * (1.0 - decay)
    return Result(losses, norms, masters, averages)


def tree(leaf: Callable[[int], Sequence[Tensor]], lo: int, hi: int) -> list[Tensor]:
    """The canonical tree over micro-batches [lo, hi): split at the largest power of two below the length, left +
    right.
    """
    if hi - lo == 1:
        return list(leaf(lo))
    middle = lo + (1 << ((hi - lo - 1).bit_length() - 1))
    return [left + right for left, right in zip(tree(leaf, lo, middle), tree(leaf, middle, hi), strict=True)]


def microbatch_leaves(model: LayeredModel, data: Any, s: Settings, step: int, microbatch: int) -> list[Tensor]:
    """One micro-batch: the fp32 gradient of each parameter, every use of a tied one by itself, and last the scaled
    loss.
    """
    ids = sample_ids(s.seed, step, s.global_batch, len(data))[
        microbatch * s.microbatch_size : (microbatch + 1) * s.microbatch_size
    ]
    tokens, targets = (torch.as_tensor(np.ascontiguousarray(z)) for z in data.batch(ids))
    ends, x = [], tokens
    for number, layer in enumerate(model.layers):
        x = begin(x, s.dtype, graded=number > 0)
        ends.append((x, call_layer(layer, x, Keys.make(s.seed, step, ids, number))))
        x = ends[-1][1]
    loss = model.loss(x, Batch(tokens, targets)) * (1.0 / (s.global_batch * tokens.shape[1]))
    ends[-1], grads = (ends[-1][0], loss), None
    for x, y in reversed(ends):
        if outputs := [one for one in _parts(y) if one.requires_grad]:
            torch.autograd.backward(outputs, grads)  # layers before the first trained parameter have nothing to do
        graded = [one for one in _parts(x) if one.requires_grad]
        grads = [torch.zeros_like(one) if one.grad is None else _plain(one.grad) for one in graded]
    leaves = []
    for p in model.parameters():
        leaves.append(torch.zeros(p.shape) if p.grad is None else 0.0 + p.grad.float())  # + settles -0.0
        p.grad = None
    return [*leaves, 0.0 + loss.detach()]


def _parts(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else value


def _plain(value: Tensor) -> Tensor:
    """Contiguous, and with the strides of its shape: `contiguous` leaves those of dims of size 1 as they are."""
    return torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())


def begin(x: Tensor | tuple[Tensor, ...], dtype: torch.dtype, *, graded: bool) -> Any:
    """A layer's input: of a tuple what the layer before has made with a gradient gets one."""
    if isinstance(x, Tensor):
        return _plain(x).requires_grad_(graded)
    made = [(one.to(dtype) if one.is_floating_point() else one) for one in x]
    leaves = [_plain(one).requires_grad_(one.requires_grad) for one in made]
    return type(x)(*leaves) if hasattr(x, "_fields") else tuple(leaves)  # pyright: ignore[reportArgumentType]


def gradient_norm(model: LayeredModel, grads: dict[str, Tensor], s: Settings) -> float:
    """Square root of the exactly rounded sum over pages of their sums of squares."""
    tied, values = {t.owner for t in model.ties}, []
    for layer in model.layer_names:
        own = [name for name in grads if name.startswith(f"{layer}.")]
        rest = sorted(set(own) - tied, key=lambda n: (*_order(model, n, grads[n].shape, s), own.index(n)))
        for block in [*([name] for name in own if name in tied), rest]:
            flat = [_padded(grads[n]) for n in block]
            values += [_page_value(page) for page in torch.cat(flat).split(s.page_size)] if flat else []
    return math.sqrt(math.fsum(values)) if all(map(math.isfinite, values)) else math.nan


def _order(model: LayeredModel, name: str, shape: torch.Size, s: Settings) -> tuple[bool, float, float]:
    """The place of a parameter in its layer: with weight decay first, then by what groups say of it."""
    scale, decay = s.group_of(name)
    decays = model.decays(name, tuple(shape)) if decay is None else decay > 0
    return not decays, scale, decay or -1.0


def _padded(z: Tensor) -> Tensor:
    return torch.nn.functional.pad(z.flatten(), (0, -z.numel() % 64))


def _page_value(page: Tensor) -> float:
    x = torch.nn.functional.pad(page * page, (0, (1 << (page.numel() - 1).bit_length()) - page.numel()))
    while x.numel() > 1:
        x = x[: x.numel() // 2] + x[x.numel() // 2 :]
    return float(x)


def update(p: Tensor, g: Tensor, state: list[Tensor], s: Settings, step: int, lr: float, decay: float) -> None:
    """One parameter's update in place."""
    if s.optimizer == "sgd":
        p.add_(state[0].mul_(s.momentum).add_(g.add(p, alpha=decay)), alpha=-lr)
        return
    kw: dict[str, Any] = {"lr": lr, "beta1": s.betas[0], "beta2": s.betas[1], "eps": s.eps}
    kw |= {"weight_decay": decay, "amsgrad": False, "maximize": False}
    # In whole vectors, as state lies in pages: the kernel rounds the odd elements at the end in another way.
    flat = [[_padded(z)] for z in (p, g, *state)]
    torch._fused_adamw_(*flat, [], [torch.tensor(float(step))], **kw)  # pyright: ignore
    for z, (new,) in zip((p, *state), (flat[0], *flat[2:]), strict=True):
        z.copy_(new[: z.numel()].view(z.shape))


def _initial(model: LayeredModel, name: str, shape: torch.Size, seed: int) -> Tensor:
    if type(model).init is LayeredModel.init:  # what its constructors made
        return model.get_parameter(name).detach().float().clone()
    return torch.from_numpy(materialize(model.init(name, tuple(shape)), seed, name, 0, shape.numel())).view(shape)
