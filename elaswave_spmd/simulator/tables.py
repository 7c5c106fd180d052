"""Computing scenarios: the report of each has its tables and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.cost_model import MemoryRule
from elaswave_spmd.scheduling.dvfs import FrequencyRange
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.step_time import Assignment, memory_of
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.simulator.changes import Change
from elaswave_spmd.simulator.failures import DAY, Fleet, Repair, exponential, outages
from elaswave_spmd.simulator.goodput import Drops, GoesOn, Restarts, Scale, Stalls, Survivor
from elaswave_spmd.simulator.optimum import Optimum, optimum
from elaswave_spmd.simulator.policies import (
    Case,
    Constants,
    DropReplica,
    Ours,
    Outcome,
    Policy,
    Restart,
    mean_recompute_s,
)
from elaswave_spmd.simulator.report import Cell, Figure, Report, Table
from elaswave_spmd.simulator.reroute import Reroute
from elaswave_spmd.simulator.scenario import EventCase, Events, Goodput, model_of
from elaswave_spmd.simulator.shapes import healthy
from elaswave_spmd.simulator.templates import Templates
from elaswave_spmd.simulator.trace import Timeline
from elaswave_spmd.simulator.transition import simulate_transition

Progress = Callable[[str], None]
"""Called with the name of each piece of work that begins."""

FREQUENCIES = FrequencyRange(0.8, 1.1)
"""The range of the policy `ours + frequency`."""

WHOLE = Reroute(split=False, name="reroute, whole backward")
POLICIES: tuple[Policy, ...] = (Ours(), Reroute(), WHOLE, DropReplica(), Templates(), Restart())
ABLATION: tuple[Policy, ...] = (
    Ours(layers=False, stages=False, name="microbatches"),
    Ours(stages=False, name="micro-batches + layers"),
    Ours(name="micro-batches + layers + stages"),
    Ours(frequencies=FREQUENCIES, name="all + frequency"),
)

# The numbers of replicas of fleets that are executed action by action. For a whole fleet this would take too long.
_RECOMPUTED_REPLICAS = 8  # to measure which fraction of a step is computed again
_EXECUTED_REPLICAS = 16  # to compare steps with their lower bounds

_MEANS = (
    "ratio: (throughput after / before) over (aggregate speed after / before); 1 is proportional; before: a step with "
    "whole backwards, for all policies, and beside it the one that ours takes, with backwards in two parts",
    "modelled: virtual time on the cost model above, no device ran",
)


def run_scenario(name: str, scenario: Events | Goodput, progress: Progress = lambda _: None) -> Report:
    """Computes all tables and figures of a scenario."""
    return _events(name, scenario, progress) if isinstance(scenario, Events) else _goodput(name, scenario, progress)


def timeline_of(scenario: Events | Goodput, label: str = "") -> Timeline | None:
    """The timeline of one case with our policy, in virtual time. If lost workers are drawn, it shows the first draw.

    Args:
        label: the row of the case; "" for the first one.

    Returns:
        The timeline. None for weeks of failures, and if our policy cannot go on.

    Raises:
        ConfigError: no row has this name.
    """
    rows = [row for case in scenario.cases for row in cases_of(scenario, case)] if isinstance(scenario, Events) else []
    if label and label not in [row for row, _ in rows]:
        exists = ", ".join(row for row, _ in rows) or "none: weeks of failures have no timeline"
        raise ConfigError(f"trace={label} is no case of the scenario", where=f"trace={label}", exists=exists)
    for row, cases in rows:
        if label in ("", row):
            decision = Ours().answer(cases[0]).decision
            return simulate_transition(cases[0], decision).timeline if decision else None
    return None


def cases_of(scenario: Events, row: EventCase) -> list[tuple[str, list[Case]]]:
    """The (label, cases) of each row that a case of a scenario stands for. The row shows the mean of the cases."""
    costs = model_of(row.model or scenario.model or {})
    mesh = Mesh.initial(MeshShape.parse(row.mesh))
    shardings = Shardings().with_zero(scenario.zero)
    placement = healthy(mesh, costs, row.microbatches, shardings)
    limit = math.inf
    if scenario.memory is not None:
        limit = scenario.memory * max(memory_of(Assignment.of(placement), costs, MemoryRule(shardings)))

    def case(change: Change) -> Case:
        return Case(placement, costs, change, remaining_steps=scenario.steps, memory_limit=limit)

    if row.event is not None:
        return [(row.name, [case(Change.parse(row.event))])]
    draw = np.random.default_rng(scenario.seed)
    found = []
    for number in row.lose:
        drawn = [draw.choice(mesh.members, number, replace=False).tolist() for _ in range(scenario.draws)]
        found.append((f"{row.name}, {number} lost", [case(Change(tuple(sorted(gone)))) for gone in drawn]))
    return found


def _events(name: str, scenario: Events, progress: Progress) -> Report:
    ratios: list[tuple[Cell, ...]] = []
    recovery: list[tuple[Cell, ...]] = []
    ablation: list[tuple[Cell, ...]] = []
    groupings: list[tuple[Cell, ...]] = []
    for row in scenario.cases:
        for label, cases in cases_of(scenario, row):
            progress(label)
            first = cases[0]
            ours_s = first.seconds(first.healthy_split, first.costs)
            head = (label, row.mesh, row.microbatches, first.before_s, ours_s, first.share)
            answers = [[policy.answer(case) for policy in POLICIES] for case in cases]
            means = _means(cases, answers)
            least = _least(first) if scenario.optimum else None
            allowed = [first.before_s / s / first.share for s in (least.best_s, least.bound_s)] if least else []
            against = [means[0] / other if other else math.inf for other in (means[1], means[3])]
            ratios.append((*head, *allowed, *means, *against))
            recovery.append((label, *(fmean(a[i].recovery_s for a in answers) for i in range(len(POLICIES)))))
            if scenario.optimum:
                by_axis = [[policy.answer(case) for policy in ABLATION] for case in cases]
                ablation.append((label, *_means(cases, by_axis)))
                groupings.append((label, *_grouping(answers[0][0], least)))
    best = ("best of all groupings", "lower bound") if scenario.optimum else ()
    names = tuple(policy.name for policy in POLICIES)
    head = ("case", "mesh", "microbatches", "step before s", "ours before s", "speed left")
    columns = (*head, *best, *names, "ours / reroute", "ours / drop replica")
    tables = [
        Table("Modelled throughput after a change, over the aggregate speed left", columns, tuple(ratios), _MEANS),
        Table("Modelled seconds that the change costs once", ("case", *names), tuple(recovery), (_stated(),)),
    ]
    figures = [_figure("ratio", "Modelled throughput over aggregate speed left", columns, ratios, (*best[:1], *names))]
    if ablation:
        title = "Modelled groupings: workers of the stages, and where layers are cut"
        tables.append(Table(title, _GROUPINGS, tuple(groupings)))
        steps, title = ("case", *(policy.name for policy in ABLATION)), "Modelled throughput with each axis added"
        tables.append(Table(title, steps, tuple(ablation), (_frequency_note(),)))
        figures.append(_figure("axes", title, steps, ablation, steps[1:]))
    return Report(name, scenario.title, scenario.about, tuple(tables), tuple(figures))


def _frequency_note() -> str:
    limits = f"{FREQUENCIES.lowest:g} to {FREQUENCIES.highest:g}"
    return f"frequency: within {limits} of the normal one; the speed that is left counts at 1"


def _stated() -> str:
    seconds = Constants()
    return (
        f"stated, not computed: detection {seconds.detect_s:g} s for all, restart {seconds.restart_s:g} s, "
        f"a checkpoint every {seconds.checkpoint_s:g} s"
    )


_GROUPINGS = ("case", "ours", "layers", "best", "layers of the best", "groupings timed", "no other is better")


def _grouping(ours: Outcome, least: Optimum | None) -> tuple[Cell, ...]:
    """The cells for the grouping that our policy chose, and for the best one."""
    chosen = [ours.decision.last.assignment] if ours.decision else []
    shown = []
    for assignment in chosen + ([least.assignment] if least else []):
        shown += ["-".join(str(len(members)) for members in assignment.stages), str(list(assignment.layer_cuts[1:]))]
    return (*shown, *((least.looked_at, "proven" if least.proven else "search cut off") if least else (None,) * 4))


def _means(cases: Sequence[Case], answers: Sequence[Sequence[Outcome]]) -> list[float]:
    """The mean ratio of each policy over the draws."""
    rows = [[case.ratio(outcome) for outcome in of_case] for case, of_case in zip(cases, answers, strict=True)]
    return [fmean(column) for column in zip(*rows, strict=True)]


def _least(case: Case) -> Optimum | None:
    """The exact optimum after the change."""
    present = [rank for members in case.change.stages(case.placement.mesh) for rank in members]
    return optimum(
        case.after,
        present,
        case.healthy.num_microbatches,
        rule=case.rule,
        memory_limit=case.memory_limit,
        microbatch_order=case.healthy.microbatch_order,
        split=case.split,
    )


def _figure(
    name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], wanted: Sequence[str]
) -> Figure:
    places = {column: columns.index(column) for column in wanted}
    series = {column: [_value(row[i]) for row in rows] for column, i in places.items()}
    return Figure(name, title, "", "ratio", tuple(str(row[0]) for row in rows), series)


def _value(cell: Cell) -> float | None:
    return float(cell) if isinstance(cell, (int, float)) and math.isfinite(cell) else None


# ---- goodput


def survivors(scenario: Goodput, steps: Table) -> tuple[Survivor, ...]:
    """The policies of a goodput scenario.

    Args:
        steps: the table of `executed`. Its last row has the factors by which steps exceed their bounds.
    """
    highest, (ours, rerouted) = scenario.highest_frequency, (float(cell or 1) for cell in steps.rows[-1][-2:])
    return (
        GoesOn("ours", over_bound=ours),
        GoesOn(f"ours, frequency to {highest:g}", highest=highest, over_bound=ours),
        GoesOn("reroute", reroute=True, over_bound=rerouted),
        Drops("drop replica"),
        Drops("drop replica, regrouped", regroups=True, again_s=scenario.swap_s),
        Restarts(),
    )


def _goodput(name: str, scenario: Goodput, progress: Progress) -> Report:
    progress("steps, action by action")
    steps, again = executed(scenario), recomputed_share(scenario)
    costs, policies = model_of(scenario.model), survivors(scenario, steps)
    stalls = Stalls(scenario.regroup_s, scenario.join_s, scenario.restart_s, scenario.checkpoint_s, again)
    seconds = scenario.days * DAY
    tables, figures = [], []
    for spares in scenario.spares:
        repair = Repair(scenario.repair_hours, spares, scenario.swap_s)
        rows: list[tuple[Cell, ...]] = []
        for devices in scenario.devices:
            progress(f"{devices:,} devices, {spares:.1%} spares")
            fleet = Fleet(devices, scenario.island, scenario.stages, scenario.microbatches)
            scale = Scale(fleet, costs)
            events = outages(fleet, exponential(fleet, scenario.rate, seconds, scenario.seed), repair)
            lost = sum(event.out for event in events if event.time < seconds)
            found = [policy.goodput(scale, events, seconds, stalls) for policy in policies]
            head = (devices, fleet.replicas, lost, scale.healthy_s, seconds / max(1, lost) / 60)
            rows.append((*head, *found))
        names = tuple(policy.name for policy in policies)
        head = ("devices", "replicas", "losses", "step s", "minutes between losses")
        title = f"Modelled goodput over {scenario.days:g} days, spares for {spares:.1%} of the workers"
        notes = ("1: a fleet that never fails", f"repair takes {scenario.repair_hours:g} hours", _MEANS[1])
        tables.append(Table(title, (*head, *names), tuple(rows), notes))
        series = {name: [_value(row[5 + i]) for row in rows] for i, name in enumerate(names)}
        ticks = tuple(float(number) for number in scenario.devices)
        figures.append(Figure(f"spares{spares:g}", title, "devices", "goodput", ticks, series, lines=True))
    return Report(name, scenario.title, scenario.about, (*tables, steps), tuple(figures))


def _small(scenario: Goodput, replicas: int) -> Placement:
    """The healthy placement of a fleet like the scenario's, but with few replicas, so that it can be executed."""
    mesh = Mesh.initial(MeshShape.of(dp=replicas, pp=scenario.stages))
    return healthy(mesh, model_of(scenario.model), replicas * scenario.microbatches)


