"""A worker process: opens its links, takes its place, and drives its executor from its mailbox."""

from __future__ import annotations

import itertools
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any, cast

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.data import PreparedData
from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.run_dir.trace import TracePart
from elaswave_spmd.runtime.devices import Device, Island
from elaswave_spmd.runtime.devices.dvfs import FrequencyCell
from elaswave_spmd.runtime.devices.process_group import group_of
from elaswave_spmd.runtime.devices.selection import kind_of
from elaswave_spmd.runtime.processes import death_watch
from elaswave_spmd.runtime.processes.child import keep_freed_memory
from elaswave_spmd.runtime.transport.link_probe import LinkProbe
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links, Transport
from elaswave_spmd.runtime.transport.mailbox import ControllerGone, Envelope, Mailbox
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.worker.channel import SocketChannel, Stopped
from elaswave_spmd.worker.checkpoint_writer import CheckpointOrders, CheckpointWriter
from elaswave_spmd.worker.configuration import Epoch
from elaswave_spmd.worker.fault_injection import Chaos
from elaswave_spmd.worker.fault_points import FaultPoint
from elaswave_spmd.worker.heartbeat import HeartbeatSender, Progress
from elaswave_spmd.worker.parameter_broadcast import GroupedPublications, StageGroup
from elaswave_spmd.worker.plan_run import RunPlan, make_executor, make_programs, plan_run
from elaswave_spmd.worker.profiling import MemoryRow, Row
from elaswave_spmd.worker.programs.eager import StagePrograms
from elaswave_spmd.worker.step import Executor
from elaswave_spmd.worker.tracing import TracedChannel, open_trace

_CONNECT_TIMEOUT_S = 60.0
_FAREWELL_MS = 2000
_COPYING_S = 5e-5  # between two looks at payloads that are on their way to host memory
_GROUP_S = (1e-4, 1e-4, 2e-4, 4e-4, 8e-4)  # between looks at what is under way in a group


def main(spec: dict[str, Any]) -> int:
    """Entry of a worker process.

    Args:
        spec: plain data: rank, life_fd (from the fork server); settings, data, controller (address), directory, token,
            host (address of its machine), latch (path and slot, or None), costs (a profile's JSON, or None),
            trace (the run's directory, or None), frequencies (directory of their cells, or None), groups (address of
            the store where groups of stages meet, or None).

    Returns: the exit code.
    """
    rank, settings = int(spec["rank"]), Settings.from_dict(spec["settings"])
    device = open_device(settings, rank)
    keep_freed_memory()
    probe = LinkProbe(lambda peer, header, payloads: links.send(peer, header, payloads))
    mailbox = Mailbox(probe.tap)
    if settings.elastic.enabled:
        # SIGTERM is a wish to leave: its handler may do no more than this, it can come in the middle of anything.
        signal.signal(signal.SIGTERM, lambda *_: mailbox.interrupt("SIGTERM"))
    links = Links(
        rank,
        mailbox,
        transport=cast(Transport, settings.runtime.transport),
        directory=spec["directory"],
        token=bytes.fromhex(spec["token"]),
        host=spec["host"],
        life_fd=spec["life_fd"],
    )
    orders = CheckpointOrders(**spec["checkpoints"])
    trace = open_trace(spec.get("trace"), rank)
    frequency = FrequencyCell(cells, rank) if (cells := spec.get("frequencies")) else None
    store, patience = spec.get("groups"), settings.timeouts.group
    group = group_of(device, store, spec["host"], patience) if store else None
    worker = Worker(rank, settings, device, links, mailbox, probe, orders, trace, frequency, group)
    try:
        links.connect(CONTROLLER, spec["controller"])
        costs = CostModel.from_json(spec["costs"]) if spec["costs"] else None
        plan = plan_run(settings, PreparedData.from_dict(spec["data"]), costs=costs)
        if spec["latch"]:
            worker.chaos.strikes = death_watch.hold(*spec["latch"])
        # Before it is ready: whoever is a member, or is about to become one, has nothing left to compile.
        worker.make_programs(plan)
        links.send(CONTROLLER, m.encode(m.Ready(rank, links.address, bool(spec["latch"]), worker.num_compiled)))
        worker.work(plan)
    except Stopped:
        worker.stopped()
    except BaseException:
        links.send(CONTROLLER, m.encode(m.Failed(rank, traceback.format_exc(), worker.step)))
        links.close(_FAREWELL_MS)
        return 1
    finally:
        if trace is not None:
            trace.close()
    links.close(_FAREWELL_MS)
    return 0


def open_device(settings: Settings, rank: int) -> Device:
    """The device that the settings name, in this process; an emulated one is the CPU with a clock of its own."""
    island = Island(settings.mesh.shape.island_size, settings.runtime.threads_per_worker)
    return kind_of(settings).open(rank, island)


