"""The log of what processes have refused: one line at once, then one in ten seconds, and totals that miss nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

from elaswave_spmd.controller.rejections import RejectionLog


class Observer:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def on_event(self, kind: str, **fields: Any) -> None:
        assert kind == "rejected"
        self.lines.append(fields)


def made() -> tuple[RejectionLog, Observer, Counter[str]]:
    observer, totals = Observer(), Counter[str]()
    return RejectionLog(observer, totals), observer, totals  # pyright: ignore[reportArgumentType]


def test_the_first_is_told_at_once_and_a_flood_in_few_lines() -> None:
    log, observer, totals = made()
    for number in range(1, 1001):
        log.counted("worker 1", {"a": number}, 100 + number * 0.02)
    log.flush()
    assert len(observer.lines) == 1 + 1 + 1 and totals == {"a": 1000}
    assert sum(line["counts"]["a"] for line in observer.lines) == 1000
    assert observer.lines[-1]["totals"] == {"a": 1000} and observer.lines[0]["processes"] == ["worker 1"]


def test_counts_of_processes_add_up_and_nothing_is_told_twice() -> None:
    log, observer, totals = made()
    for at in (0.0, 0.1):
        log.counted("the controller", {"a": 2, "b": 1}, at)
        log.counted("worker 0", {"a": 1}, at)
    log.tick(20.0)
    log.tick(40.0)
    assert totals == {"a": 3, "b": 1}
    assert [line["counts"] for line in observer.lines] == [{"a": 2, "b": 1}, {"a": 1}]


def test_reasons_that_are_made_up_are_counted_as_one() -> None:
    log, observer, totals = made()
    for number in range(0, 1001, 50):
        log.counted("worker 1", {f"reason {i}": 1 for i in range(number)}, float(number))
    log.flush()
    assert sum(totals.values()) == 1000 and len(totals) <= 65
    assert max(len(line["counts"]) for line in observer.lines) <= 65


def test_nothing_refused_leaves_no_trace() -> None:
    log, observer, totals = made()
    log.counted("worker 0", {}, 1.0)
    log.tick(100.0)
    log.flush()
    assert not observer.lines and not totals
