"""The cost of a join and of a leave for a running training.

    python -m benchmarks.join [--quick] [--joins N] [--launches N] [--json PATH]

`python train.py` on three workers, the model of `recovery`. Repeatedly `ctl RUN add 1` makes a fourth worker join, and
`ctl RUN drain RANK` makes it leave; in between some steps are undisturbed. A step counts as disturbed from the request
on until the run has settled: all copies are where they belong, and nothing is changing. A stall is the time of
disturbed steps beyond the median of undisturbed steps with as many workers. Times of steps are those of metrics.jsonl,
from one commit to the next as the controller sees them; times of events are those of events.jsonl.

Reported for each join: the time until the new worker was a member, the time that training lost while its process
started on the same cores, and then the stall itself: of the step in which the mesh changed, of the steps in which
copies were promoted, and of all together. `pause` is how long all members waited between two steps for the new mesh:
from the last member's answer until they had the new configuration.

A change is planned for the end of a step. If a member has begun the next step before it hears of the change, that step
is recovered in part, and micro-batches of it may be computed again: their number is reported.

The benchmark fails if a step was discarded, or if a loss differs between launches.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, parser, say
from benchmarks.processes import Program, new_directory, program, stop_on_signals
from benchmarks.recovery import different_losses, shown_parts
from benchmarks.recovery_runs import SIZES, json_lines, train_words
from elaswave_spmd.controller.admin_client import ask
from elaswave_spmd.errors import ControlError

WORKERS = 3
_WARM_STEPS = 20
_ALONE_STEPS = 25  # undisturbed steps between two changes
_LOOK_S = 0.05
_KINDS = ("join", "leave", "rebalance")
JOIN, LEAVE = "join", "leave"


@dataclass(frozen=True)
class Request:
    """A requested change: `at` in CLOCK_MONOTONIC, when `step` was the last committed step."""

    kind: str
    at: float
    step: int


@dataclass(frozen=True)
class Launch:
    """The files of one run."""

    requests: tuple[Request, ...]
    metrics: tuple[dict[str, Any], ...]
    events: tuple[dict[str, Any], ...]

    @property
    def losses(self) -> dict[int, str]:
        return {line["step"]: line["loss_hex"] for line in self.metrics}

    def problems(self) -> list[str]:
        """Findings that make the benchmark fail, in words."""
        findings = []
        if [line["step"] for line in self.metrics] != list(range(1, len(self.metrics) + 1)):
            findings.append("a step is missing from metrics.jsonl, or there twice")
        findings += [f"worker {e['ranks']} was lost: {e['reason']}" for e in self.events if e["event"] == "fail"]
        return findings


def run(cache: Path, joins: int) -> Launch:
    """Runs the training once, with this many joins and as many leaves."""
    requests = []
    with new_directory("join-") as directory:
        words = train_words(directory, cache, mesh={"dp": WORKERS})
        with program([sys.executable, *words], directory) as training:
            folder = directory / "run"
            _steps(training, folder, _WARM_STEPS + _ALONE_STEPS)
            for number in range(joins):
                for kind, workers in ((JOIN, WORKERS + 1), (LEAVE, WORKERS)):
                    step = json_lines(folder / "metrics.jsonl")[-1]["step"]
                    requests.append(Request(kind, time.monotonic(), step))
                    if kind == JOIN:
                        ask(str(folder), {"command": "add", "count": 1})
                    else:
                        newest = max(member["rank"] for member in ask(str(folder), {"command": "status"})["members"])
                        ask(str(folder), {"command": "drain", "ranks": [newest]})
                    training.wait(lambda workers=workers: _settled(folder, workers))
                    _steps(training, folder, _ALONE_STEPS)
                say(f"  join and leave {number + 1}/{joins}")
        return Launch(
            tuple(requests), tuple(json_lines(folder / "metrics.jsonl")), tuple(json_lines(folder / "events.jsonl"))
        )


def _steps(training: Program, folder: Path, count: int) -> None:
    """Waits for this many steps."""
    metrics = folder / "metrics.jsonl"
    until = len(json_lines(metrics)) + count
    training.wait(lambda: len(json_lines(metrics)) >= until)


def _settled(folder: Path, workers: int) -> bool:
    try:
        status = ask(str(folder), {"command": "status"})
    except ControlError:
        return False  # it has ended: the caller sees that
    time.sleep(_LOOK_S)
    moving = any(status[name] for name in ("newcomers", "leaving", "learners", "changing"))
    return len(status["members"]) == workers and not moving


@dataclass(frozen=True)
class Window:
    """The disturbed steps of one request: `first`..`last`, and the events in between."""

    request: Request
    first: int
    last: int
    events: tuple[dict[str, Any], ...]


def windows(launch: Launch) -> list[Window]:
    """The disturbed steps of each request. They end with the first step on the last of its meshes."""
    reported = [event for event in launch.events if event["event"] in _KINDS]
    found = []
    for number, request in enumerate(launch.requests):
        later = launch.requests[number + 1].at if number + 1 < len(launch.requests) else float("inf")
        own = tuple(event for event in reported if request.at <= event["placed_at"] < later)
        last = max(event["after_step"] for event in own) + 1
        found.append(Window(request, request.step + 1, last, own))
    return found


def measure(launch: Launch) -> dict[str, list[dict[str, float]]]:
    """The pieces of each change in ms, by kind of change."""
    steps = {line["step"]: line for line in launch.metrics}
    found = windows(launch)
    disturbed = {step for window in found for step in range(window.first, window.last + 1)}
    alone: dict[int, list[float]] = {}
    for step, line in steps.items():
        if step > _WARM_STEPS and step not in disturbed:
            alone.setdefault(line["workers"], []).append(line["seconds"])
    usual = {workers: statistics.median(seconds) for workers, seconds in alone.items()}

    def extra(first: int, last: int) -> float:
        return 1e3 * sum(steps[s]["seconds"] - usual[steps[s]["workers"]] for s in range(first, last + 1))

    changes: dict[str, list[dict[str, float]]] = {JOIN: [], LEAVE: []}
    for window in found:
        changed = next(event for event in window.events if event["event"] == window.request.kind)
        copies = [event for event in window.events if event["event"] == "rebalance"]
        changes[window.request.kind].append(_pieces(window, changed, copies, extra, usual))
    return changes


def _pieces(
    window: Window, changed: Mapping[str, Any], copies: Sequence[Mapping[str, Any]], extra: Any, usual: dict[int, float]
) -> dict[str, float]:
    """The pieces of one change. `extra(first, last)`: the time of these steps beyond the usual one, in ms."""
    at = changed["after_step"]
    pieces = {
        f"undisturbed step, {WORKERS} workers": 1e3 * usual[WORKERS],
        f"undisturbed step, {WORKERS + 1} workers": 1e3 * usual[WORKERS + 1],
        "request to the new mesh": 1e3 * (changed["placed_at"] - window.request.at),
    }
    if window.request.kind == JOIN:
        pieces["beyond the usual before it: the new worker starts"] = extra(window.first, at)
    return pieces | {
        "pause between two steps": 1e3 * (changed["placed_at"] - changed["answered_at"]),
        "stall: the step of the change": extra(at + 1, at + 1),
        "stall: steps in which copies are promoted": sum(
            extra(event["after_step"] + 1, event["after_step"] + 1) for event in copies
        ),
        "stall: all steps until it has settled": extra(at + 1, window.last),
        "steps until it has settled": window.last - at,
        "micro-batches computed again": sum(event["microbatches_redone"] for event in (changed, *copies)),
    }


def main() -> int:
    """Command line. Returns the exit code: 1 if a step was discarded, or a loss changed."""
    options = parser(__doc__)
    options.add_argument("--joins", type=int, help="in one launch (5; with --quick 2)")
    options.add_argument("--launches", type=int, help="fresh runs (2; with --quick 1)")
    args = options.parse_args()
    stop_on_signals()
    joins, launches = args.joins or (2 if args.quick else 5), args.launches or (1 if args.quick else 2)
    result = Result("join", {**SIZES, "mesh": {"dp": WORKERS}, "joins": joins, "launches": launches})
    done, problems = [], []
    with new_directory("join-data-") as cache:
        for number in range(launches):
            say(f"launch {number + 1}/{launches}")
            done.append(run(cache, joins))
    for launch in done:
        problems += launch.problems()
    problems += [f"bits: {difference}" for difference in different_losses([launch.losses for launch in done])]
    changes = [measure(launch) for launch in done]
    for kind, title in ((JOIN, "A worker joins, 3 to 4"), (LEAVE, "A worker leaves, 4 to 3")):
        pieces = list(itertools.chain.from_iterable(change[kind] for change in changes))
        columns = ["ms, except in the last two lines", "median", "90th percentile", "max"]
        result.table(f"{title}: {len(pieces)} times", columns, shown_parts(pieces))
        result.data[kind] = pieces
    result.data["problems"] = problems
    return result.finish(args.json, problems)


if __name__ == "__main__":
    sys.exit(main())
