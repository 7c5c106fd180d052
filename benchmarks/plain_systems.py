"""The other side of steady_state: plain PyTorch training steps over gloo, written as PyTorch's documentation advises.

Models are built on the meta device, and only what a process keeps gets memory. All use the same model code, initial
values, samples, micro-batches (`train.microbatch_size` sequences), global batch, fused AdamW with the same decay
groups, and clipping by the global norm. Gradients of micro-batches are added up in place and reduced once per step
wherever that is faster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elaswave_spmd.data import open_split
from elaswave_spmd.determinism import materialize, sample_ids
from elaswave_spmd.models import Batch, LayeredModel
from elaswave_spmd.worker.plan_run import RunPlan, make_model


class System(Protocol):
    """One worker of a system."""

    def step(self, number: int) -> float:
        """Trains step `number`, from 1. Returns this worker's share of the loss, which is the mean over the batch."""
        ...


class Windows:
    """This worker's micro-batches of a step: the same samples as in our run. `share`: its range of micro-batches."""

    def __init__(self, plan: RunPlan, share: range, place: torch.device | None = None) -> None:
        self._job, self._share, self._place = plan.job, share, place or torch.device("cpu")
        self._train = open_split(plan.data, "train")

    def of_step(self, step: int) -> list[Batch]:
        size = self._job.microbatch_size
        ids = sample_ids(self._job.seed, step, self._job.global_batch, len(self._train))
        return [self._batch(ids[microbatch * size : (microbatch + 1) * size]) for microbatch in self._share]

    def _batch(self, ids: np.ndarray) -> Batch:
        arrays = (torch.from_numpy(np.ascontiguousarray(z)) for z in self._train.batch(ids))
        if self._place.type == "cpu":
            return Batch(*arrays)
        return Batch(*(values.pin_memory().to(self._place, non_blocking=True) for values in arrays))


def empty_model(plan: RunPlan) -> LayeredModel:
    """The whole model on the meta device."""
    return make_model(plan.settings, plan.data.vocab_size)


def fill(plan: RunPlan, model: LayeredModel, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Sets parameters to the initial values that our run has. A DTensor gets its shard of them."""
    with torch.no_grad():
        for name, parameter in named:
            values = materialize(model.init(name, tuple(parameter.shape)), plan.job.seed, name, 0, parameter.numel())
            whole = torch.from_numpy(values).view(parameter.shape)
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                shards = whole.chunk(mesh.size())
                if mesh.get_local_rank() < len(shards):
                    parameter.to_local().copy_(shards[mesh.get_local_rank()])
            else:
                parameter.copy_(whole)


def adamw(plan: RunPlan, model: LayeredModel, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    """Fused AdamW with our run's decay groups and its rate, which is constant in this benchmark."""
    o = plan.settings.optim
    named = list(parameters)
    groups = []
    for decays in (True, False):
        members = [p for name, p in named if model.decays(name, tuple(p.shape)) == decays]
        if members:
            groups.append({"params": members, "weight_decay": o.weight_decay * decays})
    return torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps, fused=True)


class Replicated:
    """One process, or DistributedDataParallel: gradients live in its buckets, one all-reduce per bucket and step.

    (static_graph=True fails beside no_sync in torch 2.13; other bucket and zero_grad settings were no faster.)
    """

    def __init__(self, plan: RunPlan, rank: int, world: int) -> None:
        self._place = torch.device(plan.settings.runtime.device)
        self._half = plan.settings.runtime.dtype == "bf16"
        self._model = empty_model(plan).to_empty(device=self._place)
        self._model.share_ties()
        fill(plan, self._model, self._model.named_parameters())
        share = even_share(plan.job.num_microbatches, rank, world)
        self._clip, self._windows = plan.job.clip, Windows(plan, share, self._place)
        # DDP divides by the number of processes; the loss is a mean over the global batch.
        self._scale, self._world = world / plan.job.tokens_per_step, world
        self._replica = DistributedDataParallel(self._model, gradient_as_bucket_view=True) if world > 1 else None
        self._optimizer = adamw(plan, self._model, self._model.named_parameters())

    def step(self, number: int) -> float:
        batches = self._windows.of_step(number)
        forward = self._replica if self._replica is not None else self._model
        total = torch.zeros((), device=self._place)
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            quiet = self._replica.no_sync() if self._replica is not None and not last else contextlib.nullcontext()
            with quiet:
                with torch.autocast(self._place.type, torch.bfloat16, enabled=self._half):
                    loss = self._model.loss(forward(batch.tokens), batch) * self._scale
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        # In place: views of buckets stay views, and the next micro-batch is added without a copy.
        self._optimizer.zero_grad(set_to_none=self._replica is None)
        return float(total) / self._world


