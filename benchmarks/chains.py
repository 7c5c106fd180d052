"""Modelled: memory and recovery if micro-batches were added in chains from left to right, with the tree over chains.

    python -m benchmarks.chains [--json PATH] [--quick]

A worker with 8, 16 or 32 micro-batches holds 3, 4 or 5 gradients of full size while it adds them up: the sums of the
reduction tree that wait for their sibling. A chain needs one. It is no node of the tree until it is complete, so one
worker has to have all of it, or hand its sum on. Everything is counted, nothing is timed:

- Gradients held: the additions are walked through on the project's tree, in the order of a worker's micro-batches.
- Memory: `step_time.memory_of` for ZeRO-0 on two workers, beside the same parameters, moments and one gradient, which
  is DDP. In fp32 the parameters are their own master copy, on both sides. On top come further open gradients, and the
  reduced gradients of the other worker's pages, which are held until the step is applied. "All else" is what DDP was
  measured to need besides (the table of steady_state in docs/results.md).
- Workers lost or added: the planner's assignment of whole chains. The largest load is over the mean.
- A worker dies within a step: the recovery plan of the step, at each moment between two micro-batches; all workers are
  at the same pace. Its micro-batches are computed again; so are those of the chains that the others have begun, as a
  StepReport names nodes of the tree.
- Handed on: cuts are anywhere, and a worker that ends within a chain sends its sum to the next one.
- Stages: backwards in the order in which the simulator's engine executes them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean

from benchmarks.chain_sums import added_up, hand_on, held_in_order, shares
from benchmarks.harness import Result, parser
from benchmarks.modelled import finish, publish
from benchmarks.steady_launch import Case, settings_of
from benchmarks.steady_memory import COLUMNS
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery.messages import PartialStep
from elaswave_spmd.recovery.partial_step import recovery_plan
from elaswave_spmd.scheduling.cost_model import MemoryRule
from elaswave_spmd.scheduling.pipeline import BACKWARD
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.step_time import Assignment, memory_of, open_sums
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.sharding.layout import LayerUse, ParameterInfo, lay_out
from elaswave_spmd.simulator import alike
from elaswave_spmd.simulator.engine import FREE, execute
from elaswave_spmd.simulator.report import Cell, Table
from elaswave_spmd.simulator.work import Work

CHAINS = (1, 2, 4, 8)
"""Micro-batches of a chain; 1 is the tree as it is."""

AIM = 1.15
"""The memory of DDP that is aimed at with 8 micro-batches a worker."""

_EACH = (8, 16, 32)  # micro-batches a worker
_WORKERS = (4, 8, 16)
_LOST = (1, 2, 3)
_ADDED = ((4, 5), (4, 6), (4, 8))
_STAGES = ((4, 4), (3, 4), (4, 3), (7, 8), (8, 7, 8, 7), (15, 16))
_LAYERS = 4  # of a stage
_MIB = 2**20
_CASE = Case("10M", "dp2 zero0 against DDP", {"dp": 2}, "zero0", "ddp")
_RESULTS = Path(__file__).parents[1] / "docs" / "results.md"


# ---- memory


@dataclass(frozen=True)
class Measured:
    """The anonymous memory of the worst worker beyond its imports, in bytes, by docs/results.md."""

    ours: float
    plain: float


@cache
def measured(microbatches: int) -> Measured:
    """The row of `steady_state` for dp2 zero0 with 10 M parameters."""
    section = _RESULTS.read_text().split("<!-- results: steady_state -->")[1].split("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()]
    wanted = [_CASE.model, _CASE.title, str(microbatches)]
    row = next(row for row in rows if row[:3] == wanted and len(row) == len(COLUMNS))
    return Measured(*(float(row[COLUMNS.index(name)]) * _MIB for name in ("ours anon", "plain anon")))


@dataclass(frozen=True)
class Bytes:
    """Bytes of one of the two workers, by the project's accounting.

    Args:
        plain: of DDP: parameters, moments and one gradient.
        gradient: of one gradient of full size.
    """

    plain: float
    gradient: float

    def ours(self, gradients: int) -> float:
        """With so many gradients open at once, and the reduced gradients of the other worker's half."""
        return self.plain + (gradients - 1 + (_CASE.workers - 1) / _CASE.workers) * self.gradient


