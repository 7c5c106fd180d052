"""N executors and a controller in one process over links made of lists, in an order drawn from a seed.

Everything that trains is the product's own; only processes, sockets and clocks are missing. A worker can be killed at
any point of a step, or stand still and come back when nobody wants it any more; what it had sent arrives in part.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.models import LayeredModel
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.controller_protocol import (
    Committed,
    ControllerProtocol,
    Done,
    Effect,
    EpochBegun,
    Evict,
    Policy,
    Send,
    Unrecoverable,
    ValidationDone,
)
from elaswave_spmd.runtime.collect import collect_pages
from elaswave_spmd.runtime.describe import ModelDescription
from elaswave_spmd.runtime.epoch import Epoch
from elaswave_spmd.runtime.executor import Executor
from elaswave_spmd.runtime.job import Job
from elaswave_spmd.runtime.links import CONTROLLER
from elaswave_spmd.runtime.points import Point
from elaswave_spmd.runtime.port import Incoming, payload_dtype, tensor_of
from elaswave_spmd.runtime.stage import Batches
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.testing.faults import Fault

_PATIENCE = 3000  # turns without any progress, per worker, until a run counts as stuck


class _Killed(Exception):  # noqa: N818  (the end of a simulated process)
    pass


class LostStateError(AssertionError):
    """All holders of some pages are gone."""


@dataclass
class Trained:
    """What a run left: per committed step the loss and gradient norm as hex, validation losses, final parameters."""

    losses: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    state_bytes: dict[int, dict[str, int]] = field(default_factory=dict)
    epochs: list[EpochBegun] = field(default_factory=list)


@dataclass(frozen=True)
class _Flying:
    """A message on its way, as a link has it: encoded, its payload still in the sender's memory."""

    sender: int
    header: bytes
    payload: Tensor | None

    def arrive(self, compute: torch.dtype) -> Incoming:
        """The payload is read now, at the latest time a link may read it: overwriting it before shows as wrong bits."""
        message = m.decode(self.header)
        if self.payload is None:
            return Incoming(self.sender, message)
        data = self.payload.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        return Incoming(self.sender, message, tensor_of(memoryview(data), payload_dtype(message, compute)))


class _ListPort:
    """One worker's port."""

    def __init__(self, rank: int, cluster: LocalCluster) -> None:
        self._rank, self._cluster = rank, cluster
        self.inbox: deque[Incoming] = deque()

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        queue = self._cluster.flying.setdefault((self._rank, peer), deque())
        queue.append(_Flying(self._rank, m.encode(message), payload))

    def take(self) -> list[Incoming]:
        self._cluster.deliver_some(self._rank)
        found = list(self.inbox)
        self.inbox.clear()
        return found


class _Worker:
    """A simulated process: waits for its place, then trains."""

    def __init__(self, rank: int, port: _ListPort) -> None:
        self.rank, self.port = rank, port
        self.executor: Executor | None = None
        self.running: Generator[str, None, None] | None = None
        self.waiting = "its place"
        self.asleep = 0  # turns that it stands still
        self.passed: Counter[tuple[Point, int]] = Counter()


