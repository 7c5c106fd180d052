"""The controller of a run: checks everything, starts the workers, writes down what they commit, ends them.

One thread. It decides membership, never the outcome of a step (protocol.md, rule 2).
"""

from __future__ import annotations

import secrets
import select
import shutil
import time
from typing import TYPE_CHECKING, cast

import numpy as np

from elaswave_spmd.data import DataSpec, PreparedData, prepare_data
from elaswave_spmd.errors import ConfigError, RunError, WorkerError
from elaswave_spmd.observe import MetricsLine, RunDir, RunInfo, RunObserver
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.runtime.links import CONTROLLER, Links, Transport, socket_directory
from elaswave_spmd.runtime.mailbox import Envelope, Mailbox
from elaswave_spmd.runtime.zygote import Exited, Zygote
from elaswave_spmd.settings import Settings
from elaswave_spmd.summary import RunRecord, make_summary

if TYPE_CHECKING:
    from elaswave_spmd.assembly import RunPlan

_POLL_S = 0.1  # how long a worker's end can go unnoticed
_LAST_WORDS_S = 1.0  # how long the report of a worker that failed may take after its process ended


def run(settings: Settings) -> int:
    """Trains as the settings say. Returns the exit code.

    Raises:
        UserError: bad input, found before any worker starts; nothing is left behind.
        RunError: the run could not go on; all workers are gone.
    """
    check_device(settings.runtime.device)
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
        try:
            zygote.ready()
            observer = RunObserver(run_dir, board=settings.run.tensorboard)
        except BaseException:
            run_dir.discard()
            raise
        with observer:
            Controller(plan, data, zygote, observer, scratch).run()
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
    """One run, from the first worker to the summary."""

    def __init__(self, plan: RunPlan, data: PreparedData, zygote: Zygote, observer: RunObserver, scratch: str) -> None:
        self._plan, self._data, self._zygote, self._observer = plan, data, zygote, observer
        self._scratch = scratch
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
        """Trains to the last step and writes the summary.

        Raises:
            RunError: a worker failed or was lost, or gradients stayed non-finite.
        """
        try:
            self._start()
            while len(self._finished) < self._plan.placement.mesh.num_workers:
                self._wait()
            self._finish()
        except RunError as error:
            self._observer.on_event("stop", message=error.headline)
            raise
        finally:
            self._links.close()

    def _start(self) -> None:
        plan = self._plan
        settings, mesh = plan.settings, plan.placement.mesh
        info = RunInfo(
            model=settings.model.label,
            mesh=mesh.shape.name,
            sharding=_sharding_name(plan),
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

    def _wait(self) -> None:
        """Takes what has come; looks after the workers' processes."""
        item = self._mailbox.get(_POLL_S)
        if isinstance(item, Envelope):
            self._handle(item)
        if select.select([self._zygote], [], [], 0)[0]:
            for exited in self._zygote.poll():
                self._worker_ended(exited)

    def _handle(self, envelope: Envelope) -> None:
        message = m.decode(envelope.header)
        match message:
            case m.Ready():
                self._links.connect(message.rank, message.address)
                place = self._protocol.ready(message)
                if place is not None:
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
                raise WorkerError(message.rank, message.report)
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

    def _worker_ended(self, exited: Exited) -> None:
        """A worker's process is gone before its time. Its own report, if there is one, says more than its exit."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while (left := deadline - time.monotonic()) > 0:
            item = self._mailbox.get(left)
            if isinstance(item, Envelope) and isinstance(m.decode(item.header), m.Failed):
                self._handle(item)
        raise RunError(str(exited))

    def _send_all(self, message: m.Message) -> None:
        for rank in self._plan.placement.mesh.members:
            self._links.send(rank, m.encode(message))

    def _finish(self) -> None:
        weights: dict[str, np.ndarray] = self._record.weights
        sha256 = self._observer.write_weights(weights)
        self._send_all(m.Stop())
        self._observer.on_finish(make_summary(self._plan, self._data, self._record, self._finished, sha256))


def _sharding_name(plan: RunPlan) -> str:
    return f"zero{plan.shardings.zero_level}"
