"""A worker of one of the systems that `recovery` compares with.

    python -m benchmarks.recovery_peers torchft|torchrun JSON

Both train the same as our run: model, initial values, samples, micro-batches, AdamW and clipping. Each worker writes a
line per step with CLOCK_MONOTONIC. With torchft the batch is divided again over the workers that take part, which its
recipe leaves to the user.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from benchmarks.plain_systems import Windows, adamw, empty_model, even_share, fill
from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller.launching import data_spec
from elaswave_spmd.data import prepare_data
from elaswave_spmd.models import LayeredModel
from elaswave_spmd.worker.plan_run import RunPlan, plan_run

_CHECKPOINT_EVERY = 10
Quiet = Callable[[], AbstractContextManager[Any]]
_TIMEOUT = timedelta(seconds=30)


class Log:
    """The log of a worker: one line per step, each written at once."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  (for as long as the process lives)

    def step(self, step: int, samples: int, workers: int, committed: bool) -> None:
        line = {"step": step, "at": time.monotonic(), "samples": samples, "workers": workers, "committed": committed}
        self._file.write(json.dumps(line) + "\n")


def _plan(spec: dict[str, Any]) -> RunPlan:
    settings = Settings.from_dict(spec["settings"])
    torch.set_num_threads(settings.runtime.threads_per_worker)
    return plan_run(settings, prepare_data(data_spec(settings)))


def _model(plan: RunPlan) -> LayeredModel:
    model = empty_model(plan).to_empty(device="cpu")
    model.share_ties()
    fill(plan, model, model.named_parameters())
    return model


def _backward(
    plan: RunPlan,
    replica: nn.Module,
    model: LayeredModel,
    step: int,
    share: range,
    scale: float,
    quiet: Quiet,
) -> None:
    """The gradients of a worker's micro-batches; `quiet` is the context in which nothing is reduced."""
    batches = Windows(plan, share).of_step(step)
    for number, batch in enumerate(batches):
        with quiet() if number < len(batches) - 1 else contextlib.nullcontext():
            (model.loss(replica(batch.tokens), batch) * scale).backward()


def torchft(spec: dict[str, Any]) -> None:
    """Runs a replica group of one worker until it is killed."""
    from torchft import (  # pyright: ignore[reportMissingImports]  (an extra, `bench`)
        DistributedDataParallel,
        Manager,
        ProcessGroupGloo,
    )

    plan, log, rank = _plan(spec), Log(spec["log"]), int(spec["rank"])
    model = _model(plan)
    optimizer = adamw(plan, model, model.named_parameters())
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=spec["lighthouse"],
        replica_id=f"replica_{rank}",
        hostname="localhost",
        heartbeat_interval=timedelta(milliseconds=spec["heartbeat"]),
        init_sync=False,  # all begin with the same values
    )
    replica = DistributedDataParallel(manager, model, gradient_as_bucket_view=True)
    job = plan.job
    while True:
        manager.start_quorum()
        optimizer.zero_grad(set_to_none=False)
        step, workers, place = manager.current_step() + 1, manager.num_participants(), manager.participating_rank()
        share = even_share(job.num_microbatches, place, workers) if place is not None else range(1)
        _backward(plan, replica, model, step, share, workers / job.tokens_per_step, replica.no_sync)
        committed = manager.should_commit()
        if committed:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            optimizer.step()
        log.step(step, len(share) * job.microbatch_size, workers, committed)


def torchrun(spec: dict[str, Any]) -> None:
    """Runs one of torchrun's workers. When one is lost, torchrun starts all of them again."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    life, directory = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), Path(spec["directory"])
    (directory / f"pid-{life}-{rank}").write_text(str(os.getpid()))
    plan, log = _plan(spec), Log(str(directory / f"log-{life}-{rank}"))
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    model = _model(plan)
    optimizer = adamw(plan, model, model.named_parameters())
    saved = sorted((p for p in directory.glob("step-*") if (p / ".metadata").exists()), key=_step_of)
    step = 0
    if saved:
        state = {"model": model.state_dict(), "optimizer": _filled(optimizer, model)}
        load_checkpoint(state, checkpoint_id=saved[-1])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = _step_of(saved[-1])
    replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    share = even_share(plan.job.num_microbatches, rank, world)
    while True:
        step += 1
        _backward(plan, replica, model, step, share, world / plan.job.tokens_per_step, replica.no_sync)
        nn.utils.clip_grad_norm_(model.parameters(), plan.job.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        log.step(step, len(share) * plan.job.microbatch_size, world, True)
        if step % _CHECKPOINT_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(state, checkpoint_id=directory / f"step-{step}")


def _filled(optimizer: torch.optim.AdamW, model: LayeredModel) -> dict[str, Any]:
    """The optimizer's state with all its tensors allocated, for DCP to load into."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return optimizer.state_dict()


def _step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def main(words: Sequence[str]) -> None:
    """Entry of a worker."""
    {"torchft": torchft, "torchrun": torchrun}[words[0]](json.loads(words[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