class Worker:
    """The worker's life, from its place in the mesh to the controller's Stop."""

    def __init__(
        self,
        rank: int,
        settings: Settings,
        device: Device,
        links: Links,
        mailbox: Mailbox,
        probe: LinkProbe,
        orders: CheckpointOrders,
        trace: TracePart | None = None,
        frequency: Callable[[], float] | None = None,
        group: StageGroup | None = None,
    ) -> None:
        self._rank, self._settings, self._device, self._group = rank, settings, device, group
        self._links, self._mailbox = links, mailbox
        self._trace, self._frequency = trace, frequency or (lambda: 1.0)
        self._probe, self._link_told = probe, False
        self._progress = Progress(waiting=True, action="start")
        self.step = 0
        self._programs: StagePrograms | None = None
        self._deadline: float | None = None  # once the controller is gone
        self.chaos = Chaos(rank, settings.chaos, links)
        self.checkpoints = CheckpointWriter(rank, orders, lambda wrote: links.send(CONTROLLER, m.encode(wrote)))

    @property
    def num_compiled(self) -> int:
        """Programs that it has compiled so far."""
        return self._programs.num_compiled if self._programs else 0

    def make_programs(self, plan: RunPlan) -> None:
        """Compiles, where the device does; tells the controller of each layer that is done."""
        told = itertools.count(1)

        def compiled(layer: str) -> None:
            beat = m.Heartbeat(self._rank, next(told), False, f"compiling, {layer} done")
            self._links.send(CONTROLLER, m.encode(beat))

        self._programs = make_programs(plan, self._rank, self._device.place, self._frequency, compiled)

    def work(self, plan: RunPlan) -> None:
        """Waits for its place and trains until it is told to stop."""
        HeartbeatSender(self._rank, self._links, self._progress, self._settings.timeouts.heartbeat)
        place, early = self._await_place()
        self._progress.waiting = False  # its first action may take long
        first = self._epoch(plan, place)
        others = [p for p in place.addresses if p != self._rank]
        self._links.wait_connected(others, _CONNECT_TIMEOUT_S)  # of those that are closed the port will hear
        if others:
            self._probe.start(min(others, key=lambda peer: (peer < self._rank, peer)))  # the next one round
        port = SocketChannel(self._links, self._mailbox, plan.job.torch_dtype, self._device, early)
        # A newcomer learns its state from the others; the checkpoint that they began with may be gone by then.
        saved = self.checkpoints.orders.reader() if first.placement.mesh.epoch == 0 else None
        assert self._programs is not None, "they are made before it is ready"
        executor = make_executor(
            plan,
            self._rank,
            port if self._trace is None else TracedChannel(port, self._trace),
            self._device,
            first,
            lambda p: self._epoch(plan, p),
            self._visit,
            saved,
            self._programs,
            self._group,
        )
        if self._trace is not None:
            executor.trace(self._trace.action)
        self.checkpoints.attach(executor.replica, plan.description.layout, self._device)
        executor.measured = self._send_costs
        port.controller_gone = lambda: self._orphaned(executor)
        executor.save = self.checkpoints.save
        # A fault strikes at the first attempt of its step only, not when a resumed run comes to the step again.
        self.chaos.attach(executor, max(first.version, self.checkpoints.orders.committed))
        progress = self._progress
        for what in executor.run():
            progress.waiting, progress.action = True, what
            began = time.perf_counter()
            if not self._wait(port, executor.replica.parameters.grouped):
                raise Stopped
            if self._trace is not None:
                self._trace.wait(what, began, time.perf_counter())
            progress.waiting = False
        raise RunError(f"worker {self._rank} has nothing left to do, and was not told to stop")

    def _wait(self, port: SocketChannel, grouped: GroupedPublications) -> bool:
        """Until something has come; False: nothing did, and without a controller it has waited long enough."""
        pauses = iter(_GROUP_S)
        while (copying := port.is_copying()) or not grouped.idle:
            if grouped.has_news or self._mailbox.wait(_COPYING_S if copying else next(pauses, _GROUP_S[-1])):
                return True
            if self._deadline is not None and time.monotonic() > self._deadline:
                return False
        return self._mailbox.wait(None if self._deadline is None else self._deadline - time.monotonic())

    def _orphaned(self, executor: Executor) -> None:
        """The controller is gone. Nobody begins another step, and a step that all have begun is still completed.

        So all end at the same version: a step needs the vote of everybody, and whoever has not begun it gives none.
        """
        executor.halts = True
        self._deadline = time.monotonic() + self._settings.timeouts.controller

    def stopped(self) -> None:
        """The end: what was copied is written; without a controller, all state is."""
        if self._deadline is not None:
            self.checkpoints.write_now()
        self.checkpoints.close()

    def _visit(self, point: FaultPoint, step: int) -> None:
        progress = self._progress
        progress.count += 1
        if point is FaultPoint.FORWARD or point is FaultPoint.BACKWARD:
            progress.action = point.value
        self.step = step
        if point is FaultPoint.APPLY and self._trace is not None:
            self._trace.mark(f"step {step} applied")
        self.chaos.visit(point, step)

    def _send_costs(self, step: int, rows: tuple[Row, ...], memory: tuple[MemoryRow, ...]) -> None:
        link = () if self._link_told else self._probe.found or ()
        if rows or memory or link:
            self._link_told = self._link_told or bool(link)
            self._links.send(CONTROLLER, m.encode(m.Measured(self._rank, step, rows, memory, self.num_compiled, link)))

    def _epoch(self, plan: RunPlan, place: m.Reconfigure) -> Epoch:
        """What a PLACE says; connects to the members that are new, and closes the links to those that are none now."""
        if self._trace is not None:
            self._trace.mark(f"mesh epoch {place.epoch}")
        for peer in set(self._links.peers) - {CONTROLLER} - place.addresses.keys():
            self._links.drop(peer)
        for peer, address in place.addresses.items():
            if peer != self._rank:
                self._links.connect(peer, address)
        return Epoch.of(plan.placement, place)

    def _await_place(self) -> tuple[m.Reconfigure, list[Envelope]]:
        """The PLACE that makes this worker a member, and what arrived before it from those that had theirs earlier."""
        early: list[Envelope] = []
        while True:
            item = self._mailbox.get()
            if isinstance(item, ControllerGone):
                raise Stopped
            if not isinstance(item, Envelope):
                continue
            message = m.decode(item.header)
            if isinstance(message, m.Reconfigure):
                return message, early
            if isinstance(message, m.Stop):
                raise Stopped
            early.append(item)
