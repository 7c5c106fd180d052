"""Emulated: throughput after workers are lost or slow, over the aggregate speed that is left. 1 is proportional.

    python -m benchmarks.rescheduling [--launches N] [--times X] [--quick] [--only TEXT] [--json PATH]

`python train.py` on the emulated accelerator (benchmarks/emulated_runs.py: real processes, links and bytes; layer
programs sleep). In a run there are healthy steps, then workers are killed in the middle of a step, or one runs at
half speed from a step on, and the run assigns micro-batches and moves layers by itself. Unlike with the default
settings it looks for gains more often, and accepts them from 2 % (schedule.every, window, patience, min_gain). With
--times, programs sleep that many times as long: what 16 processes compute beside that on two cores counts less. A run
gives the medians of its healthy steps and of its last ones, when nothing had changed for two steps, from metrics.jsonl;
reported are medians over the launches, and

    ratio = (throughput after / before) / (aggregate speed after / before)

beside the modelled ratio of the run's last placement with the costs that it measured ("modelled"), the ratio that
plan_change predicts, and the best ratio over all cuts of the layers (all are tried; workers stay in their stages,
micro-batches are assigned by the planner, steps last as workers execute them): the optimum over whole layers and
micro-batches. "No order" is a lower bound of the step over all cuts, whatever the order of actions. "Any grouping" is
elaswave_spmd.simulator.optimum: workers may change their stage, too (same number of stages; cut off after 400).
Backwards are in two parts, as in any run.

Reroute (ReCycle's policy) is run, too, as a placement, in turns with ours: layers stay, a lost worker's micro-batches
go evenly to the others of its stage (schedule.layers=false). It gets all that our workers have: backwards in two
parts, whatever is ready, limits in flight by simulation; what it has not is its staggered optimizer. Beside a slow
worker it waits, or treats it as lost (elastic.evict_slower_than), whichever is faster. It is modelled as well, with
its staggered optimizer, and so is drop replica (TorchFT's policy), on the same costs; these run plain 1F1B before the
event, which takes longer than our healthy step, and their ratios are over ours, so that all compare steps after the
event. The ablation, of the first launch, leaves axes out: schedule.microbatches=false
(micro-batches are assigned again only if a worker is lost, or layers move),
schedule.layers=false, both; and with frequencies from 0.8 to 1.1 of normal (schedule.frequency=simulated).

The losses of all runs with equally many layers and micro-batches are compared, bit for bit.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.emulated_runs import FOLLOWING, LAYERS, WARM_STEPS, Run, costs_of, emulated, placed, run
from benchmarks.harness import Result, parser, say
from benchmarks.processes import new_directory, stop_on_signals
from benchmarks.recovery import different_losses
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.microbatch_assignment import assign_microbatches
from elaswave_spmd.scheduling.rebalance import PlanSettings, plan_change
from elaswave_spmd.scheduling.split_backward import SplitBackward, executed
from elaswave_spmd.scheduling.step_time import Assignment, bound, stage_seconds, step_time
from elaswave_spmd.simulator import Case, Change, DropReplica, Reroute, healthy, optimum

EVENT_STEP, SETTLE_STEPS, LAST_STEPS = 10, 17, 7
_UNDER_WAY = 4  # steps after an order of frequencies that may have run with some of both
_QUICK = (6, 17, 4)
_FOLLOWING: Mapping[str, object] = {
    **FOLLOWING,
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
REROUTES: Mapping[str, tuple[Mapping[str, object], ...]] = {
    "fail": (AXES["microbatches"],),
    "slow": (AXES[NEITHER], {**AXES[NEITHER], "elastic__evict_slower_than": 0.75}),
}
"""The settings that make a run reroute, by the kind of the event; of several the faster one counts."""


@dataclass(frozen=True)
class Event:
    """A mesh, its micro-batches per worker, and the workers that are lost or slow. `axes`: run the ablation, too."""

    name: str
    mesh: str
    microbatches: int
    change: str
    axes: bool = False
    times: float = 1.0

    @property
    def case(self) -> Case:
        """The event in the form that the planner and the policies take."""
        mesh = Mesh.initial(MeshShape.parse(self.mesh))
        costs = costs_of(len(mesh.stages), self.times)
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
    return emulated(mesh, microbatches, sum(steps) + 1, event.times, **_FOLLOWING, **axes, **faults)


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
        case.placement, case.after, case.remaining_steps, PlanSettings(split=case.split, stage_counts=()), stages=stages
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


def policies_of(event: Event, launches: Launches, figures: Mapping[str, float]) -> list[str]:
    """One line of the second table."""
    ratio = ratio_of(event, launches.times)
    ours, reroute = launches.times.after_s, launches.reroute.after_s
    others = [figures["reroute"], figures["drop replica"]]
    against = [f"{ratio / other:.2f}" if other else "-" for other in others]
    more = [figures["no order"], figures.get("any grouping", math.nan)]
    executed = [f"{1e3 * ours:.0f}", f"{1e3 * reroute:.0f}", f"{reroute / ours:.3f}"]
    return [
        *_head(event),
        *executed,
        f"{ratio:.3f}",
        *(f"{x:.3f}" for x in others),
        *against,
        *(f"{x:.3f}" for x in more),
    ]


def ratio_of(event: Event, times: Times) -> float:
    """The throughput after / before, over the aggregate speed after / before."""
    return times.before_s / times.after_s / event.case.share


def _head(event: Event) -> list[str]:
    return [event.name, event.mesh, f"{event.microbatches}"]


HEAD = ("case", "mesh", "micro-batches each")
COLUMNS = (*HEAD, "step, ms", "modelled, ms", "ratio", "plan in advance", "optimum", "ratio / optimum")
COLUMNS += ("workers; layers of stages", "steps to settle", "cores busy")
POLICIES = (*HEAD, "step of ours, ms", "of reroute, ms", "reroute / ours, both executed", "ours")
POLICIES += ("reroute, modelled", "drop replica, modelled", "ours / reroute", "ours / drop replica")
POLICIES += ("no order", "any grouping")
ABLATION = (
    *HEAD,
    "neither",
    "micro-batches",
    "layers (graph)",
    "both",
    "both, and frequency from 0.8 to 1.1",
)


@dataclass
class Launches:
    """The runs of one event.

    Args:
        ours: our run of each launch.
        rerouted: of each launch, the times of the ways to reroute.
    """

    ours: list[tuple[Run, Times]] = field(default_factory=list)
    rerouted: list[list[Times]] = field(default_factory=list)

    @property
    def done(self) -> Run:
        """Our last run."""
        return self.ours[-1][0]

    @property
    def times(self) -> Times:
        """Medians of our runs."""
        return _median([times for _, times in self.ours])

    @property
    def reroute(self) -> Times:
        """Medians of the runs that rerouted, in the faster way."""
        return min(map(_median, zip(*self.rerouted, strict=True)), key=lambda times: times.after_s)


def _median(launches: Sequence[Times]) -> Times:
    return Times(
        statistics.median(times.before_s for times in launches),
        statistics.median(times.after_s for times in launches),
        all(times.settled for times in launches),
        int(statistics.median(times.steps for times in launches)),
    )


@dataclass
class Measured:
    """All runs of the benchmark.

    Args:
        launches: by event.
        ablation: rows of the last table.
        losses: of all runs, by the numbers of layers and micro-batches.
        data: plain values of all runs.
    """

    launches: defaultdict[Event, Launches] = field(default_factory=lambda: defaultdict(Launches))
    ablation: list[list[str]] = field(default_factory=list)
    losses: dict[tuple[int, int], list[dict[int, str]]] = field(default_factory=dict)
    data: list[dict[str, Any]] = field(default_factory=list)

    def run(
        self, event: Event, name: str, axes: Mapping[str, object], steps: tuple[int, int, int], cache: Path
    ) -> tuple[Run, Times]:
        """Runs an event once, and keeps what the run left."""
        case = event.case
        done = run(settings_of(event, axes, steps), case.costs, cache, steps[0] - 1)
        times = times_of(done, steps)
        self.losses.setdefault((len(case.costs.layers), case.placement.num_microbatches), []).append(done.losses)
        reported = [e for e in done.events if "after_step" in e or e["event"] in ("frequency", "slow")]
        seconds = [line["seconds"] for line in done.metrics]
        self.data.append({"event": vars(event), "axes": name, **vars(times), "seconds": seconds, "events": reported})
        say(
            f"{event.name}, {event.mesh}, {event.microbatches} micro-batches, {name}: "
            f"{1e3 * times.after_s:.0f} ms, {ratio_of(event, times):.3f}" + ("" if times.settled else ", not settled")
        )
        return done, times


def measure(events: Sequence[Event], steps: tuple[int, int, int], cache: Path, launches: int, quick: bool) -> Measured:
    """All runs: of each launch all events, ours and reroute in turns; of the first launch the ablation, too."""
    found = Measured()
    for launch in range(launches):
        for event in events:
            of_event = found.launches[event]
            of_event.ours.append(found.run(event, FULL, AXES[FULL], steps, cache))
            ways = REROUTES[event.change.split()[0]]
            of_event.rerouted.append([found.run(event, "reroute", axes, steps, cache)[1] for axes in ways])
            if launch == 0 and event.axes and not quick:
                names = (NEITHER, "microbatches", "layers", "all")
                ratios = {n: ratio_of(event, found.run(event, n, AXES[n], steps, cache)[1]) for n in names}
                ratios[FULL] = ratio_of(event, of_event.times)
                shown = [f"{ratios[name]:.3f}" for name in (NEITHER, "microbatches", "layers", FULL, "all")]
                found.ablation.append([*_head(event), *shown])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 1 if losses differ."""
    options = parser(__doc__)
    options.add_argument("--only", default="", help="only cases whose name, mesh and micro-batches contain this")
    options.add_argument("--launches", type=int, default=5)
    options.add_argument("--times", type=float, default=1.0, help="how many times as long programs sleep")
    args = options.parse_args(argv)
    stop_on_signals()
    steps = _QUICK if args.quick else (EVENT_STEP, SETTLE_STEPS, LAST_STEPS)
    events = [replace(event, times=args.times) for event in EVENTS]
    events = [e for e in events if args.only in f"{e.name}, {e.mesh}, {e.microbatches} micro-batches"]
    if args.quick:
        events = [e for e in events if e.mesh == "dp4_pp2" and e.microbatches == 4]
    launches = 1 if args.quick else args.launches
    settings = {"layers of a stage": LAYERS, "steps": steps, "launches": launches, "only": args.only}
    settings["times"] = args.times
    result = Result("rescheduling", {**settings, "quick": args.quick})
    figures = {event: modelled(event.case) for event in events}
    with new_directory("rescheduling-data-") as cache:
        found = measure(events, steps, cache, launches, args.quick)
    title = f"Emulated: throughput after a change over the aggregate speed left, medians of {launches} launches"
    rows = [row_of(event, of.done, of.times, figures[event]) for event, of in found.launches.items()]
    result.table(title, COLUMNS, rows)
    policies = [policies_of(event, of, figures[event]) for event, of in found.launches.items()]
    result.table("Ours and reroute, executed, and the ratio beside modelled policies", POLICIES, policies)
    if found.ablation:
        result.table("Emulated: the same ratio by axis, one run each", ABLATION, found.ablation)
    problems = [difference for losses in found.losses.values() for difference in different_losses(losses)]
    number = sum(map(len, found.losses.values()))
    print(
        f"losses of {number} runs, of {len(found.losses)} numbers of layers and micro-batches: {len(problems)} differ"
    )
    modelled_ratios = [{"event": vars(event), **ratios} for event, ratios in figures.items()]
    result.data = {"problems": problems, "modelled": modelled_ratios, "runs": found.data}
    return result.finish(args.json, problems)


if __name__ == "__main__":
    sys.exit(main())
