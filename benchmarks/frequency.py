"""Frequency hints: their effect on bubbles and on modelled energy, and their distance from the optimum.

    python -m benchmarks.frequency [--lowest 0.5] [--highest 1.0] [--change-ms 5] [--json PATH] [--quick]

No training is run: all figures are modelled (scheduling.dvfs: an action of t seconds takes t / f; a device draws
0.3 + 0.7 f^3 while it computes and 0.3 while it waits, as parts of its power at the normal frequency). Each case is
planned as in a run, with backwards in two parts: micro-batches and layers first, for the workers that are left and
their speeds, then limits, then frequencies, at an unchanged makespan. "each action" is our optimum with a frequency for
every action, "8 changes" what a device that changes eight times a step can have of it, once if a change takes no time,
and once if it takes so many milliseconds; "one each" is one frequency for each worker. "executed" is the step with 8
changes in virtual time (simulator.engine), over the step before.

"lowtime" is the frontier of lowtime (Perseus; Chung et al., SOSP 2024) on the same graph at the same makespan, with a
frequency for each action on a grid of time. It is left out for steps of more than 256 actions, since it takes minutes,
and where lowtime is not installed (the extra `dvfs`); there the saving of each action stands in for it.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness import Result, parser
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery.reconfiguration import next_stages
from elaswave_spmd.scheduling.action_graph import ActionGraph
from elaswave_spmd.scheduling.cost_model import REPLICATED, WEIGHT_SHARE, CostModel, LayerCost
from elaswave_spmd.scheduling.dvfs import FrequencyPlan, FrequencyRange, Hint, PowerModel, plan_paces
from elaswave_spmd.scheduling.microbatch_assignment import assign_microbatches
from elaswave_spmd.scheduling.partition import balance_layers
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.rebalance import PlanSettings, plan_change
from elaswave_spmd.scheduling.split_backward import SplitBackward
from elaswave_spmd.scheduling.step_time import Assignment, timed_graph
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.simulator.engine import FREE, execute
from elaswave_spmd.simulator.work import Work

_POWER = PowerModel()
_GRID_S = 0.0025  # of lowtime's time; all actions are multiples of it
_SCALE = 1e4  # of energies in lowtime: its solver takes differences below 1e-6 for none, and large ones end it early
_MOST_ACTIONS = 256
_STEPS = 1_000_000  # enough that any move of layers pays


@dataclass(frozen=True)
class Case:
    """A mesh that has lost workers, or has slow ones."""

    name: str
    dp: int
    pp: int
    lost: tuple[int, ...] = ()
    slow: tuple[tuple[int, float], ...] = ()


CASES = (
    Case("healthy", 2, 4),
    Case("1 of 8 lost", 2, 4, (3,)),
    Case("1 of 16 lost", 4, 4, (6,)),
    Case("2 of 16 lost", 4, 4, (6, 11)),
    Case("a replica of all stages lost, 4 of 8", 2, 4, (1, 3, 5, 7)),
    Case("1 of 8 at half speed", 2, 4, (), ((5, 0.5),)),
    Case("1 of 16 at half speed", 4, 4, (), ((9, 0.5),)),
)


def costs_of(num_layers: int) -> CostModel:
    """Layers of 10 ms forward and 20 ms backward; the embedding is half of one, the head one and a half."""
    sizes = [0.5, *[1.0] * (num_layers - 2), 1.5]
    layers = (LayerCost(f"l{i}", 0.010 * s, 0.020 * s, weight_share=WEIGHT_SHARE) for i, s in enumerate(sizes))
    return CostModel(tuple(layers), 1e12)


def planned(case: Case, costs: CostModel, microbatches: int) -> tuple[Assignment, CostModel]:
    """The assignment after planning, and the costs of its workers."""
    shape = MeshShape.of(dp=case.dp, pp=case.pp)
    mesh = Mesh.initial(shape)
    counts = assign_microbatches(case.dp * microbatches, [np.ones(case.dp) for _ in range(case.pp)]).counts
    cuts = balance_layers([layer.seconds for layer in costs.layers], [case.dp] * case.pp)
    placement = Placement(mesh, case.dp * microbatches, cuts, counts, Shardings().with_zero(1))
    now = costs.with_speeds(dict(case.slow))
    stages = next_stages(mesh.stages, dict.fromkeys(case.lost, "fail"), (), case.pp) if case.lost else None
    split = SplitBackward.of_costs(now, REPLICATED)
    decision = plan_change(placement, now, _STEPS, PlanSettings(stage_counts=(), split=split), stages=stages)
    return decision.last.assignment, now


def lowtime_energy(graph: ActionGraph, limits: FrequencyRange, makespan: float) -> float | None:
    """The energy of lowtime's frontier at a makespan, with a frequency per action; None if it does not reach it, or
    is not installed."""
    if importlib.util.find_spec("lowtime") is None or len(graph.order) > _MOST_ACTIONS:
        return None
    networkx = importlib.import_module("networkx")
    operation: Any = importlib.import_module("lowtime.operation")
    solver: Any = importlib.import_module("lowtime.solver")
    curve_type: Any = importlib.import_module("lowtime.cost_model").CostModel

    class Energy(curve_type):
        """dynamic * f^2 * seconds, scaled, with the f that makes it take `quant_time` steps of the grid."""

        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def __call__(self, quant_time: int) -> float:
            return _SCALE * _POWER.dynamic * self.seconds * (self.seconds / (quant_time * _GRID_S)) ** 2

    def spec(seconds: float) -> Any:
        curve = Energy(seconds)
        low, high = (max(1, round(seconds / f / _GRID_S)) for f in (limits.highest, limits.lowest))
        half = 0.5 * _GRID_S  # it rounds down
        options = [operation.ExecutionOption(t * _GRID_S + half, _GRID_S, curve(t), t) for t in range(low, high + 1)]
        candidates = operation.CandidateExecutionOptions(options=options)
        return operation.OperationSpec(options=candidates, cost_model=curve)

    dag = _dag(graph, networkx)
    specs: dict[float, Any] = {}
    for action, seconds in enumerate(graph.seconds.tolist()):
        specs.setdefault(seconds, spec(seconds))
        dag.add_node(action + 2, op=operation.Operation(specs[seconds]))
    for node in (dag.graph["source_node"], dag.graph["sink_node"]):
        dag.add_node(node, op=operation.DummyOperation())
    for found in solver.PhillipsDessouky(dag).run():
        if found.quant_time <= makespan / _GRID_S + 1e-6:
            return found.cost / _SCALE + _POWER.static * makespan * len(graph.ranks)
    return None  # it ended before it reached the makespan, which its rounding can do


def _dag(graph: ActionGraph, networkx: Any) -> Any:
    """The graph of which action waits for which, from node 2 on, with one source (0) and one sink (1)."""
    dag = networkx.DiGraph(source_node=0, sink_node=1)
    for action, (before, other) in enumerate(zip(graph.before, graph.waits, strict=True)):
        dag.add_edge(before + 2 if before >= 0 else 0, action + 2)
        if other >= 0:
            dag.add_edge(other + 2, action + 2)
    for todo in graph.lists:
        dag.add_edge(todo[-1] + 2, 1)
    return dag


def executed_s(
    assignment: Assignment, costs: CostModel, graph: ActionGraph, plan: FrequencyPlan, change_s: float
) -> float:
    """Seconds of a step with these paces, in virtual time."""
    stage_of = {rank: s for s, members in enumerate(assignment.stages) for rank in members}
    hints = [
        Hint(stage_of[rank], (rank,), pace, tuple(graph.order[action] for action in todo))
        for rank, pace, todo in zip(graph.ranks, plan.paces, graph.lists, strict=True)
    ]
    order = assignment.microbatch_order
    work = Work.from_assignment(assignment)
    return execute(work, costs, wires=FREE, microbatch_order=order, hints=hints, change_s=change_s).step_s


def measure(case: Case, microbatches: int, num_layers: int, limits: FrequencyRange) -> dict[str, Any]:
    """The figures of one case.

    Args:
        limits: with the seconds of a change.
    """
    assignment, costs = planned(case, costs_of(num_layers), microbatches)
    graph = timed_graph(assignment, costs)
    free = replace(limits, change_s=0.0)
    ways = {
        "each action": replace(free, most_changes=len(graph.order)),
        "8 changes": replace(free, most_changes=8),
        "8 changes that take time": replace(limits, most_changes=8),
        "one each": replace(free, most_changes=0),
    }
    plans = {name: plan_paces(graph, way, power=_POWER) for name, way in ways.items()}
    began = perf_counter()
    plan_paces(graph, ways["8 changes that take time"], power=_POWER)
    seconds = perf_counter() - began
    energies = {name: plan.energy for name, plan in plans.items()}
    before = plans["one each"]
    return {
        "case": case.name,
        "workers": len(graph.ranks),
        "microbatches": microbatches,
        "layers": num_layers,
        "actions": len(graph.order),
        "plan_s": seconds,
        "makespan_before_s": before.makespan_before_s,
        "makespan_s": {name: plan.makespan_s for name, plan in plans.items()},
        "executed_s": executed_s(assignment, costs, graph, plans["8 changes that take time"], limits.change_s),
        "idle_before": 1.0 - float(graph.work().sum()) / (len(graph.ranks) * before.makespan_before_s),
        "changes": max(pace.changes for pace in plans["8 changes"].paces),
        "modelled_energy": {
            "before": before.energy_before,
            **energies,
            "lowtime": lowtime_energy(graph, limits, before.makespan_before_s),
        },
    }


WAYS = ("one each", "8 changes that take time", "8 changes", "each action", "lowtime")


def saved(found: Mapping[str, Any], name: str) -> float | None:
    """The part of the modelled energy that is saved; None: not computed."""
    energies = found["modelled_energy"]
    return None if energies[name] is None else 1 - energies[name] / energies["before"]


def row_of(found: Mapping[str, Any]) -> list[str]:
    """One line of the table."""
    parts = [saved(found, name) for name in WAYS]
    return [
        found["case"],
        f"{found['microbatches']}",
        f"{1e3 * found['makespan_before_s']:.0f}",
        f"{found['executed_s'] / found['makespan_before_s']:.4f}",
        f"{100 * found['idle_before']:.1f} %",
        *("-" if part is None else f"{100 * part:.1f} %" for part in parts),
        f"{1e3 * found['plan_s']:.0f}",
    ]


def frontier(found: Mapping[str, Any]) -> float:
    """The saving that others are compared with: lowtime's, or else ours with a frequency for each action."""
    of_lowtime = saved(found, "lowtime")
    return of_lowtime if of_lowtime is not None else saved(found, "each action") or 0.0


