"""Layer programs of one worker on PyTorch/XLA: beside eager and torch.compile, and beside a loop in plain torch_xla.

    python -m benchmarks.xla [--quick] [--json PATH]

In the environment of `make test-xla` (torch_xla fits one version of torch only); `python tests/xla/environment.py`
prints the path of its Python, and makes it first where it is missing.

gpt_tiny (4 blocks, width 128, 128 tokens, micro-batches of 4 samples, fp32, no dropout) in one process for each kind of
programs; they are started one after another and then alternate, a block of steps each. A step is forward and backward
of all micro-batches through all layers, without an update. Ours leave the gradients in host memory, where links and
updates take them; eager and torch.compile compute there. The hand-written loop cuts the same model at the same places:
autograd, and torch_xla.sync after each layer's forward and backward. Fused is that loop without cuts: one graph for
the step. All programs on XLA have the same environment variables, and send and fetch tensors with the same calls.

A second table shows the partitioner's result for the annotations: bytes on each device, and collectives in the compiled
HLO of each program, beside those that the specs imply.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, estimate, parser, say
from benchmarks.processes import new_directory, stop_on_signals

_PATIENCE_S = 300.0
_STOP_S = 20.0


@dataclass(frozen=True)
class Row:
    """One row of the table: steps of a process in one mode (benchmarks/xla_members.py)."""

    title: str
    kind: str
    tp: int = 1
    mode: str = "stay"

    @property
    def process(self) -> tuple[str, int]:
        return self.kind, self.tp


def rows_of(with_inductor: bool) -> list[Row]:
    """All rows, in the order of the table."""
    found = [Row("eager", "eager")]
    found += [Row("torch.compile", "inductor")] if with_inductor else []
    for tp, where in ((1, "one device"), (2, "tp2")):
        found += [
            Row(f"XLA, {where}", "xla", tp),
            Row(f"XLA, {where}, parameters sent anew every step", "xla", tp, "send"),
            Row(f"hand-written, {where}, gradients stay there", "hand", tp),
            Row(f"hand-written, {where}, gradients fetched at the end of a step", "hand", tp, "fetch"),
            Row(f"hand-written, {where}, one graph for the step", "fused", tp),
        ]
    return found


class Member:
    """A process that runs blocks of steps."""

    def __init__(self, process: tuple[str, int], microbatches: int, directory: Path) -> None:
        self.name = f"{process[0]}-tp{process[1]}"
        self._log = directory / f"{self.name}.log"
        spec = json.dumps({"kind": process[0], "tp": process[1], "microbatches": microbatches})
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.xla_members", spec],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(directory / self.name)},
                start_new_session=True,
            )

    def answer(self) -> dict[str, Any]:
        """Its next answer.

        Raises:
            RuntimeError: the process ended, or takes too long; with the end of its output.
        """
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _PATIENCE_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            output = self._log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{self.name} ended or takes too long:\n{output}")
        return json.loads(line)

    def block(self, first: int, steps: int, mode: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        order = {"first": first, "steps": steps, "mode": mode}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def started(rows: Sequence[Row], microbatches: int) -> Iterator[tuple[dict[tuple[str, int], Member], dict[str, Any]]]:
    """Starts the processes of the rows. Yields them after their first step, with its results; ends them at exit."""
    members: dict[tuple[str, int], Member] = {}
    firsts: dict[str, Any] = {}
    with new_directory("xla-") as directory:
        try:
            for process in dict.fromkeys(row.process for row in rows):
                member = members[process] = Member(process, microbatches, directory)
                firsts[member.name] = member.answer()
                say(f"{member.name}: first step after {firsts[member.name]['first_s']:.1f} s")
            yield members, firsts
        finally:
            for member in members.values():
                member.close()


def launch(rows: Sequence[Row], microbatches: int, rounds: int, steps: int) -> dict[str, Any]:
    """Starts all processes and lets them run in turn.

    Returns:
        For each process its first step and the programs that it compiled after it; by title of a row the mean ms of a
        step in each block, and of its CPU time; load averages (1 min) before the rounds.
    """
    with started(rows, microbatches) as (members, firsts):
        for row in rows:  # the first block of a mode compiles what that mode needs in addition
            members[row.process].block(2, 2, row.mode)
        found: dict[str, list[float]] = {row.title: [] for row in rows}
        cpu: dict[str, list[float]] = {row.title: [] for row in rows}
        loads, later = [], {}
        for number in range(rounds):
            loads.append(os.getloadavg()[0])
            for row in rows if number % 2 == 0 else rows[::-1]:
                member = members[row.process]
                answer = member.block(10 + number * steps, steps, row.mode)
                found[row.title].append(1000 * statistics.mean(answer["seconds"]))
                cpu[row.title].append(1000 * answer["cpu_s"] / steps)
                later[member.name] = answer["compiled"] - firsts[member.name]["compiled"]
            say(f"round {number + 1} of {rounds}")
    return {"firsts": firsts, "later": later, "ms": found, "cpu_ms": cpu, "loads": loads}


def time_table(result: Result, rows: Sequence[Row], launches: Sequence[Mapping[str, Any]], microbatches: int) -> None:
    """First steps, steady steps, programs compiled."""
    loads = [load for found in launches for load in found["loads"]]
    eager = launches[0]["firsts"]["eager-tp1"]
    shown: set[tuple[str, int]] = set()
    cells = []
    for row in rows:
        name = f"{row.kind}-tp{row.tp}"
        firsts = [found["firsts"][name] for found in launches]
        own: list[object] = ["", "", "", ""]
        if row.process not in shown:
            shown.add(row.process)
            apart = max(abs(first[what] / eager[what] - 1) for first in firsts for what in ("loss", "norm"))
            seconds = [first["first_s"] for first in firsts]
            made = max(found["later"][name] for found in launches)
            compiled = max(first["compiled"] for first in firsts)
            own = [f"{statistics.median(seconds):.1f}", compiled, made, f"{apart:.0e}"]
        ms = [value for found in launches for value in found["ms"][row.title]]
        cpu = statistics.median([value for found in launches for value in found["cpu_ms"][row.title]])
        times = [f"{statistics.median(ms):.0f}", f"{min(ms):.0f} - {max(ms):.0f}", len(ms), f"{cpu:.0f}"]
        cells.append([row.title, row.tp, *own[:3], *times, own[3]])
    result.table(
        f"A step of {microbatches} micro-batches, forward and backward, no update; gpt_tiny in one process "
        "each. First step: from "
        "torch (and torch_xla) imported until its gradients are in host memory, compiling with empty caches included; "
        "step: median of the blocks' means; CPU: of all threads of the process, a step; later: programs compiled after "
        "the first step; apart: loss and gradient norm of the first step from eager's, relative, the larger of both; "
        f"load average before the rounds {min(loads):.1f} to {max(loads):.1f}",
        [
            *("programs", "threads", "first step, s", "compiled", "later"),
            *("step, ms", "min - max", "blocks", "CPU, ms", "apart"),
        ],
        cells,
    )


def ratio_table(result: Result, rows: Sequence[Row], launches: Sequence[Mapping[str, Any]]) -> None:
    """Speeds, block by block."""
    by = {(row.kind, row.tp, row.mode): row.title for row in rows}
    pairs = [(("xla", 1, "stay"), ("eager", 1, "stay")), (("inductor", 1, "stay"), ("eager", 1, "stay"))]
    for tp in (1, 2):
        pairs += [(("xla", tp, "stay"), (kind, tp, mode)) for kind, mode in _OTHERS]
    cells = []
    for ours, other in pairs:
        if ours in by and other in by:
            each = [
                [theirs / mine for mine, theirs in zip(found["ms"][by[ours]], found["ms"][by[other]], strict=True)]
                for found in launches
            ]
            found = estimate(each)
            result.data[f"{by[ours]} / {by[other]}"] = found
            cells.append([by[ours], by[other], found, f"{found.num_pairs} / {found.num_launches}"])
    result.table(
        "Speed over that of the other; above 1: faster",
        ["programs", "other", "ratio [95 %]", "pairs / launches"],
        cells,
    )


_OTHERS = (("hand", "stay"), ("hand", "fetch"), ("fused", "stay"))


def partition_tables(result: Result) -> None:
    """Bytes and collectives on two devices, as `benchmarks.xla_partitions` finds them."""
    with new_directory("xla-") as directory:
        dump = directory / "dump"
        dump.mkdir()
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.xla_partitions", str(dump)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"benchmarks.xla_partitions ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    found = result.data["partitions"] = json.loads(done.stdout)
    same = all(set(row["found"]) == {row["implied"]} for row in found["bytes"])
    result.table(
        f"Bytes of parameters on each device, mesh.tp=2: {'as' if same else 'NOT as'} the specs imply",
        ["layer", "whole", "implied, each device", "found, by device"],
        [[row["layer"], row["whole"], row["implied"], " ".join(map(str, row["found"]))] for row in found["bytes"]],
    )
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in found["collectives"]:
        groups.setdefault(row["number"], []).append(row)
    cells = []
    for number, group in groups.items():
        implied, counts = group[0]["implied"], _counts(operator for operator, _ in group[0]["found"])
        shapes = "; ".join(f"{operator} {shape}" for operator, shape in group[0]["found"])
        cells.append(
            [_users(group), number, _told(implied), _told(counts), "yes" if implied == counts else "no", shapes]
        )
    result.table(
        "Collectives in the compiled HLO of each program, mesh.tp=2, beside what the specs imply",
        ["layers' programs", "number", "implied", "found", "equal", "results"],
        cells,
    )


def _users(group: Sequence[Mapping[str, Any]]) -> str:
    """The layers that run a program, and as which kind of program."""
    layers: dict[str, list[str]] = {}
    for row in group:
        layers.setdefault(row["program"], []).append(row["layer"])
    parts = {name: f"{found[0]} to {found[-1]}" if len(found) > 1 else found[0] for name, found in layers.items()}
    return "; ".join(f"{where} {name}" for name, where in parts.items())


def _counts(operators: Iterator[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for operator in operators:
        found[operator] = found.get(operator, 0) + 1
    return found


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {operator}" for operator, count in sorted(counts.items())) or "none"


def lacks_xla() -> bool:
    """Returns True if this interpreter has no torch_xla, after printing how to get one that has it."""
    lacks = importlib.util.find_spec("torch_xla") is None
    if lacks:
        how = "`python tests/xla/environment.py` makes its environment and prints its Python; use that."
        print(f"torch_xla is not there. {how}", file=sys.stderr)
    return lacks


def main() -> int:
    """Command line. Returns the exit code."""
    args = parser(__doc__).parse_args()
    if lacks_xla():
        return 2
    stop_on_signals()
    launches, rounds, steps, microbatches = (1, 2, 1, 2) if args.quick else (2, 5, 4, 2)
    settings = {
        "launches": launches,
        "rounds": rounds,
        "steps a block": steps,
        "microbatches": microbatches,
        "quick": args.quick,
    }
    result = Result("xla", {**settings, "torch_xla": metadata.version("torch_xla")})
    with_inductor = shutil.which("g++") is not None
    if not with_inductor:
        say("no g++: without torch.compile")
    rows = rows_of(with_inductor)
    found = result.data["launches"] = [launch(rows, microbatches, rounds, steps) for _ in range(launches)]
    time_table(result, rows, found, microbatches)
    ratio_table(result, rows, found)
    partition_tables(result)
    result.finish(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
