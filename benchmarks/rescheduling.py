"""Emulated: throughput after workers are lost or slow, over the aggregate speed that is left. 1 is proportional.

    python -m benchmarks.rescheduling [--quick] [--only TEXT] [--json PATH]

`python train.py` on the emulated accelerator (benchmarks/emulated_runs.py: real processes, links and bytes; layer
programs sleep). Each case is one run: healthy steps, then workers are killed in the middle of a step, or one runs at
half speed from a step on, and the run assigns micro-batches and moves layers by itself. Unlike with the default
settings it looks for gains more often, and accepts them from 2 % (schedule.every, window, patience, min_gain). Reported
are medians of the healthy steps and of the last ones, when nothing had changed for two steps, from metrics.jsonl, and

    ratio = (throughput after / before) / (aggregate speed after / before)

beside the modelled ratio of the run's last placement with the costs that it measured ("modelled"), the ratio that
plan_change predicts, and the best ratio over all cuts of the layers (all are tried; workers stay in their stages,
micro-batches are assigned by the planner, steps last as workers execute them): the optimum over whole layers and
micro-batches. "No order" is a lower bound of the step over all cuts, whatever the order of actions. "Any grouping" is
elaswave_spmd.simulator.optimum: workers may change their stage, too (same number of stages; cut off after 400).
Backwards are in two parts, as in any run. Reroute (ReCycle's policy) and drop replica (TorchFT's) are modelled on the
same costs, not run; they run plain 1F1B before the event, which takes longer than our healthy step. Their ratios are
over ours, so that all compare steps after the event. The ablation leaves axes out: schedule.microbatches=false
(micro-batches are assigned again only if a worker is lost, or layers move),
schedule.layers=false, both; and with frequencies from 0.8 to 1.1 of normal (schedule.frequency=simulated).

The losses of all runs with equally many layers and micro-batches are compared, bit for bit.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.emulated_runs import LAYERS, WARM_STEPS, Run, costs_of, emulated, placed, run
from benchmarks.harness import Result, parser, say
from benchmarks.processes import new_directory, stop_on_signals
from benchmarks.recovery import different_losses
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.microbatch_assignment import assign_microbatches
from elaswave_spmd.scheduling.rebalance import plan_change
from elaswave_spmd.scheduling.split_backward import SplitBackward, executed
from elaswave_spmd.scheduling.step_time import Assignment, bound, stage_seconds, step_time
from elaswave_spmd.simulator import Case, Change, DropReplica, Reroute, healthy, optimum

EVENT_STEP, SETTLE_STEPS, LAST_STEPS = 10, 17, 7
_UNDER_WAY = 4  # steps after an order of frequencies that may have run with some of both
_QUICK = (6, 17, 4)
_FOLLOWING: Mapping[str, object] = {
    "schedule__every": 2,
    "schedule__window": 3,
    "schedule__patience": 1,
    "schedule__lasting": 0,
    "schedule__min_gain": 0.02,
    "schedule__stages": "false",
}
_NO_LIMIT = 1 << 30
AXES: Mapping[str, Mapping[str, object]] = {
    "all but frequency": {},
    "neither": {"schedule__microbatches": "false", "schedule__layers": "false"},
    "microbatches": {"schedule__layers": "false"},
    "layers": {"schedule__microbatches": "false"},
    "all": {"schedule__frequency": "simulated", "schedule__f_min": 0.8, "schedule__f_max": 1.1},
}
FULL, NEITHER = "all but frequency", "neither"


@dataclass(frozen=True)
class Event:
    """A mesh, its micro-batches per worker, and the workers that are lost or slow. `axes`: run the ablation, too."""

    name: str
    mesh: str
    microbatches: int
    change: str
    axes: bool = False

    @property
    def case(self) -> Case:
        """The event in the form that the planner and the policies take."""
        mesh = Mesh.initial(MeshShape.parse(self.mesh))
        costs = costs_of(len(mesh.stages))
        placement = healthy(mesh, costs, self.microbatches * len(mesh.stages[0]))
        return Case(placement, costs, Change.parse(self.change), remaining_steps=1000)


EVENTS = (
    Event("1 of 8 lost", "dp4_pp2", 4, "fail 6"),
    Event("1 of 8 lost", "dp4_pp2", 16, "fail 6"),
    Event("1 of 16 lost", "dp4_pp4", 4, "fail 6", axes=True),
    Event("1 of 16 lost", "dp4_pp4", 16, "fail 6"),
    Event("1 of 16 lost", "dp8_pp2", 4, "fail 6"),
    Event("1 of 16 lost", "dp8_pp2", 8, "fail 6"),
    Event("2 of 16 lost", "dp4_pp4", 8, "fail 3 6"),
    Event("a replica of all stages lost", "dp4_pp4", 4, "fail 2 6 10 14"),
    Event("1 of 8 at half speed", "dp4_pp2", 4, "slow 6 0.5", axes=True),
    Event("1 of 16 at half speed", "dp4_pp4", 4, "slow 6 0.5"),
    Event("1 of 16 at half speed", "dp8_pp2", 8, "slow 6 0.5"),
)


@dataclass(frozen=True)
class Times:
    """The result of a run. Times are seconds of a step.

    Args:
        settled: False if something changed in the last steps that were measured.
        steps: from the event until the last change.
    """

    before_s: float
    after_s: float
    settled: bool
    steps: int


def settings_of(event: Event, axes: Mapping[str, object], steps: tuple[int, int, int]) -> dict[str, object]:
    """The run's settings, by name."""
    case, change = event.case, Change.parse(event.change)
    if change.gone:
        ranks = ",".join(map(str, change.gone))
        faults = {"chaos__events": f"[{{step: {steps[0]}, kind: kill, rank: [{ranks}], point: backward}}]"}
    else:
        slow = ", ".join(f"{{rank: {rank}, speed: {speed}, step: {steps[0]}}}" for rank, speed in change.slow)
        faults = {"emulated__slow": f"[{slow}]"}
    mesh, microbatches = case.placement.mesh, case.placement.num_microbatches
    return emulated(mesh, microbatches, sum(steps) + 1, **_FOLLOWING, **axes, **faults)


