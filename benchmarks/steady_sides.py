"""The two sides of steady_state as processes of their own.

    python -m benchmarks.steady_sides ours|counted|plain JSON

Ours is the product: its controller, its files of a run, its display, its workers. The only thing added is the gate:
a worker's channel waits after it has reported a step as applied, which is where the step ends. Counted is ours, and
also reports to the driver what it sends and holds (`snapshot`). Plain is one process per worker from the same kind of
fork server, so both sides begin with the same imports in memory.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
from typing import Any
from unittest import mock

from benchmarks.gate import Gate
from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller.launching import PRELOAD, data_spec
from elaswave_spmd.controller.startup import make_controller
from elaswave_spmd.data import PreparedData, prepare_data
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.run_dir import RunDir, RunObserver
from elaswave_spmd.runtime.devices.selection import worker_start
from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient, ForkServerSpec
from elaswave_spmd.runtime.transport.links import CONTROLLER, socket_directory
from elaswave_spmd.worker import process as worker
from elaswave_spmd.worker.channel import SocketChannel
from elaswave_spmd.worker.context import WorkerContext
from elaswave_spmd.worker.loop import Executor
from elaswave_spmd.worker.plan_run import plan_run

_GATE_PATH = "ELASWAVE_BENCHMARK_GATE"
_PRELOAD = (*PRELOAD, "benchmarks.steady_sides")
_PLAIN_PRELOAD = (*_PRELOAD, "torch._dynamo", "benchmarks.plain_systems")


class GatedChannel(SocketChannel):
    """A worker's channel that lets the driver of the benchmark decide when the next steps may begin."""

    gate: Gate

    def send(self, peer: int, message: m.Message, payload: Any = None) -> None:
        super().send(peer, message, payload)
        if peer == CONTROLLER and isinstance(message, m.Applied):
            self.gate.after_step(message.loss, self.report)

    def report(self) -> dict[str, Any]:
        """Further data for the driver at the end of a block."""
        return {}


class CountingChannel(GatedChannel):
    """A gated channel that counts bytes: `sent`, `mirrored` (payload of gradients for mirrors), and those of state."""

    mirrored = 0
    executor: Executor | None = None

    def send(self, peer: int, message: m.Message, payload: Any = None) -> None:
        if isinstance(message, m.ReducedGradient) and payload is not None:
            self.mirrored += payload.nbytes
        super().send(peer, message, payload)

    def report(self) -> dict[str, Any]:
        assert self.executor is not None
        sent = sum(self._links.bytes_sent(peer) for peer in self._links.peers)
        return {"sent": sent, "mirrored": self.mirrored, "state": self.executor.state_bytes()}


def our_worker(spec: dict[str, Any], kind: type[GatedChannel] = GatedChannel) -> int:
    """Entry of a worker of ours: the product's own, with a gated channel."""
    gate = Gate(os.environ[_GATE_PATH], int(spec["rank"]))

    class Channel(kind):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.gate = gate
            gate.before_first()

    with mock.patch.object(worker, "SocketChannel", Channel):
        return worker.main(spec)


def our_counting_worker(spec: dict[str, Any]) -> int:
    """Entry of a worker of ours with a channel that counts."""

    def make_known(context: WorkerContext, *rest: Any) -> Executor:
        channel = context.channel
        assert isinstance(channel, CountingChannel)
        channel.executor = Executor(context, *rest)
        return channel.executor

    with mock.patch.object(worker, "Executor", make_known):
        return our_worker(spec, CountingChannel)


def ours(settings: Settings, gate_path: str, entry: str = "our_worker") -> None:
    """Runs the product with one of the entries above for its workers."""
    scratch = socket_directory()
    environment = {**worker_start(settings).environment, _GATE_PATH: gate_path}
    fork_server = ForkServerClient.start(
        f"benchmarks.steady_sides:{entry}", ForkServerSpec(preload=_PRELOAD, scratch=[scratch], env=environment)
    )
    try:
        data = prepare_data(data_spec(settings))
        plan = plan_run(settings, data)
        run_dir = RunDir.create(
            settings.run.dir, settings.to_yaml(), model=settings.model.label, mesh=settings.mesh.shape.name
        )
        with RunObserver(run_dir, board=settings.run.tensorboard) as observer:
            make_controller(plan, fork_server, observer, scratch).run()
    finally:
        fork_server.stop(0.0)
        shutil.rmtree(scratch, ignore_errors=True)


def plain_worker(spec: dict[str, Any]) -> None:
    """Entry of a worker of plain PyTorch."""
    rank, world = int(spec["rank"]), int(spec["world"])
    gate = Gate(spec["gate"], rank)
    import torch
    import torch.distributed as dist

    from benchmarks.plain_systems import make_system

    settings = Settings.from_dict(spec["settings"])
    torch.set_num_threads(settings.runtime.threads_per_worker)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{spec['store']}", rank=rank, world_size=world)
    system = make_system(spec["kind"], plan_run(settings, PreparedData.from_dict(spec["data"])), rank, world)
    gate.before_first()
    step = 0
    while step < settings.train.steps:
        step += 1
        gate.after_step(system.step(step))


def plain(settings: Settings, gate_path: str, kind: str) -> None:
    """Runs one process per worker of plain PyTorch, until the driver ends this process."""
    data = prepare_data(data_spec(settings))
    spec = {
        "settings": settings.to_dict(),
        "data": data.to_dict(),
        "gate": gate_path,
        "kind": kind,
        "world": settings.mesh.shape.num_workers,
        "store": gate_path + ".store",
    }
    with ForkServerClient.start(
        "benchmarks.steady_sides:plain_worker", ForkServerSpec(preload=_PLAIN_PRELOAD)
    ) as fork_server:
        for rank in range(spec["world"]):
            fork_server.spawn(rank, spec)
        left = spec["world"]
        while left:
            select.select([fork_server], [], [])
            for exited in fork_server.poll():
                left -= 1
                if exited.code != 0:
                    raise SystemExit(str(exited))


def main() -> None:
    """Entry of a side's process; Ctrl-C from the driver ends it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    side, spec = sys.argv[1], json.loads(sys.argv[2])
    settings = Settings.from_dict(spec["settings"])
    try:
        if side == "ours":
            ours(settings, spec["gate"])
        elif side == "counted":
            ours(settings, spec["gate"], "our_counting_worker")
        else:
            plain(settings, spec["gate"], spec["kind"])
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
