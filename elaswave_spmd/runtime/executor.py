"""The worker's training loop: interprets the actions of its placement, one step after another.

It is a generator that yields whenever it has nothing to do until a message arrives. The process runtime resumes it from
a mailbox; tests resume many of them in one process, in any order. It decides nothing: what runs where is in the
placement, and when a step may be applied in the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd.keyed import Init, Keys, materialize, sample_ids
from elaswave_spmd.keyed.philox import WordSource
from elaswave_spmd.models import Batch
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.worker_protocol import (
    Apply,
    Effect,
    Install,
    SendVote,
    WorkerProtocol,
    held_runs,
)
from elaswave_spmd.runtime.buffers import ValueBuffer, aligned_copy
from elaswave_spmd.runtime.job import Job
from elaswave_spmd.runtime.links import CONTROLLER
from elaswave_spmd.runtime.numerics import page_norm_values
from elaswave_spmd.runtime.optimizers import clip_divisor
from elaswave_spmd.runtime.port import Incoming, Port
from elaswave_spmd.runtime.publication import Publisher
from elaswave_spmd.runtime.reduction import GradientReducer
from elaswave_spmd.runtime.stage import Batches, Loss, StagePrograms
from elaswave_spmd.runtime.state import HeldState
from elaswave_spmd.scheduling.actions import FORWARD, Action
from elaswave_spmd.scheduling.placement import HolderMap, HolderRun, Placement, RunKey
from elaswave_spmd.sharding.pages import LOSS, ModelLayout

Waiting = str
"""What a suspended executor waits for, in words."""


class BoundaryKey(NamedTuple):
    """Names a tensor that crosses from one stage to another, whoever sends it."""

    kind: str
    step: int
    unit: int


ACTIVATION, GRADIENT, VALIDATION = "activation", "gradient", "validation activation"


class Executor:
    """One worker of a run.

    Args:
        rank: this worker.
        job: the run's arithmetic.
        placement, layout: what runs where; how state lies.
        modules: this worker's layers, layer number -> module. Their parameters are replaced by views of flat buffers.
        loss: (last layer's output, batch) -> token-sum loss, fp32 scalar.
        inits: owned parameter name -> initial distribution.
        train, validation: the data.
        port: the way out.
        actions: what to do in a step, in order (scheduling.actions).
    """

    def __init__(
        self,
        rank: int,
        job: Job,
        placement: Placement,
        layout: ModelLayout,
        modules: Mapping[int, nn.Module],
        loss: Loss,
        inits: Mapping[str, Init],
        train: Batches,
        validation: Batches | None,
        port: Port,
        actions: Sequence[Action],
    ) -> None:
        self.rank, self.job, self.placement, self.layout = rank, job, placement, layout
        self._actions, self._port, self._inits = actions, port, inits
        self._train, self._validation = train, validation
        mesh = placement.mesh
        self._stage = mesh.stage_of(rank)
        self._is_last = self._stage == placement.num_stages - 1
        self._layers = placement.layers_of_stage(self._stage)
        self._units = placement.units_of(rank)
        self._drops_params = bool(placement.shardings.params.axes)
        self.values = {ly: ValueBuffer(layout.layers[ly], modules[ly], job.torch_dtype) for ly in self._layers}
        self._programs = StagePrograms(
            modules,
            self.values,
            loss=loss if self._is_last else None,
            loss_scale=1.0 / job.tokens_per_step,
            checkpointing=job.checkpointing,
        )
        self._set_up_state(placement.holder_runs(layout, self._stages_of_interest()))
        self._entries: dict[int, dict[RunKey, Tensor]] = {}
        self._boundary: dict[BoundaryKey, Tensor] = {}
        self._published: dict[m.Publish, Tensor] = {}
        self._batches: dict[int, Batch] = {}
        units = np.array(self._units, dtype=np.int64)
        self._slots = (units[:, None] * job.unit_size + np.arange(job.unit_size)).reshape(-1)
        self._samples: dict[int, np.ndarray] = {}
        self._seed = torch.tensor(job.seed)
        self._words = WordSource()
        self._layer_numbers = {layer: torch.tensor(layer) for layer in self._layers}
        self._step = 0

    def _stages_of_interest(self) -> set[int]:
        """This worker's stage, and those that own a parameter which a layer of it reads."""
        sources = (block.source for ly in self._layers for block in self.layout.layers[ly].reader_blocks)
        return {self._stage, *(self.placement.stage_of_layer(source[0]) for source in sources if source)}

    def _set_up_state(self, runs: HolderMap) -> None:
        """Held pages, and the parts that reduce, decide and publish them."""
        job, placement, layout, rank = self.job, self.placement, self.layout, self.rank
        held = held_runs(runs, rank)
        self._loss_run = next((r for r in held if layout.layers[r.layer].block_of(r.first).kind == LOSS), None)
        self.state = HeldState(
            (r for r in held if r is not self._loss_run),
            self.values,
            job.optimizer,
            separate_master=self._drops_params or job.torch_dtype != torch.float32,
        )
        loss_key = self._loss_run.key if self._loss_run else None
        self.protocol = WorkerProtocol(rank, placement.mesh.epoch, placement.mesh.members, held, loss_key)
        self._reducer = GradientReducer(
            rank,
            layout,
            runs,
            self._layers,
            self._units,
            job.num_units,
            sharded=bool(placement.shardings.grads.axes),
            add_in_place=job.torch_dtype == torch.float32,
            send=self._port.send,
            entry_done=self._entry_done,
        )
        self._publisher = Publisher(rank, placement, layout, self.values, self.state, self._port.send)

    # ---- the loop

    def run(self) -> Generator[Waiting, None, None]:
        """The whole run; yields what it waits for. Ends when all steps are applied and the final pages are sent."""
        self._initialise()
        for step in range(1, self.job.steps + 1):
            yield from self._run_step(step)
            if self.job.validates_at(step):
                yield from self._validate(step)
        for held in self.state.layers.values():
            for part in held:
                if part.run.primary == self.rank:
                    self._port.send(CONTROLLER, m.FinalPages(*part.run.key), part.master)

    def _initialise(self) -> None:
        def draw(name: str, first: int, stop: int) -> Tensor:
            return torch.from_numpy(materialize(self._inits[name], self.job.seed, name, first, stop))

        self.state.initialise(draw)
        for layer in self._layers:
            self._publisher.publish(layer, 0)

    def _run_step(self, step: int) -> Generator[Waiting, None, None]:
        self._step = step
        ids = sample_ids(self.job.seed, step, self.job.global_batch, len(self._train), self._slots)
        self._samples = dict(zip(self._units, ids.reshape(-1, self.job.unit_size), strict=True))
        self._step_number = torch.tensor(step)
        for action in self._actions:
            run = self._forward if action.kind == FORWARD else self._backward
            yield from run(step, action.unit)
        if not self._actions:
            for layer in self._layers:
                yield from self._until_at(layer, step - 1)
        self._perform(self.protocol.computed(step))
        yield from self._until(lambda: self.protocol.version >= step, "votes of step", step)

    def _forward(self, step: int, unit: int) -> Generator[Waiting, None, None]:
        batch = self._unit_batch(unit)
        if self._stage == 0:
            assert batch is not None
            x = batch.tokens
        else:
            x = yield from self._receive(BoundaryKey(ACTIVATION, step, unit))
        samples = torch.from_numpy(self._samples[unit])
        for layer in self._layers:
            yield from self._until_at(layer, step - 1)
            keys = Keys(self._seed, self._step_number, samples, self._layer_numbers[layer], {}, self._words)
            x = self._programs.forward(layer, unit, x, keys, batch)
        if not self._is_last:
            peer = self.placement.worker_of_unit(self._stage + 1, unit)
            self._port.send(peer, m.Activation(step, unit, tuple(x.shape)), x)

    def _backward(self, step: int, unit: int) -> Generator[Waiting, None, None]:
        dy: Tensor | None = None
        if not self._is_last:
            dy = yield from self._receive(BoundaryKey(GRADIENT, step, unit))
        batch = self._batches.pop(unit, None)
        last_unit = unit == self._actions[-1].unit
        for layer in reversed(self._layers):
            assert self.values[layer].is_at(step - 1), (layer, step)
            buffer, add = self._reducer.begin_unit(layer, unit)
            dy = self._programs.backward(layer, unit, dy, buffer, add=add, batch=batch)
            if self._drops_params and last_unit:
                self.values[layer].drop()
            self._reducer.end_unit(step, layer, unit)
            self._take()
        if self._stage:
            assert dy is not None
            peer = self.placement.worker_of_unit(self._stage - 1, unit)
            self._port.send(peer, m.ActivationGradient(step, unit, tuple(dy.shape)), dy.contiguous())

    # ---- data

    def _unit_batch(self, unit: int) -> Batch | None:
        """The unit's data, where it is needed: tokens in the first stage, targets in the last."""
        if self._stage and not self._is_last:
            return None
        batch = self._batches[unit] = _to_batch(self._train, self._samples[unit])
        return batch

    # ---- waiting and receiving

    def _until(self, ready: Callable[[], bool], what: str, number: int) -> Generator[Waiting, None, None]:
        self._take()
        while not ready():
            yield f"{what} {number}"
            self._take()

    def _until_at(self, layer: int, version: int) -> Generator[Waiting, None, None]:
        """Waits until every page of the layer's compute buffer is at this version, exactly."""
        values = self.values[layer]
        if not values.is_at(version):
            yield from self._until(lambda: values.is_at(version), "parameters of layer", layer)

    def _receive(self, key: BoundaryKey) -> Generator[Waiting, None, Tensor]:
        yield from self._until(lambda: key in self._boundary, f"{key.kind} of unit", key.unit)
        return self._boundary.pop(key)

    def _take(self) -> None:
        for incoming in self._port.take():
            self._handle(incoming)

    def _handle(self, incoming: Incoming) -> None:
        message, payload = incoming.message, incoming.payload
        match message:
            case m.Activation():
                assert payload is not None
                kind = VALIDATION if message.validation else ACTIVATION
                self._boundary[BoundaryKey(kind, message.step, message.unit)] = aligned_copy(payload, message.shape)
            case m.ActivationGradient():
                assert payload is not None
                self._boundary[BoundaryKey(GRADIENT, message.step, message.unit)] = aligned_copy(payload, message.shape)
            case m.NodeSum():
                assert payload is not None
                self._reducer.node_received(message, payload)
            case m.Entry():
                assert payload is not None
                key = (message.layer, message.first, message.stop)
                self._entries.setdefault(message.step, {})[key] = payload
                norms = np.frombuffer(message.norms, "<f4").tolist()
                self._perform(self.protocol.entry_complete(message.step, key, norms, self._loss_of(key, payload)))
            case m.Vote():
                self._perform(self.protocol.vote_received(message))
            case m.Publish():
                assert payload is not None
                self._published[message] = payload
                self._perform(self.protocol.publish_received(message))
            case _:
                raise AssertionError(f"worker {self.rank} got {message}")

    # ---- reduction, commit, publication

    def _entry_done(self, step: int, run: HolderRun, entry: Tensor) -> None:
        """A run of this worker's primary pages is reduced: forward it to the mirrors, tell the protocol.

        `step` can be ahead of this worker's own: others' units may be all of a step.
        """
        key = run.key
        self._entries.setdefault(step, {})[key] = entry
        loss = self._loss_of(key, entry)
        norms = page_norm_values(entry, self.layout.page_size) if loss is None else []
        if len(run.holders) > 1:
            message = m.Entry(step, *key, np.array(norms, "<f4").tobytes())
            for mirror in run.mirrors:
                self._port.send(mirror, message, entry)
        self._perform(self.protocol.entry_complete(step, key, norms, loss))

    def _loss_of(self, key: RunKey, entry: Tensor) -> float | None:
        return float(entry[0]) if self._loss_run and key == self._loss_run.key else None

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendVote(vote):
                    for peer in self.placement.mesh.members:
                        if peer != self.rank:
                            self._port.send(peer, vote)
                case Apply():
                    self._apply(effect)
                case Install(publish):
                    self._publisher.install(publish, self._published.pop(publish))

    def _apply(self, decided: Apply) -> None:
        lr = self.job.learning_rate.at(decided.step)
        divisor = clip_divisor(decided.norm, self.job.clip) if decided.finite else 1.0
        entries = self._entries.pop(decided.step, {})
        for layer in self._layers:
            if decided.finite:
                self.state.apply(layer, entries, step=decided.step, lr=lr, divisor=divisor)
            else:
                self.state.keep(layer, decided.step)
            self._publisher.publish(layer, decided.step)
        self._reducer.step_decided(decided.step)
        report = m.Applied(decided.step, self.protocol.epoch, self.rank, decided.loss, decided.norm, decided.finite)
        self._port.send(CONTROLLER, report)

    # ---- validation

    def _validate(self, version: int) -> Generator[Waiting, None, None]:
        """A read-only pass at a version: units dealt in turn to each stage's workers, losses to the controller."""
        assert self._validation is not None
        self._programs.set_training(False)
        size, units, losses = self.job.unit_size, [], []
        for unit in self._my_validation_units():
            ids = np.arange(unit * size, (unit + 1) * size)
            batch = _to_batch(self._validation, ids) if self._stage == 0 or self._is_last else None
            if self._stage:
                x = yield from self._receive(BoundaryKey(VALIDATION, version, unit))
            else:
                assert batch is not None
                x = batch.tokens
            keys = Keys.make(self.job.seed, version, ids, 0)
            for layer in self._layers:
                yield from self._until_at(layer, version)
                x = self._programs.evaluate(layer, x, keys.at(layer), batch)
            if self._is_last:
                units.append(unit)
                losses.append(float(x))
            else:
                peers = self.placement.mesh.stages[self._stage + 1]
                self._port.send(peers[unit % len(peers)], m.Activation(version, unit, tuple(x.shape), True), x)
        if units:
            self._port.send(CONTROLLER, m.ValidationLoss(version, self.rank, tuple(units), tuple(losses)))
        self._programs.set_training(True)

    def _my_validation_units(self) -> range:
        members = self.placement.mesh.stages[self._stage]
        return range(members.index(self.rank), self.job.validation_units, len(members))

    def state_bytes(self) -> dict[str, int]:
        """Bytes of training state on this worker between steps; gradients at their peak within a step."""
        values = sum(v.flat.numel() * v.flat.element_size() for v in self.values.values())
        held = self.state.num_bytes()
        sharded = self._drops_params
        master_is_params = not self.state.separate_master or (sharded and self.job.dtype == "fp32")
        return {
            "params": held["master"] if sharded and master_is_params else 0 if sharded else values,
            "grads": self._reducer.num_bytes,
            "optim": held["optimizer"] + (0 if master_is_params else held["master"]),
            "mirrors": 0,
        }


def _to_batch(data: Batches, ids: np.ndarray) -> Batch:
    tokens, targets = data.batch(ids)
    return Batch(torch.from_numpy(np.ascontiguousarray(tokens)), torch.from_numpy(np.ascontiguousarray(targets)))
