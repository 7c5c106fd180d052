"""Frequency hints: their effect on bubbles and on modelled energy, and their distance from the optimum.

    python -m benchmarks.frequency [--lowest 0.5] [--highest 1.0] [--json PATH] [--quick]

No training is run: all figures are modelled (scheduling.frequency: an action of t seconds takes t / f; a device draws
0.3 + 0.7 f^3 while it computes and 0.3 while it waits, as parts of its power at the normal frequency). Each case is
planned as in a run: micro-batches and layers first, for the workers that are left and their speeds, then frequencies.
"by class" are the hints of the plan, four for each worker; "by worker" is what a run sets, one for each. "lowtime" is
the frontier of lowtime (Perseus; Chung et al., SOSP 2024) with a frequency for each single action, at the same
makespan: the optimum, but for its grid of time. It is left out for steps of more than 256 actions, since it takes
minutes, and where lowtime is not installed (the extra `dvfs`).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness import Result, parser
from elaswave_spmd.controller.dvfs import modelled_energy, worker_frequencies
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery.reconfiguration import next_stages
from elaswave_spmd.scheduling.cost_model import CostModel, LayerCost
from elaswave_spmd.scheduling.dvfs import FrequencyPlan, FrequencyRange, PowerModel
from elaswave_spmd.scheduling.microbatch_assignment import assign_microbatches
from elaswave_spmd.scheduling.partition import balance_layers
from elaswave_spmd.scheduling.pipeline import FORWARD, Schedule
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.rebalance import frequency_hints, plan_change
from elaswave_spmd.scheduling.step_time import ActionGraph, Assignment, executed_lists, timed_graph
from elaswave_spmd.sharding import Shardings

_POWER = PowerModel()
_GRID_S = 0.0025  # of lowtime's time; all actions are multiples of it
_SCALE = 1e6  # of energies in lowtime: its solver takes differences below 1e-6 for none
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
    return CostModel(tuple(LayerCost(f"l{i}", 0.010 * s, 0.020 * s) for i, s in enumerate(sizes)), 1e12)


def planned(case: Case, costs: CostModel, microbatches: int) -> tuple[Assignment, CostModel]:
    """The assignment after planning, and the costs of its workers."""
    shape = MeshShape.of(dp=case.dp, pp=case.pp)
    mesh = Mesh.initial(shape)
    counts = assign_microbatches(case.dp * microbatches, [np.ones(case.dp) for _ in range(case.pp)]).counts
    cuts = balance_layers([layer.seconds for layer in costs.layers], [case.dp] * case.pp)
    placement = Placement(mesh, case.dp * microbatches, cuts, counts, Shardings().with_zero(1))
    now = costs.with_speeds(dict(case.slow))
    stages = next_stages(mesh.stages, dict.fromkeys(case.lost, "fail"), (), case.pp) if case.lost else None
    decision = plan_change(placement, now, _STEPS, stages=stages, stage_counts=())
    return decision.last.assignment, now


def idle(graph: ActionGraph, work: np.ndarray, frequencies: np.ndarray, makespan: float) -> float:
    """The share of all workers' time in which nothing is computed."""
    return 1.0 - float((work / frequencies).sum()) / (len(graph.ranks) * makespan)


def lowtime_energy(assignment: Assignment, costs: CostModel, limits: FrequencyRange, makespan: float) -> float | None:
    """The energy of lowtime's frontier at a makespan, with a frequency per action; None if lowtime is not installed."""
    actions = 2 * assignment.num_stages * assignment.num_microbatches
    if importlib.util.find_spec("lowtime") is None or actions > _MOST_ACTIONS:
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

    numbers, dag = _dag(executed_lists(assignment, costs), networkx)
    graph, seconds, _ = timed_graph(assignment, costs)
    row_of = {rank: row for row, rank in enumerate(graph.ranks)}
    specs: dict[float, Any] = {}
    for (rank, action), node in numbers.items():
        of = float(seconds[row_of[rank], 0 if action.kind == FORWARD else 2])
        specs.setdefault(of, spec(of))
        dag.add_node(node, op=operation.Operation(specs[of]))
    for node in (dag.graph["source_node"], dag.graph["sink_node"]):
        dag.add_node(node, op=operation.DummyOperation())
    best = float("nan")
    for found in solver.PhillipsDessouky(dag).run():
        best = found.cost
        if found.quant_time <= makespan / _GRID_S + 1e-6:
            break
    return best / _SCALE + _POWER.static * makespan * len(graph.ranks)