@cache
def bytes_of_case() -> Bytes:
    """Bytes of the model with 10 M parameters on two workers with ZeRO-0."""
    from elaswave_spmd.conf.schema import Settings
    from elaswave_spmd.controller.launching import data_spec
    from elaswave_spmd.data import prepare_data
    from elaswave_spmd.worker.plan_run import plan_run

    settings = Settings.from_dict(settings_of(_CASE, 8 * _CASE.workers, 1, Path("unused")))
    plan = plan_run(settings, prepare_data(data_spec(settings)))
    rule = MemoryRule(plan.placement.shardings, mirror_count=0)
    assignment, gradient = Assignment.of(plan.placement), float(plan.costs.prefix("gradient_bytes")[-1])
    (sums,), (whole,) = open_sums(assignment.counts, rule), memory_of(assignment, plan.costs, rule)
    # The plan counts a master copy beside the compute buffer; in fp32 with whole parameters both are one tensor.
    return Bytes(whole - float(plan.costs.prefix("value_bytes")[-1]) - (sums - 1) * gradient, gradient)


def memory_rows(each: Sequence[int]) -> list[tuple[Cell, ...]]:
    """Open gradients of a worker of two, and its memory over DDP's."""
    sizes, known = bytes_of_case(), {2: measured(2), 8: measured(8)}
    rows: list[tuple[Cell, ...]] = []
    for microbatches in (2, *each):
        at = known.get(microbatches)
        plain = (at or known[8]).plain  # micro-batches that wait take no memory: that of 8
        now = added_up(range(microbatches), 2 * microbatches, 1).most
        for chain in CHAINS if microbatches > 2 else (1,):
            sums = added_up(range(microbatches), 2 * microbatches, chain)
            saved = (now - sums.most) * sizes.gradient
            rows.append(
                (
                    microbatches,
                    chain,
                    sums.most,
                    sums.additions,
                    round(sums.most * sizes.gradient / _MIB, 1),
                    sizes.ours(sums.most) / sizes.plain,
                    (sizes.ours(sums.most) + plain - sizes.plain) / plain,
                    None if at is None else (at.ours - saved) / at.plain,
                )
            )
    return rows


# ---- workers lost


def worst(parts: Sequence[range], num_microbatches: int, chain: int) -> int:
    """The gradients that the worst worker holds, in ascending order."""
    return max(added_up(part, num_microbatches, chain).most for part in parts)


def load(parts: Sequence[range]) -> float:
    """The largest load over the mean."""
    return max(map(len, parts)) * len(parts) / sum(map(len, parts))


def loss_rows(each: Sequence[int], workers: Sequence[int]) -> list[tuple[Cell, ...]]:
    """Loads and gradients after losses, with cuts at chains only."""
    rows: list[tuple[Cell, ...]] = []
    for microbatches in each:
        for size in workers:
            total = microbatches * size
            for lost in _LOST:
                parts = [shares(total, size - lost, chain) for chain in CHAINS]
                held = [worst(some, total, chain) for some, chain in zip(parts, CHAINS, strict=True)]
                rows.append((microbatches, f"{size} - {lost}", *map(load, parts), *held))
    return rows


# ---- a worker dies within a step


@dataclass(frozen=True)
class Again:
    """The cost of a loss within a step, in micro-batches, as a mean over its moments.

    Args:
        lost: computed again that the lost worker had computed.
        begun: computed again by workers that are left: those of chains that they had begun.
        rest: that the busiest worker has still to compute.
        kept: the same, if a worker kept the chain that it had begun.
        handed: the same, if besides the lost chains were spread as single micro-batches are now, and their sums handed
            on, with no gradient held besides.
    """

    lost: float
    begun: float
    rest: float
    kept: float
    handed: float


