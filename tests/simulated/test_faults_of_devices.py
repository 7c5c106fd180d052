"""A device fails in the middle of a step and is brought back: the step is done again, with the same bits.

The fault is an exception at a point of a step, as torch_npu raises one; the device that comes back is the CPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn

from elaswave_spmd.determinism import Init
from elaswave_spmd.models import LayeredModel
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.devices import Device, Remedy
from elaswave_spmd.worker.context import WorkerContext
from elaswave_spmd.worker.device_fault import DeviceRecovery
from elaswave_spmd.worker.fault_points import FaultPoint
from elaswave_spmd.worker.loop import Executor
from elaswave_spmd.worker.state import LEARNING
from tests.cluster import cluster
from tests.cluster.failing_device import DEVICE_FAULT, FailingDevice
from tests.cluster.faults import AnyFault, Fault
from tests.cluster.grouped import GroupedCluster
from tests.cluster.processes import Killed, LostStateError, Worker
from tests.simulated import bits_cases
from tests.simulated.bits_cases import (
    VOCAB,
    MirroredCluster,
    Run,
    expected,
    one_thread,
    outcome,
)

Hits = dict[tuple[int, int, str], Remedy | None]
"""(rank, step, point) -> the remedy of a fault there, at the first visit."""


@pytest.fixture
def fail_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hits], list[Executor]]:
    """Has devices of a cluster fail; returns the executors that were made, in order."""

    def prepare(hits: Hits) -> list[Executor]:
        left, made = dict(hits), []

        def make(context: WorkerContext, *rest: Any) -> Executor:
            rank, visit = context.rank, context.hooks.on_point
            remedies: list[Remedy | None] = []

            def visit_first(point: FaultPoint, step: int) -> None:
                visit(point, step)
                if (rank, step, point.value) in left:
                    remedies.append(left.pop((rank, step, point.value)))
                    raise RuntimeError(f"{DEVICE_FAULT}\nlook at the log")

            recovery = DeviceRecovery(cast(Device, FailingDevice(remedies)))
            hooks = replace(context.hooks, on_point=visit_first, device_recovery=recovery)
            executor = Executor(replace(context, hooks=hooks), *rest)
            made.append(executor)
            return executor

        monkeypatch.setattr(cluster, "Executor", make)
        return made

    return prepare


class MadeUpMachines(MirroredCluster):
    """A cluster whose workers send copies, as from a device with memory of its own."""

    def send(self, sender: int, peer: int, message: m.Message, payload: torch.Tensor | None) -> None:
        super().send(sender, peer, message, None if payload is None else payload.clone())


class EndingMachines(MadeUpMachines):
    """A device that cannot be brought back is the end of its worker."""

    def _advance(self, worker: Worker) -> None:
        try:
            super()._advance(worker)
        except RuntimeError as error:
            if DEVICE_FAULT not in str(error):
                raise
            try:
                self.inject(worker.rank, Fault(0, "kill", worker.rank, "forward"))
            except Killed as killed:
                self._kill(worker.rank, *killed.args)


def train(
    run: Run,
    mesh: str,
    zero: int,
    seed: int = 0,
    faults: tuple[AnyFault, ...] = (),
    kind: type[MirroredCluster] = MadeUpMachines,
) -> tuple[Any, list[m.Damaged]]:
    """Returns the outcome of the run, and the messages of workers whose devices had failed."""
    made = kind(run, mesh, zero, seed=seed, faults=faults, uneven=bool(seed % 2))
    found = outcome(made.run())
    return found, [message for message in made.heard if isinstance(message, m.Damaged)]


@pytest.mark.parametrize("remedy", Remedy)
@pytest.mark.parametrize("point", ["forward", "backward", "reduce"])
@pytest.mark.parametrize(("mesh", "zero"), [("dp2", 0), ("dp3", 1), ("dp2_pp2", 2), ("pp2", 1), ("dp2", 3)])
@one_thread()
def test_the_step_is_done_again(
    mesh: str, zero: int, point: str, remedy: Remedy, fail_devices: Callable[[Hits], list[Executor]]
) -> None:
    run = Run(microbatches=5, steps=6, model="gpt_tied")
    executors = fail_devices({(1, 3, point): remedy})
    found, damaged = train(run, mesh, zero)
    assert found == expected(run)
    (message,) = damaged
    assert (message.rank, message.step, message.reason) == (1, 3, DEVICE_FAULT)
    held = [part for part in executors[1].replica.state]
    assert bool(message.page_ranges) == (remedy is Remedy.RELOAD and bool(held))
    assert all(part.version != LEARNING for part in held)


@pytest.mark.parametrize("seed", range(12))
@one_thread()
def test_faults_at_any_time_among_other_faults(seed: int, fail_devices: Callable[[Hits], list[Executor]]) -> None:
    draw = random.Random(seed)
    run = Run(
        microbatches=5, steps=8, model=draw.choice(["gpt", "mlp", "gpt_tied"]), dtype=draw.choice(["fp32", "bf16"])
    )
    mesh, zero = draw.choice([("dp3", 1), ("dp3_pp2", 2), ("dp4", 3), ("dp2_pp2", 0), ("stages3-2", 1)])
    points = ["forward", "backward", "reduce"]
    hits: Hits = {
        (draw.randrange(4), draw.randint(2, 6), draw.choice(points)): draw.choice(list(Remedy))
        if i == 0
        else Remedy.REDO
        for i in range(3)
    }
    fail_devices(hits)
    other = (Fault(draw.randint(2, 6), "kill", 2, draw.choice(points)),) if seed % 4 == 3 else ()
    try:
        found, damaged = train(run, mesh, zero, seed, other, EndingMachines)
    except LostStateError as lost:
        assert lost.losses + list(hits.values()).count(Remedy.RELOAD) > 1, "one mirror stands in for one loss"
        return
    assert found == expected(run)
    assert damaged or not any(rank in (0, 1) for rank, _, _ in hits), "the first fault comes while all is well"


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("step", range(3, 7))
@one_thread()
def test_a_learner_gets_all_state_though_the_device_of_a_sender_fails(
    rank: int, step: int, fail_devices: Callable[[Hits], list[Executor]]
) -> None:
    """A newcomer is sent its state, and the device of one of the senders fails in one of these steps."""
    run = Run(microbatches=5, steps=10, model="gpt_tied")
    executors = fail_devices({(rank, step, "forward"): Remedy.REDO})
    found, damaged = train(run, "dp2", 1, faults=(Fault(2, "join", 0, "backward"),))
    assert found == expected(run) and [message.rank for message in damaged] == [rank]
    last = max((e.placement for e in executors), key=lambda placement: placement.mesh.epoch)
    assert last.replicas is not None and len(last.mesh.members) == 3
    assert not any(held.learners for runs in last.replicas.values() for held in runs), "all have learned"


@pytest.mark.parametrize("point", ["forward", "apply", "publish"])
@one_thread()
def test_a_device_that_stays_broken_ends_its_worker(point: str, fail_devices: Callable[[Hits], list[Executor]]) -> None:
    """No remedy; or a fault in an update, which may have changed half of the state."""
    fail_devices({(1, 3, point): None if point == "forward" else Remedy.REDO})
    with pytest.raises(RuntimeError, match="UCE ERROR"):
        train(Run(microbatches=5, steps=6), "dp2", 1)


class Ramped(nn.Linear):
    """A constant of its own lies on the device, as a buffer or as an attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__(8, VOCAB)
        ramp = torch.linspace(0.0, 1.0, VOCAB)
        self.ramp: torch.Tensor
        if kind == "buffer":
            self.register_buffer("ramp", ramp)
        else:
            self.ramp = ramp

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x) + self.ramp


