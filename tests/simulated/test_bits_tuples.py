"""Losses, joins and wrong results in runs whose layers hand on tuples: the bits of the reference all the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from tests.cluster.faults import SENDER, AnyFault, Fault, MessageFault
from tests.simulated import bits_cases
from tests.simulated.bits_cases import VOCAB, MirroredCluster, Run, expected, one_thread, outcome
from tests.tuple_models import FeaturesFirst, Mixture, Skips

RUN = Run(model="skips", microbatches=5, steps=4, page_size=64)


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bits_cases.MODELS, "skips", lambda: Skips(VOCAB, 2, 8, dropout=0.2))
    monkeypatch.setitem(bits_cases.MODELS, "terms", lambda: Mixture(VOCAB, 2, 8))
    monkeypatch.setitem(bits_cases.MODELS, "features", lambda: FeaturesFirst(VOCAB, 8))


def assert_as_undisturbed(run: Run, mesh: str, zero: int, faults: Sequence[AnyFault], rate: float = 0.0) -> int:
    """Returns the number of mesh epochs."""
    with one_thread():
        trained = MirroredCluster(run, mesh, zero, faults=faults, seed=zero, verify_rate=rate).run()
    assert outcome(trained) == expected(run)
    return len(trained.epochs)


@pytest.mark.parametrize("point", ["forward", "backward", "input", "weights", "reduce"])
@pytest.mark.parametrize(("mesh", "zero"), [("dp2_pp2", 1), ("pp3", 3), ("dp2_pp3", 2)])
def test_a_worker_is_lost_anywhere_in_a_step(mesh: str, zero: int, point: str) -> None:
    for rank, count in itertools.product((0, 1, 2), (1, 2)):
        assert_as_undisturbed(RUN, mesh, zero, [Fault(2, "kill", rank, point, count)])


@pytest.mark.parametrize("seed", range(10))
def test_random_losses_and_joins_with_checks(seed: int) -> None:
    draw = random.Random(seed)
    run = Run(model=draw.choice(["skips", "features", "terms"]), microbatches=5, steps=4, page_size=64)
    faults: list[AnyFault] = [
        MessageFault(
            "kill", draw.choice(["Activation", "ActivationGradient", "Vote"]), SENDER, False, draw.randint(1, 9)
        ),
        MessageFault("join", "Applied", SENDER, True, draw.randint(1, 5)),
    ]
    epochs = assert_as_undisturbed(run, draw.choice(["dp2_pp2", "dp3_pp2", "pp3"]), seed % 4, faults, rate=0.5)
    assert epochs > 1


@pytest.mark.parametrize("point", ["forward", "backward", "reduce"])
def test_a_wrong_result_is_found(point: str) -> None:
    assert assert_as_undisturbed(RUN, "dp3_pp2", 1, [Fault(2, "miscompute", 1, point)], rate=1.0) > 1
