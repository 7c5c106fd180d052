"""The same bits on every mesh: the full product with real processes, against one worker and against the reference.

    python -m benchmarks.bits [--quick] [--only TEXT] [--json PATH]
    python -m benchmarks.bits --faults [--quick] [--full] [--only TEXT] [--json PATH]

Meshes x ZeRO levels x models x dtypes x batches, 20 steps each, one thread per worker. Compared exactly: the columns
loss_hex and grad_norm_hex, weights_sha256, and every validation loss. Two standards: the run on one worker with the
same model, dtype and batch, and the one-process trainer of tests/reference.py (no validation in it), which shares
nothing with the framework but models and random numbers. Exit code 1 on any difference or failed run. `--faults`: runs
that lose and gain workers, see benchmarks/bits_faults.py.

How runs are started: the real controller, links and worker processes, but one fork server and one controller process
for all runs, because importing torch twice per run would take most of the time. In addition each mesh runs once through
`python train.py`, as users start it; those rows are marked.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness import Result, parser, say

T = TypeVar("T")
STEPS = 20
MESHES: dict[str, dict[str, Any]] = {
    "single": {},
    "dp2": {"dp": 2},
    "dp3": {"dp": 3},
    "dp4": {"dp": 4},
    "pp2": {"pp": 2},
    "pp3": {"pp": 3},
    "dp2_pp2": {"dp": 2, "pp": 2},
    "dp3_pp2": {"dp": 3, "pp": 2},
    "[3,2]": {"stages": [3, 2]},
    "[1,3]": {"stages": [1, 3]},
}
ZEROS = ("zero0", "zero1", "zero2", "zero3")
MODELS: dict[str, dict[str, Any]] = {
    "gpt, dropout 0.1": {"target": "gpt", "dropout": 0.1},
    "llama, tied": {"target": "llama", "args": {"tied": True, "kv_heads": 2}},
}
DTYPES = ("fp32", "bf16")
BATCHES = {"even, 12 micro-batches": 24, "uneven, 7 micro-batches": 14}
_MOST_NEWCOMERS = 4
_QUICK_MESHES = ("single", "dp3", "pp2", "[3,2]")
_QUICK_ZEROS = ("zero0", "zero3")


@dataclass(frozen=True)
class Identity:
    """The settings that the bits of a run may depend on."""

    model: str
    dtype: str
    batch: str

    def __str__(self) -> str:
        return f"{self.model}; {self.dtype}; {self.batch}"


@dataclass(frozen=True)
class Case:
    """One run."""

    identity: Identity
    mesh: str
    zero: str

    def __str__(self) -> str:
        return f"{self.identity}; {self.mesh} {self.zero}"


@dataclass(frozen=True)
class Outcome:
    """The bits of a run. The reference has no validation losses."""

    loss_hex: tuple[str, ...]
    grad_norm_hex: tuple[str, ...]
    weights_sha256: str
    validation: tuple[str, ...] | None


def settings_of(case: Case, run_dir: Path) -> dict[str, Any]:
    """The settings of a run, in the form of `Settings.from_dict`."""
    i = case.identity
    sizes = {"name": MODELS[i.model]["target"], "layers": 3, "d_model": 48, "heads": 4}
    return {
        "mesh": MESHES[case.mesh],
        "sharding": {"name": case.zero},
        "model": sizes | MODELS[i.model],
        "train": {
            "steps": STEPS,
            "global_batch": BATCHES[i.batch],
            "microbatch_size": 2,
            "seq_len": 48,
            "validate_every": 10,
            "validate_microbatches": 5,
        },
        "page": {"size": 1024},
        "optim": {"lr": 5e-3, "warmup_steps": 3},
        "runtime": {"dtype": i.dtype},
        "run": {"dir": str(run_dir), "tensorboard": False},
    }


def read_outcome(run_dir: Path, steps: int = STEPS) -> Outcome:
    """Reads the outcome that a finished run of this many steps wrote.

    Raises:
        OSError, ValueError: it did not finish.
    """
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        raise ValueError(f"{len(lines)} lines, not one for each of {steps} steps")
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return Outcome(
        tuple(line["loss_hex"] for line in lines),
        tuple(line["grad_norm_hex"] for line in lines),
        json.loads((run_dir / "summary.json").read_text())["weights_sha256"],
        tuple(event["loss_hex"] for event in events if event["event"] == "validation"),
    )


def differences(found: Outcome, standard: Outcome) -> list[str]:
    """The fields that are not equal, in words. Validation losses are compared where both sides have them."""
    differing = []
    for name in ("loss_hex", "grad_norm_hex", "validation"):
        ours, theirs = getattr(found, name), getattr(standard, name)
        if ours is None or theirs is None or ours == theirs:
            continue
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        differing.append(
            f"{name}: {len(ours)} and {len(theirs)} values" if at is None else f"{name} from entry {at + 1}"
        )
    if found.weights_sha256 != standard.weights_sha256:
        differing.append("weights_sha256")
    return differing


class Runner:
    """Runs cases one after another. The workers of all of them are forked from one fork server."""

    def __init__(self, directory: Path) -> None:
        from elaswave_spmd.controller.launching import PRELOAD
        from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient, ForkServerSpec

        self._directory = directory
        self._fork_server = ForkServerClient.start("elaswave_spmd.worker.process:main", ForkServerSpec(preload=PRELOAD))

    def run(self, case: Case) -> Outcome:
        """Runs a case without any fault.

        Raises:
            RunError: the run failed.
        """
        return self.run_as(settings_of(case, self.run_dir), read_outcome)

    @property
    def run_dir(self) -> Path:
        """The directory that each run writes to."""
        return self._directory / "run"

    def run_as(self, fields: dict[str, Any], read: Callable[[Path], T]) -> T:
        """Like `controller.run`, but on this runner's fork server. Returns what `read` finds in the run's directory.

        Raises:
            RunError: the run failed.
        """
        from elaswave_spmd.conf.schema import Settings
        from elaswave_spmd.controller.launching import data_spec
        from elaswave_spmd.controller.outcomes import RunStopped
        from elaswave_spmd.controller.startup import make_controller
        from elaswave_spmd.data import prepare_data
        from elaswave_spmd.run_dir import RunDir, RunObserver
        from elaswave_spmd.runtime.transport.links import socket_directory
        from elaswave_spmd.worker.plan_run import plan_run

        run_dir, scratch = self.run_dir, socket_directory()
        settings = Settings.from_dict(fields)
        data = prepare_data(data_spec(settings))
        plan = plan_run(settings, data)
        try:
            files = RunDir.create(settings.run.dir, settings.to_yaml(), model="bits", mesh=settings.mesh.shape.name)
            with RunObserver(files, display=_Silent(), board=False) as observer:
                outcome = make_controller(plan, self._fork_server, observer, scratch).run()
            if isinstance(outcome, RunStopped):
                raise outcome.error
            self._wait_for_exits(settings.mesh.shape.num_workers)
            return read(run_dir)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.rmtree(run_dir, ignore_errors=True)

    def _wait_for_exits(self, count: int) -> None:
        """Waits until none of the run's workers is left, those that joined later included."""
        deadline = time.monotonic() + 60
        while left := [rank for rank in range(count + _MOST_NEWCOMERS) if self._fork_server.signal(rank, 0)]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"workers {left} have not ended")
            time.sleep(0.002)
        self._fork_server.poll()

    def close(self) -> None:
        self._fork_server.stop()


