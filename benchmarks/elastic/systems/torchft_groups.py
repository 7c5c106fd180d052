"""torchft: a lighthouse, and replica groups of one worker each, which are started again by themselves when they end.

    python -m benchmarks.elastic.systems.torchft_groups DIRECTORY [recipe|divided]

recipe: as README.md and train_ddp.py of torchft have it. Every replica group has a shard of the data of its own, whose
position it saves in each step; the lighthouse has the README's timeouts, manager and process group train_ddp.py's.
divided: what can be had with some lines more. The batch of a step is divided again over those that take part, and the
lighthouse has short timeouts.

A replica group is launched without torchrun around it, by this command: less work for the machine than in the README.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

_MODULE = "benchmarks.elastic.systems.torchft_groups"
_LOOK_S = 0.05
_FINISHED = "finished"
_LAST_S = 2.0  # for the other replica groups to end, when one has finished


@dataclass(frozen=True)
class Way:
    """A way to use torchft.

    Args:
        lighthouse: options of the lighthouse.
        heartbeat_ms: of a manager.
        divides: the batch is divided over those that take part.
    """

    lighthouse: tuple[str, ...]
    heartbeat_ms: int
    divides: bool


WAYS = {
    "recipe": Way(("--quorum_tick_ms", "100", "--join_timeout_ms", "10000"), 100, False),
    "divided": Way(("--quorum_tick_ms", "10", "--join_timeout_ms", "500", "--heartbeat_timeout_ms", "500"), 50, True),
}


def launch(directory: str, way: str, workers: int) -> None:
    """Starts the lighthouse and the replica groups, and starts again whoever ends, until one has finished.

    It says so by a file: managers may keep its process for long after its last step.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # with all that it has started
    port = _free_port()
    program = Path(sysconfig.get_path("scripts")) / "torchft_lighthouse"
    words = [str(program), "--min_replicas", "1", "--bind", f"[::]:{port}", *WAYS[way].lighthouse]
    lighthouse = subprocess.Popen(words)
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}

    def replica(number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", _MODULE, directory, way, str(number)]
        return subprocess.Popen(command, env=environment)

    groups = [replica(number) for number in range(workers)]
    try:
        while not (Path(directory) / _FINISHED).exists():
            for number, group in enumerate(groups):
                if group.poll() is not None:
                    groups[number] = replica(number)
            time.sleep(_LOOK_S)
        until = time.monotonic() + _LAST_S
        while any(group.poll() is None for group in groups) and time.monotonic() < until:  # they write their last lines
            time.sleep(_LOOK_S)
    finally:
        for process in (*groups, lighthouse):
            process.kill()
            process.wait()


def worker(directory: str, way: Way, number: int) -> None:
    """One replica group."""
    import torch
    from torch import nn
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
    from torchft import (  # pyright: ignore[reportMissingImports]  (in the environment of this system)
        DistributedDataParallel,
        Manager,
        Optimizer,
        ProcessGroupGloo,
    )

    from benchmarks.elastic import problem
    from benchmarks.elastic.lines import Writer

    torch.set_num_threads(1)
    job = problem.Job.read(directory)
    order, writer, position = job.order(), Writer(directory), Position(Path(directory) / f"position-{number}")
    model = problem.model()
    inner = problem.adamw(model)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"replica_{number}_",
        hostname="localhost",
        heartbeat_interval=timedelta(milliseconds=way.heartbeat_ms),
        # The recipe's managers agree on the initial values by themselves; here all begin with the same ones.
        init_sync=False,
    )
    replica, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    _wait_for_first_replicas(Path(directory), number, job.workers)
    writer.start()
    while manager.current_step() < job.steps:
        optimizer.zero_grad()  # asks for a quorum
        if way.divides:
            workers, place = manager.num_participants(), manager.participating_rank()
            step = manager.current_step() + 1
            ids = problem.share(order[step - 1], place, workers) if place is not None else order[step - 1][:1]
            scale = len(ids) * workers / job.global_batch
        else:
            ids, scale = problem.share(order[position.next() % len(order)], number, job.workers), 1.0
        tokens, targets = problem.batch(ids)
        loss = problem.mean_loss(replica(tokens), targets)
        (loss * scale).backward()
        before, takes_part = manager.current_step(), manager.is_participating()
        nn.utils.clip_grad_norm_(model.parameters(), problem.CLIP)
        optimizer.step()
        if manager.current_step() > before and takes_part:
            writer.step(manager.current_step(), ids, loss.item())
    (Path(directory) / _FINISHED).touch()
    manager.shutdown(wait=False)


class Position:
    """The position of a replica group in its shard of the data, saved in each step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = int(path.read_text()) if path.exists() else 0

    def next(self) -> int:
        """The number of the next batch; a batch that was drawn is never drawn again."""
        self._number += 1
        beside = self._path.with_suffix(".new")
        beside.write_text(str(self._number))
        beside.replace(self._path)
        return self._number - 1


def _wait_for_first_replicas(directory: Path, number: int, workers: int) -> None:
    """Returns when each replica group has been here once: the lighthouse hears them, and the first quorum has all."""
    (directory / f"ready-{number}").touch()
    while len(list(directory.glob("ready-*"))) < workers:
        time.sleep(_LOOK_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def main(words: Sequence[str]) -> None:
    """The command of the system, or one of its replica groups."""
    directory, way = words[0], words[1] if len(words) > 1 else "recipe"
    if len(words) > 2:
        worker(directory, WAYS[way], int(words[2]))
    else:
        import json

        launch(directory, way, json.loads((Path(directory) / "job.json").read_text())["workers"])


if __name__ == "__main__":
    main(sys.argv[1:])
