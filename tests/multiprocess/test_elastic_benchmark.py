"""The judge of benchmarks/elastic with this project's own program: real workers, one of which is killed."""

from __future__ import annotations

from pathlib import Path

from benchmarks.elastic.contestants import named
from benchmarks.elastic.lines import Start
from benchmarks.elastic.runs import Plan, judged
from benchmarks.elastic.score import progress
from benchmarks.elastic.trace import KILL, Failure
from tests.waiting import PATIENCE_S

STEPS = 20
"""So many that the run goes on where the judge does not get to look for some seconds after the third of them."""


def test_a_kill_in_a_run_of_this_project_is_struck_seen_and_scored(tmp_path: Path) -> None:
    plan = Plan(steps=STEPS, rates=(), launches=1, seed=1, limit_s=PATIENCE_S, keep=tmp_path)
    (system,) = named("this project")
    run = judged(system, plan, [Failure(3.5, KILL, 2, "software bug")])
    seen, found = run.observed, run.score
    assert not seen.problem and seen.left == 0, seen.problem
    assert found.steps == STEPS and found.seconds is not None
    assert (found.twice, found.never, found.again) == (0, 0, 0)
    (struck,) = seen.struck
    workers = [line.pid for line in seen.lines if isinstance(line, Start)]
    assert len(set(workers[:4])) == 4 and struck.pids == (workers[2],)
    assert max(step for at, step in progress(run.steps) if at <= struck.at) >= 3
    assert "lost" in (tmp_path / "this_project-0-0" / "output").read_text()
