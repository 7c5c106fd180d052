"""Devices that compute wrongly, in whole runs of `train.py`: who is found, when, and what the run's bits are then.

    python -m benchmarks.miscompute [--runs 100] [--late 30] [--seed N] [--quick] [--json PATH]

At rate 1: one bit of one element is changed once, at a place, worker and step that are drawn, on meshes from 2 to 4
workers at all ZeRO levels; wrong updates with three copies of each page. All must hold in each run: exit code 0, one
event `corrupt`, with that worker and that step (wrong state: its version), one loss, of that worker; and losses,
gradient norms, validations and weights of the undisturbed run.

At rate 0.1: a worker of dp3 computes a micro-batch wrongly with probability 1/2 in each step from the second on, and
the run ends when it is found. Steps until then beside the formula of docs/assumptions.md, and in how many runs the
first step with other bits is one of those that the event calls unsure: this worker is mostly right where it is checked,
and the steps before its last check are not called unsure then. Exit code 1 if anything at rate 1 does not hold, or
another worker is found.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, parser, say

_TRAIN = Path(__file__).parents[1] / "train.py"
_SETTINGS = (
    *("model.layers=2", "model.d_model=32", "model.heads=2", "model.dropout=0.1", "data=stdlib", "page.size=256"),
    *("train.seq_len=12", "train.global_batch=14", "train.microbatch_size=2", "train.validate_microbatches=3"),
    *("optim.warmup_steps=2", "run.tensorboard=false", "timeouts.suspect=4"),
    *("schedule.microbatches=false", "schedule.layers=false"),
)
_STEPS, _VALIDATE_EVERY = 10, 5
_MESHES = {"dp2": 2, "dp3": 3, "dp4": 4, "dp2_pp2": 4}
_COPIED = ("dp3", "dp4")  # meshes that have three copies of each page
_OF_STATE = "apply"
_PLACES = {
    "forward": "output",
    "backward": "input gradient",
    "reduce": "weight gradient",
    "sum": "sum",
    "norm": "reduced gradient",
    _OF_STATE: "state",
}
"""Point of the fault -> kind of the tensor that the event names."""
_LATE_STEPS, _LATE_RATE, _LATE_FAULTS = 200, 0.1, 0.5
_WITHIN = (5, 10, 20, 30, 45, 60)


@dataclass(frozen=True)
class Case:
    """A run with one wrong result, at rate 1."""

    mesh: str
    zero: int
    point: str
    rank: int
    step: int

    def words(self) -> tuple[str, ...]:
        """Its words on the command line of train.py."""
        state = ("mirror.count=2", "mirror.verify_every=1") if self.point == _OF_STATE else ("verify.rate=1",)
        wrong = f"{{step: {self.step}, kind: miscompute, rank: {self.rank}, point: {self.point}}}"
        return f"mesh={self.mesh}", f"sharding=zero{self.zero}", *state, f"chaos.events=[{wrong}]"


def drawn(seed: int, runs: int) -> list[Case]:
    """Cases of all places in turn. A first stage has no gradient of its input that anybody is sent."""
    draw = random.Random(seed)
    found = []
    for _, point in zip(range(runs), itertools.cycle(_PLACES), strict=False):
        mesh = draw.choice(_COPIED if point == _OF_STATE else ("dp2_pp2",) if point == "backward" else list(_MESHES))
        ranks = (2, 3) if point == "backward" else range(_MESHES[mesh])
        # Sharded state is what replicas are compared for: at ZeRO-0 each worker has, and updates, all of it.
        zero = draw.randrange(1 if point == _OF_STATE else 0, 4)
        found.append(Case(mesh, zero, point, draw.choice(ranks), draw.randrange(2, _STEPS)))
    return found


def train(folder: Path, name: str, *words: str) -> tuple[int, str]:
    """One run. Returns its exit code and what it wrote to stderr."""
    command = [sys.executable, str(_TRAIN), *_SETTINGS, *words]
    command += [f"data.cache={folder / 'cache'}", f"run.dir={folder / name}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def bits_of(run: Path) -> tuple[Any, ...]:
    """Everything of a run that no fault may change."""
    losses = [(line["step"], line["loss_hex"], line["grad_norm_hex"]) for line in lines_of(run / "metrics.jsonl")]
    validations = {event["step"]: event["loss_hex"] for event in events_of(run, "validation")}
    return losses, validations, json.loads((run / "summary.json").read_text(encoding="utf-8"))["weights_sha256"]


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in lines_of(run / "events.jsonl") if event["event"] == kind]


def problems_of(case: Case, folder: Path, name: str, standard: tuple[Any, ...]) -> list[str]:
    """What did not hold in a run of a case."""
    steps = (f"train.steps={_STEPS}", f"train.validate_every={_VALIDATE_EVERY}")
    code, told = train(folder, name, *steps, *case.words())
    if code:
        return [f"ended with {code}: {told.strip().splitlines()[:1]}"]
    found = [(e["ranks"], e["step"], e["tensor"]) for e in events_of(folder / name, "corrupt")]
    wanted = [([case.rank], case.step, _PLACES[case.point])]
    lost = [event["ranks"] for event in events_of(folder / name, "fail")]
    problems = [] if found == wanted else [f"found {found}, not {wanted}"]
    problems += [] if lost == [[case.rank]] else [f"lost {lost}"]
    return problems + ([] if bits_of(folder / name) == standard else ["other bits"])


def at_rate_1(result: Result, folder: Path, cases: Sequence[Case]) -> list[str]:
    """Runs the cases; adds their table. Returns what did not hold."""
    steps = (f"train.steps={_STEPS}", f"train.validate_every={_VALIDATE_EVERY}")
    code, told = train(folder, "standard", *steps, "mesh=single", "verify.rate=0")
    if code:
        raise SystemExit(f"the undisturbed run ended with {code}:\n{told}")
    standard = bits_of(folder / "standard")
    held: Counter[str] = Counter()
    problems = []
    for number, case in enumerate(cases):
        found = problems_of(case, folder, f"run{number}", standard)
        problems += [f"{case}: {problem}" for problem in found]
        held[case.point] += not found
        say(f"{number + 1}/{len(cases)} {case}: {found or 'held'}")
    of_place = Counter(case.point for case in cases)
    rows = [[place, _PLACES[place], of_place[place], held[place]] for place in _PLACES]
    rows.append(["all", "", len(cases), sum(held.values())])
    columns = ("place", "tensor of the event", "runs", "right worker, same step, undisturbed bits")
    result.table("One wrong bit, at rate 1", columns, rows)
    return problems


def late(folder: Path, seed: int, standard: list[dict[str, Any]]) -> tuple[int, int, int | None, list[int]]:
    """A run at a lower rate: the worker that is wrong, when it is found, the first step of other bits, unsure steps."""
    rank = random.Random(seed).randrange(3)
    wrong = f"{{step: 2, kind: miscompute, rank: {rank}, point: forward, rate: {_LATE_FAULTS}}}"
    given = (f"verify.rate={_LATE_RATE}", "verify.action=stop", f"seed={seed}", f"chaos.seed={seed}")
    name = f"late{seed}"
    shared = (f"train.steps={_LATE_STEPS}", "train.validate_every=0", "mesh=dp3")
    _, told = train(folder, name, *shared, *given, f"chaos.events=[{wrong}]")
    found = events_of(folder / name, "corrupt")
    if [event["ranks"] for event in found] != [[rank]]:
        raise SystemExit(f"seed {seed}: worker {rank} is wrong, and found is {found}\n{told}")
    other = [
        line["step"]
        for line, right in zip(lines_of(folder / name / "metrics.jsonl"), standard, strict=False)
        if (line["loss_hex"], line["grad_norm_hex"]) != (right["loss_hex"], right["grad_norm_hex"])
    ]
    return rank, found[0]["step"], other[0] if other else None, found[0]["unsure_steps"]


def at_a_lower_rate(result: Result, folder: Path, seeds: Sequence[int]) -> None:
    """Runs that end with a verdict; adds their table."""
    steps, told = [], []
    for seed in seeds:
        shared = (f"train.steps={_LATE_STEPS}", "train.validate_every=0", "mesh=single", f"seed={seed}")
        code, error = train(folder, f"right{seed}", *shared, "verify.rate=0")
        if code:
            raise SystemExit(f"the undisturbed run ended with {code}:\n{error}")
        rank, step, first, unsure = late(folder, seed, lines_of(folder / f"right{seed}" / "metrics.jsonl"))
        steps.append(step - 1)
        told.append(first is None or (bool(unsure) and unsure[0] <= first <= unsure[1]))
        say(f"seed {seed}: worker {rank} found in step {step}; first wrong bits in {first}, unsure {unsure}")
    chance = _LATE_FAULTS * _LATE_RATE
    rows = [
        [within, sum(step <= within for step in steps), f"{len(steps) * (1 - (1 - chance) ** within):.1f}"]
        for within in _WITHIN
    ]
    mean = f"{sum(steps) / len(steps):.1f}"
    rows.append(["mean of steps", mean, f"{1 / chance:.1f}"])
    rows.append(["first wrong step is unsure", sum(told), ""])
    title = f"{len(steps)} runs at rate {_LATE_RATE:g}, wrong in half of the steps: found within steps"
    result.table(title, ("within", "runs", "formula"), rows)
    result.data["late"] = steps


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, help="at rate 1")
    options.add_argument("--late", type=int, help=f"runs at rate {_LATE_RATE:g}")
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    runs = (6 if given.quick else 100) if given.runs is None else given.runs
    lates = (1 if given.quick else 30) if given.late is None else given.late
    result = Result("miscompute", {"runs": runs, "late": lates, "seed": given.seed, "settings": _SETTINGS})
    with tempfile.TemporaryDirectory() as folder:
        problems = at_rate_1(result, Path(folder), drawn(given.seed, runs))
        if lates:
            at_a_lower_rate(result, Path(folder), range(given.seed, given.seed + lates))
    return result.finish(given.json, problems)


if __name__ == "__main__":
    sys.exit(main())
