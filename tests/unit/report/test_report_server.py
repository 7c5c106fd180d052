"""What a live page is sent, and how much of a core that may take."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from elaswave_spmd.report.recorded import RunReader
from elaswave_spmd.report.server import SHARE, LiveRun


@dataclass
class Clocks:
    """Time stands still but for what the test adds; each look takes `cost` seconds of processor time."""

    now: float = 0.0
    spent: float = 0.0
    cost: float = 0.5

    def passed(self) -> float:
        return self.now

    def used(self) -> float:
        self.spent += self.cost
        return self.spent


def test_a_page_is_brought_up_to_date_within_its_share_of_a_core(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: m\n")
    clocks = Clocks()
    live = LiveRun(RunReader(tmp_path), clocks.passed, clocks.used)
    assert json.loads(live.changes(""))["version"] == "0.0"
    (tmp_path / "events.jsonl").write_text('{"event": "finish", "time": 1.0}\n')
    clocks.now = clocks.cost / SHARE - 1e-6
    assert json.loads(live.changes("0.0")) == {"version": "0.0", "state": "not ended"}
    clocks.now = clocks.cost / SHARE
    changed = json.loads(live.changes("0.0"))
    assert (changed["version"], changed["state"]) == ("0.1", "finished") and "columns" in changed
    assert "columns" not in json.loads(live.changes("0.1"))
