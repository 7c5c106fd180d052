"""Compares the results of the model check, which every worker makes before it is ready, between the workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from elaswave_spmd.conf.schema import NEVER
from elaswave_spmd.controller.actions import Action, Record
from elaswave_spmd.errors import DataError, ModelError, UserError
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.scheduling.cost_model import LayerCost, MemoryRule
from elaswave_spmd.scheduling.split_backward import SplitBackward

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan

MODEL_CHECK = "model_check"
"""The kind of the event about the first worker that has passed the check."""


class ModelChecks:
    """Compares the digests of each worker's results with those of the first worker, and of the run that is resumed.

    Each worker has found by itself that it computes the same result of a micro-batch twice. This finds what is
    reproducible on one worker and different on another: other libraries, another processor, a number that differs
    between workers (such as a process id), the order of a set, or what the first micro-batch has left behind in a
    global variable.

    Args:
        plan: the plan of the run.
        known: layer -> digest, in hexadecimal, from the check of the run that is resumed; empty or None if there was
            none.
        given: as in `Constructions`.
    """

    def __init__(
        self, plan: RunPlan, known: Mapping[str, str] | None = None, given: Iterable[tuple[str, bool, bytes]] = ()
    ) -> None:
        self.constructions = Constructions(given)
        self._plan = plan
        self._layers = plan.description.layout.layers
        self._topology = plan.placement.mesh.topology
        self._known = known or {}
        self._first: m.Checked | None = None
        self._split: SplitBackward | None = None
        self._is_recorded = False  # True once the event of the first worker that passed was written

    def difference(self, message: m.Checked) -> UserError | None:
        """The error if a worker has read other samples or computed other bits than the first worker; None if it agrees.

        The bits are also compared with those of the run that is resumed.
        """
        first = self._first = self._first or message
        if message.samples != first.samples:
            return _other_samples(self._named(first.rank), self._named(message.rank))
        wanted = {layer: digest for layer, *_, digest in first.layers}
        for number, *_, digest in message.layers:
            name = self._layers[number].name
            if wanted.get(number) != digest:
                around = {0: "inputs(batch)", len(self._layers) - 1: "loss(output, batch)"}.get(number)
                return _other_worker(name, around, self._named(first.rank), self._named(message.rank))
            if self._known.get(name, digest.hex()) != digest.hex():
                return _other_run(name)
        return None

    def adopted(self, message: m.Checked) -> None:
        """A worker that is adopted had this result when it started: the controller before has compared and recorded it.

        What a layer keeps, and which layers can run their backward in two parts, is known again by it.
        """
        self._first = self._first or message
        self._is_recorded = True

    @property
    def split(self) -> SplitBackward | None:
        """The layers whose backward may run in two parts, by the first worker's report; None if there are none."""
        if self._split is None and self._first is not None:
            kept = {layer: (kept, output, put_off) for layer, _, kept, output, put_off, _ in self._first.layers}
            self._split = _split_of(self._plan, [kept[kind] for kind in self._first.kinds])
        return self._split

    def passed(self, message: m.Checked) -> list[Action]:
        """A worker has passed. Only the first one is recorded, as each kind of layer takes the same bytes on all."""
        if self._is_recorded:
            return []
        self._is_recorded = True
        rows = []
        for number, count, kept, output, put_off, digest in message.layers:
            state, values, gradient = self._plan.bytes_of(number)
            sizes = {"state_bytes": state, "value_bytes": values, "gradient_bytes": gradient, "kept_bytes": kept}
            row = {"layer": self._layers[number].name, "count": count, **sizes, "output_bytes": output}
            rows.append({**row, "put_off_bytes": put_off, "digest": digest.hex()})
        seconds = round(message.seconds, 3)
        largest = max(rows, key=lambda row: row["state_bytes"] + row["gradient_bytes"] + row["kept_bytes"])
        text = (
            f"each of {len(rows)} kinds of layers computed a micro-batch twice alike, in {seconds:.2f} s; the largest, "
            f"{largest['layer']}, takes {_mib(largest['state_bytes'])} of state, {_mib(largest['gradient_bytes'])} of "
            f"gradient and {_mib(largest['kept_bytes'])} for each micro-batch in flight"
        )
        if in_parts := sum(row["put_off_bytes"] > 0 for row in rows):
            text += f"; the backward of {in_parts} may be in two parts, with the same bits"
        unchecked = {"loss_unchecked": message.loss_unchecked} if message.loss_unchecked else {}
        if unchecked:
            text += (
                ". Nothing has shown that loss() is a sum over samples, as it must be: of half a micro-batch it could "
                f"not be computed ({message.loss_unchecked})"
            )
        return [Record(MODEL_CHECK, {"seconds": seconds, "layers": rows, **unchecked, "message": text})]

    def _named(self, rank: int) -> str:
        topology = self._topology
        several = len({path for _, path in topology.domains}) > 1
        return f"worker {rank}" + (f" on {'/'.join(topology.path(rank))}" if several and rank in topology else "")