def means(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """The line of geometric means of the savings over the frontier's; a saving of nothing makes it 0."""
    found = []
    for name in WAYS[:-1]:
        ratios = [max(0.0, saved(case, name) or 0.0) / frontier(case) for case in cases]
        found.append(f"{100 * math.exp(sum(map(math.log, ratios)) / len(ratios)) if all(ratios) else 0:.0f} %")
    return ["geometric mean over the frontier", *[""] * 4, *found, "", ""]


COLUMNS = (
    "case",
    "micro-batches per worker",
    "modelled step, ms",
    "executed, ratio",
    "idle before",
    "modelled energy saved, one frequency each",
    "8 changes of {change:g} ms",
    "8 changes",
    "each action",
    "lowtime (each action)",
    "planning, ms",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    arguments = parser(__doc__)
    arguments.add_argument("--lowest", type=float, default=0.5, help="of the normal frequency")
    arguments.add_argument("--highest", type=float, default=1.0)
    arguments.add_argument("--change-ms", type=float, default=5.0, help="that a change of frequency takes")
    args = arguments.parse_args(argv)
    limits = FrequencyRange(args.lowest, args.highest, change_s=args.change_ms / 1e3)
    cases, sizes = (CASES[:2], (4,)) if args.quick else (CASES, (4, 16))
    settings = {"lowest": args.lowest, "highest": args.highest, "change_ms": args.change_ms, "grid_ms": 1e3 * _GRID_S}
    result = Result("frequency", {**settings, "quick": args.quick})
    found = [measure(case, microbatches, 4 * case.pp + 2, limits) for case in cases for microbatches in sizes]
    result.data["cases"] = found
    title = f"Frequency hints from {args.lowest:g} to {args.highest:g}, all figures modelled"
    columns = [column.format(change=args.change_ms) for column in COLUMNS]
    result.table(title, columns, [*(row_of(of_case) for of_case in found), means(found)])
    result.finish(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
