"""The controller of a run: checks everything, starts the workers, writes down what they commit, ends them.

One thread. It decides membership, never the outcome of a step (protocol.md, rule 2).
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller.admin_server import Control
from elaswave_spmd.controller.checkpoints import CheckpointCoordinator
from elaswave_spmd.controller.dvfs import Frequencies
from elaswave_spmd.controller.events import Compilations, CopyWatch, EpochEvents, GroupWatch, SkippedSteps
from elaswave_spmd.controller.failures import FailureHandler, RestartError, Restarts, Stopping, begin_again
from elaswave_spmd.controller.rescheduler import Rescheduler
from elaswave_spmd.controller.resume import ResumePoint, open_run, run_info
from elaswave_spmd.controller.startup import data_spec, gather, listen_host, start_launcher
from elaswave_spmd.controller.summary import RunRecord, make_summary
from elaswave_spmd.controller.supervision import Supervision
from elaswave_spmd.data import PreparedData, prepare_data
from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import (
    Committed,
    Done,
    Effect,
    EpochBegun,
    Evict,
    Save,
    Send,
    Unrecoverable,
    ValidationDone,
)
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, Policy
from elaswave_spmd.run_dir import MetricsLine, RunObserver, weights_sha256
from elaswave_spmd.run_dir.checkpoints import remove_unfinished
from elaswave_spmd.run_dir.trace import merge_trace
from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient
from elaswave_spmd.runtime.processes.launcher import Launcher
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links, Transport, make_room, socket_directory
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox, PeerClosed, Request
from elaswave_spmd.sharding.replicas import ReplicaSet
from elaswave_spmd.worker.spec import LinkSpec, OptionSpec, RunSpec, WorkerSpec

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan

_POLL_S = 0.1  # how long a worker's end can go unnoticed


def run(settings: Settings, *, here: bool = False) -> int:
    """Trains as the settings say. Returns the exit code. `here`: as for ForkServerClient.start, if this is a command's
    process.

    Raises:
        UserError: bad input, found before any worker starts; nothing is left behind.
        RunError: the run could not go on; all workers are gone.
    """
    restarts = Restarts()
    while True:
        try:
            return _run(settings, here)
        except RestartError as restart:
            settings, here = restarts.next(restart), False


def _run(settings: Settings, here: bool) -> int:
    """Raises RestartError when it is to be called again."""
    make_room(settings.mesh.shape.num_workers)
    scratch = socket_directory()
    # Started first: this process has one thread now, and the fork server imports the rest while this one finds the
    # data.
    launcher = start_launcher(settings, scratch, here=here)
    try:
        data = prepare_data(data_spec(settings))
        from elaswave_spmd.worker.plan_run import plan_run, read_profile

        costs = read_profile(settings.schedule.profile) if settings.schedule.profile else None
        plan = plan_run(settings, data, costs=costs)
        if (topology := gather(launcher, settings, data)) is not None:
            plan = plan_run(settings, data, topology, costs)
        run_dir, start = open_run(plan, data)
        with contextlib.ExitStack() as undo:
            undo.callback(start.close)
            undo.callback(run_dir.discard)
            launcher.ready()
            observer = RunObserver(run_dir, board=settings.run.tensorboard)
            undo.callback(observer.close)
            frequencies = undo.enter_context(Frequencies.of(settings.schedule, observer, scratch))
            controller = Controller(plan, data, launcher, observer, scratch, start=start, frequencies=frequencies)
            undo.pop_all()
        with contextlib.closing(start), observer, frequencies, contextlib.ExitStack() as ended:
            ended.callback(merge_trace, run_dir.path)
            ended.callback(launcher.stop, 0.0)
            controller.run()
            launcher.stop(grace_s=0.0)
            remove_unfinished(run_dir.path)
    finally:
        launcher.stop(grace_s=0.0)  # to a worker SIGTERM is a wish to leave, and nobody is left to grant it
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


class Controller:
    """One run, from the first worker to the summary.

    Args:
        scratch: directory of the sockets.
        start_timeout_s: how long the first workers may take until all of them listen; None: timeouts.start.
        start: where the run begins; None: at nothing.
        frequencies: those of the workers' devices; None: they stay as they are.

    Raises:
        ConfigError: the links cannot be opened as the settings say.
    """

    def __init__(
        self,
        plan: RunPlan,
        data: PreparedData,
        fork_server: ForkServerClient | Launcher,
        observer: RunObserver,
        scratch: str,
        *,
        start_timeout_s: float | None = None,
        start: ResumePoint | None = None,
        frequencies: Frequencies | None = None,
    ) -> None:
        self._plan, self._data, self._fork_server, self._observer = plan, data, fork_server, observer
        settings, elastic, mirror = plan.settings, plan.settings.elastic, plan.settings.mirror
        self._start_timeout_s = settings.timeouts.start if start_timeout_s is None else start_timeout_s
        self._scratch = scratch
        self._start_until: float | None = None  # while workers are missing
        self._token = secrets.token_bytes(16)
        self._mailbox = Mailbox()
        self._start_at = start or ResumePoint.fresh(observer.run_dir.path)
        transport = cast(Transport, settings.runtime.transport)
        self._host = listen_host(settings.runtime)
        self._links = Links(
            CONTROLLER, self._mailbox, transport=transport, directory=scratch, token=self._token, host=self._host
        )
        self._groups = GroupWatch(settings, self._host, observer)
        self._durability = CheckpointCoordinator(
            plan, data, observer, self._start_at, lambda: self._mailbox.interrupt("disk")
        )
        self._protocol = ControllerProtocol(
            plan.placement,
            plan.description.layout,
            plan.job.steps,
            plan.job.validation_microbatches,
            plan.job.validates_at,
            Policy(mirror.count, mirror.scatter, elastic.min_workers),
            domain_of=fork_server.domain_of if isinstance(fork_server, Launcher) else lambda _: None,
        )
        self._supervision = Supervision(
            fork_server, scratch, self._mailbox, settings.timeouts, lambda rank: rank in self._protocol.free_to_leave
        )
        self._record = RunRecord(plan.description.layout)
        self._compilations = Compilations(observer, self._record)
        kinds_of_state = 1 + len(plan.job.optimizer.state_names)
        self._events = EpochEvents(observer, plan.description.layout, 4 * kinds_of_state)
        self._copies = CopyWatch(observer, lambda rank, why: self._perform(self._protocol.lost(rank, why)))
        self._finished: dict[int, m.Finished] = {}
        self._skipped = SkippedSteps(observer, settings.optim.max_skipped)
        self._committed_at = 0.0
        self._next_rank = max(plan.placement.mesh.members) + 1
        self._workers: dict[int, int | None] = {}  # started, neither lost nor let go; process id, None: elsewhere
        self._losses = FailureHandler(
            elastic,
            self._protocol,
            self._supervision,
            self._mailbox,
            fork_server,
            self._events,
            self._workers,
            self._spawn,
            self._perform,
        )
        self._stopping = Stopping(self._durability, self._losses, observer.run_dir.path, settings.timeouts.shutdown)
        self._control = Control(
            self._mailbox, self._protocol, observer, elastic, self._workers, self._spawn, self._perform
        )
        self._frequencies = frequencies or Frequencies(settings.schedule, observer)
        self._frequencies.pid_of = self._workers.get
        self._rescheduler = Rescheduler.of(plan, self._protocol, observer, self._perform, self._frequencies)
        self._protocol.version = self._start_at.step
        if self._start_at.step == plan.job.steps:  # nothing is left to do but to collect the weights
            self._record.last = self._start_at.last_line
        self._done = False

    def run(self) -> None:
        """Trains to the last step and writes the summary. Whatever ends it before leaves an event `stop`.

        Raises:
            RunError: a worker failed, was lost or never started; gradients stayed non-finite; the disk is full.
        """
        try:
            self._start()
            while not self._done:
                self._wait()
            self._finish()
        except RestartError:
            raise
        except BaseException as error:
            self._observer.on_stop(error)
            raise
        finally:
            self._control.close()
            self._links.close()
            self._groups.close()
            self._durability.close()
            self._supervision.close()

    def _start(self) -> None:
        plan, settings, mesh = self._plan, self._plan.settings, self._plan.placement.mesh
        self._observer.on_start(run_info(plan, self._data, self._observer.run_dir.path, self._start_at.step))
        self._start_at.announce(self._observer, mesh.shape.name)
        self._control.open()
        self._spec = RunSpec(
            settings,
            self._data,
            LinkSpec(self._links.address, self._scratch, self._token, self._host),
            self._durability.orders(),
            OptionSpec(
                profile=plan.costs.to_json() if settings.schedule.profile else None,
                trace=str(self._observer.run_dir.path) if settings.run.trace else None,
                frequencies=self._frequencies.cells,
                groups=self._groups.address,
            ),
        )
        for rank in mesh.members:
            self._start_worker(rank)
        self._start_until = time.monotonic() + self._start_timeout_s

    def _spawn(self, count: int) -> list[int]:
        """Starts newcomers; each says Ready when it is. Returns their ranks."""
        ranks = list(range(self._next_rank, self._next_rank + count))
        self._next_rank += count
        for rank in ranks:
            self._supervision.expect(rank)
            self._start_worker(rank)
        return ranks

    def _start_worker(self, rank: int) -> None:
        spec = WorkerSpec(rank, self._spec, self._supervision.seat(rank))
        self._workers[rank] = self._fork_server.spawn(rank, spec.to_dict())

    def _wait(self) -> None:
        """Takes what has come; looks after the workers' processes."""
        until = max(self._start_until or 0.0, self._compilations.got_further_at + self._start_timeout_s)
        if self._start_until is not None and time.monotonic() > until:
            missing = [r for r in self._plan.placement.mesh.members if r not in self._protocol.addresses]
            raise RunError(f"workers {missing} did not start within {self._start_timeout_s:g} s")
        item = self._mailbox.get(_POLL_S)
        match item:
            case Envelope():
                self._handle(item)
            case Request():
                self._control.answer(item)
            case PeerClosed():
                self._losses.link_closed(item.peer)
        self._durability.poll()
        self._stopping.look()
        self._supervision.wait_for(*self._protocol.owing)
        for loss in self._supervision.losses():
            self._losses.lost(loss)

    def _handle(self, envelope: Envelope) -> None:
        message, protocol = m.decode(envelope.header), self._protocol
        self._compilations.take(message)
        match message:
            case m.Ready() if message.rank not in self._workers:
                pass  # it was given up before
            case m.Ready():
                self._links.connect(message.rank, message.address)
                self._supervision.watch(message.rank, message.latched)
                self._perform(protocol.ready(message))
            case m.Heartbeat():
                self._supervision.heartbeat(message)
                self._losses.lives(message.rank)
            case m.StepReport():
                self._events.answered()
                self._perform(protocol.status(message))
            case m.Applied():
                self._perform(protocol.applied(message))
                self._events.applied(message.rank, message.step)
            case m.Measured():
                self._rescheduler.measured(message)
            case m.CaughtUp():
                self._perform(protocol.learned(message))
            case m.ValidationLoss():
                self._perform(protocol.validation(message))
            case m.FinalPages():
                self._record.add_pages(message, envelope.payloads[0])
            case m.Finished():
                self._finished[message.rank] = message
                self._perform(protocol.finished(message))
            case m.Leaving():
                self._supervision.wants_to_leave(message.rank)
                self._perform(protocol.drain(message.rank, "asked to leave"))
            case m.Wanted():
                self._spawn(message.count)
            case m.Wrote():
                self._durability.wrote(message)
            case m.Fingerprints():
                self._copies.fingerprints(message)
            case m.Damaged():
                self._copies.damaged(message)
                self._perform(protocol.damaged(message))
            case m.GroupLost():
                self._groups.lost(message, self._protocol.version)
            case m.LinkClosed():
                self._losses.link_closed(message.rank, message.peer)
            case m.Failed():
                self._losses.failed(message)
            case _:
                raise AssertionError(f"the controller got {message}")

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(rank, message):
                    if isinstance(message, m.Reconfigure) and self._start_until is not None:
                        self._start_until, self._committed_at = None, time.monotonic()
                    self._durability.sending(message)
                    if isinstance(message, m.Prepare):
                        self._events.preparing()
                    self._links.send(rank, m.encode(message))
                case Evict(rank, lost):
                    self._supervision.forget(rank)
                    self._workers.pop(rank, None)
                    self._finished.pop(rank, None)
                    if lost:
                        self._supervision.end(rank)
                        self._links.drop(rank)
                case Committed(applied):
                    self._committed(applied)
                case ValidationDone(step, total):
                    self._validated(step, total)
                case EpochBegun():
                    self._events.begun(effect)
                    self._frequencies.begun(effect.placement, effect.version)
                case Save():
                    self._stopping.begin(effect)
                case Done():
                    self._done = True
                case Unrecoverable(runs, reason):
                    self._losses.give_up(reason, lambda: self._last_resort(runs, reason))

    def _last_resort(self, runs: Sequence[ReplicaSet], reason: str) -> str:
        self._durability.drain()
        return begin_again(self._observer, self._protocol, self._plan.settings, runs, reason)

    def _committed(self, applied: m.Applied) -> None:
        now = time.monotonic()
        line = MetricsLine.of(
            step=applied.step,
            mesh_epoch=applied.epoch,
            loss=applied.loss,
            grad_norm=applied.grad_norm,
            lr=self._plan.job.learning_rate.at(applied.step),
            tokens=self._plan.job.tokens_per_step,
            seconds=now - self._committed_at,
            workers=self._protocol.placement.mesh.num_workers,
        )
        self._committed_at = now
        self._groups.committed(applied)
        self._events.committed(line)
        self._record.add_step(line, after_validation=self._plan.job.validates_at(applied.step - 1))
        self._observer.on_step(line)
        self._rescheduler.committed(applied.step)
        self._skipped.committed(applied)

    def _validated(self, step: int, total: float) -> None:
        job = self._plan.job
        loss = total / (job.validation_microbatches * job.microbatch_size * job.seq_len)
        self._record.validation_loss = loss
        self._durability.validated(step, loss)
        self._observer.on_validation(step, loss)

    def _finish(self) -> None:
        self._durability.drain()
        if not self._record.has_all_weights:
            raise RunError("all workers have finished, but pages of the trained weights have not come")
        for rank in self._protocol.addresses:
            self._links.send(rank, m.encode(m.Stop()))
        weights = self._record.weights
        summary = make_summary(self._plan, self._data, self._record, self._finished, weights_sha256(weights))
        self._observer.on_finish(summary, weights)
