"""The controller of a run: checks everything, starts the workers, writes down what they commit, ends them.

One thread. It decides membership, never the outcome of a step (protocol.md, rule 2).
"""

from __future__ import annotations

import contextlib
import secrets
import select
import shutil
import time
from typing import TYPE_CHECKING, NoReturn, cast

from elaswave_spmd.data import DataSpec, PreparedData, prepare_data
from elaswave_spmd.errors import ConfigError, RunError, WorkerError
from elaswave_spmd.observe import MetricsLine, RunDir, RunInfo, RunObserver, weights_sha256
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.runtime.descriptors import make_room
from elaswave_spmd.runtime.links import CONTROLLER, Links, Transport, socket_directory
from elaswave_spmd.runtime.mailbox import Envelope, Mailbox
from elaswave_spmd.runtime.zygote import Exited, Zygote
from elaswave_spmd.settings import Settings
from elaswave_spmd.summary import RunRecord, make_summary

if TYPE_CHECKING:
    from elaswave_spmd.assembly import RunPlan

_START_TIMEOUT_S = 300.0  # how long a worker may take to import what it needs and to say that it listens
_POLL_S = 0.1  # how long a worker's end can go unnoticed
_LAST_WORDS_S = 1.0  # how long the report of a worker that failed may take after its process ended


def run(settings: Settings) -> int:
    """Trains as the settings say. Returns the exit code.

    Raises:
        UserError: bad input, found before any worker starts; nothing is left behind.
        RunError: the run could not go on; all workers are gone.
    """
    check_device(settings.runtime.device)
    make_room(settings.mesh.shape.num_workers)
    scratch = socket_directory()
    # Started first: it imports torch while this process finds the data and imports torch itself.
    zygote = Zygote.start("elaswave_spmd.worker:main", preload=_PRELOAD, scratch=[scratch])
    try:
        data = prepare_data(data_spec(settings))
        from elaswave_spmd.assembly import plan_run

        plan = plan_run(settings, data)
        run_dir = RunDir.create(
            settings.run.dir, settings.to_yaml(), model=settings.model.label, mesh=settings.mesh.shape.name
        )
        with contextlib.ExitStack() as undo:
            undo.callback(run_dir.discard)
            zygote.ready()
            observer = RunObserver(run_dir, board=settings.run.tensorboard)
            undo.callback(observer.close)
            controller = Controller(plan, data, zygote, observer, scratch)
            undo.pop_all()
        with observer:
            controller.run()
    finally:
        zygote.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


def check_device(name: str) -> None:
    """Refuses a device that this version cannot run on.

    Raises:
        ConfigError: with what exists.
    """
    if name != "cpu":
        raise ConfigError(
            "a device is one that this version runs on", got=name, where=f"runtime.device={name}", exists="cpu"
        )


_PRELOAD = ("numpy", "torch", "torch._dynamo", "zmq", "randomgen", "elaswave_spmd.worker", "elaswave_spmd.models")


def data_spec(settings: Settings) -> DataSpec:
    """What the data room needs of the settings."""
    d = settings.data
    return DataSpec(
        name=d.name,
        path=d.path,
        tokenizer=d.tokenizer,
        target=d.target,
        args=d.args,
        cache=d.cache,
        validation_fraction=d.validation_fraction,
        seq_len=settings.train.seq_len,
    )


