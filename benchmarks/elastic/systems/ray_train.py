"""Ray Train's elastic trainer: 1 to as many workers as there are slots, which begin again at the newest checkpoint.

    python -m benchmarks.elastic.systems.ray_train DIRECTORY [EVERY]

ScalingConfig(num_workers=(1, N)), FailureConfig(max_failures=-1), and a checkpoint of rank 0 every EVERY steps (5) by
ray.train.report, as in the guides "Elastic training", "Handling failures" and "Saving and loading checkpoints". The
batch of a step is divided over the workers that there are.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.elastic import problem
from benchmarks.elastic.lines import Writer

_STATE = "state.pt"


def train_loop(given: dict[str, Any]) -> None:
    """What each worker of Ray runs."""
    import ray.train  # pyright: ignore[reportMissingImports]  (in the environment of this system)
    import ray.train.torch  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist

    torch.set_num_threads(1)
    job, every = problem.Job.read(given["directory"]), given["every"]
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    begun = [time.monotonic_ns()]
    if world > 1:
        dist.broadcast_object_list(begun)  # a number that grows with each start of the group
    order, writer, model = job.order(), Writer(job.directory), problem.model()
    done, optimizer = 0, problem.adamw(model)
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / _STATE)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    replica: nn.Module = ray.train.torch.prepare_model(model) if world > 1 else model
    writer.start()
    for step in range(done + 1, job.steps + 1):
        ids = problem.share(order[step - 1], rank, world)
        tokens, targets = problem.batch(ids)
        loss = problem.mean_loss(replica(tokens), targets)
        (loss * (len(ids) * world / job.global_batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), problem.CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        writer.step(step, ids, loss.item(), begun[0])
        if step % every == 0 and step < job.steps:
            with tempfile.TemporaryDirectory() as folder:
                saved = None
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(folder) / _STATE)
                    saved = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"step": step}, checkpoint=saved)


def main(words: Sequence[str]) -> None:
    """Runs the trainer until it has finished."""
    job, every = problem.Job.read(words[0]), int(words[1]) if len(words) > 1 else 5
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # with all that it has started
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    import ray  # pyright: ignore[reportMissingImports]
    from ray.train import FailureConfig, RunConfig, ScalingConfig  # pyright: ignore[reportMissingImports]
    from ray.train.torch import TorchTrainer  # pyright: ignore[reportMissingImports]

    # Each worker reserves a CPU that the machine may not have: the number of slots is what is compared.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as short:  # paths of its sockets are limited
        ray.init(num_cpus=job.workers + 1, include_dashboard=False, _temp_dir=short)
        try:
            TorchTrainer(
                train_loop,
                train_loop_config={"directory": job.directory, "every": every},
                scaling_config=ScalingConfig(num_workers=(1, job.workers), use_gpu=False),
                run_config=RunConfig(
                    name="elastic",
                    storage_path=str(Path(job.directory) / "storage"),
                    failure_config=FailureConfig(max_failures=-1),
                ),
            ).fit()
        finally:
            ray.shutdown()


if __name__ == "__main__":
    # Workers import the loop by its module's name.
    from benchmarks.elastic.systems import ray_train

    ray_train.main(sys.argv[1:])