def times_of(done: Run, steps: tuple[int, int, int]) -> Times:
    """The medians before the event, and of the last steps except the very last, which no step follows."""
    event_step, settle, last = steps
    end = event_step + settle + last
    hints = [event["step"] + _UNDER_WAY for event in done.events if event["event"] == "frequency"]
    change = max([done.last_change, *hints])
    before = statistics.median(done.seconds(WARM_STEPS + 1, event_step - 1))
    after = statistics.median(done.seconds(end - last + 1, end))
    return Times(before, after, change + 2 <= end - last + 1, max(0, change - event_step))


# ---- the possible gain


def least(case: Case) -> tuple[float, float]:
    """Seconds of the fastest step over all cuts, with workers in these stages: as executed, and a lower bound."""
    stages = case.change.stages(case.placement.mesh)
    speeds = [case.after.speeds_of(members) for members in stages]
    microbatches = case.healthy.num_microbatches
    candidates = {
        assign_microbatches(microbatches, speeds, fewest_nodes=fewest_nodes).counts for fewest_nodes in (True, False)
    }
    found = sorted(_bounds(case, speeds, min(candidates), len(stages)))
    best = math.inf
    for bound_s, cuts in found:
        if bound_s >= best:
            break
        for counts in candidates:
            assignment = executed(Assignment(stages, cuts, counts, case.healthy.microbatch_order), case.split)
            best = min(best, step_time(assignment, case.after, case.rule).seconds)
    return best, found[0][0]