def recomputed_share(scenario: Goodput) -> float:
    """The fraction of a step that is computed again after a loss, if the rest of the step is kept.

    It is measured in virtual time on fewer replicas than the fleet has, which makes it too large.
    """
    case = Case(_small(scenario, _RECOMPUTED_REPLICAS), model_of(scenario.model), Change())
    whole_s = case.seconds(case.healthy_split, case.costs)
    gone = [case.placement.mesh.stages[scenario.stages // 2][1]]
    return mean_recompute_s(case.healthy_split, case.costs, gone, whole_s) / whole_s


def executed(scenario: Goodput) -> Table:
    """The table that compares the lower bounds of `goodput` with executed steps, on few replicas.

    The last two columns are the factors by which steps exceed their bounds, divided by those of the whole fleet, and at
    least 1. The last row is the mean over the rows with workers missing.
    """
    replicas = _EXECUTED_REPLICAS
    costs, placement, stages = model_of(scenario.model), _small(scenario, replicas), scenario.stages
    scale = Scale(Fleet(scenario.island * stages * replicas, scenario.island, stages, scenario.microbatches), costs)
    rows: list[tuple[Cell, ...]] = []
    over: list[list[float]] = []
    for label, where in (("none", []), ("one worker", [stages // 2]), ("one of each stage", range(stages))):
        gone = tuple(placement.mesh.stages[s][(s + 1) % replicas] for s in where)
        missing = tuple(int(s in where) for s in range(stages))
        case = Case(placement, costs, Change(gone))
        found = [
            (scale.elastic_s(missing), max(case.before_s, Ours(stages=False).answer(case).step_s)),
            (scale.rerouted_s(missing), Reroute().answer(case).step_s),
        ]
        over.append([step_s / bound_s for bound_s, step_s in found])
        relative = [max(1.0, now / whole) for now, whole in zip(over[-1], over[0], strict=True)]
        rows.append((label, *found[0], *found[1], *relative))
    means = [fmean(float(row[column] or 1) for row in rows[1:]) for column in (5, 6)]
    rows.append(("mean, as taken above", None, None, None, None, *means))
    pairs = [f"{policy}, {what}" for policy in ("ours", "reroute") for what in ("lower bound", "executed")]
    title = f"Modelled seconds of a step of {replicas} replicas with workers missing: lower bounds, and executed"
    columns = ("missing", *pairs, "ours, over bound", "reroute, over bound")
    return Table(title, columns, tuple(rows), ("over bound: relative to nobody missing",))