class Controller:
    """One run, from the first worker to the summary.

    Args:
        scratch: directory of the sockets.
        start_timeout_s: how long the workers may take until all of them listen.

    Raises:
        ConfigError: the links cannot be opened as the settings say.
    """

    def __init__(
        self,
        plan: RunPlan,
        data: PreparedData,
        zygote: Zygote,
        observer: RunObserver,
        scratch: str,
        *,
        start_timeout_s: float = _START_TIMEOUT_S,
    ) -> None:
        self._plan, self._data, self._zygote, self._observer = plan, data, zygote, observer
        self._scratch = scratch
        self._start_timeout_s = start_timeout_s
        self._start_until: float | None = None  # while workers are missing
        settings = plan.settings
        self._token = secrets.token_bytes(16)
        self._mailbox = Mailbox()
        transport = cast(Transport, settings.runtime.transport)
        self._links = Links(CONTROLLER, self._mailbox, transport=transport, directory=scratch, token=self._token)
        self._protocol = ControllerProtocol(plan.placement, plan.job.validation_units)
        self._record = RunRecord(plan.description.layout)
        self._finished: dict[int, m.Finished] = {}
        self._skipped_in_a_row = 0
        self._committed_at = 0.0

    def run(self) -> None:
        """Trains to the last step and writes the summary. Whatever ends it before leaves an event `stop`.

        Raises:
            RunError: a worker failed, was lost or never started; gradients stayed non-finite; the disk is full.
        """
        try:
            self._start()
            while len(self._finished) < self._plan.placement.mesh.num_workers:
                self._wait()
            self._finish()
        except BaseException as error:
            self._observer.on_stop(error)
            raise
        finally:
            self._links.close()

    def _start(self) -> None:
        plan = self._plan
        settings, mesh = plan.settings, plan.placement.mesh
        info = RunInfo(
            model=settings.model.label,
            mesh=mesh.shape.name,
            sharding=plan.placement.shardings.name,
            params=plan.description.layout.num_parameters,
            total_steps=plan.job.steps,
            workers=mesh.num_workers,
            corpus=f"{self._data.corpus} ({self._data.num_bytes:,} bytes)",
            run_dir=str(self._observer.run_dir.path),
        )
        self._observer.on_start(info)
        spec = {
            "settings": settings.to_dict(),
            "data": self._data.to_dict(),
            "controller": self._links.address,
            "directory": self._scratch,
            "token": self._token.hex(),
        }
        for rank in mesh.members:
            self._zygote.spawn(rank, spec)
        self._start_until = time.monotonic() + self._start_timeout_s

    def _wait(self) -> None:
        """Takes what has come; looks after the workers' processes."""
        if self._start_until is not None and time.monotonic() > self._start_until:
            missing = [r for r in self._plan.placement.mesh.members if r not in self._protocol.addresses]
            raise RunError(f"workers {missing} did not start within {self._start_timeout_s:g} s")
        item = self._mailbox.get(_POLL_S)
        if isinstance(item, Envelope):
            self._handle(item)
        if select.select([self._zygote], [], [], 0)[0]:
            self._workers_ended(self._zygote.poll())

    def _handle(self, envelope: Envelope) -> None:
        message = m.decode(envelope.header)
        match message:
            case m.Ready():
                self._links.connect(message.rank, message.address)
                place = self._protocol.ready(message)
                if place is not None:
                    self._start_until = None
                    self._committed_at = time.monotonic()
                    self._send_all(place)
            case m.Applied():
                if self._protocol.applied(message):
                    self._committed(message)
            case m.ValidationLoss():
                if done := self._protocol.validation(message):
                    self._validated(*done)
            case m.FinalPages():
                self._record.add_pages(message, envelope.payloads[0])
            case m.Finished():
                self._finished[message.rank] = message
            case m.Failed():
                self._failed(message)
            case _:
                raise AssertionError(f"the controller got {message}")

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
            workers=self._plan.placement.mesh.num_workers,
        )
        self._committed_at = now
        self._record.add_step(line, after_validation=self._plan.job.validates_at(applied.step - 1))
        self._observer.on_step(line)
        if applied.updated:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        message = f"step {applied.step}: gradient not finite, no update"
        self._observer.on_event("skip", step=applied.step, message=message)
        if self._skipped_in_a_row >= self._plan.settings.optim.max_skipped:
            raise RunError(
                f"the gradient was not finite in {self._skipped_in_a_row} steps in a row (optim.max_skipped); "
                f"last: step {applied.step}, loss {applied.loss}. A lower optim.lr, or optim.warmup_steps, may help"
            )

    def _validated(self, step: int, total: float) -> None:
        job = self._plan.job
        loss = total / (job.validation_units * job.unit_size * job.seq_len)
        self._record.validation_loss = loss
        self._observer.on_validation(step, loss)

    def _failed(self, message: m.Failed) -> NoReturn:
        """A worker says that it ends. If another one was killed, that is the cause, and this a consequence."""
        self._zygote.signal(message.rank, 0)  # kills nobody; its answer comes after the notices of all who have ended
        _raise_if_killed(self._zygote.poll())
        raise WorkerError(message.rank, message.report)

    def _workers_ended(self, exits: list[Exited]) -> None:
        """Processes are gone before their time. A worker's own report, if there is one, says more than its exit."""
        _raise_if_killed(exits)
        ranks = {exited.rank for exited in exits}  # what the others say now are consequences
        deadline = time.monotonic() + _LAST_WORDS_S
        while exits and (left := deadline - time.monotonic()) > 0:
            item = self._mailbox.get(left)
            message = m.decode(item.header) if isinstance(item, Envelope) else None
            if isinstance(message, m.Failed) and message.rank in ranks:
                self._failed(message)
        if exits:
            raise RunError(str(exits[0]))

    def _send_all(self, message: m.Message) -> None:
        for rank in self._plan.placement.mesh.members:
            self._links.send(rank, m.encode(message))

    def _finish(self) -> None:
        if not self._record.has_all_weights:
            raise RunError("all workers have finished, but pages of the trained weights have not come")
        self._send_all(m.Stop())
        weights = self._record.weights
        summary = make_summary(self._plan, self._data, self._record, self._finished, weights_sha256(weights))
        self._observer.on_finish(summary, weights)


def _raise_if_killed(exits: list[Exited]) -> None:
    for exited in exits:
        if exited.signal is not None:
            raise RunError(str(exited))
