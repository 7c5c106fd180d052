"""State that has outlived all workers that had applied its step."""

from __future__ import annotations

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.reconfiguration import ahead_everywhere
from elaswave_spmd.sharding.replicas import ReplicaSet


def test_state_that_is_a_step_ahead_of_everybody_on_all_of_its_replicas() -> None:
    """Whoever had applied the step is lost, and with one attempt of it the state before it."""
    pages = {0: (ReplicaSet(0, 0, 2, 1, frozenset({1, 2})), ReplicaSet(0, 2, 5, 2, frozenset({2, 3})))}

    def found(*reports: m.StepReport) -> list[tuple[int, int, int]]:
        return [pages.key for pages in ahead_everywhere(pages, {report.rank: report for report in reports})]

    one = m.StepReport(4, 1, 6, ahead=((0, 0, 2),))
    two = m.StepReport(4, 2, 6, ahead=((0, 0, 5),))
    assert found(m.StepReport(4, 1, 6), m.StepReport(4, 2, 6), m.StepReport(4, 3, 6)) == []
    assert found(one, m.StepReport(4, 2, 6)) == [], "worker 2 has the version of all"
    assert found(one, m.StepReport(4, 2, 6, ahead=((0, 0, 1),))) == [], "of page 1"
    assert found(one, two) == [(0, 0, 2), (0, 2, 5)], "worker 3 is lost"
    assert found(one, two, m.StepReport(4, 3, 6)) == [(0, 0, 2)]
    assert found(one, two, m.StepReport(4, 3, 7)) == [], "worker 3 has applied the step: the others complete it"
