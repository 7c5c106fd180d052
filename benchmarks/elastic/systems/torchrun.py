"""torchrun and torch.distributed.checkpoint: all workers are started again, and load the newest checkpoint.

    python -m benchmarks.elastic.systems.torchrun DIRECTORY [EVERY]

Checkpoints are asynchronous, every EVERY steps (5), as in PyTorch's recipe, over a process group of their own. The
command replaces itself by torchrun, which starts this module again as a worker.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.nn.parallel import DistributedDataParallel

from benchmarks.elastic import problem
from benchmarks.elastic.lines import Writer

_MODULE = "benchmarks.elastic.systems.torchrun"
_RESTARTS = 1_000_000  # as many as the trace asks for


def command(words: Sequence[str], workers: int) -> list[str]:
    """torchrun on one machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:1", f"--nproc-per-node={workers}"]
    launcher += [f"--max-restarts={_RESTARTS}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return [*launcher, "-m", _MODULE, *words]


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that is complete."""
    found = [path for path in folder.glob("step-*") if (path / ".metadata").exists()]
    return max(found, key=step_of, default=None)


def step_of(path: Path) -> int:
    """The step of a checkpoint's directory."""
    return int(path.name.partition("-")[2])


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint has."""
    values, state = get_state_dict(model, optimizer)
    return {"model": values, "optimizer": state}


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest checkpoint. Returns its step; 0 without one."""
    path = newest(folder)
    if path is None:
        return 0
    state = state_of(model, optimizer)
    load_checkpoint(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step_of(path)


def worker(words: Sequence[str]) -> None:
    """One of torchrun's workers."""
    job, every = problem.Job.read(words[0]), int(words[1]) if len(words) > 1 else 5
    torch.set_num_threads(1)
    with _process_group():
        rank, world, history = dist.get_rank(), dist.get_world_size(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        saving = dist.new_group(backend="gloo")
        assert isinstance(saving, dist.ProcessGroup)
        order, writer, folder = job.order(), Writer(job.directory), Path(job.directory) / "checkpoints"
        model = problem.model()
        replica, optimizer = DistributedDataParallel(model, gradient_as_bucket_view=True), problem.adamw(model)
        saved: Future[Any] | None = None
        done = resume(folder, model, optimizer)
        writer.start()
        for step in range(done + 1, job.steps + 1):
            ids = problem.share(order[step - 1], rank, world)
            tokens, targets = problem.batch(ids)
            loss = problem.mean_loss(replica(tokens), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), problem.CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            writer.step(step, ids, loss.item(), history)
            if step % every == 0 and step < job.steps:
                if saved is not None:
                    saved.result()
                made = async_save(
                    state_of(model, optimizer), checkpoint_id=folder / f"step-{step}", process_group=saving
                )
                assert isinstance(made, Future)
                saved = made
        if saved is not None:
            saved.result()


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def main(words: Sequence[str]) -> None:
    """The command of the system, or one of its workers."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        worker(words)
    else:
        workers = problem.Job.read(words[0]).workers
        # A group that is restarted finds the addresses of the one before in the shared store (pytorch#135712).
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        os.execve(sys.executable, command(words, workers), environment)


if __name__ == "__main__":
    main(sys.argv[1:])
