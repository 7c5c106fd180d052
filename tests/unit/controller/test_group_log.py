"""The events of a run about the groups of its stages, and about pairs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elaswave_spmd.controller.run_log import GroupLog, PairLog
from elaswave_spmd.recovery.messages import GROUPED, Applied, GroupLost, PairLost
from elaswave_spmd.run_dir import RunDir, RunObserver, read_events


@contextmanager
def open_observer(folder: Path) -> Iterator[RunObserver]:
    observer = RunObserver(RunDir.create(folder / "run", "", model="m", mesh="dp2"), board=False)
    try:
        yield observer
    finally:
        observer.close()


def applied(step: int, epoch: int, grouped: bool) -> Applied:
    return Applied(step, epoch, 0, 1.0, 1.0, True, GROUPED if grouped else "")


def told(folder: Path) -> list[tuple[Any, ...]]:
    events = [event for event in read_events(folder) if event["event"] == "group"]
    return [(event["step"], event["mesh_epoch"], event["serves"], event["reason"]) for event in events]


def test_each_change_of_the_way_is_told_once(tmp_path: Path) -> None:
    with open_observer(tmp_path) as observer:
        made = GroupLog(observer)
        for step, epoch, grouped in [(1, 0, False), (2, 0, True), (3, 0, True), (4, 1, False), (5, 1, True)]:
            made.committed(applied(step, epoch, grouped))
        folder = observer.run_dir.path
    none_yet = "a new mesh epoch has none yet"
    assert told(folder) == [(2, 0, True, ""), (4, 1, False, none_yet), (5, 1, True, "")]
    assert [event["message"] for event in read_events(folder) if event["event"] == "group"] == [
        "from step 2 on parameters go by a group, and gradients from step 3 on",
        f"from step 4 on parameters and gradients go by links: {none_yet}",
        "from step 5 on parameters go by a group, and gradients from step 6 on",
    ]


def test_a_group_that_never_served_is_told_of_when_it_fails(tmp_path: Path) -> None:
    with open_observer(tmp_path) as observer:
        made = GroupLog(observer)
        made.lost(GroupLost(0, 2, "no such interface"), 3)
        made.lost(GroupLost(0, 1, "Connection closed"), 3)
        made.committed(applied(4, 0, False))
        folder = observer.run_dir.path
    assert told(folder) == [(4, 0, False, "worker 2: no such interface")]


def test_a_failure_that_overtakes_the_report_of_a_step_has_the_last_word(tmp_path: Path) -> None:
    """Nothing more is logged until the next epoch.

    A step may be agreed on for groups, and go over links where its group has failed since.
    """
    with open_observer(tmp_path) as observer:
        made = GroupLog(observer)
        made.lost(GroupLost(0, 1, "timed out"), 0)
        for step, epoch in ((1, 0), (2, 1)):
            made.committed(applied(step, epoch, True))
        folder = observer.run_dir.path
    assert told(folder) == [(1, 0, False, "worker 1: timed out"), (2, 1, True, "")]


def test_a_pair_that_fails_is_told_of_once_in_a_mesh_epoch(tmp_path: Path) -> None:
    """Both of its workers may report it, and a report may be late."""
    with open_observer(tmp_path) as observer:
        made = PairLog(observer)
        made.lost(PairLost(0, 2, 0, "timed out"), 3)
        made.lost(PairLost(0, 0, 2, "Connection closed"), 3)
        made.lost(PairLost(0, 0, 1, "Connection closed"), 4)
        made.lost(PairLost(1, 2, 0, "timed out"), 5)
        made.lost(PairLost(0, 2, 1, "timed out"), 5)
        folder = observer.run_dir.path
    events = [event for event in read_events(folder) if event["event"] == "pair"]
    assert [(event["step"], event["mesh_epoch"], event["ranks"], event["reason"]) for event in events] == [
        (4, 0, [0, 2], "timed out"),
        (5, 0, [0, 1], "Connection closed"),
        (6, 1, [0, 2], "timed out"),
    ]
    assert events[0]["message"] == "workers 0 and 2 send each other over links: worker 2: timed out"