class OwnRules(LayeredModel):
    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        return super().init(name, shape)


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
@one_thread()
def test_bad_memory_that_may_be_a_constants_ends_the_worker(
    kind: str, fail_devices: Callable[[Hits], list[Executor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mirror has a copy of it."""

    def make() -> LayeredModel:
        return OwnRules({"embed": nn.Embedding(VOCAB, 8), "head": Ramped(kind)})

    monkeypatch.setitem(bits_cases.MODELS, f"constant {kind}", make)
    fail_devices({(1, 3, "forward"): Remedy.RELOAD})
    with pytest.raises(RuntimeError, match="UCE ERROR"):
        train(Run(model=f"constant {kind}", microbatches=5, steps=6), "dp2", 1)


@pytest.mark.parametrize("mesh", ["dp2", "pp2"])
@one_thread()
def test_keys_are_made_of_new_numbers_after_bad_memory(
    mesh: str, fail_devices: Callable[[Hits], list[Executor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of the run and of its layers lie on the device all the time: dropout would draw other masks."""
    executors, recover = fail_devices({(1, 3, "forward"): Remedy.RELOAD}), FailingDevice.recover

    def spoil(device: FailingDevice, error: BaseException) -> Remedy | None:
        (failed,) = [executor for executor in executors if executor._context.rank == 1]
        runner = failed._steps._microbatches
        for number in (runner._seed, *runner._layer_numbers.values()):
            number += 1000
        return recover(device, error)

    monkeypatch.setattr(FailingDevice, "recover", spoil)
    run = Run(microbatches=5, steps=4)
    assert train(run, mesh, 1)[0] == expected(run)


class GroupedMachines(GroupedCluster, MadeUpMachines):
    """Machines whose stages publish through groups."""


@pytest.mark.parametrize("remedy", Remedy)
@pytest.mark.parametrize("seed", range(6))
@one_thread()
def test_a_device_fails_whose_stage_publishes_through_a_group(
    seed: int, remedy: Remedy, fail_devices: Callable[[Hits], list[Executor]]
) -> None:
    run, point = Run(microbatches=5, steps=6), ("forward", "backward", "reduce")[seed % 3]
    fail_devices({(1, 3 + seed % 2, point): remedy})
    made = GroupedMachines(run, "dp4", 1 + seed % 3, seed=seed, uneven=bool(seed % 2), failing=0.0)
    assert outcome(made.run()) == expected(run)
    assert made.hub.ended["gathered"] > 0 and made.result.epochs