class LocalCluster:
    """Runs a placement to the end in this process.

    Args:
        make_model: called for every worker and set of layers; a new model with real parameters or on the meta device.
        seed: of the order of workers and messages; not of the training.
        faults: what happens on the way.
        policy: how the controller answers.
    """

    def __init__(
        self,
        job: Job,
        placement: Placement,
        description: ModelDescription,
        make_model: Callable[[], LayeredModel],
        train: Batches,
        validation: Batches | None = None,
        *,
        seed: int = 0,
        faults: Sequence[Fault] = (),
        policy: Policy | None = None,
    ) -> None:
        self._job, self._description, self._healthy = job, description, placement
        self._make_model, self._train, self._validation = make_model, train, validation
        self._random = random.Random(seed)
        self._faults = list(faults)
        self._next_rank = max(placement.mesh.members) + 1
        self.flying: dict[tuple[int, int], deque[_Flying]] = {}
        self._workers: dict[int, _Worker] = {}
        self._notices: list[tuple[int, Callable[[], list[Effect]]]] = []  # (turn, what the controller then knows)
        self._turn = 0
        self._done = False
        self._result = Trained()
        validates_at = job.validates_at if validation is not None else lambda _: False
        self._controller = ControllerProtocol(
            placement, description.layout, job.steps, job.validation_units, validates_at, policy or Policy()
        )
        for rank in placement.mesh.members:
            self._spawn(rank)

    # ---- links

    def deliver_some(self, rank: int) -> None:
        """Moves some of what is in flight to a worker into its inbox: per link in order, between links at random."""
        links = [queue for (_, peer), queue in sorted(self.flying.items()) if peer == rank and queue]
        for queue in self._random.sample(links, len(links)):
            for _ in range(self._random.randint(0, len(queue))):
                self._workers[rank].port.inbox.append(queue.popleft().arrive(self._job.torch_dtype))

    def _to_controller(self) -> None:
        links = [queue for (_, peer), queue in sorted(self.flying.items()) if peer == CONTROLLER and queue]
        for queue in self._random.sample(links, len(links)):
            for _ in range(self._random.randint(0, len(queue))):
                self._report(queue.popleft().arrive(self._job.torch_dtype))
        for notice in [n for n in self._notices if n[0] <= self._turn]:
            self._notices.remove(notice)
            self._perform(notice[1]())

    # ---- workers

    def _spawn(self, rank: int) -> None:
        port = _ListPort(rank, self)
        self._workers[rank] = _Worker(rank, port)
        port.send(CONTROLLER, m.Ready(rank, f"sim://{rank}"))

    def _begin(self, worker: _Worker, place: m.Place, early: list[Incoming]) -> None:
        """The worker becomes a member; what came before its PLACE is not lost."""
        rank = worker.rank
        worker.port.inbox.extendleft(reversed(early))
        model = self._make_model()

        worker.executor = Executor(
            rank,
            self._job,
            self._description.layout,
            Epoch.of(self._healthy, place),
            lambda layers: {layer: self._make_model().layers[layer] for layer in layers},
            model.loss,
            self._description.inits,
            self._train,
            self._validation,
            worker.port,
            place_of=lambda message: Epoch.of(self._healthy, message),
            visit=lambda point, step: self._visit(worker, point, step),
        )
        worker.running = worker.executor.run()

    def _advance(self, worker: _Worker) -> None:
        """One turn of a worker."""
        try:
            if worker.running is None:
                early = worker.port.take()
                at = next((i for i, e in enumerate(early) if isinstance(e.message, m.Place)), None)
                if at is None:
                    worker.port.inbox.extend(early)
                    return
                place = early.pop(at).message
                assert isinstance(place, m.Place)
                self._begin(worker, place, early)
            assert worker.running is not None
            worker.waiting = next(worker.running)
        except _Killed:
            self._kill(worker.rank)

    def _visit(self, worker: _Worker, point: Point, step: int) -> None:
        worker.passed[point, step] += 1
        for fault in self._faults:
            here = (fault.rank, fault.step, fault.point) == (worker.rank, step, point.value)
            if here and worker.passed[point, step] == fault.count:
                self._faults.remove(fault)
                self._strike(worker, fault)

    def _strike(self, worker: _Worker, fault: Fault) -> None:
        later = self._turn + self._random.randint(0, 60)
        rank = worker.rank
        if fault.kind in ("join", "replace"):
            self._spawn(self._next_rank)
            self._next_rank += 1
        if fault.kind == "term":
            self._notices.append((later, lambda: self._controller.drain(rank, "asked to leave")))
        if fault.kind in ("kill", "replace"):
            self._notices.append((later, lambda: self._controller.lost(rank, "killed")))
            raise _Killed
        if fault.kind == "stop":
            self._notices.append((later, lambda: self._controller.lost(rank, "hangs")))
            worker.asleep = 400

    def _kill(self, rank: int) -> None:
        """The process is gone; of what it had not got out, each link delivers some first part."""
        del self._workers[rank]
        for (sender, peer), queue in self.flying.items():
            if sender == rank:
                keep = self._random.randint(0, len(queue))
                while len(queue) > keep:
                    queue.pop()
            if peer == rank:
                queue.clear()

    # ---- the controller

    def _report(self, incoming: Incoming) -> None:
        controller, message = self._controller, incoming.message
        match message:
            case m.Ready():
                self._perform(controller.ready(message))
            case m.Applied():
                self._perform(controller.applied(message))
            case m.Status():
                self._perform(controller.status(message))
            case m.Learned():
                self._perform(controller.learned(message))
            case m.ValidationLoss():
                self._perform(controller.validation(message))
            case m.Finished():
                self._perform(controller.finished(message))
            case m.FinalPages():
                assert incoming.payload is not None
                collect_pages(self._description.layout, message, incoming.payload, self._result.weights)
            case _:
                raise AssertionError(f"the controller got {message}")

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(rank, message):
                    if rank in self._workers:
                        queue = self.flying.setdefault((CONTROLLER, rank), deque())
                        queue.append(_Flying(CONTROLLER, m.encode(message), None))
                case Evict(rank, lost):
                    if not lost:
                        self._workers.pop(rank, None)
                case Committed(applied):
                    self._result.losses.append(applied.loss.hex())
                    self._result.norms.append(applied.grad_norm.hex())
                case ValidationDone(step, total):
                    self._result.validation[step] = total
                case EpochBegun():
                    self._result.epochs.append(effect)
                case Done():
                    self._done = True
                case Unrecoverable():
                    raise LostStateError(effect)

    def run(self) -> Trained:
        """All steps.

        Raises:
            AssertionError: nothing can go on (a deadlock), with what each worker waits for.
            LostStateError: all holders of some pages are gone.
        """
        idle, before = 0, None
        while not self._done:
            self._turn += 1
            self._to_controller()
            if not self._workers:
                self._to_controller()
                assert self._notices, "no worker is left"
                self._turn = max(self._turn, min(turn for turn, _ in self._notices))
                continue
            worker = self._workers[self._random.choice(sorted(self._workers))]
            if worker.asleep:
                worker.asleep -= 1
                continue
            self._advance(worker)
            now = (sum(map(len, self.flying.values())), len(self._notices), self._controller.version)
            waits = {rank: w.waiting for rank, w in self._workers.items()}
            idle = idle + 1 if (now, waits) == before else 0
            before = (now, waits)
            assert not self._workers or idle < _PATIENCE * len(self._workers), (
                f"nothing moves: {waits}, {now}, {self._controller}"
            )
        executors = {rank: w.executor for rank, w in self._workers.items() if w.executor is not None}
        self._result.state_bytes = {rank: executor.state_bytes() for rank, executor in executors.items()}
        return self._result
