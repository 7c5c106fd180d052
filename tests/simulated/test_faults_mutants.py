"""The schedules find what they are made for: each rule of the protocol, taken out, shows."""

from __future__ import annotations

import pytest

from tests.cluster.schedules import Schedule, run, undisturbed
from tests.simulated.mutants import MUTANTS, planted

# Seeds of schedules that show the damage; others: `python -m tests.simulated.mutants`.
SEEDS: dict[str, tuple[int, ...]] = {
    "applies in e after answering PREPARE": (154, 177, 353),
    "reuses a STATUS": (23, 50, 80),
    "votes before the mirrored entries": (14, 24, 26),
    "drops future-epoch messages": (6, 7, 10),
    "installs PUBLISH on receipt": (23, 65, 69),
    "no version check in compute": (0, 3),
    "applies twice": (6, 10, 22),
    "votes two ahead": (15, 144, 600),
    "no fence": (198, 248),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_schedule_finds_the_mutant(name: str) -> None:
    found = []
    for seed in SEEDS[name]:
        schedule = Schedule.draw(seed)
        undisturbed(schedule.run.key)  # what is expected is not of the mutant
        assert run(schedule).failure == "", f"schedule {seed} fails without any damage"
        with planted(name):
            found.append(run(schedule).failure)
    assert any(found), f"none of the schedules {SEEDS[name]} shows it any more: find others"


def test_a_mutant_is_gone_after_its_with() -> None:
    before = {key: vars(key[0])[key[1]] for name in MUTANTS for key in MUTANTS[name]()}
    for name in MUTANTS:
        with planted(name):
            assert all(vars(owner)[method] is not before[owner, method] for owner, method in MUTANTS[name]())
    assert all(vars(owner)[method] is original for (owner, method), original in before.items())