def _bounds(
    case: Case, speeds: Sequence[np.ndarray], counts: Sequence[Sequence[int]], number: int
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """A lower bound of the step for all cuts and any order of actions, by the smallest possible largest load."""
    microbatches = [np.array(of_stage) for of_stage in counts]
    layers = len(case.after.layers)
    for inner in combinations(range(1, layers), number - 1):
        cuts = (0, *inner, layers)
        forward, backward, delays = stage_seconds(cuts, case.after)
        weights = np.diff(case.after.prefix("weights_s")[np.array(cuts)])
        weights[0] = 0.0  # nobody waits for a part of the first stage's backward
        forward_s, backward_s, weights_s = (
            [s / v for s, v in zip(kind, speeds, strict=True)] for kind in (forward, backward, weights)
        )
        limits, put_off = [_NO_LIMIT] * number, [_NO_LIMIT if late else 0 for late in weights]
        yield bound(forward_s, backward_s, microbatches, delays, limits, weights_s, put_off), cuts


def modelled(case: Case) -> dict[str, float]:
    """The ratios in advance, with the configured costs of the programs."""
    stages = case.change.stages(case.placement.mesh)
    decision = plan_change(
        case.placement, case.after, case.remaining_steps, stages=stages, split=case.split, stage_counts=()
    )
    best_s, bound_s = least(case)
    ranks = [rank for members in stages for rank in members]
    number = case.healthy.num_microbatches
    best = optimum(case.after, ranks, number, stage_counts=(len(stages),), rule=case.rule, split=case.split)
    seconds = {"plan": decision.last.time.seconds, "optimum": best_s, "no order": bound_s}
    if best is not None:
        seconds["any grouping"] = best.best_s
    before_s = case.seconds(case.healthy_split, case.costs)
    found = {name: before_s / s / case.share for name, s in seconds.items()}
    # All ratios are over the healthy step of ours, so that they compare steps after the event.
    of_whole = before_s / case.before_s
    found |= {policy.name: of_whole * case.ratio(policy.answer(case)) for policy in (Reroute(), DropReplica())}
    return found | {"before_s": before_s, "whole_before_s": case.before_s, "plan_s": decision.last.time.seconds}


# ---- tables


def row_of(event: Event, done: Run, times: Times, figures: Mapping[str, float]) -> list[str]:
    """One line of the first table."""
    case, ratio = event.case, ratio_of(event, times)
    chosen = done.assignment(case.placement)
    costs = done.costs or case.after
    planned_s = step_time(executed(chosen, SplitBackward.of_costs(costs, case.rule)), costs, case.rule).seconds
    return [
        *_head(event),
        f"{1e3 * times.before_s:.0f} to {1e3 * times.after_s:.0f}",
        f"{1e3 * planned_s:.0f}",
        f"{ratio:.3f}" + ("" if times.settled else " (not settled)"),
        f"{figures['plan']:.3f}",
        f"{figures['optimum']:.3f}",
        f"{ratio / figures['optimum']:.3f}",
        placed(chosen.stages, chosen.layer_cuts),
        f"{times.steps}",
        f"{done.busy:.2f}",
    ]


def policies_of(event: Event, times: Times, figures: Mapping[str, float]) -> list[str]:
    """One line of the second table."""
    ratio = ratio_of(event, times)
    others = [figures["reroute"], figures["drop replica"]]
    against = [f"{ratio / other:.2f}" if other else "-" for other in others]
    more = [figures["no order"], figures.get("any grouping", math.nan)]
    return [*_head(event), f"{ratio:.3f}", *(f"{other:.3f}" for other in others), *against, *(f"{x:.3f}" for x in more)]


def ratio_of(event: Event, times: Times) -> float:
    """The throughput after / before, over the aggregate speed after / before."""
    return times.before_s / times.after_s / event.case.share


def _head(event: Event) -> list[str]:
    return [event.name, event.mesh, f"{event.microbatches}"]


HEAD = ("case", "mesh", "micro-batches each")
COLUMNS = (*HEAD, "step, ms", "modelled, ms", "ratio", "plan in advance", "optimum", "ratio / optimum")
COLUMNS += ("workers; layers of stages", "steps to settle", "cores busy")
POLICIES = (*HEAD, "ours (emulated)", "reroute", "drop replica", "ours / reroute", "ours / drop replica")
POLICIES += ("no order", "any grouping")
ABLATION = (
    *HEAD,
    "neither",
    "micro-batches",
    "layers (graph)",
    "both",
    "both, and frequency from 0.8 to 1.1",
)


def measure(events: Sequence[Event], steps: tuple[int, int, int], cache: Path, quick: bool) -> dict[str, Any]:
    """All runs. Returns the rows of the tables, the losses by number of layers and micro-batches, and plain data."""
    rows, policies, ablation, data = [], [], [], []
    losses: dict[tuple[int, int], list[dict[int, str]]] = {}
    for event in events:
        case = event.case
        figures = modelled(case)
        ratios: dict[str, float] = {}
        axes = AXES if event.axes and not quick else {FULL: AXES[FULL]}
        for name, chosen in axes.items():
            done = run(settings_of(event, chosen, steps), case.costs, cache, steps[0] - 1)
            times = times_of(done, steps)
            losses.setdefault((len(case.costs.layers), case.placement.num_microbatches), []).append(done.losses)
            ratios[name] = ratio_of(event, times)
            say(
                f"{event.name}, {event.mesh}, {event.microbatches} micro-batches, {name}: {ratios[name]:.3f}, "
                f"plan {figures['plan']:.3f}"
            )
            if name == FULL:
                rows.append(row_of(event, done, times, figures))
                policies.append(policies_of(event, times, figures))
            reported = [e for e in done.events if "after_step" in e or e["event"] in ("frequency", "slow")]
            seconds = [line["seconds"] for line in done.metrics]
            data.append(
                {"event": vars(event), "axes": name, **vars(times), "seconds": seconds, "events": reported} | figures
            )
        if len(ratios) > 1:
            shown = [f"{ratios[name]:.3f}" for name in (NEITHER, "microbatches", "layers", FULL, "all")]
            ablation.append([*_head(event), *shown])
    return {"rows": rows, "policies": policies, "ablation": ablation, "losses": losses, "data": data}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 1 if losses differ."""
    options = parser(__doc__)
    options.add_argument("--only", default="", help="only cases whose name, mesh and micro-batches contain this")
    args = options.parse_args(argv)
    stop_on_signals()
    steps = _QUICK if args.quick else (EVENT_STEP, SETTLE_STEPS, LAST_STEPS)
    events = [e for e in EVENTS if args.only in f"{e.name}, {e.mesh}, {e.microbatches} micro-batches"]
    if args.quick:
        events = [e for e in events if e.mesh == "dp4_pp2" and e.microbatches == 4]
    result = Result(
        "rescheduling", {"layers of a stage": LAYERS, "steps": steps, "only": args.only, "quick": args.quick}
    )
    with new_directory("rescheduling-data-") as cache:
        found = measure(events, steps, cache, args.quick)
    title = "Emulated: throughput after a change over the aggregate speed left, medians of one run each"
    result.table(title, COLUMNS, found["rows"])
    result.table("The same ratio of ours, emulated, beside modelled policies", POLICIES, found["policies"])
    if found["ablation"]:
        result.table("Emulated: the same ratio by axis", ABLATION, found["ablation"])
    problems = [difference for losses in found["losses"].values() for difference in different_losses(losses)]
    number = sum(map(len, found["losses"].values()))
    print(
        f"losses of {number} runs, of {len(found['losses'])} numbers of layers and micro-batches: "
        f"{len(problems)} differ"
    )
    result.data = {"problems": problems, "runs": found["data"]}
    return result.finish(args.json, problems)


if __name__ == "__main__":
    sys.exit(main())
