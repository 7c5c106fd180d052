"""How many workers a controller that comes back starts in place of those that were about to join."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_spmd.conf.schema import ElasticSettings, Timeouts
from elaswave_spmd.controller.adopter import Adopter
from elaswave_spmd.controller.resume import Adoption
from elaswave_spmd.recovery.tick_clock import TickClock
from tests.cluster.kept_checkpoints import RUN_DIR

MEMBERS = (0, 1, 2, 3)


def started_anew(newcomers: tuple[int, ...], num_dead: int = 0, **elastic: Any) -> int:
    settings = SimpleNamespace(timeouts=Timeouts(), elastic=ElasticSettings(**elastic))
    adoption = Adoption(RUN_DIR, 2, 1, newcomers=newcomers)
    supervision = SimpleNamespace(clock=TickClock(0.1, 0.0))
    arguments: list[Any] = [adoption, SimpleNamespace(settings=settings), None, None, supervision, None, 0, None]
    return Adopter(*cast(Any, arguments))._number_anew(MEMBERS, num_dead)


def test_without_spares_all_were_about_to_join() -> None:
    assert started_anew((4, 5)) == 2
    assert started_anew((3, 4)) == 1, "a member has joined"
    assert started_anew(()) == 0


@pytest.mark.parametrize(("newcomers", "number"), [((), 0), ((4,), 0), ((4, 5), 0), ((4, 5, 6), 1)])
def test_as_many_as_there_are_spares_were_spares(newcomers: tuple[int, ...], number: int) -> None:
    assert started_anew(newcomers, spares=2) == number


def test_the_mesh_grows_no_further_than_it_may() -> None:
    assert started_anew((4, 5), max_workers=4) == 0
    assert started_anew((4, 5), max_workers=5) == 1
    assert started_anew((4, 5), max_workers=5, num_dead=1) == 2, "nobody takes the place of the dead"
    assert started_anew((4, 5), max_workers=5, num_dead=1, replace=True) == 1
    assert started_anew((4, 5, 6), max_workers=5, num_dead=1, spares=1) == 1
