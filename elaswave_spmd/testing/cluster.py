"""N executors in one process over links made of lists, in an order drawn from a seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.models import LayeredModel
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.runtime.collect import collect_pages
from elaswave_spmd.runtime.describe import ModelDescription
from elaswave_spmd.runtime.executor import Executor
from elaswave_spmd.runtime.job import Job
from elaswave_spmd.runtime.links import CONTROLLER
from elaswave_spmd.runtime.port import Incoming, payload_dtype, tensor_of
from elaswave_spmd.runtime.stage import Batches
from elaswave_spmd.scheduling.actions import actions_of
from elaswave_spmd.scheduling.placement import Placement


@dataclass
class Trained:
    """What a run left: per committed step the loss and gradient norm as hex, validation losses, final parameters."""

    losses: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    state_bytes: dict[int, dict[str, int]] = field(default_factory=dict)


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


class LocalCluster:
    """Runs a placement to the end in this process.

    Args:
        make_model: called once per worker; returns a new model with real parameters or on the meta device.
        seed: of the order of workers and messages; not of the training.
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
    ) -> None:
        self._job, self._layout = job, description.layout
        self._random = random.Random(seed)
        self.flying: dict[tuple[int, int], deque[_Flying]] = {}
        self._ports = {rank: _ListPort(rank, self) for rank in placement.mesh.members}
        self.executors: dict[int, Executor] = {}
        for rank in placement.mesh.members:
            model = make_model()
            layers = placement.layers_of_stage(placement.mesh.stage_of(rank))
            self.executors[rank] = Executor(
                rank,
                job,
                placement,
                description.layout,
                {layer: model.layers[layer] for layer in layers},
                model.loss,
                description.inits,
                train,
                validation,
                self._ports[rank],
                actions_of(placement, rank),
            )
        self._controller = ControllerProtocol(placement, job.validation_units)
        self._result = Trained()

    def deliver_some(self, rank: int) -> None:
        """Moves some of what is in flight to a worker into its inbox: per link in order, between links at random."""
        links = [queue for (_, peer), queue in sorted(self.flying.items()) if peer == rank and queue]
        for queue in self._random.sample(links, len(links)):
            for _ in range(self._random.randint(0, len(queue))):
                self._ports[rank].inbox.append(queue.popleft().arrive(self._job.torch_dtype))

    def run(self) -> Trained:
        """All steps.

        Raises:
            AssertionError: nothing can go on (a deadlock), with what each worker waits for.
        """
        running = {rank: executor.run() for rank, executor in self.executors.items()}
        waits: dict[int, str] = {}
        idle = 0
        while running:
            rank = self._random.choice(list(running))
            before = sum(map(len, self.flying.values()))
            try:
                waiting = next(running[rank])
            except StopIteration:
                del running[rank]
                waits.pop(rank, None)
                idle = 0
                continue
            idle = idle + 1 if waits.get(rank) == waiting and sum(map(len, self.flying.values())) == before else 0
            waits[rank] = waiting
            self._drain_controller()
            assert idle < 2000 * len(self.executors), f"nothing moves: {waits}"
        self._drain_controller()
        self._result.state_bytes = {rank: executor.state_bytes() for rank, executor in self.executors.items()}
        return self._result

    def _drain_controller(self) -> None:
        for (_, peer), queue in self.flying.items():
            while peer == CONTROLLER and queue:
                self._to_controller(queue.popleft().arrive(self._job.torch_dtype))

    def _to_controller(self, incoming: Incoming) -> None:
        match incoming.message:
            case m.Applied() as applied:
                if self._controller.applied(applied):
                    self._result.losses.append(applied.loss.hex())
                    self._result.norms.append(applied.grad_norm.hex())
            case m.ValidationLoss() as losses:
                if done := self._controller.validation(losses):
                    self._result.validation[done[0]] = done[1]
            case m.FinalPages() as pages:
                assert incoming.payload is not None
                collect_pages(self._layout, pages, incoming.payload, self._result.weights)
