"""The golden set: what the product computed when `tests/golden.json` was recorded, to show that a change moves no bit.

The product promises that a run's losses, gradient norms, validation losses and final weights are the same bits on every
mesh, at every ZeRO level, and whatever happens to its workers. Other tests compare the product with a reference of the
same checkout; a mistake that changes both would pass them. The golden set compares the product with its own past, which
is what a refactoring needs. It has three parts, which can be recorded one by one:

- `runs`: 192 runs in the simulated cluster (all workers in one process): 2 models x 6 meshes x 4 ZeRO levels x
  {undisturbed, a worker is killed, a worker joins, work moves between workers}.
- `real`: 8 runs of `train.py` with real worker processes, one of which loses a worker.
- `schedules`: how each of 2,000 random schedules of faults in the simulated cluster ended.

    python -m tests.golden record [--part runs|real|schedules] [--jobs 2]
    python -m tests.golden check  [--part runs|real|schedules] [--jobs 2] [--quick]

`check` prints each case that differs, with the first step that differs and both values, and exits with 1 if any does.
`--quick` runs the subset that is also a part of `make test` (tests/simulated/test_golden.py).

The bits of the parts `runs` and `real` depend on torch and on the CPU: torch and its libraries choose their kernels by
the CPU's type. Each of these parts names the environment of its record. In another environment its bits cannot be
compared with the record; `check` says so, and then compares the runs with each other: all runs of one model must have
the same bits. How schedules end does not depend on the environment.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import platform
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from elaswave_spmd.run_dir import weights_sha256
from elaswave_spmd.scheduling.placement import Placement
from tests.cluster.faults import AnyFault, Fault
from tests.cluster.processes import Trained
from tests.cluster.schedules import Schedule, run
from tests.faults.fault_runs import Bits, Changes, chaos
from tests.multiprocess.real_runs import SMALL, train, write_text
from tests.simulated.bits_cases import MirroredCluster, Run, mirrored_placement, one_thread

RECORD = Path(__file__).with_name("golden.json")
PARTS = ("runs", "real", "schedules")

# ---- simulated runs

# 5 micro-batches of work in a step: no mesh of the list deals them evenly. Both models have dropout; the GPT's head
# reads its embedding. Steps enough for an event in the first or second of them to come to its end.
MODELS = {
    "gpt_tied_fp32": Run(model="gpt_tied", microbatches=5, steps=6),
    "llama_bf16": Run(model="llama", dtype="bf16", microbatches=5, steps=6),
}
MESHES = ("dp2", "dp3", "pp3", "dp2_pp2", "dp3_pp2", "stages3-2")
ZERO_LEVELS = (0, 1, 2, 3)
EVENTS = ("undisturbed", "kill", "join", "move")
KILLED_AT = ("backward", "reduce", "apply", "publish")  # by ZeRO level
ORDERS = 10  # orders of messages that are tried, until an event comes to its end before the run does


@dataclass(frozen=True)
class SimulatedCase:
    """One run in the simulated cluster.

    Args:
        model: a key of MODELS, which is all that the run's bits may depend on.
        event: one of EVENTS.
    """

    model: str
    mesh: str
    zero: int
    event: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.mesh} zero{self.zero} {self.event}"

    def bits(self) -> Bits:
        """Runs the case. Whether an event still happens within the run depends on the order of messages, which a seed
        draws: seeds are tried until it does.

        Raises:
            AssertionError: the event happened with none of the seeds, or some seeds gave other bits.
        """
        found: list[Bits] = []
        for seed in range(ORDERS):
            trained = self._train(seed)
            found.append(_bits_of(trained))
            assert found[-1] == found[0], f"seed {seed}: {difference(found[0], found[-1])}"
            if self._has_happened(trained):
                return found[0]
        raise AssertionError(f"no {self.event} has happened in {ORDERS} orders of messages")

    @one_thread()
    def _train(self, seed: int) -> Trained:
        return MirroredCluster(MODELS[self.model], self.mesh, self.zero, seed=seed, faults=self._faults()).run()

    def _faults(self) -> tuple[AnyFault, ...]:
        """The faults of a case. Every mesh has a worker 0 and a worker 1."""
        if self.event == "kill":
            return (Fault(2, "kill", 1, KILLED_AT[self.zero]),)
        if self.event == "join":
            return (Fault(1, "join", 0, "forward"),)
        if self.event == "move":
            return (Fault(1, "rebalance", 0, "forward"), Fault(2, "rebalance", 0, "forward"))
        return ()

    def _has_happened(self, trained: Trained) -> bool:
        """True if the run began a mesh epoch for the event; of an undisturbed run, whether it began none."""
        kinds = {kind for begun in trained.epochs for kind in begun.kinds.values()}
        if self.event == "kill":
            return "fail" in kinds
        if self.event == "join":
            return "join" in kinds
        if self.event == "move":
            first = mirrored_placement(MODELS[self.model], self.mesh, self.zero)
            placements = [first, *(begun.placement for begun in trained.epochs)]
            return any(is_move(old, new) for old, new in itertools.pairwise(placements))
        return not trained.epochs


def is_move(old: Placement, new: Placement) -> bool:
    """True if the members stayed, and micro-batches, layers or workers went elsewhere."""
    if sorted(old.mesh.members) != sorted(new.mesh.members):
        return False
    return (old.mesh.stages, old.layer_cuts, old.microbatch_counts) != (
        new.mesh.stages,
        new.layer_cuts,
        new.microbatch_counts,
    )


def _bits_of(trained: Trained) -> Bits:
    validation = {step: loss.hex() for step, loss in sorted(trained.validation.items())}
    return Bits(tuple(trained.losses), tuple(trained.norms), validation, weights_sha256(trained.weights))


SIMULATED = tuple(SimulatedCase(*values) for values in itertools.product(MODELS, MESHES, ZERO_LEVELS, EVENTS))
# Half of them: every mesh at every ZeRO level with two of the four events, and with the other two at the next level.
QUICK_SIMULATED = tuple(
    case
    for case in SIMULATED
    if (MESHES.index(case.mesh) + case.zero + EVENTS.index(case.event)) % 2 == list(MODELS).index(case.model)
)

# ---- real runs

ARITHMETIC = {  # a model's name -> the settings that the bits may depend on
    "gpt_bf16": ("model=gpt_tiny", "model.dropout=0.1", "runtime.dtype=bf16"),
    "llama_fp32": ("model=llama_tiny", "runtime.dtype=fp32"),
}
FIVE_MICROBATCHES = (
    "train.global_batch=10"  # in place of SMALL's four: no mesh of more than one worker deals five evenly
)


@dataclass(frozen=True)
class RealCase:
    """One run of `train.py`.

    Args:
        model: a key of ARITHMETIC.
        settings: the others, none of which may change a bit.
        killed: ranks that the run must report as failed; no rank: nobody is killed.
    """

    model: str
    settings: tuple[str, ...]
    killed: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.model, *self.settings))

    def bits(self) -> Bits:
        """Runs `train.py` in a new folder.

        Raises:
            AssertionError: it did not end well, or did not lose the workers that it should.
        """
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_text(folder)
            done = train(folder, *SMALL, FIVE_MICROBATCHES, *ARITHMETIC[self.model], *self.settings)
            assert done.code == 0, done.err
            failed = {rank for ranks in Changes.of(folder / "run").ranks("fail") for rank in ranks}
            assert failed >= {*self.killed}, f"workers {self.killed} were to be killed, {failed} were lost"
            return Bits.of(folder / "run")


REAL = (
    RealCase("gpt_bf16", ("mesh=single", "sharding=zero2", "runtime.activation_checkpointing=true")),
    RealCase("gpt_bf16", ("mesh=dp2", "sharding=zero1")),
    RealCase("gpt_bf16", ("mesh=pp2", "sharding=zero3", "runtime.transport=tcp")),
    RealCase(
        "gpt_bf16",
        ("mesh=dp2_pp2", "sharding=zero2", chaos("step: 3, kind: kill, rank: 1, point: backward")),
        killed=(1,),
    ),
    RealCase("llama_fp32", ("mesh=dp3", "sharding=zero0")),
    RealCase("llama_fp32", ("mesh=dp3", "sharding=zero3", "runtime.transport=tcp")),
    RealCase("llama_fp32", ("mesh=dp2_pp2", "sharding=zero1")),
    RealCase("llama_fp32", ("mesh.stages=[3,2]", "sharding=zero3", "runtime.activation_checkpointing=true")),
)
QUICK_REAL = (REAL[1], REAL[3])  # of one model: they can be compared with each other in any environment

# ---- random schedules

SEEDS = {"plain": range(1200), "moving": range(500), "grouped": range(300)}  # kinds of tests.cluster.schedules
QUICK_SEEDS = {kind: seeds[:: len(seeds) // 20] for kind, seeds in SEEDS.items()}
LETTERS = {"bits": "b", "lost": "l", "": "f"}  # how a schedule ended; f: it failed
WORDS = {letter: how or "failed" for how, letter in LETTERS.items()}
A_LINE = 100  # seeds in a line of the record


def end_of(kind: str, seed: int) -> str:
    """The letter of how the schedule ended."""
    return LETTERS[run(Schedule.draw(seed, moving=kind == "moving", grouped=kind == "grouped")).how]


def _end_of(what: tuple[str, int]) -> tuple[str, int, str]:
    return (*what, end_of(*what))


# ---- running many

AnyCase: TypeAlias = SimulatedCase | RealCase
Found: TypeAlias = Bits | str
"""What a case gave, or in words why it gave nothing."""


def attempt(case: AnyCase) -> tuple[str, Found]:
    """Runs a case: its name and what it gave."""
    try:
        return case.name, case.bits()
    except Exception as error:  # whatever it is, the other cases are to be compared as well
        return case.name, f"{type(error).__name__}: {error}"


def run_cases(cases: Sequence[AnyCase], jobs: int = 1) -> dict[str, Found]:
    """Runs the cases, in so many processes; real runs, which have many processes each, one after the other."""
    if jobs == 1 or any(isinstance(case, RealCase) for case in cases):
        return dict(map(attempt, cases))
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return dict(pool.imap_unordered(attempt, cases, chunksize=4))


def run_schedules(seeds: Mapping[str, Iterable[int]], jobs: int = 1) -> dict[str, dict[int, str]]:
    """Runs the schedules, in so many processes. Returns kind -> seed -> letter."""
    what = [(kind, seed) for kind, some in seeds.items() for seed in some]
    found: dict[str, dict[int, str]] = {kind: {} for kind in seeds}
    if jobs == 1:
        ends = list(map(_end_of, what))
    else:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            ends = list(pool.imap_unordered(_end_of, what, chunksize=20))
    for kind, seed, letter in ends:
        found[kind][seed] = letter
    return found


# ---- comparing


def difference(wanted: Bits, found: Bits) -> str:
    """The first thing that differs between two runs, in words; nothing differs: an empty string."""
    validations = sorted(wanted.validation.items()), sorted(found.validation.items())
    series = (
        ("loss", list(enumerate(wanted.loss_hex, 1)), list(enumerate(found.loss_hex, 1))),
        ("gradient norm", list(enumerate(wanted.grad_norm_hex, 1)), list(enumerate(found.grad_norm_hex, 1))),
        ("validation loss", *validations),
    )
    firsts = []
    for what, here, there in series:
        for old, new in itertools.zip_longest(here, there):
            if old != new:
                step = min(pair[0] for pair in (old, new) if pair)
                firsts.append((step, f"{what} of step {step}: {_value(old)} is now {_value(new)}"))
                break
    if firsts:
        return min(firsts, key=lambda first: first[0])[1]
    if wanted.weights_sha256 != found.weights_sha256:
        return f"final weights: sha256 {wanted.weights_sha256} is now {found.weights_sha256}"
    return ""


def _value(entry: tuple[int, str] | None) -> str:
    return entry[1] if entry else "(nothing)"


def problems_of_one_model(cases: Sequence[AnyCase], found: Mapping[str, Found]) -> list[str]:
    """Problems among the runs themselves: those that gave nothing, and those with other bits than the first run
    of the same model."""
    problems, firsts = [], {}
    for case in cases:
        here = found[case.name]
        if isinstance(here, str):
            problems.append(f"{case.name}: {here}")
            continue
        first_name, first = firsts.setdefault(case.model, (case.name, here))
        if text := difference(first, here):
            problems.append(f"{case.name}: differs from the run {first_name}: {text}")
    return problems


def problems_with_record(wanted: Mapping[str, Bits], found: Mapping[str, Found]) -> list[str]:
    """The runs that do not have the recorded bits. A run that gave nothing is not among them: see
    `problems_of_one_model`."""
    problems = []
    for name, here in found.items():
        if name not in wanted:
            problems.append(f"{name}: this case is not in the record: record the part again")
        elif isinstance(here, Bits) and (text := difference(wanted[name], here)):
            problems.append(f"{name}: {text}")
    return problems


def problems_of_schedules(wanted: Mapping[str, Mapping[int, str]], found: Mapping[str, Mapping[int, str]]) -> list[str]:
    """The schedules that ended in another way than recorded."""
    return [
        f"schedule {kind} {seed}: {WORDS[wanted[kind][seed]]} is now {WORDS[letter]}"
        for kind, ends in found.items()
        for seed, letter in sorted(ends.items())
        if letter != wanted[kind][seed]
    ]


# ---- the record


def environment() -> dict[str, str]:
    """The bits depend on this besides the code: libraries that compute, and the CPU, by whose type they choose."""
    return {
        "cpu": _cpu(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }


def _cpu() -> str:
    """The CPU's vendor, family and model, as Linux has them; elsewhere as Python has it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    fields = dict(re.findall(r"^(vendor_id|cpu family|model|CPU implementer|CPU part)\s*: (.*)$", text, re.MULTILINE))
    return ", ".join(f"{name} {value}" for name, value in sorted(fields.items()))


