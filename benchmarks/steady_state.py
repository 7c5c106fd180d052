"""Training speed and memory against plain PyTorch, healthy run.

    python -m benchmarks.steady_state [--quick] [--rows TEXT] [--part speed|memory] [--backward always|never]
        [--device cpu|cuda] [--dtype fp32|bf16] [--json PATH]

Ours is the whole product (controller, metrics, TensorBoard and all) on real processes; the other side is a loop of
plain PyTorch (benchmarks/plain_systems.py): one process, DistributedDataParallel, FSDP2 or a schedule of pipelining.
Same model code, initial values, samples, micro-batch, global batch, fused AdamW, clipping; one thread per process,
gloo. Ours runs with mirror.count=0 and verify.rate=0: the others have neither replicas of sharded state nor checks of
devices. `benchmarks.checks` has what checks cost. The rows of small steps (768 tokens) are there with a replica as well
(mirror.count=1, the default), since that is how they are run. Weight gradients are put off, or with --backward never
are not: it is not tried in the run, as a trial would be measured as well.

On an accelerator there is one row for each model, a worker of ours against one process; plain PyTorch computes in bf16
by autocast, and its kernels need not be deterministic.

How it is timed. Both sides are alive at the same time; a gate (benchmarks/gate.py) lets one run a block of steps while
the other's workers block in a read, then they swap, and every other pair begins with the other side. So a machine that
gets slower gets slower for both, and one clock times both, from "go" to "all workers are done". This was
preferred to SIGSTOP, which halts processes in the middle of a step with messages on their way, and to reading time
stamps from metrics.jsonl, which the other side does not write. A block ends when the last worker has updated its
parameters. Our side then still sends the parameters of the block's last step, which would otherwise overlap with the
next step; this is a small part of one step in each block.

Ratio: tokens/s of ours over plain, per pair; median and 95 % interval over launches and pairs (benchmarks/harness.py).
"By processor time" is the same ratio of the processor seconds that all workers took, which other programs on the
machine change less; what a worker waits for does not show in it.
The losses of both sides after the warm-up must agree to 1e-3, or the row fails: it shows that both do the same work.

Memory: at two micro-batches per worker and at eight, per worker, worst worker. `rss`: growth of the resident peak since
the worker's imports (ru_maxrss); `anon`: growth of anonymous resident memory, sampled every millisecond, which leaves
out pages of libraries that both sides read in. "open nodes": the partial sums of the canonical tree, by formula: the
gradients of the worker's layers times the nodes that are open at once (determinism.reduction_tree.max_open_nodes).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import Estimate, Result, estimate, parser, say
from benchmarks.steady_launch import (
    ENDLESS,
    MODELS,
    OURS,
    PLAIN,
    Case,
    Side,
    launch,
    microbatches_of,
    seq_len_of,
)
from benchmarks.steady_memory import memory_rows
from elaswave_spmd.conf.schema import ALWAYS, NEVER

_WARM_UP = 4
_BLOCK_S = 1.0
_KINDS: tuple[tuple[str, dict[str, int], str, str], ...] = (
    ("single against one process", {}, "zero0", "plain"),
    ("dp2 zero0 against DDP", {"dp": 2}, "zero0", "ddp"),
    ("dp2 zero1 against DDP", {"dp": 2}, "zero1", "ddp"),
    ("dp2 zero2 against DDP", {"dp": 2}, "zero2", "ddp"),
    ("dp2 zero3 against FSDP2", {"dp": 2}, "zero3", "fsdp"),
    ("dp2 zero3 against FSDP2, reduced every micro-batch", {"dp": 2}, "zero3", "fsdp_sync_each"),
    ("pp2 against Schedule1F1B", {"pp": 2}, "zero0", "pipeline"),
    ("dp4 zero1 against DDP, four workers", {"dp": 4}, "zero1", "ddp"),
)
_PIPELINES = {
    "Schedule1F1B": "pipeline",
    "ScheduleInterleavedZeroBubble, a stage each": "pipeline_zb1p",
    "ScheduleInterleavedZeroBubble, two stages each": "pipeline_zb_interleaved",
    "ScheduleZBVZeroBubble": "pipeline_zbv",
}
_DEEP, _LARGE, _SMALL = "deep", "85M", "small"
_ON_ACCELERATORS = ("1M", _LARGE)


def cases(models: Sequence[str], backward: str = ALWAYS) -> list[Case]:
    """All rows of the tables. Pipelines need blocks enough for two stages on each of four workers.

    Args:
        backward: our schedule.split_backward.
    """
    usual = [model for model in models if model not in (_DEEP, _LARGE, _SMALL)]
    found = [Case(model, *kind, backward) for model in usual for kind in _KINDS]
    for stages, (name, kind) in itertools.product((2, 4), _PIPELINES.items()):
        found.append(Case(_DEEP, f"pp{stages} against {name}", {"pp": stages}, "zero0", kind, backward))
    for title, mesh, sharding, kind in (_KINDS[0], _KINDS[2], _KINDS[7]):
        # A worker alone has nobody who could hold a replica.
        for replicas in (0, 1) if mesh else (0,):
            name = f"{title}, a replica" if replicas else title
            found.append(Case(_SMALL, name, mesh, sharding, kind, backward, replicas=replicas))
    return found


def on_accelerator(device: str, backward: str, dtype: str) -> list[Case]:
    """The rows on an accelerator, of which there may be one."""
    return [Case(model, *_KINDS[0], backward, device, dtype) for model in _ON_ACCELERATORS]


def measure(case: Case, launches: int, pairs: int) -> dict[str, Any]:
    """Measures the speed of one row.

    Returns:
        Plain data: seconds per step of both sides by launch and pair, and processor seconds; steps per block, losses
        after the warm-up.
    """
    found: dict[str, Any] = {"seconds": {OURS: [], PLAIN: []}, "processor": {OURS: [], PLAIN: []}, "losses": []}
    steps = 0
    for number in range(launches):
        with launch(case, microbatches_of(case.model), ENDLESS) as sides:
            found["losses"].append(_warm_up(case, sides))
            if not steps:
                seconds = max(side.team.block(2) / 2 for side in sides.values())
                steps = max(2, math.ceil(_BLOCK_S / seconds))
            times: dict[str, list[float]] = {OURS: [], PLAIN: []}
            used: dict[str, list[float]] = {OURS: [], PLAIN: []}
            for pair in range(pairs):
                order = (OURS, PLAIN) if (pair + number) % 2 else (PLAIN, OURS)
                for name in order:
                    before = sides[name].processor
                    times[name].append(sides[name].team.block(steps) / steps)
                    used[name].append((sides[name].processor - before) / steps)
            for name in times:
                found["seconds"][name].append(times[name])
                found["processor"][name].append(used[name])
        ratios = [b / a for a, b in zip(times[OURS], times[PLAIN], strict=True)]
        say(f"{case.model} {case.title}: launch {number + 1}/{launches}, ratio {statistics.median(ratios):.3f}")
    return found | {"steps_per_block": steps}


def _warm_up(case: Case, sides: dict[str, Side]) -> dict[str, float]:
    losses = {}
    for name, side in sides.items():
        side.team.block(_WARM_UP)
        members = side.team.members
        # Each of our workers reports the loss of the step; each worker of the other side reports its share of it.
        losses[name] = members[0].loss if name == OURS else sum(member.loss for member in members)
    if not math.isclose(losses[OURS], losses[PLAIN], rel_tol=1e-3 if case.dtype == "fp32" else 2e-2):
        raise SystemExit(f"{case.title}, {case.model}: the sides do not train alike, losses {losses}")
    return losses


def speed_row(case: Case, found: dict[str, Any]) -> list[str]:
    """One line of the table."""
    found["ratio"] = ratio = _ratio(found["seconds"])
    found["processor_ratio"] = by_processor = _ratio(found["processor"])
    tokens = microbatches_of(case.model) * MODELS[case.model]["microbatch"] * seq_len_of(case.model)
    rates = [tokens / statistics.median(itertools.chain.from_iterable(side)) for side in found["seconds"].values()]
    return [
        case.model,
        case.title,
        *(f"{rate:,.0f}" for rate in rates),
        str(ratio),
        str(by_processor),
        f"{ratio.num_pairs} / {ratio.num_launches}",
        f"{found['steps_per_block']}",
    ]


def _ratio(seconds: Mapping[str, Sequence[Sequence[float]]]) -> Estimate:
    """Plain over ours, from the seconds of a step by side, launch and pair."""
    both = zip(seconds[OURS], seconds[PLAIN], strict=True)
    return estimate([[b / a for a, b in zip(*launch, strict=True)] for launch in both])


def main() -> None:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--rows", default="", help="only rows whose model and title contain this, words with commas")
    options.add_argument("--backward", choices=(ALWAYS, NEVER), default=ALWAYS, help="our schedule.split_backward")
    options.add_argument("--part", choices=("all", "speed", "memory"), default="all")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    options.add_argument("--launches", type=int)
    options.add_argument("--pairs", type=int, help="per launch")
    args = options.parse_args()
    launches = args.launches or (2 if args.quick else 5)
    pairs = args.pairs or (3 if args.quick else 6)
    words = [word for word in args.rows.split(",") if word]
    if args.device == "cpu":
        if args.dtype != "fp32":
            options.error("--dtype goes with --device: on the CPU the other side computes in fp32")
        everything = cases(list(MODELS), args.backward)
    else:
        everything = on_accelerator(args.device, args.backward, args.dtype)
    chosen = [c for c in everything if all(word in f"{c.model} {c.title}" for word in words)]
    result = Result(
        "steady_state",
        {
            **{"launches": launches, "pairs_per_launch": pairs},
            "microbatches": {case.model: microbatches_of(case.model) for case in chosen},
            **{"backward": args.backward, "device": args.device, "dtype": args.dtype},
        },
    )
    if args.part in ("all", "speed"):
        _speed(result, chosen, launches, pairs)
    if args.part in ("all", "memory"):
        columns, rows, data = memory_rows(chosen, (2,) if args.quick else (2, 8))
        result.data["memory"] = data
        result.table("Peak memory of the worst worker beyond its imports, MiB", columns, rows)
    result.finish(args.json)


def _speed(result: Result, chosen: Sequence[Case], launches: int, pairs: int) -> None:
    rows, data = [], []
    for case in chosen:
        found = measure(case, launches, pairs)
        rows.append(speed_row(case, found))
        data.append({"model": case.model, "row": case.title, **found})
    result.data["speed"] = data
    columns = ("model", "row", "ours tok/s", "plain tok/s", "ratio [95 %]", "by processor time")
    columns += ("pairs / launches", "steps a block")
    result.table("Speed against plain PyTorch", columns, rows)


if __name__ == "__main__":
    main()
