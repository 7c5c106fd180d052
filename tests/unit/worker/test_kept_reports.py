"""A worker keeps what a controller that dies may not have written down (A5)."""

from __future__ import annotations

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.worker.kept_reports import KeptReports

MOST = 1024


def applied(step: int) -> m.Applied:
    return m.Applied(step, 0, 1, 0.5, 0.25, True)


def test_reports_are_kept_until_they_are_written() -> None:
    reports = KeptReports()
    for step in range(1, 6):
        reports.keep(applied(step))
    reports.written(3)
    assert [report.step for report in reports.applied] == [4, 5]
    reports.written(2)
    assert [report.step for report in reports.applied] == [4, 5]


def test_a_worker_whose_reports_nobody_writes_begins_no_other_step() -> None:
    reports = KeptReports()
    for step in range(1, MOST):
        reports.keep(applied(step))
        assert not reports.is_full
    reports.keep(applied(MOST))
    assert reports.is_full
    reports.written(1)
    assert not reports.is_full


def test_damage_and_differences_are_kept_until_the_next_mesh_epoch() -> None:
    reports, damaged = KeptReports(), m.Damaged(1, 0, 8, ((0, 0, 3),))
    reports.keep(damaged)
    reports.keep(m.ChecksDiffer(1, 0, 8, 2, 0, (), ()))
    reports.keep(m.CaughtUp(1, 0))
    assert reports.damaged == [damaged]
    assert reports.results_differ(7) and not reports.results_differ(8), "a step that is decided is settled"
    reports.entered()
    assert not reports.damaged and not reports.results_differ(7)