def again(workers: int, microbatches: int, chain: int) -> Again:
    """The cost of the loss of one worker of a stage: a chain is a micro-batch of the project's recovery plan."""
    assert not microbatches % chain, (microbatches, chain)
    mine = microbatches // chain
    total, gone = workers * mine, workers // 2
    members = tuple(rank for rank in range(workers) if rank != gone)
    counts = tuple(map(len, shares(total, len(members))))
    mesh = Mesh(MeshShape.of(dp=len(members)), (members,), epoch=1)
    placement = Placement(mesh, total, (0, 1), (counts,), Shardings().with_zero(0))
    handed_s = hand_on(shares(microbatches, len(members)), microbatches, chain).waiting_s
    layout = lay_out([LayerUse("l0", (ParameterInfo("l0.w", (64 * workers,)),))], page_size=64)
    found = []
    for moment in range(microbatches):
        complete = moment // chain
        reported = {}
        for rank in members:
            own = range(rank * mine, rank * mine + mine)
            nodes = tuple(sorted(added_up(own[:complete], total, 1).tree.held))
            sums = {0: nodes} if nodes else {}
            reported[rank] = PartialStep(1, tuple(own), tuple(own[:complete]), layer_sums=sums)
        lines = recovery_plan(1, placement, layout, reported, dict.fromkeys(members, (0, 1)))
        computed = {True: 0, False: 0}
        for line in lines:
            owner, number = divmod(line.microbatch, mine)
            computed[owner == gone] += min(chain, max(0, moment - number * chain))
        left = chain * max(sum(line.worker == rank for line in lines) for rank in members)
        # All are at the same pace, so the busiest one has begun a chain as well.
        kept, handed = left - moment % chain, microbatches - moment + handed_s
        found.append((computed[True], computed[False], left, kept, handed))
    return Again(*(fmean(column) for column in zip(*found, strict=True)))


def again_rows(each: Sequence[int], workers: Sequence[int]) -> list[tuple[Cell, ...]]:
    """The cost of a loss within a step, by chain."""
    rows: list[tuple[Cell, ...]] = []
    for microbatches in each:
        for size in workers if microbatches == each[0] else workers[1:2]:
            now = again(size, microbatches, 1).rest
            for chain in CHAINS:
                found = again(size, microbatches, chain)
                rests = (rest / now for rest in (found.rest, found.kept, found.handed))
                rows.append((microbatches, size, chain, found.lost, found.begun, found.rest, *rests))
    return rows


# ---- chains that span workers


def handed_rows(workers: Sequence[int], chains: Sequence[int] = (4, 8), each: int = 8) -> list[tuple[Cell, ...]]:
    """Cuts anywhere, and sums of chains that are handed on, after losses and with more workers."""
    changes = [(size, size - lost) for size in workers for lost in _LOST]
    rows: list[tuple[Cell, ...]] = []
    for before, after in (*changes, *_ADDED):
        total = before * each
        parts = shares(total, after)
        now, longest = worst(parts, total, 1), max(map(len, parts))
        for chain in chains:
            found = hand_on(parts, total, chain)
            ratios = found.waiting_s / longest, found.ordered_s / longest
            of_orders = ratios[0], found.apart, ratios[1], found.waits, found.ordered
            rows.append((f"{before} to {after}", chain, now, found.sums, *of_orders))
    return rows


# ---- stages


def of_stages(sizes: Sequence[int], each: int, chain: int, cut_at: int) -> tuple[int, float]:
    """Gradients that the worst worker holds in the order of an executed step, and the seconds of the step."""
    total = each * max(sizes)
    ranks = tuple(tuple(range(first, stop)) for first, stop in pairwise(accumulate(sizes, initial=0)))
    parts = [shares(total, size, cut_at) for size in sizes]
    layers = _LAYERS * len(sizes)
    counts = tuple(tuple(map(len, of_stage)) for of_stage in parts)
    assignment = Assignment(ranks, tuple(range(0, layers + 1, _LAYERS)), counts)
    run = execute(Work.from_assignment(assignment), alike(layers), wires=FREE)
    most = 0
    for stage, members in enumerate(ranks):
        spans = [s for s in run.spans if s.action.stage == stage and s.action.kind == BACKWARD]
        spans.sort(key=lambda span: (span.stop, span.worker))
        added = [(members.index(span.worker), span.action.microbatch) for span in spans]
        most = max(most, *held_in_order(parts[stage], added, total, chain))
    return most, run.step_s


