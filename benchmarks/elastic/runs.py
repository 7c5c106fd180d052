"""All runs of the benchmark, in turns: each system undisturbed, then each one at the first rate, and so on."""

from __future__ import annotations

import dataclasses
import re
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.elastic.contestants import System
from benchmarks.elastic.judge import Observed, observe
from benchmarks.elastic.lines import Step
from benchmarks.elastic.score import Score, losses, progress, score, usual_step_s
from benchmarks.elastic.trace import Failure, Machines, draw
from benchmarks.harness import say
from benchmarks.processes import new_directory

GLOBAL_BATCH = 24
_MORE_STEPS = 100  # in order.json, for systems whose workers are not all at the same step
_SAME_LOSS = 1e-5  # of the first step, between systems: other losses are another model, or other samples


@dataclass(frozen=True)
class Plan:
    """What is asked of all systems alike.

    Args:
        rates: failures per hundred steps.
        launches: runs at each rate, under other traces.
        limit_s: of a run, from its first step on.
        keep: where lines and output of each run are kept; None keeps nothing.
    """

    steps: int
    rates: tuple[float, ...]
    launches: int
    seed: int
    limit_s: float
    keep: Path | None = None
    machines: Machines = dataclasses.field(default_factory=Machines)


@dataclass(frozen=True)
class Run:
    """One run of a system. `rate`: failures per hundred steps; 0: undisturbed."""

    system: str
    rate: float
    launch: int
    score: Score
    observed: Observed

    @property
    def steps(self) -> list[Step]:
        """The lines of its steps."""
        return [line for line in self.observed.lines if isinstance(line, Step)]

    @property
    def plain(self) -> dict[str, Any]:
        """What the JSON file has of it. Times are in seconds since the first step."""
        new = progress(self.steps)
        first = new[0][0] if new else self.observed.ended
        struck = self.observed.struck
        failures = [{**vars(s.failure), "seconds": s.at - first, "processes": len(s.pids)} for s in struck]
        return {
            "system": self.system,
            "failures_per_100_steps": self.rate,
            "launch": self.launch,
            "score": dataclasses.asdict(self.score),
            "left": self.observed.left,
            "problem": self.observed.problem,
            "ended": self.observed.ended - first,
            "progress": [(at - first, step) for at, step in new],
            "failures": failures,
            "losses": losses(self.steps),
        }


def judged(
    system: System, plan: Plan, trace: Sequence[Failure], rate: float = 0.0, launch: int = 0, calm: Run | None = None
) -> Run:
    """Runs a system once, under a trace.

    Args:
        rate, launch: which run it is.
        calm: its undisturbed run; None if this is it.
    """
    from benchmarks.elastic.problem import NUM_SAMPLES, Job
    from elaswave_spmd.determinism import sample_ids

    numbers = range(1, plan.steps + _MORE_STEPS + 1)
    order = [sample_ids(plan.seed, step, GLOBAL_BATCH, NUM_SAMPLES).tolist() for step in numbers]
    step_s = usual_step_s(calm.steps) if calm else 0.0
    with new_directory("el-") as directory:
        Job(str(directory), plan.steps, plan.machines.workers, GLOBAL_BATCH, plan.seed).write(order)
        seen = observe(system, directory, plan.steps, trace, plan.machines, step_s, plan.limit_s)
        if plan.keep is not None:
            kept = plan.keep / f"{re.sub(r'[^a-zA-Z0-9]+', '_', system.name)}-{rate:g}-{launch}"
            shutil.copytree(directory / "lines", kept / "lines", dirs_exist_ok=True)
            shutil.copy(directory / "program" / "output", kept / "output")
    own = [line for line in seen.lines if isinstance(line, Step)]
    before = {step: x for step, x in losses(calm.steps if calm else own).items() if step <= plan.steps}
    found = score(seen.lines, order, plan.steps, seen.launched, seen.ended, before)
    return Run(system.name, rate, launch, found, seen)


def measure(systems: Sequence[System], plan: Plan) -> tuple[list[Run], list[str]]:
    """All runs. Returns them, and what went wrong, in words.

    A system whose undisturbed run does not reach the last step is not run under failures.
    """
    runs, problems = list[Run](), list[str]()
    for launch in range(plan.launches):
        calm: dict[str, Run] = {}
        for rate in (0.0, *plan.rates):
            trace = draw(plan.seed + launch, rate, plan.steps, plan.machines)
            for system in systems:
                if rate and system.name not in calm:
                    continue
                what = f"{system.name}, {rate:g} per 100 steps"
                try:
                    run = judged(system, plan, trace, rate, launch, calm.get(system.name))
                except (RuntimeError, OSError, ValueError) as error:
                    problems.append(f"{what}: {error}")
                    say(problems[-1])
                    continue
                runs.append(run)
                say(f"{what}: {_told(run.score)}")
                if run.observed.problem:
                    problems.append(f"{what}: {run.observed.problem}")
                    say(problems[-1])
                elif not rate and run.score.seconds is None:
                    problems.append(f"{what}: step {run.score.steps} only; it is not run under failures")
                    say(problems[-1])
                elif not rate:
                    calm[system.name] = run
    return runs, problems + different_begins(runs)


def different_begins(runs: Sequence[Run]) -> list[str]:
    """The systems whose first loss is not that of the others, in words: they train something else."""
    first: dict[str, float] = {}
    for run in runs:
        if not run.rate and (x := losses(run.steps).get(1)) is not None:
            first.setdefault(run.system, x)
    middle = statistics.median(first.values()) if first else 0.0
    return [
        f"{name}: the loss of step 1 is {x!r}, and {middle!r} elsewhere: another model, or other samples"
        for name, x in first.items()
        if abs(x - middle) > _SAME_LOSS
    ]


def _told(found: Score) -> str:
    end = f"in {found.seconds:.1f} s" if found.seconds is not None else "when its time was up"
    return f"step {found.steps} {end}, longest pause {found.pause_s:.2f} s, {found.twice} twice, {found.never} never"
