"""A worker process: opens links, waits to become a member of the mesh, and resumes its executor from its mailbox."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

from msgspec.structs import replace as replace_fields
from torch import Tensor

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.errors import LinksError, RunError, UserError
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.admission import LONGEST_REPORT, LONGEST_TEXT
from elaswave_spmd.recovery.generations import FIRST, ControllerFence
from elaswave_spmd.recovery.peers import Reached
from elaswave_spmd.runtime.devices import Device, Island
from elaswave_spmd.runtime.devices.dvfs import SIMULATED, GuardedClock, SimulatedClock
from elaswave_spmd.runtime.devices.group_store import group_host
from elaswave_spmd.runtime.devices.pair_groups import pairs_of
from elaswave_spmd.runtime.devices.process_group import group_of
from elaswave_spmd.runtime.devices.selection import kind_of
from elaswave_spmd.runtime.processes import death_watch
from elaswave_spmd.runtime.processes.adoption import write_address
from elaswave_spmd.runtime.processes.beat_relay import RelayClient
from elaswave_spmd.runtime.processes.child import ignore_terminal
from elaswave_spmd.runtime.processes.malloc_tuning import keep_freed_memory
from elaswave_spmd.runtime.processes.term_in_forks import TermInForks
from elaswave_spmd.runtime.transport.link_probe import LinkProbe
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links, Transport
from elaswave_spmd.runtime.transport.mailbox import ControllerLost, Envelope, Interrupted, Item, Mailbox, PeerClosed
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.worker.assembly import digests_of, make_context, make_local_model, make_programs, open_datasets
from elaswave_spmd.worker.channel import Channel, SocketChannel, WorkerStopped, decoded, elements_in
from elaswave_spmd.worker.checkpoint_writer import CheckpointWriter
from elaswave_spmd.worker.configuration import Configuration
from elaswave_spmd.worker.context import Datasets, LocalModel, WorkerHooks
from elaswave_spmd.worker.device_fault import DeviceRecovery
from elaswave_spmd.worker.direct_channel import Pairs
from elaswave_spmd.worker.fault_injection import FaultInjector
from elaswave_spmd.worker.fault_points import FaultPoint
from elaswave_spmd.worker.heartbeat import HeartbeatSender, Progress
from elaswave_spmd.worker.loading import BackgroundLoader
from elaswave_spmd.worker.loop import Executor
from elaswave_spmd.worker.message_limits import message_limits
from elaswave_spmd.worker.model_check import check_model, refusing_mistakes
from elaswave_spmd.worker.plan_run import RunPlan, plan_run, refuse_other_layout
from elaswave_spmd.worker.profiling import MemoryRow, Row, WeightsRow
from elaswave_spmd.worker.programs.eager import StagePrograms
from elaswave_spmd.worker.spec import WorkerSpec, message_bounds
from elaswave_spmd.worker.stage_collectives import StageGroup
from elaswave_spmd.worker.tracing import TracedChannel, TracedClock, TracedGroup, TracedPairs, open_trace

_CONNECT_TIMEOUT_S = 60.0
_FAREWELL_MS = 2000  # the most that a worker which ends waits for what it has sent to leave
_LEFT_OUT = "\n(a part of this report is left out, as it is too long)\n"
_EXPLAINED_S = 2.0  # how long the end of the controller, or its Stop, may be filed after the end of the link to it
_COPYING_S = 5e-5  # seconds between two polls of payloads that are being copied to host memory
_GROUP_S = (1e-4, 1e-4, 2e-4, 4e-4, 8e-4)  # seconds before each poll of a group or pair; the last one is repeated


def main(fields: dict[str, Any]) -> int:
    """The entry point of a worker process, called by the fork server.

    Args:
        fields: the fields of a `WorkerSpec`.

    Returns:
        The exit code. 0: the worker was stopped. 1: an exception or a refusal, which is reported to the controller; or
        the controller is gone and the state could not be written, which is printed to stderr.
    """
    process = WorkerProcess(WorkerSpec.from_dict(fields))
    try:
        process.run()
    except WorkerStopped:
        if why := process.save_if_orphaned():
            with contextlib.suppress(OSError):  # one call of write, as other workers print at the same moment
                os.write(2, f"worker {process.rank}, whose controller is gone: {why}\n".encode())
            return 1
    except BaseException as error:
        process.report_failure(error)
        return 1
    finally:
        process.close()
    return 0


def open_device(settings: Settings, rank: int) -> Device:
    """Open the device that the settings name, in this process."""
    island = Island(settings.mesh.shape.island_size, settings.runtime.threads_per_worker)
    return kind_of(settings).open(rank, island)


class WorkerProcess:
    """The life of the process, from its first link to the controller's Stop."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._rank = rank = spec.rank
        self._settings = settings = spec.run.settings
        self._device = open_device(settings, rank)
        keep_freed_memory()  # activations are freed and allocated again in every step
        self._probe = LinkProbe(self._send_probe)
        self._mailbox = mailbox = Mailbox(self._probe.tap)
        # SIGTERM is a request to leave gracefully. A handler may run at any point of the code, so this one only notes
        # the signal.
        self._term_in_forks = TermInForks()
        signal.signal(signal.SIGTERM, self._on_term)
        self._links = Links(
            rank,
            mailbox,
            transport=cast(Transport, settings.runtime.transport),
            directory=spec.run.links.directory,
            credentials=spec.run.links.credentials,
            host=spec.run.links.host,
            limits=message_limits(spec.run.links.payloads),
            life_fd=spec.life_fd,
            silence_s=settings.timeouts.silent_link,
        )
        if why := self._links.why_not_shared:
            print(f"links of worker {rank} go over Unix sockets: memory is not shared, since {why}", file=sys.stderr)
        self._trace = open_trace(spec.run.options.trace, rank)
        self._clock = _open_clock(settings, spec.run.options.frequency_guard, rank)
        self._group = self._open_group()
        self._pairs = self._open_pairs()
        self._fence = ControllerFence(spec.run.options.generation or FIRST)
        self._progress = Progress(waiting=True, action="start")
        self._step = 0
        self._is_ready = False
        self._link_reported = False  # to the present controller
        self._checked: m.Checked | None = None  # the report of the check of the model
        self._deadline: float | None = None  # how long to wait without a controller (time.monotonic()); None: it lives
        self._is_abandoned = False  # the agent is gone as well
        self._before_loss: Callable[[], None] = lambda: None  # called before an injected death, to note its time
        self._checkpoints: CheckpointWriter | None = None
        self._faults: FaultInjector | None = None
        self._executor: Executor | None = None
        self._reached = Reached()
        self._loader: BackgroundLoader | None = None

    def _open_group(self) -> StageGroup | None:
        """The process group of this worker's stage, if that option is on; else None."""
        if (store := self._spec.run.options.groups) is None:
            return None
        host = group_host(self._settings.runtime, self._spec.run.links.host)
        group = group_of(self._device, store, host, self._settings.timeouts.group)
        return group if self._trace is None else TracedGroup(group, self._trace)

    def _open_pairs(self) -> Pairs | None:
        """The pairs of this worker, if that option is on; else None."""
        store, settings = self._spec.run.options.groups, self._settings
        if store is None or not settings.runtime.pairs:
            return None
        pairs = pairs_of(
            self._device, store, group_host(settings.runtime, self._spec.run.links.host), settings.timeouts.group
        )
        return pairs if self._trace is None else TracedPairs(pairs, self._trace)

    def _open_relay(self) -> RelayClient | None:
        """The client that sends heartbeats by way of this worker's agent.

        None without an agent, or if no socket can be made: then heartbeats go to the controller.
        """
        if (path := self._spec.run.options.beats) is None:
            return None
        try:
            return RelayClient(self._rank, path)
        except OSError:  # for example, no room is left in the directory of the sockets
            return None

    # ---- from the first link to the end

    def run(self) -> None:
        """Become ready, become a member of the mesh, and train until the controller says Stop.

        Raises:
            WorkerStopped: always, unless something fails.
        """
        plan, model, data = self._become_ready()
        # After Ready the controller takes a silent worker for lost. So heartbeats begin now. They come from a thread of
        # their own, so that they go on while the training thread computes, and stop with the process.
        timeouts = self._settings.timeouts
        outlives = timeouts.adopt is not None
        self._progress.num_workers = plan.placement.mesh.num_workers
        relay = self._open_relay()
        HeartbeatSender(self._rank, self._links, self._progress, timeouts, relay, outlives_link=outlives)
        first, early = self._until_member(plan)
        channel = SocketChannel(
            self._links,
            self._mailbox,
            plan.job.torch_dtype,
            self._device,
            early,
            self._fence,
            has_agent=bool(self._spec.run.options.has_agent),
            timeouts=timeouts,
        )
        executor = self._make_executor(plan, model, data, first, channel)
        self._train(executor, channel)

    def _become_ready(self) -> tuple[RunPlan, LocalModel, Datasets]:
        """Connect to the controller, plan the run as it did, compile, check the model, and report Ready.

        A worker compiles before it is ready, so that no step and no recovery waits for a compilation.

        Raises:
            UserError: a model that breaks the promise of equal bits, cannot be compiled, or raises an exception.
        """
        spec = self._spec
        self._links.connect(CONTROLLER, spec.run.links.controller)
        profile = spec.run.options.profile
        costs = CostModel.from_json(profile) if profile is not None else None
        # The plan is made here again rather than sent by the controller: it is a pure function of settings and data,
        # and for a large model the layout is larger than both.
        plan = plan_run(self._settings, spec.run.data, costs=costs)
        refuse_other_layout(plan, spec.run.layout, self._rank)
        if spec.death_watch is not None:
            self._before_loss = death_watch.hold_mutex(*spec.death_watch)
        progress = itertools.count(1)

        def beat(what: str, layer: str) -> None:
            self._send(m.Heartbeat(self._rank, next(progress), False, f"{what}, {layer} done"))

        data, compiled = open_datasets(plan), partial(beat, "compiling")
        self._loader = data.loader
        place = self._device.place
        programs = make_programs(plan, self._rank, place, self._frequency, compiled, data.train)
        model = make_local_model(plan, programs)
        begins = spec.run.checkpoints.source is None
        rows = digests_of(plan, self._rank, model, begins=begins)
        if rows:
            self._send(m.Constructed(self._rank, rows))
        if self._settings.checks_model:
            checked = partial(beat, "checking the model")
            with refusing_mistakes(place):
                alone = plan.placement.mesh.num_workers == 1
                check = check_model(model, plan.job, data.train, place, rank=self._rank, alone=alone, checked=checked)
            rows = tuple(map(dataclasses.astuple, check.layers))
            self._checked = m.Checked(self._rank, check.seconds, rows, check.kinds, check.loss_unchecked, check.samples)
            self._send(self._checked)
        if self._loader is not None:
            self._loader.pop_waited()  # the time waited for samples of the check does not count as time of a step
        if model.made is not None and not (begins and self._rank in plan.placement.mesh):
            # This worker does not need the initial values: it reads a checkpoint, or is sent its state. Should it be a
            # member of the first mesh all the same, it makes them again.
            model.made.clear()
        watched = spec.death_watch is not None
        # Again, as code of the user was imported and run, which may have set handlers: of Ctrl-C, which comes to all
        # workers, or of SIGTERM, by which this one would end without a word.
        ignore_terminal()
        signal.signal(signal.SIGTERM, self._on_term)
        self._send(m.Ready(self._rank, self._links.address, watched, programs.num_compiled))
        self._is_ready = True
        return plan, model, data

    def _until_member(self, plan: RunPlan) -> tuple[Configuration, list[Envelope]]:
        """Wait for the configuration that makes this worker a member, and for the links to its peers.

        Returns:
            The configuration, and the messages that arrived before it, from members that entered it earlier.

        Raises:
            WorkerStopped: the controller has sent Stop, or as for `_next_item`.
        """
        # (sender, header) -> message, in the order in which they came. Duplicates are dropped.
        early: dict[tuple[int, bytes], Envelope] = {}
        bounds = message_bounds(plan.job, plan.description.layout)
        is_cut_off = False
        while True:
            item = self._next_item(is_cut_off=is_cut_off)
            is_cut_off = is_cut_off or item == PeerClosed(CONTROLLER)
            if not isinstance(item, Envelope):
                continue
            message = decoded(item, self._links, self._fence)
            if message is None:
                continue
            if isinstance(message, m.Reconfigure):
                break
            if isinstance(message, m.Stop):
                raise WorkerStopped
            if why := bounds.refused_payload(message, elements_in(item, message, plan.job.torch_dtype)):
                self._links.reject(why)
                continue
            early[item.sender, item.header] = item  # a member entered the epoch first: the channel delivers it
        self._progress.waiting = False  # from now on it computes: the first action may take long
        # From now on this worker has state, so a controller that comes back must be able to find it (A3 to A6).
        if self._settings.timeouts.adopt is not None:
            write_address(self._spec.run.links.directory, self._rank, self._links.address)
        self._members_changed(message)
        others = [peer for peer in message.addresses if peer != self._rank]
        self._links.wait_connected(others, _CONNECT_TIMEOUT_S)  # the channel reports links that could not be made
        if others:
            # Each worker measures the speed of one link: to the next higher rank among its peers, or else the lowest.
            self._probe.start(min(others, key=lambda peer: (peer < self._rank, peer)))
        return Configuration.from_message(plan.placement, message), list(early.values())

    def _next_item(self, *, is_cut_off: bool) -> Item:
        """The next item, for a worker that is no member yet: it has no state, so it ends at once when it is not needed.

        If its link alone has ended it says so on stderr, as it cannot tell the controller. Its exit code is 0: a worker
        that has ended without being told to is lost, and another one is started. With another code the run would end
        before its first step, as after an exception.

        Args:
            is_cut_off: its link to the controller has ended. What explains that may be filed later.

        Raises:
            WorkerStopped: the controller is gone, the link to it has ended, or the process got SIGTERM.
        """
        item = self._mailbox.get(_EXPLAINED_S if is_cut_off else None)
        if item is None:
            why = "its link to the controller has ended before it was a member of the mesh, so it ends"
            with contextlib.suppress(OSError):
                os.write(2, f"worker {self._rank}: {why}\n".encode())
        if item is None or isinstance(item, ControllerLost | Interrupted):  # Interrupted means SIGTERM
            raise WorkerStopped
        # On an agent's machine the life pipe ends with the agent, not with the controller. There the end of the link to
        # the controller shows that it is gone.
        if item == PeerClosed(CONTROLLER) and self._spec.run.options.has_agent:
            raise WorkerStopped
        return item

    def _make_executor(
        self, plan: RunPlan, model: LocalModel, data: Datasets, first: Configuration, channel: SocketChannel
    ) -> Executor:
        orders, trace = self._spec.run.checkpoints, self._trace
        self._checkpoints = checkpoints = CheckpointWriter(
            self._rank, orders, plan.description.layout, self._device, self._send
        )
        if (chaos := self._settings.chaos).events or chaos.random:
            # A fault is injected only when its step is run for the first time, not when a resumed run runs it again.
            version = max(first.version, orders.committed)
            self._faults = FaultInjector(self._rank, chaos, self._links, self._before_loss, version)
        hooks = WorkerHooks(
            on_point=self._on_point,
            wrong_result=self._wrong_result if self._settings.chaos.events else None,
            evaluated=self._evaluated,
            step_measured=partial(self._send_costs, model.programs),
            data_waited=self._send_data_wait,
            applied=checkpoints.applied,
            save=checkpoints.save,
            failed=self._report_of,
            members_changed=self._members_changed,
            stage_group=self._group,
            pairs=self._pairs,
            clock=self._clock if self._clock is None or trace is None else TracedClock(self._clock, trace),
            device_recovery=DeviceRecovery(self._device) if self._device.kind.capabilities.recovers else None,
            adopted=partial(self._adopted, channel) if self._settings.timeouts.adopt is not None else None,
            **({"layer_ran": trace.action} if trace is not None else {}),
        )
        way: Channel = channel if trace is None else TracedChannel(channel, trace)
        context = make_context(plan, self._rank, self._device, way, model, data, hooks)
        # Only members of the first mesh read the checkpoint. A newcomer is sent its state by the others, as that
        # checkpoint may have been removed since.
        layout, saved = plan.description.layout, None
        if first.epoch == 0:
            saved = orders.reader(self._rank, layout, first.placement.replica_map(layout))
        self._executor = Executor(context, first, saved)
        return self._executor

    def _train(self, executor: Executor, channel: SocketChannel) -> None:
        """Run the training loop until it is stopped. An orphan sends what is still on its way before it ends.

        Raises:
            WorkerStopped: by the loop, or since an orphan has waited for long enough.
            RunError: the loop has ended by itself, which it never does unless it has a bug.
        """
        try:
            self._resume(executor, channel)
        except WorkerStopped:
            if executor.is_orphaned:
                executor.hand_over()
                self._flush(channel)
            raise
        raise RunError(f"worker {self._rank} has nothing left to do, and was not told to stop")

    def _flush(self, channel: SocketChannel) -> None:
        """Wait until all payloads that this orphan has sent are copied from the device, so that `close` sends them."""
        until = time.monotonic() + _FAREWELL_MS / 1000
        while channel.is_copying() and time.monotonic() < until:
            time.sleep(_COPYING_S)

    def _resume(self, executor: Executor, channel: SocketChannel) -> None:
        """Resume the training loop each time that it waits and something has come."""
        progress = self._progress
        for reason in executor.train():
            progress.waiting = True
            progress.action = reason
            # Without a controller, workers complete the step that all of them have begun. The deadline limits how long
            # this worker waits for that, or for another controller. It is shorter if the agent is gone as well.
            if not executor.is_orphaned:
                self._deadline = None  # the controller lives, or another one has adopted this worker
            elif self._deadline is None or (channel.is_abandoned and not self._is_abandoned):
                self._is_abandoned = channel.is_abandoned
                timeouts = self._settings.timeouts
                seconds = timeouts.controller if self._is_abandoned else timeouts.without_controller
                self._deadline = min(time.monotonic() + seconds, self._deadline or math.inf)
            began = time.perf_counter()
            if not self._wait(executor, channel):
                executor.hand_over()
                raise WorkerStopped
            if self._trace is not None:
                self._trace.wait(reason, began, time.perf_counter())
            progress.waiting = False

    def _wait(self, executor: Executor, channel: SocketChannel) -> bool:
        """Wait until the loop can go on: a message, a transfer that has ended, or a planned time.

        Returns:
            False if the deadline of a worker without a controller has passed.
        """
        pauses, grouped, wakes_at = iter(_GROUP_S), executor.replica.parameters.grouped, executor.wakes_at
        direct = executor.direct
        while (copying := channel.is_copying()) or not grouped.idle or executor.transfers:
            if grouped.has_news or (direct is not None and direct.has_news):
                return True
            if self._mailbox.wait(_COPYING_S if copying else next(pauses, _GROUP_S[-1])):
                return True
            if self._deadline is not None and time.monotonic() > self._deadline:
                return False
            if wakes_at is not None and time.monotonic() >= wakes_at:
                return True
        if wakes_at is not None:  # the loop waits for a planned action, and goes on at this time without it
            self._mailbox.wait(max(0.0, wakes_at - time.monotonic()))
            return True
        return self._mailbox.wait(None if self._deadline is None else self._deadline - time.monotonic())

    @property
    def rank(self) -> int:
        return self._rank

    def save_if_orphaned(self) -> str:
        """Write the state of a worker that has ended without a controller, for the run that resumes.

        Returns:
            The reason for which it could not be written; empty if it was, or if there was nothing to write.
        """
        executor, why = self._executor, ""
        if executor is not None and executor.is_orphaned and self._checkpoints is not None:
            why = self._checkpoints.write_now(executor.replica)
        if self._checkpoints is not None:
            self._checkpoints.close()
        return why

    def _frequency(self) -> float:
        """The present frequency of the device, relative to its normal one; 1.0 where frequencies are not set."""
        return 1.0 if self._clock is None else self._clock.frequency

    def report_failure(self, error: BaseException) -> None:
        """Send the controller the exception that ends this worker.

        A UserError before Ready is sent as Refused: the input of the run is wrong, not this worker.
        """
        if isinstance(error, UserError) and not self._is_ready:
            self._send(m.Refused(self._rank, {name: text[:LONGEST_TEXT] for name, text in error.fields().items()}))
        else:
            self._send(self._failed(error))

    def _failed(self, error: BaseException) -> m.Failed:
        """The report of an exception. If it is too long for a message, its middle is left out."""
        report = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if len(report) > LONGEST_REPORT:  # the controller would refuse the message, and go on waiting for this worker
            half = LONGEST_REPORT // 2 - len(_LEFT_OUT)
            report = report[:half] + _LEFT_OUT + report[-half:]
        report = report.encode(errors="replace").decode()
        return m.Failed(self._rank, report, self._step, isinstance(error, LinksError))

    def close(self) -> None:
        """End the loader, close the trace and the clock; then close the links, once what was sent has left."""
        if self._loader is not None:
            self._loader.close()
        if self._trace is not None:
            self._trace.close()
        if self._clock is not None:
            self._clock.close()
        self._links.close(_FAREWELL_MS)

    # ---- hooks

    def _on_term(self, *_: object) -> None:
        self._term_in_forks.came()
        self._mailbox.interrupt("SIGTERM")

    def _send(self, message: m.Message) -> None:
        self._links.send(CONTROLLER, m.encode(message))

    def _send_probe(self, peer: int, header: bytes, payloads: Sequence[Any]) -> bool:
        """Send a message that measures a link. Only over a link that exists: no link is made for a measurement."""
        return self._links.reaches(peer) and self._links.send(peer, header, payloads, ordered=False)

    def _on_point(self, point: FaultPoint, step: int) -> None:
        """A step passes a fault point: count progress, and inject the faults that are due here."""
        progress = self._progress
        progress.count += 1
        if point in (FaultPoint.FORWARD, FaultPoint.BACKWARD, FaultPoint.WEIGHTS):
            progress.action = point.value
            self._term_in_forks.drop_others()  # once per action: there are many more of the other points
        self._step = step
        if point is FaultPoint.APPLY and self._trace is not None:
            self._trace.mark(f"step {step} applied")
        if self._faults is not None and self._executor is not None:
            self._faults.visit(point, step, self._executor.placement.mesh.members, self._executor.replica.state)

    def _evaluated(self) -> None:
        """A layer has run for a validation: count progress."""
        self._progress.count += 1
        self._progress.action = "validation"

    def _report_of(self, error: Exception) -> m.Failed | None:
        """The report of an exception after which this worker stays, so that its state can be saved (C17).

        None after an error of the links: the worker could not receive the order to save.
        """
        return None if isinstance(error, LinksError) else self._failed(error)

    def _wrong_result(self, point: FaultPoint, step: int, result: Tensor) -> Tensor:
        """The result that the device has computed, made wrong if a fault of `chaos` is due."""
        assert self._executor is not None and self._faults is not None
        return self._faults.computed(point, step, self._executor.placement.mesh.members, result)

    def _send_costs(
        self,
        programs: StagePrograms,
        step: int,
        rows: tuple[Row, ...],
        weights: tuple[WeightsRow, ...],
        memory: tuple[MemoryRow, ...],
    ) -> None:
        """Report the times and memory measured in a step; and once, when there is a result, the measured link."""
        link = () if self._link_reported else self._probe.result or ()
        if rows or memory or link:
            self._link_reported = self._link_reported or bool(link)
            self._send(m.Measured(self._rank, step, rows, memory, programs.num_compiled, link, weights))

    def _send_data_wait(self, step: int, seconds: float) -> None:
        self._send(m.Measured(self._rank, step, (), data_seconds=seconds))

    def _adopted(self, channel: SocketChannel, members: Iterable[int]) -> m.Adopted:
        """Begin the answer to a controller that has come back. What only the one before was told is told again."""
        self._link_reported = False
        return replace_fields(channel.link_facts(members), checked=self._checked)

    def _members_changed(self, message: m.Reconfigure) -> None:
        """Open links to new peers, and close links to workers that are no members or no peers any more.

        On a large mesh the message has only the addresses of this worker's peers (docs/protocol.md, C16).
        """
        if self._trace is not None:
            self._trace.mark(f"mesh epoch {message.epoch}")
        entered = -1 if self._executor is None else self._executor.configuration.epoch
        self._reached = self._reached.after(message, entered)
        members = {rank for ranks in message.stages for rank in ranks}
        self._progress.num_workers = len(members)
        linked = members & self._reached.ranks
        self._links.drop_all_but({CONTROLLER, *linked}, members - linked)
        for peer, address in message.addresses.items():
            if peer != self._rank:
                try:
                    self._links.connect(peer, address)
                except RunError as error:  # the address is not valid, or no file descriptor is left
                    # Printed here, since the controller is told only that the link is lost, and not why.
                    with contextlib.suppress(OSError):
                        os.write(2, f"worker {self._rank}: {error}\n".encode())
                    self._mailbox.put(PeerClosed(peer))


def _open_clock(settings: Settings, guard: str | None, rank: int) -> SimulatedClock | GuardedClock | None:
    """The clock that sets the frequency of this worker's device; None if frequencies are not set."""
    if guard is not None:
        return GuardedClock(guard, rank)
    schedule = settings.schedule
    return SimulatedClock(schedule.f_change_ms / 1e3) if schedule.frequency == SIMULATED else None
