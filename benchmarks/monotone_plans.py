"""Plans of random, modelled clusters: how often a planned step gets faster when a worker is taken away.

    python -m benchmarks.monotone_plans [--clusters 2000] [--first 0] [--jobs 2] [--json PATH] [--quick]

Each cluster has stages of random sizes, layers, speeds, links and a memory limit; in half of them backwards are in two
parts. Some of its workers are lost, and the planner answers; then one more worker is lost at the same time, and it
answers again ("taken away"). A newcomer joins what the first answer ended with ("added"). The memory limit stays. A
plan with fewer workers should not be faster, and one with more should not be slower: the first could have been had by
leaving a worker without micro-batches. "Executed" is the same plan run by the simulator's engine, in the order of
workers, with links that messages share, reduction, votes and publication.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from time import perf_counter

from benchmarks.harness import Result, parser, say
from benchmarks.modelled import publish
from elaswave_spmd.errors import PlanError
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.cost_model import CostModel, LayerCost, MemoryRule
from elaswave_spmd.scheduling.partition import balance_layers
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.rebalance import Decision, PlanSettings, plan_change
from elaswave_spmd.scheduling.split_backward import SplitBackward
from elaswave_spmd.scheduling.step_time import Assignment, memory_of
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.simulator.engine import execute
from elaswave_spmd.simulator.report import Cell, Table
from elaswave_spmd.simulator.work import Work

TOLERANCE = 0.005
"""A plan that gets faster by no more than this part of it when a worker is lost is as fast as before."""

_STEPS = 100_000  # remaining: a move pays if it gains anything that counts
_EXECUTED_WORKERS = 32  # larger clusters are planned, but not executed


@dataclass(frozen=True)
class Cluster:
    """A placement, its costs, and the workers that are left of it.

    Args:
        memory_limit: bytes of each worker; the healthy placement fits.
        stages: the workers that are left, by stage.
        fewer: the same with one worker less.
    """

    placement: Placement
    costs: CostModel
    memory_limit: float
    stages: tuple[tuple[int, ...], ...]
    fewer: tuple[tuple[int, ...], ...]

    @cached_property
    def split(self) -> SplitBackward | None:
        """The layers whose backward is in two parts; None: there are none."""
        return SplitBackward.of_costs(self.costs, MemoryRule(self.placement.shardings), self.memory_limit)

    def plan(self, stages: tuple[tuple[int, ...], ...], placement: Placement | None = None) -> Decision | None:
        """The answer if these workers are left; None if nothing fits in memory."""
        try:
            return plan_change(
                placement or self.placement,
                self.costs,
                _STEPS,
                PlanSettings(memory_limit=self.memory_limit, split=self.split),
                stages=stages,
            )
        except PlanError:
            return None


def cluster(seed: int) -> Cluster:
    """A random cluster: most are small and have equal workers, some have slow ones, uneven layers or slow links."""
    draw = random.Random(seed)
    pp = draw.choice([1, 2, 2, 3, 4, 4])
    dp = draw.choice([2, 2, 3, 3, 4, 4, 5, 6, 8] + ([12, 16] if seed % 4 == 0 else []))
    sizes = [dp if draw.random() < 0.8 else max(2, dp + draw.choice([-1, 1])) for _ in range(pp)]
    number = draw.randint(max(pp, 4), 6 * pp + 4)
    uneven = draw.random() < 0.4
    seconds = [draw.uniform(0.5, 2.0) if uneven else 1.0 for _ in range(number)]
    seconds[-1] *= draw.choice([1.0, 1.0, 2.0])
    sizes_of = {"state_bytes": 12_000, "value_bytes": 2000, "gradient_bytes": 4000, "activation_bytes": 1000}
    layers = tuple(
        LayerCost(f"l{i}", s / 3, s * 2 / 3, boundary_bytes=draw.choice([50, 500]) if i < 1 else 100, **sizes_of)
        for i, s in enumerate(seconds)
    )
    more = random.Random(f"split {seed}")  # the other draws are those that they were without it
    share = more.choice([0.0, 0.3, 0.5, 0.5]) if more.random() < 2 / 3 else 0.0
    if share:
        layers = tuple(replace(layer, weight_share=share, put_off_bytes=1000) for layer in layers)
    costs = CostModel(layers, bandwidth=draw.choice([1e4, 1e5, 1e6]), latency_s=draw.choice([0.0, 0.001, 0.05]))
    mesh = Mesh.initial(MeshShape.of_stages(sizes))
    if draw.random() < 0.4:
        slow = draw.sample(mesh.members, draw.randint(1, max(1, mesh.num_workers // 4)))
        costs = costs.with_speeds({rank: draw.choice([0.3, 0.5, 0.8, 0.9, 1.2]) for rank in slow})
    microbatches = max(sizes) * draw.choice([2, 4, 4, 8]) + draw.choice([0, 0, 0, 1, 3])
    cuts = balance_layers(seconds, sizes)
    counts = tuple(tuple(microbatches * (i + 1) // n - microbatches * i // n for i in range(n)) for n in sizes)
    shardings = Shardings().with_zero(draw.choice([0, 1, 1, 2]))
    placement = Placement(mesh, microbatches, cuts, counts, shardings)
    needed = max(memory_of(Assignment.of(placement), costs, MemoryRule(shardings)))
    limit = needed * draw.choice([1.3, 2.0, 4.0, 1e6])
    lost = draw.sample(mesh.members, draw.randint(0, max(1, mesh.num_workers // 4)))
    left = _without(mesh.stages, lost)
    able = [rank for members in left if len(members) > 1 for rank in members]
    if not all(left) or not able:
        left = mesh.stages
        able = [rank for members in left if len(members) > 1 for rank in members]
    return Cluster(placement, costs, limit, left, _without(left, [draw.choice(able)]))


def _without(stages: Sequence[Sequence[int]], gone: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(rank for rank in members if rank not in gone) for members in stages)


@dataclass(frozen=True)
class Figures:
    """The planned seconds of a cluster: with all its workers, with one less, and with a newcomer.

    Args:
        more_s, fewer_s: None: nothing fits in memory.
        executed: seconds of the executed step over those of the planned one; None: not executed.
        planning_s: the longest that a plan took.
    """

    seconds: float
    more_s: float | None
    fewer_s: float | None
    executed: float | None
    planning_s: float

    @property
    def gained_by_losing(self) -> float:
        """The part by which the step gets faster when a worker is taken away; 0 if it does not."""
        return 0.0 if self.fewer_s is None else max(0.0, 1.0 - self.fewer_s / self.seconds)

    @property
    def lost_by_adding(self) -> float:
        """The part by which the step gets slower when a worker is added; 0 if it does not."""
        return 0.0 if self.more_s is None else max(0.0, self.more_s / self.seconds - 1.0)


def measure(seed: int, *, executes: bool = True) -> Figures | None:
    """Plans for one cluster; None if what is left of it fits nowhere."""
    it = cluster(seed)
    longest, began = 0.0, perf_counter()
    decision = it.plan(it.stages)
    longest, began = perf_counter() - began, perf_counter()
    if decision is None:
        return None
    fewer = it.plan(it.fewer)
    longest = max(longest, perf_counter() - began)
    last = decision.last
    settled = _settled(it, last.assignment)
    newcomer = 1 + max(it.placement.mesh.members)
    smallest = min(range(len(last.assignment.stages)), key=lambda s: len(last.assignment.stages[s]))
    joined = tuple((*m, newcomer) if s == smallest else m for s, m in enumerate(last.assignment.stages))
    more = it.plan(joined, settled)
    executed = None
    rule = MemoryRule(it.placement.shardings)
    if executes and sum(map(len, it.stages)) <= _EXECUTED_WORKERS:
        work, order = Work.from_assignment(last.assignment), last.assignment.microbatch_order
        run = execute(work, it.costs, rule=rule, microbatch_order=order, steps=2)
        executed = run.step_s / last.time.seconds
    found = [None if plan is None else plan.last.time.seconds for plan in (more, fewer)]
    return Figures(last.time.seconds, found[0], found[1], executed, longest)


def _settled(it: Cluster, assignment: Assignment) -> Placement:
    """The placement once the plan is carried out."""
    mesh = it.placement.mesh.with_stages(assignment.stages)
    shardings = it.placement.shardings
    counts = assignment.microbatch_counts
    return Placement(mesh, assignment.num_microbatches, assignment.layer_cuts, counts, shardings)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 1 if a plan was not monotone."""
    words = parser(__doc__)
    words.add_argument("--clusters", type=int, default=2000)
    words.add_argument("--first", type=int, default=0)
    words.add_argument("--jobs", type=int, default=2)
    args = words.parse_args(argv)
    number = 50 if args.quick else args.clusters
    result = Result("monotone_plans", {"clusters": number, "first": args.first, "quick": args.quick})
    found = {}
    seeds = range(args.first, args.first + number)
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for seed, figures in zip(seeds, pool.imap(measure, seeds, chunksize=4), strict=True):
            if figures is not None:
                found[seed] = figures
                if max(figures.gained_by_losing, figures.lost_by_adding) > TOLERANCE:
                    say(f"seed {seed}: {figures}")
            if (seed + 1) % 100 == 0:
                say(f"{seed + 1 - args.first} clusters")
    gained = {seed: of.gained_by_losing for seed, of in found.items()}
    lost = {seed: of.lost_by_adding for seed, of in found.items()}
    rows: list[tuple[Cell, ...]] = []
    for name, table in (("faster without a worker", gained), ("slower with a worker more", lost)):
        worst = max(table, key=lambda seed: table[seed])
        beyond = [seed for seed in table if table[seed] > TOLERANCE]
        rows.append((name, sum(v > 1e-9 for v in table.values()), len(beyond), table[worst], worst))
        say(f"{name}: {beyond[:40]}")
    executed = sorted(of.executed for of in found.values() if of.executed is not None)
    apart = sorted(abs(ratio - 1) for ratio in executed)
    notes = (
        f"{len(found)} random clusters of {number}; in the others nothing fits in memory",
        f"beyond: by more than {TOLERANCE:.1%}",
        f"executed and planned differ by {median(apart):.1%} in the median and {apart[-1]:.1%} at most",
        f"a plan took {median(of.planning_s for of in found.values()):.3f} s in the median, "
        f"{max(of.planning_s for of in found.values()):.3f} s at most",
    )
    columns = ("planned step", "clusters", "beyond", "worst", "seed of the worst")
    publish(result, Table("Modelled: plans with a worker less or more", columns, tuple(rows), notes))
    result.data["clusters"] = [{"seed": seed, **vars(of)} for seed, of in found.items()]
    result.finish(args.json)
    return int(any(v > TOLERANCE for v in (*gained.values(), *lost.values())))


if __name__ == "__main__":
    sys.exit(main())
