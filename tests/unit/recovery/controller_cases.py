"""A controller protocol over three workers, (0, 1) and (2), and what its effects say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.recovery.actions import Broadcast, ProtocolAction, Send
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, ProtocolSpec
from elaswave_spmd.recovery.messages import Message, PartialStep, Prepare, Ready, Reconfigure, StepReport
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import ReplicaSet
from tests.unit.runtime.runtime_cases import small_layout

LAYOUT: ModelLayout = small_layout(64)
STEPS = 20


def placement(*stages: int, microbatches: int = 5, zero: int = 0) -> Placement:
    """Three layers on one, two or three stages."""
    sizes = stages or (2, 1)
    cuts = {1: (0, 3), 2: (0, 1, 3), 3: (0, 1, 2, 3)}[len(sizes)]
    counts = tuple(even_counts(microbatches, size) for size in sizes)
    return Placement(Mesh.initial(MeshShape.of_stages(sizes)), microbatches, cuts, counts, Shardings().with_zero(zero))


def make(*stages: int, zero: int = 0, steps: int = STEPS, **options: Any) -> ControllerProtocol:
    """A protocol; `options`: of its ProtocolSpec, and its own."""
    about = {name: options.pop(name) for name in [*options] if name in ProtocolSpec.__dataclass_fields__}
    return ControllerProtocol(placement(*stages, zero=zero), ProtocolSpec(LAYOUT, steps, **about), **options)


def started(*stages: int, **options: Any) -> ControllerProtocol:
    """All members are ready and have entered the first epoch."""
    protocol = make(*stages, **options)
    effects: list[ProtocolAction] = []
    for rank in protocol.placement.mesh.members:
        effects = protocol.ready(Ready(rank, f"at {rank}"))
    assert reconfigures(effects).keys() == set(protocol.placement.mesh.members)
    return protocol


def messages(effects: Iterable[ProtocolAction]) -> list[tuple[int, Message]]:
    """(rank, message) of everything that is sent, to one worker or to several."""
    found: list[tuple[int, Message]] = []
    for effect in effects:
        if isinstance(effect, Send):
            found.append((effect.rank, effect.message))
        elif isinstance(effect, Broadcast):
            found += [(rank, effect.message) for rank in effect.ranks]
    return found


def reconfigures(effects: Iterable[ProtocolAction]) -> dict[int, Reconfigure]:
    """Rank -> the Reconfigure message that is sent to it."""
    return {rank: message for rank, message in messages(effects) if isinstance(message, Reconfigure)}


def prepares(effects: Iterable[ProtocolAction]) -> dict[int, Prepare]:
    """Rank -> the Prepare message that is sent to it."""
    return {rank: message for rank, message in messages(effects) if isinstance(message, Prepare)}


def answer(protocol: ControllerProtocol, version: int = 0, *held: PartialStep) -> list[ProtocolAction]:
    """All members answer the Prepare under way, with the same; the effects of the last answer."""
    effects: list[ProtocolAction] = []
    for rank in protocol.changing:
        assert not reconfigures(effects)
        effects = protocol.report_received(StepReport(protocol._last_epoch, rank, version, held, protocol._attempt))
    return effects


def replicas_of(protocol: ControllerProtocol) -> list[ReplicaSet]:
    return [run for runs in protocol.placement.replica_map(LAYOUT).values() for run in runs]