class Constructions:
    """Compares the initial values and constants that the constructors of a model made on each worker.

    Constructors run with generators that are seeded by the run. One that reads the clock or a process id, or depends on
    the order of a set, makes different values on each worker. Files of given weights (`model.init_from`) may differ
    between machines.

    Args:
        given: (name, False, digest) of the weights as the controller reads them.
    """

    def __init__(self, given: Iterable[tuple[str, bool, bytes]] = ()) -> None:
        self._given = {name: digest for name, _, digest in given}
        self._known: dict[str, tuple[int, bytes]] = {}  # name -> the first worker that made it, digest

    def difference(self, message: m.Constructed) -> ModelError | None:
        """The error if a worker has made, or read, other values than one before it."""
        for name, is_constant, digest in message.rows:
            if self._given.get(name, digest) != digest:
                return _read_otherwise(name, message.rank)
            first, known = self._known.setdefault(name, (message.rank, digest))
            if known != digest:
                return _made_otherwise(name, is_constant, first, message.rank)
        return None


def _read_otherwise(name: str, rank: int) -> ModelError:
    return ModelError(
        f"worker {rank} reads other values of parameter {name} from model.init_from than the controller",
        rule="all machines of a run begin with the same weights",
        where=f"parameter {name}, worker {rank}",
        fix="copy the files to that machine again",
    )


def _made_otherwise(name: str, is_constant: bool, first: int, other: int) -> ModelError:
    layer = name.partition(".")[0]
    what = f"constant {name}" if is_constant else f"parameter {name}"
    return ModelError(
        f"the constructor of layer {layer} made other values of {what} on worker {other} than on worker {first}",
        rule="a constructor makes the same values on every worker: it draws from torch's, numpy's or Python's "
        "generators, which are seeded before it, and reads no clock, process id or rank",
        where=f"layer {layer}, {name}",
        fix="draw them from torch's generator, or override init(name, shape) for parameters",
    )


def split_of_emulated(plan: RunPlan) -> SplitBackward | None:
    """The layers that an emulated device may run backward in two parts: all that have a gradient of their input.

    Nothing has to be tried: its numbers are the same either way. What it keeps until the weight gradients are these.
    """
    if not plan.settings.emulated.weight_share:
        return None
    first_trained = plan.description.layout.first_trained
    rows = []
    for number, cost in enumerate(plan.costs.layers):
        _, _, gradient = plan.bytes_of(number)
        splits = number > first_trained and gradient > 0
        rows.append((cost.activation_bytes, cost.boundary_bytes, gradient if splits else 0))
    return _split_of(plan, rows)


def _split_of(plan: RunPlan, bytes_of: Sequence[tuple[int, int, int]]) -> SplitBackward | None:
    """The split of backwards that follows from a check of a model.

    Args:
        bytes_of: per layer what a micro-batch keeps of it until its backward, of its output, and until its weight
            gradients; 0: its backward is whole.
    """
    layers = tuple(layer for layer, (_, _, put_off) in enumerate(bytes_of) if put_off)
    if not layers:
        return None
    # Sizes as they are: a profile that was given (schedule.profile) may lack them.
    costs, until_weights = [], []
    for number, (cost, (kept, output, put_off)) in enumerate(zip(plan.costs.layers, bytes_of, strict=True)):
        state, values, gradient = plan.bytes_of(number)
        costs.append(LayerCost(cost.name, cost.forward_s, cost.backward_s, state, values, gradient, kept, output))
        # Beside those that are split, a layer makes its gradients in the first part, in the compute dtype.
        until_weights.append(put_off or values)
    settings, schedule = plan.settings, plan.settings.schedule
    rule = MemoryRule(plan.placement.shardings, settings.mirror.count)
    model, room = replace(plan.costs, layers=tuple(costs)), schedule.memory_limit or math.inf
    return SplitBackward(layers, tuple(until_weights), model, rule, room, schedule.split_backward == NEVER)


def _other_samples(first: str, other: str) -> DataError:
    return DataError(
        f"the samples of the first micro-batches are others on {other} than on {first}",
        rule="a sample is a function of its id: the same on every worker, whatever was read before",
        where="data.target",
        fix="no rank, host, clock or global generator in __getitem__; for augmentation __getitem__(self, index, keys); "
        "the same files on all machines",
    )


def _other_worker(layer: str, around: str | None, first: str, other: str) -> ModelError:
    return ModelError(
        f"layer {layer}{'' if around is None else f', or {around},'} computes other bits on {other} than on {first}",
        rule="a micro-batch has the same result on every worker: the same files of the model, libraries and kind "
        "of processor, and nothing in a layer that depends on its worker or on what ran before",
        where=f"layer {layer}",
        fix="no rank, host, process id or global variable in a layer (hand on what a later layer needs in a tuple), "
        "no order of a set (sort it); install the "
        "same versions on machines of the same kind",
    )


def _other_run(layer: str) -> ModelError:
    return ModelError(
        f"layer {layer} computes other bits than it did when the run that is resumed was checked",
        rule="a run goes on with the bits that it began with",
        where=f"layer {layer}",
        fix="resume it with the files of the model as they were, with nothing in a layer that depends on the process, "
        "such as the order of a set (sort it); or give runtime.check_model=false",
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