def other_environment(part: Mapping[str, Any]) -> str:
    """Why the bits of a part cannot be compared here; empty if they can."""
    recorded, here = part["environment"], environment()
    differing = [f"{key} {recorded.get(key)!r}, here {here[key]!r}" for key in here if here[key] != recorded.get(key)]
    return "recorded in another environment: " + "; ".join(differing) if differing else ""


def read_record() -> dict[str, Any]:
    """tests/golden.json; nothing is recorded yet: an empty record."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def write_record(record: Mapping[str, Any]) -> None:
    """Writes tests/golden.json; an equal record makes an equal file."""
    text = json.dumps(record, indent=1, sort_keys=True)
    RECORD.write_text(text + "\n", encoding="utf-8")


def encode_runs(found: Mapping[str, Bits]) -> dict[str, Any]:
    """A part of the record: each distinct series of values once, under a name made of its hash; cases refer to it."""
    series, cases = {}, {}
    for case, bits in found.items():
        values = {
            "grad_norm_hex": list(bits.grad_norm_hex),
            "loss_hex": list(bits.loss_hex),
            "validation_hex": {str(step): value for step, value in bits.validation.items()},
            "weights_sha256": bits.weights_sha256,
        }
        name = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
        series[name], cases[case] = values, name
    return {"cases": cases, "environment": environment(), "series": series}


def decode_runs(part: Mapping[str, Any]) -> dict[str, Bits]:
    """Case -> its recorded bits."""
    series = {
        name: Bits(
            tuple(values["loss_hex"]),
            tuple(values["grad_norm_hex"]),
            {int(step): value for step, value in values["validation_hex"].items()},
            values["weights_sha256"],
        )
        for name, values in part["series"].items()
    }
    return {case: series[name] for case, name in part["cases"].items()}


def encode_schedules(found: Mapping[str, Mapping[int, str]]) -> dict[str, Any]:
    """A part of the record: for each kind the counts, and a letter for each seed from 0, so many in a line."""
    part = {}
    for kind, ends in found.items():
        letters = "".join(ends[seed] for seed in range(len(ends)))
        counts = {WORDS[letter]: count for letter, count in Counter(letters).items()}
        lines = [letters[first : first + A_LINE] for first in range(0, len(letters), A_LINE)]
        part[kind] = {"counts": counts, "ends": lines}
    return {"kinds": part, "letters": WORDS}


def decode_schedules(part: Mapping[str, Any]) -> dict[str, dict[int, str]]:
    """Kind -> seed -> letter."""
    return {kind: dict(enumerate("".join(recorded["ends"]))) for kind, recorded in part["kinds"].items()}


# ---- the command


def check_runs(part: Mapping[str, Any], cases: Sequence[AnyCase], jobs: int = 1) -> list[str]:
    """Runs the cases; what is wrong with them. In another environment they are compared with each other only."""
    found = run_cases(cases, jobs)
    problems = problems_of_one_model(cases, found)
    return problems if other_environment(part) else [*problems, *problems_with_record(decode_runs(part), found)]


def check_schedules(part: Mapping[str, Any], seeds: Mapping[str, Iterable[int]], jobs: int = 1) -> list[str]:
    """Runs the schedules; those that ended in another way than recorded."""
    return problems_of_schedules(decode_schedules(part), run_schedules(seeds, jobs))


def cases_of(part: str, quick: bool = False) -> Sequence[AnyCase]:
    """The cases of the part `runs` or `real`."""
    if part == "runs":
        return QUICK_SIMULATED if quick else SIMULATED
    return QUICK_REAL if quick else REAL


def check(parts: Sequence[str], jobs: int, quick: bool) -> int:
    """Compares the parts with the record; 1 if anything differs."""
    record, all_problems = read_record(), []
    for part in parts:
        if part not in record:
            all_problems.append(f"part {part} is not recorded")
            continue
        began = time.monotonic()
        if part == "schedules":
            seeds = QUICK_SEEDS if quick else SEEDS
            what = f"{sum(map(len, seeds.values()))} schedules end as recorded"
            problems = check_schedules(record[part], seeds, jobs)
        else:
            cases = cases_of(part, quick)
            what = f"{len(cases)} cases have the recorded bits"
            if why := other_environment(record[part]):
                print(f"!!! part {part}: BITS CANNOT BE COMPARED WITH THE RECORD: {why}")
                print("!!! The runs are compared with each other instead: those of one model must have the same bits.")
                what = f"{len(cases)} cases have the same bits as the others of their model; THE RECORD WAS NOT USED"
            problems = check_runs(record[part], cases, jobs)
        verdict = f"PROBLEMS: {len(problems)}" if problems else what
        print(f"{part}: {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
        all_problems += problems
    for problem in all_problems:
        print(f"DIFFERS  {problem}")
    return int(bool(all_problems))


def make_record(parts: Sequence[str], jobs: int) -> int:
    """Records the parts, the others stay; 1, and nothing is written, if what was found contradicts itself."""
    record = read_record()
    for part in parts:
        began = time.monotonic()
        if part == "schedules":
            ends = run_schedules(SEEDS, jobs)
            problems = [f"schedule {kind} {seed} failed" for kind in ends for seed, x in ends[kind].items() if x == "f"]
            record[part] = encode_schedules(ends)
            what = ", ".join(f"{kind} {value['counts']}" for kind, value in record[part]["kinds"].items())
        else:
            cases = cases_of(part)
            found = run_cases(cases, jobs)
            problems = problems_of_one_model(cases, found)
            record[part] = encode_runs({name: bits for name, bits in found.items() if isinstance(bits, Bits)})
            what = f"{len(found)} cases, {len(record[part]['series'])} distinct series"
        if problems:
            print(f"{part} is not recorded:", *problems, sep="\n")
            return 1
        print(f"{part}: {what} ({time.monotonic() - began:.0f} s)", flush=True)
    write_record(record)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description="makes and compares the golden set")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "check"):
        command = commands.add_parser(name)
        command.add_argument("--part", choices=PARTS, action="append", help="this part only; may be given again")
        command.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default 2)")
    commands.choices["check"].add_argument("--quick", action="store_true", help="the subset that `make test` runs")
    options = parser.parse_args(arguments)
    parts = options.part or PARTS
    return (
        make_record(parts, options.jobs) if options.command == "record" else check(parts, options.jobs, options.quick)
    )


if __name__ == "__main__":
    sys.exit(main())
