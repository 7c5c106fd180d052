"""Real workers that wait for a message that was lost: they send again what others may lack, or the run ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.run_dir import read_metrics
from tests.faults.fault_runs import Bits
from tests.multiprocess.real_runs import SMALL, Done, fork_command, train, write_text

pytestmark = pytest.mark.mends("standstill")
# Workers are forks of the command. Worker 1 loses what it sends of one kind in step 3, once or always.
SCRIPT = """
import sys

if __name__ == "__main__":
    from elaswave_spmd.cli import train
    from elaswave_spmd.recovery import messages as m
    from elaswave_spmd.worker.channel import SocketChannel

    send, lost = SocketChannel.send, []

    def loses(self, peer, message, payload=None):
        if self._links.me == 1 and isinstance(message, m.PartialSum) and message.step == 3 and len(lost) < {most}:
            lost.append(message)
        else:
            send(self, peer, message, payload)

    SocketChannel.send = loses
    sys.exit(train())
"""
WORDS = [*SMALL, "mesh=dp3", "timeouts.progress=13", "checkpoint.every=1"]


def lossy(folder: Path, most: int) -> Done:
    """A run whose worker 1 loses so many sums of step 3."""
    write_text(folder)
    script = folder / "lossy.py"
    script.write_text(SCRIPT.format(most=most))
    return fork_command(script, folder, *WORDS, environment=dict(os.environ))


def standstills(folder: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "standstill"]


def test_what_was_lost_is_sent_again(tmp_path: Path) -> None:
    done = lossy(tmp_path, most=1)
    assert done.code == 0, done.err
    (event,) = standstills(tmp_path)
    assert event["step"] == 2 and event["ranks"] == [0, 1, 2] and event["seconds"] >= 13 and not event["again"]
    assert event["waits"] == {"votes of step 3": [0, 1, 2]}
    done = train(tmp_path, *WORDS, "run.dir=undisturbed")
    assert done.code == 0 and Bits.of(tmp_path / "run") == Bits.of(tmp_path / "undisturbed")


def test_a_run_that_stands_still_again_ends_with_the_cause_and_its_state(tmp_path: Path) -> None:
    done = lossy(tmp_path, most=10**9)
    assert done.code == 1, done.err
    assert [event["again"] for event in standstills(tmp_path)] == [False, True]
    first, *_, command = done.err.splitlines()
    assert first.startswith("error: the run stands still, also after all was sent again: nothing has moved for 13.")
    assert "after step 2: workers 0-2 wait for votes of step 3" in first
    assert f"Its state after step 2 is in {tmp_path}/run/checkpoints/step_00000002" in first
    assert command.startswith("resume with: ")
    done = train(tmp_path, f"train.resume={tmp_path}/run")
    assert done.code == 0 and [line.step for line in read_metrics(tmp_path / "run")] == [*range(1, 7)], done.err
