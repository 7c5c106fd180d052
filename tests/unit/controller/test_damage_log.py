"""Damaged copies and failed devices: what the run says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elaswave_spmd.controller.run_log import DamageLog
from elaswave_spmd.recovery.messages import Damaged
from elaswave_spmd.run_dir import RunDir, RunObserver, read_events


def events_of(folder: Path, message: Damaged) -> list[dict[str, Any]]:
    with RunObserver(RunDir.create(folder / "run", "", model="m", mesh="dp2"), board=False) as observer:
        DamageLog(observer).damaged(message)
    return [event for event in read_events(folder / "run") if event["event"] in ("corruption", "device")]


def test_damaged_copies(tmp_path: Path) -> None:
    (event,) = events_of(tmp_path, Damaged(1, 0, 5, ((2, 0, 3),)))
    assert (event["event"], event["ranks"], event["step"], event["page_ranges"]) == ("corruption", [1], 5, [[2, 0, 3]])
    assert "layer 2 pages [0, 3)" in event["message"]


def test_a_device_that_came_back_with_its_state(tmp_path: Path) -> None:
    (event,) = events_of(tmp_path, Damaged(1, 0, 5, (), "FORCE STOP"))
    assert (event["event"], event["ranks"], event["step"]) == ("device", [1], 5)
    assert (event["reason"], event["reloads"]) == ("FORCE STOP", False)
    assert "sent to it again" not in event["message"]


def test_a_device_that_came_back_without_it(tmp_path: Path) -> None:
    (event,) = events_of(tmp_path, Damaged(1, 0, 5, ((0, 0, 3), (1, 0, 2)), "UCE ERROR"))
    assert event["reloads"] is True and "2 page ranges of state are sent to it again" in event["message"]