class FullyShard:
    """FSDP2, one group per layer. Parameters stay gathered from a step's first micro-batch to its last, as in our run.

    Args:
        sync_each: reduce-scatter the gradients of every micro-batch, as our ZeRO-3 does; otherwise only those of the
            last one, which is faster and keeps whole gradients.
    """

    def __init__(self, plan: RunPlan, rank: int, world: int, *, sync_each: bool = False) -> None:
        self._model = empty_model(plan)
        mesh = init_device_mesh("cpu", (world,))
        for layer in self._model.layers:
            fully_shard(layer, mesh=mesh)
        self._root = fully_shard(self._model, mesh=mesh)
        self._model.to_empty(device="cpu")
        fill(plan, self._model, self._model.named_parameters())
        self._clip, self._windows = plan.job.clip, Windows(plan, even_share(plan.job.num_microbatches, rank, world))
        self._scale, self._world, self._sync_each = world / plan.job.tokens_per_step, world, sync_each
        self._root.set_reshard_after_forward(False)
        self._optimizer = adamw(plan, self._model, self._model.named_parameters())

    def step(self, number: int) -> float:
        batches = self._windows.of_step(number)
        total = torch.zeros(())
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            self._root.set_requires_gradient_sync(last or self._sync_each)
            self._root.set_reshard_after_backward(last)
            self._root.set_is_last_backward(last)
            loss = self._model.loss(self._model(batch.tokens), batch) * self._scale
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(total) / self._world


class _Stage(nn.Module):
    """Consecutive layers as one module of the pipeline."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, None)
        return x


class Pipeline:
    """A schedule of torch.distributed.pipelining over the layers in so many stages as there are workers, or twice that.

    Args:
        kind: "pipeline" for Schedule1F1B; "pipeline_zb1p" and "pipeline_zb_interleaved" for
            ScheduleInterleavedZeroBubble with one stage or two for each worker; "pipeline_zbv" for
            ScheduleZBVZeroBubble, whose two stages of a worker lie in a V.
    """

    def __init__(self, plan: RunPlan, rank: int, world: int, kind: str) -> None:
        model = empty_model(plan)  # stays on the meta device, except the layers of this worker's stages
        cuts = plan.placement.layer_cuts if kind in ("pipeline", "pipeline_zb1p") else _even_blocks(model, 2 * world)
        num_stages = len(cuts) - 1
        if num_stages == world:
            mine = [rank]
        else:
            mine = [rank, 2 * world - 1 - rank if kind == "pipeline_zbv" else world + rank]
        names = {s: model.layer_names[cuts[s] : cuts[s + 1]] for s in mine}
        stages: list[Any] = [
            PipelineStage(
                _Stage([model.get_submodule(name) for name in names[s]]).to_empty(device="cpu"),
                s,
                num_stages,
                torch.device("cpu"),
            )
            for s in mine
        ]
        named = [
            pair
            for of_stage in names.values()
            for name in of_stage
            for pair in model.get_submodule(name).named_parameters(prefix=name)
        ]
        fill(plan, model, named)
        self._first, self._last = 0 in mine, num_stages - 1 in mine
        self._optimizer = adamw(plan, model, named)
        self._parameters = [p for _, p in named]
        self._clip, self._windows = plan.job.clip, Windows(plan, range(plan.job.num_microbatches))
        scale = 1.0 / plan.job.tokens_per_step

        def loss(output: Tensor, targets: Tensor) -> Tensor:
            return model.loss(output, Batch(targets, targets)) * scale

        # The loss on every stage: a schedule without one runs no backward.
        options: dict[str, Any] = {
            "n_microbatches": plan.job.num_microbatches,
            "loss_fn": loss,
            "scale_grads": False,
        }
        if kind == "pipeline":
            self._schedule = Schedule1F1B(stages[0], **options)
        elif kind == "pipeline_zbv":
            self._schedule = ScheduleZBVZeroBubble(stages, **options)
        else:
            self._schedule = ScheduleInterleavedZeroBubble(stages, **options)

    def step(self, number: int) -> float:
        losses: list[Tensor] = []
        inputs, outputs = (), {}
        if self._first:
            inputs = (torch.cat([b.tokens for b in self._windows.of_step(number)]),)
        if self._last:
            targets = torch.cat([b.targets for b in self._windows.of_step(number)])
            outputs = {"target": targets, "losses": losses}
        self._schedule.step(*inputs, **outputs)
        self._clip_over_stages()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(torch.stack(losses).sum().detach()) if losses else 0.0

    def _clip_over_stages(self) -> None:
        """Clips by the norm over all stages; clip_grad_norm_ sees the gradients of one process only."""
        square = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None]) ** 2
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(self._parameters, self._clip, square.sqrt())


def _even_blocks(model: LayeredModel, num_stages: int) -> tuple[int, ...]:
    """Cuts of the layers into stages with equally many blocks; the first layer and the last come on top."""
    blocks = [len(part) for part in np.array_split(np.arange(1, len(model.layer_names) - 1), num_stages)]
    inner = np.cumsum(blocks)[:-1] + 1
    return (0, *inner.tolist(), len(model.layer_names))


def even_share(num_microbatches: int, rank: int, world: int) -> range:
    """The micro-batches of one worker: contiguous; the first workers have one more if they cannot be divided evenly."""
    base, extra = divmod(num_microbatches, world)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def make_system(kind: str, plan: RunPlan, rank: int, world: int) -> System:
    """The system called `kind`: plain, ddp, fsdp, fsdp_sync_each, or one of `Pipeline`."""
    if kind in ("plain", "ddp"):
        return Replicated(plan, rank, world)
    if kind in ("fsdp", "fsdp_sync_each"):
        return FullyShard(plan, rank, world, sync_each=kind == "fsdp_sync_each")
    if kind.startswith("pipeline"):
        return Pipeline(plan, rank, world, kind)
    raise ValueError(f"no such system: {kind!r}")