def stage_rows(meshes: Sequence[Sequence[int]], each: int = 8) -> list[tuple[Cell, ...]]:
    """Gradients in the order of pipelines, with sums handed on, and with cuts at chains, and steps of the latter."""
    rows: list[tuple[Cell, ...]] = []
    for sizes in meshes:
        now, seconds = of_stages(sizes, each, 1, 1)
        handed = [of_stages(sizes, each, chain, 1)[0] for chain in CHAINS[1:]]
        cut = [of_stages(sizes, each, chain, chain) for chain in CHAINS[1:]]
        steps = [step_s / seconds for _, step_s in cut]
        rows.append((" + ".join(map(str, sizes)), now, *handed, *(most for most, _ in cut), *steps))
    return rows


def tables(*, quick: bool) -> list[Table]:
    """All tables."""
    each, workers = (_EACH[:1], _WORKERS[:2]) if quick else (_EACH, _WORKERS)
    of_chains = [f"{chain}" for chain in CHAINS]
    memory = Table(
        "Modelled: gradients and memory, dp2 zero0 with 10 M parameters",
        (
            *("micro-batches a worker", "chain", "gradients", "additions", "gradients, MiB"),
            *("state and gradients / DDP", "with all else / DDP", "by the measured row / DDP"),
        ),
        tuple(memory_rows(each)),
        (
            "gradients: of full size, open at once; a chain of 1 is the tree as it is",
            "additions: those of a step that take a pass over the gradient of their own",
            "by the measured row: that of steady_state, less the gradients that are not held",
        ),
    )
    losses = Table(
        "Modelled: workers lost, cuts at chains only",
        (
            *("micro-batches a worker", "workers", *(f"load, chain {c}" for c in of_chains)),
            *(f"gradients, {c}" for c in of_chains),
        ),
        tuple(loss_rows(each, workers)),
        ("load: the largest over the mean", "gradients: those of the worst worker; one stage"),
    )
    within = Table(
        "Modelled: one worker dies within a step, in micro-batches",
        (
            *("micro-batches a worker", "workers", "chain", "again, of the lost", "again, of others", "rest"),
            *("rest / now", "begun chains kept", "and lost ones handed on"),
        ),
        tuple(again_rows(each, workers)),
        (
            "means over the moments between two micro-batches",
            "again: computed before and once more, those of the lost worker and those of chains that others had begun",
            "rest: what the busiest worker has still to compute",
            "begun chains kept: the rest over that of now, if others could go on with the chains that they have begun",
            "handed on: if the lost chains were spread as micro-batches are now, and no gradient held besides",
        ),
    )
    handed = Table(
        "Modelled: chains that span workers are handed on, 8 micro-batches a worker",
        (
            *("workers", "chain", "gradients now", "sums handed on", "step, all wait", "gradients, none waits"),
            *("step, ordered", "waits, ordered", "gradients, ordered"),
        ),
        tuple(handed_rows(workers[:1] if quick else workers)),
        (
            "one stage, load as now, messages take no time; steps are over those of now",
            "all wait: in ascending order a gradient is added when the sum before it has come",
            "none waits: it is held by itself until then",
            "ordered: first what the next worker needs, last what needs the one before",
        ),
    )
    names = [f"chain {chain}" for chain in CHAINS[1:]]
    staged = Table(
        "Modelled: stages, 8 micro-batches a worker of the largest",
        (
            *("workers of the stages", "gradients now", *(f"handed on, {name}" for name in names)),
            *(f"cut, {name}" for name in names),
            *(f"step, {name}" for name in names),
        ),
        tuple(stage_rows(_STAGES[:2] if quick else _STAGES)),
        (
            "gradients of the worst worker in the order in which pipelines run backwards",
            "handed on: cuts anywhere, nobody waits; cut: at chains only, and the step over that of now",
        ),
    )
    return [memory, losses, within, handed, staged]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    args = parser(__doc__).parse_args(argv)
    result = Result("chains", {"chains": list(CHAINS), "model": _CASE.model, "aim": AIM, "quick": args.quick})
    for table in tables(quick=args.quick):
        publish(result, table)
    finish(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