def _dag(lists: Schedule, networkx: Any) -> tuple[dict[Any, int], Any]:
    """(rank, action) -> graph node, and the graph of which action waits for which, with one source and one sink."""
    numbers = {
        (rank, action): i + 2 for i, (rank, action) in enumerate((r, a) for r, todo in lists.items() for a in todo)
    }
    at = {(a.stage, a.kind, a.microbatch): node for (_, a), node in numbers.items()}
    dag = networkx.DiGraph(source_node=0, sink_node=1)
    for rank, todo in lists.items():
        before = 0
        for action in todo:
            node = numbers[rank, action]
            dag.add_edge(before, node)
            stage = action.stage - 1 if action.kind == FORWARD else action.stage + 1
            if (needed := at.get((stage, action.kind, action.microbatch))) is not None:
                dag.add_edge(needed, node)
            before = node
        dag.add_edge(before, 1)
    return numbers, dag


def measure(case: Case, microbatches: int, num_layers: int, limits: FrequencyRange) -> dict[str, Any]:
    """The figures of one case."""
    assignment, costs = planned(case, costs_of(num_layers), microbatches)
    began = perf_counter()
    plan, _ = frequency_hints(assignment, costs, limits, _POWER)
    seconds = perf_counter() - began
    _, wanted = worker_frequencies(assignment, costs, limits, _POWER)
    graph, microbatch_seconds, delays = timed_graph(assignment, costs)
    of = np.array([wanted[rank] for rank in graph.ranks])[:, None]
    by_worker_s = graph.makespan(microbatch_seconds / of, delays)
    work = graph.work(microbatch_seconds)
    energies = {
        "before": plan.energy_before,
        "by class": plan.energy,
        "by worker": modelled_energy(assignment, costs, wanted, by_worker_s),
        "lowtime": lowtime_energy(assignment, costs, limits, plan.makespan_s),
    }
    return {
        "case": case.name,
        "workers": len(graph.ranks),
        "microbatches": microbatches,
        "layers": num_layers,
        "plan_s": seconds,
        "makespan_before_s": plan.makespan_before_s,
        "makespan_by_class_s": plan.makespan_s,
        "makespan_by_worker_s": by_worker_s,
        "idle_before": idle(graph, work, np.ones_like(of), plan.makespan_before_s),
        "idle_by_class": idle(graph, work, _table(plan), plan.makespan_s),
        "idle_by_worker": idle(graph, work, of, by_worker_s),
        "modelled_energy": energies,
    }


def _table(plan: FrequencyPlan) -> np.ndarray:
    return np.array(plan.frequencies)


def row_of(found: Mapping[str, Any]) -> list[str]:
    """One line of the table."""
    energies = found["modelled_energy"]
    before = energies["before"]

    def saved(name: str) -> str:
        return "-" if energies[name] is None else f"{100 * (1 - energies[name] / before):.1f} %"

    def absorbed(name: str) -> str:
        return f"{100 * (1 - found[name] / found['idle_before']):.0f} %"

    return [
        found["case"],
        f"{found['microbatches']}",
        f"{1e3 * found['makespan_before_s']:.0f}",
        f"{found['makespan_by_class_s'] / found['makespan_before_s']:.4f}",
        f"{found['makespan_by_worker_s'] / found['makespan_before_s']:.4f}",
        f"{100 * found['idle_before']:.1f} %",
        absorbed("idle_by_class"),
        absorbed("idle_by_worker"),
        saved("by class"),
        saved("by worker"),
        saved("lowtime"),
        f"{1e3 * found['plan_s']:.0f}",
    ]


COLUMNS = (
    "case",
    "micro-batches per worker",
    "modelled step, ms",
    "with hints by class, ratio",
    "by worker, ratio",
    "idle before",
    "idle absorbed, by class",
    "by worker",
    "modelled energy saved, by class",
    "by worker",
    "lowtime (each action)",
    "planning, ms",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    arguments = parser(__doc__)
    arguments.add_argument("--lowest", type=float, default=0.5, help="of the normal frequency")
    arguments.add_argument("--highest", type=float, default=1.0)
    args = arguments.parse_args(argv)
    limits = FrequencyRange(args.lowest, args.highest)
    cases, sizes = (CASES[:2], (4,)) if args.quick else (CASES, (4, 16))
    result = Result(
        "frequency", {"lowest": args.lowest, "highest": args.highest, "grid_ms": 1e3 * _GRID_S, "quick": args.quick}
    )
    found = [measure(case, microbatches, 4 * case.pp + 2, limits) for case in cases for microbatches in sizes]
    result.data["cases"] = found
    title = f"Frequency hints from {args.lowest:g} to {args.highest:g}, all figures modelled"
    result.table(title, COLUMNS, [row_of(of_case) for of_case in found])
    result.finish(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
