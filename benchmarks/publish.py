"""Time to send new parameters to the other workers of a stage: over links, or through a process group.

    python -m benchmarks.publish [--quick] [--runs N] [--json PATH]

`python train.py` on the emulated accelerator, whose programs sleep for a millisecond: the rest of a step is the update
of the optimizer and the messages between workers. Three kinds of run alternate: links by ipc, links by tcp, and
`runtime.collectives=group`, which on the CPU is gloo over tcp. A run's figure is the median of its last steps, in which
groups were used; its ratio is to the run with links by ipc of the same turn.

On the CPU a group can gain little: a link and gloo move bytes through the same kernel. The benchmark shows that nothing
is lost by it, and checks that the bits are the same. The gain by NCCL or HCCL can be measured on their hardware only.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Result, estimate, parser, say
from benchmarks.processes import new_directory, program, stop_on_signals
from benchmarks.recovery import different_losses
from benchmarks.recovery_runs import json_lines

STEPS, _LAST = 40, 20
IPC, TCP, GROUP = "links ipc", "links tcp", "group (gloo)"
WAYS = {
    IPC: ("runtime.collectives=links", "runtime.transport=ipc"),
    TCP: ("runtime.collectives=links", "runtime.transport=tcp"),
    GROUP: ("runtime.collectives=group", "runtime.transport=ipc"),
}
CASES = (("dp3", "zero1", 256), ("dp3", "zero3", 256), ("dp4", "zero1", 256), ("dp3", "zero1", 512))
Case = tuple[str, str, int]
"""mesh, sharding, model.d_model."""
_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Trained:
    """The result of one run: among others the median of its last steps, in ms."""

    step: float
    losses: Mapping[int, str]


def train(cache: Path, case: Case, way: str) -> Trained:
    """Runs the training once.

    Raises:
        RuntimeError: it failed, or groups were not used in the steps that count.
    """
    mesh, sharding, width = case
    settings = {
        "mesh": mesh,
        "sharding": sharding,
        "model.layers": 4,
        "model.d_model": width,
        "model.heads": 8,
        "train.seq_len": 8,
        "train.microbatch_size": 1,
        "train.global_batch": 4,
        "train.steps": STEPS,
        "train.validate_every": 0,
        "runtime.device": "emulated",
        "emulated.forward_ms": 1,
        "emulated.backward_ms": 1,
        "schedule.microbatches": "false",
        "schedule.layers": "false",
        "data.cache": cache,
        "run.tensorboard": "false",
    }
    with new_directory("publish-") as directory:
        words = [f"{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "train.py", *words, *WAYS[way], f"run.dir={directory / 'run'}"]
        with program(command, directory) as run:
            run.finish(_PATIENCE_S)
        metrics, events = (json_lines(directory / "run" / f"{name}.jsonl") for name in ("metrics", "events"))
    served = [event["step"] for event in events if event["event"] == "group" and event["serves"]]
    if way == GROUP and not (served and served[-1] <= STEPS - _LAST):
        raise RuntimeError(f"groups served from steps {served} on, of {STEPS}")
    seconds = [line["seconds"] for line in metrics[-_LAST:]]
    return Trained(1e3 * statistics.median(seconds), {line["step"]: line["loss_hex"] for line in metrics})


def rows(found: Mapping[tuple[Case, str], Sequence[Trained]]) -> list[list[str]]:
    """The table."""
    lines = []
    for (case, way), runs in found.items():
        steps = [run.step for run in runs]
        ratios = [run.step / other.step for run, other in zip(runs, found[case, IPC], strict=True)]
        spread = f"{min(steps):.1f} - {max(steps):.1f}"
        lines.append([*map(str, case), way, f"{statistics.median(steps):.1f}", spread, str(estimate([ratios]))])
    return lines


def main() -> int:
    """Command line. Returns the exit code: 1 if a loss differs."""
    options = parser(__doc__)
    options.add_argument("--runs", type=int, help="of each kind (7; with --quick 1)")
    args = options.parse_args()
    stop_on_signals()
    count = args.runs or (1 if args.quick else 7)
    cases = CASES[: 1 if args.quick else None]
    result = Result("publish", {"runs": count, "steps": STEPS, "last": _LAST})
    found: dict[tuple[Case, str], list[Trained]] = {(case, way): [] for case in cases for way in WAYS}
    with new_directory("publish-data-") as cache:
        for number in range(count):
            for case, way in found:
                found[case, way].append(train(cache, case, way))
                say(f"{number + 1}/{count} {' '.join(map(str, case))} {way}: {found[case, way][-1].step:.1f} ms")
    problems = [
        line for case in cases for line in different_losses(run.losses for way in WAYS for run in found[case, way])
    ]
    columns = ["mesh", "sharding", "d_model", "way", "step ms", "min - max", "step / links ipc [95 %]"]
    result.table("Steps of runs that do little but publish (emulated accelerator)", columns, rows(found))
    runs = {" ".join((*map(str, case), way)): [run.step for run in made] for (case, way), made in found.items()}
    result.data = {"problems": problems, "step_ms": runs}
    return result.finish(args.json, problems)


if __name__ == "__main__":
    sys.exit(main())
