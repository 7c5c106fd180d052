"""Workers are lost, leave and come while state is half copied."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from elaswave_spmd.worker import state
from tests.cluster.faults import AnyFault, Fault
from tests.cluster.piecewise import PiecewiseCluster
from tests.cluster.processes import LostStateError
from tests.simulated.bits_cases import (
    MirroredCluster,
    Run,
    expected,
    one_thread,
    outcome,
)

MESHES = [("pp2", 1), ("stages1-3", 1), ("dp2_pp2", 1), ("pp3", 1), ("dp2_pp2", 3), ("dp2_pp2", 2)]
JOIN = Fault(2, "join", 0, "backward")


class Overtaken(PiecewiseCluster, MirroredCluster):
    """The workers of a run, others between any two pieces of a copy."""


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "COPY_ELEMENTS", 128)


def train(mesh: str, zero: int, seed: int, faults: tuple[AnyFault, ...]) -> str:
    """Trains, and returns how it ended: with the "bits" of the reference, or with all replicas of a page "lost"."""
    run = Run(microbatches=5, steps=6)
    made = Overtaken(run, mesh, zero, seed=seed, faults=faults, uneven=bool(seed % 2))
    try:
        found = outcome(made.run())
    except LostStateError:
        return "lost"
    assert found == expected(run)
    return "bits"


@pytest.mark.parametrize("point", ["forward", "backward"])
@pytest.mark.parametrize("seed", range(4))
@one_thread()
def test_a_learner_that_is_moved_to_another_stage(seed: int, point: str) -> None:
    """The newcomer has a part of a layer's state, and the buffer that it belongs to, when it gets other layers."""
    assert train("pp2", 1, seed, (JOIN, Fault(3, "kill", 1, point))) == "bits"


@pytest.mark.parametrize("block", range(3))
@one_thread()
def test_whatever_happens_meanwhile(block: int) -> None:
    ends: Counter[str] = Counter()
    for seed in range(12 * block, 12 * block + 12):
        draw = random.Random(seed)
        mesh, zero = draw.choice(MESHES)
        workers = 2 if mesh == "pp2" else 3 if mesh == "pp3" else 4
        kill = Fault(
            draw.choice((3, 4)), "kill", draw.randrange(1, workers), draw.choice(("forward", "backward", "apply"))
        )
        faults: list[AnyFault] = [JOIN, kill]
        if draw.random() < 0.4:
            kinds = "join", "rebalance", "rebalance", "term"
            faults.append(Fault(draw.choice((3, 4, 5)), draw.choice(kinds), 0, "forward"))
        ends[train(mesh, zero, seed, tuple(faults))] += 1
    assert ends["bits"] >= 9, ends