class _Silent:
    """A display that shows nothing."""

    def start(self, info: object) -> None: ...
    def step(self, line: object) -> None: ...
    def validation(self, step: int, loss: float, metrics: object = None) -> None: ...
    def show_line(self, text: str) -> None: ...
    def show_workers(self, workers: object) -> None: ...

    @property
    def wants_workers(self) -> bool:
        return False

    def finish(self, summary: object) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


def run_command(case: Case, directory: Path) -> Outcome:
    """Runs a case as a user starts it: `python train.py name=value ...`."""
    run_dir = directory / "command"
    fields = settings_of(case, run_dir)
    words = [f"++model.args.{name}={value}" for name, value in fields["model"].pop("args", {}).items()]
    words += [f"sharding={fields.pop('sharding')['name']}"]
    for group, values in fields.items():
        words += [f"{group}.{name}={str(value).replace(' ', '')}" for name, value in values.items()]
    done = subprocess.run([sys.executable, "train.py", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    try:
        return read_outcome(run_dir)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def reference(identity: Identity) -> Outcome | None:
    """The outcome by tests/reference.py; None where the tests are missing (an installed package)."""
    try:
        from tests import reference as trainer
    except ImportError:
        return None
    import torch

    from elaswave_spmd.conf.schema import Settings
    from elaswave_spmd.controller.launching import data_spec
    from elaswave_spmd.data import open_split, prepare_data
    from elaswave_spmd.worker.plan_run import make_model, plan_run

    torch.set_num_threads(1)
    settings = Settings.from_dict(settings_of(Case(identity, "single", "zero0"), Path("unused")))
    data = prepare_data(data_spec(settings))
    job = plan_run(settings, data).job
    o = settings.optim
    reference_settings = trainer.Settings(
        lr_at=job.learning_rate.at,
        seed=job.seed,
        steps=job.steps,
        global_batch=job.global_batch,
        microbatch_size=job.microbatch_size,
        optimizer=o.name,
        weight_decay=o.weight_decay,
        betas=o.betas,
        eps=o.eps,
        momentum=o.momentum,
        clip=job.clip,
        dtype=job.torch_dtype,
        page_size=settings.page.size,
    )
    model = make_model(settings, data.vocab_size, device="cpu")
    found = trainer.train(model, open_split(data, "train"), reference_settings)
    return Outcome(tuple(found.loss_hex), tuple(found.grad_norm_hex), found.weights_sha256, None)


def identities(quick: bool) -> Iterator[Identity]:
    """All combinations of model, dtype and batch."""
    for number, triple in enumerate(itertools.product(MODELS, DTYPES, BATCHES)):
        if not quick or number in (1, 6):
            yield Identity(*triple)


@dataclass
class Findings:
    """The cells of the table, and the differences found."""

    equal: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    runs: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    def judge(self, row: str, column: str, what: str, found: Outcome | str, standards: dict[str, Outcome]) -> None:
        """Counts a run. `found` is the reason in words if the run failed."""
        reasons = [f"failed: {found}"] if isinstance(found, str) else []
        if isinstance(found, Outcome):
            if not standards:
                reasons.append("nothing to compare with")
            for name, standard in standards.items():
                reasons += [f"differs from {name}: {d}" for d in differences(found, standard)]
        self.runs[row, column] = self.runs.get((row, column), 0) + 1
        self.equal[row, column] = self.equal.get((row, column), 0) + (not reasons)
        self.problems += [f"{what}: {line}" for line in reasons]
        for line in reasons:
            say(f"{what}: {line}")

    def cell(self, row: str, column: str) -> str:
        count, equal = self.runs.get((row, column), 0), self.equal.get((row, column), 0)
        return "-" if not count else f"{equal}/{count}" + ("" if equal == count else "  NOT EQUAL")


def attempt(run: Any, *args: Any) -> Outcome | str:
    """The outcome of a run, or the reason why there is none, in words."""
    try:
        return run(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run_all(chosen: Sequence[Identity], meshes: Sequence[str], zeros: Sequence[str], directory: Path) -> Findings:
    """Runs all cases. The run on one worker comes first, since it is a standard for the others."""
    findings, runner = Findings(), Runner(directory)
    try:
        for number, identity in enumerate(chosen):
            standards: dict[str, Outcome] = {}
            judged = attempt(reference, identity)
            if isinstance(judged, str):
                findings.problems.append(f"{identity}: the reference failed: {judged}")
            elif judged is not None:
                standards["the reference"] = judged
            for mesh, zero in itertools.product(meshes, zeros):
                case = Case(identity, mesh, zero)
                found = attempt(runner.run, case)
                if mesh == "single" and isinstance(found, Outcome):
                    standards.setdefault("one worker", found)
                findings.judge(mesh, zero, str(case), found, standards)
            if number == 0:
                for mesh in meshes:
                    case = Case(identity, mesh, zeros[-1])
                    found = attempt(run_command, case, directory)
                    findings.judge(mesh, "train.py", f"{case} by train.py", found, standards)
            say(f"{number + 1}/{len(chosen)} {identity}: against {' and '.join(standards) or 'nothing'}")
    finally:
        runner.close()
    return findings


def main() -> int:
    """Command line. Returns the exit code."""
    options = parser(__doc__)
    options.add_argument("--only", default="", help="only models, dtypes and batches, or faults, named so in part")
    options.add_argument("--faults", action="store_true", help="runs that lose and gain workers")
    options.add_argument("--full", action="store_true", help="of the faults: all that there are")
    args = options.parse_args()
    if args.faults:
        from benchmarks.bits_faults import faults

        return faults(args.json, args.only, quick=args.quick, full=args.full)
    meshes = _QUICK_MESHES if args.quick else tuple(MESHES)
    zeros = _QUICK_ZEROS if args.quick else ZEROS
    chosen = [identity for identity in identities(args.quick) if args.only in str(identity)]
    result = Result("bits", {"steps": STEPS, "identities": [str(i) for i in chosen]})
    directory = Path(tempfile.mkdtemp(prefix="bits-"))
    try:
        findings = run_all(chosen, meshes, zeros, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    columns = (*zeros, "train.py")
    rows = [[mesh, *(findings.cell(mesh, column) for column in columns)] for mesh in meshes]
    total, equal = sum(findings.runs.values()), sum(findings.equal.values())
    title = f"{equal} of {total} runs have the bits of one worker and of the reference, {STEPS} steps each"
    result.table(title, ("mesh", *columns), rows)
    result.data = {"runs": total, "equal": equal, "problems": findings.problems}
    result.finish(args.json)
    for problem in findings.problems:
        print(problem)
    return 1 if findings.problems or not total else 0


if __name__ == "__main__":
    sys.exit(main())
