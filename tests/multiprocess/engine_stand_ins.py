"""Stand-ins for the programs of Slurm that the scripts of examples/slurm call, and the programs that they start.

They are no Slurm: `srun` starts its tasks on this machine, `scontrol` prints names and writes down what is queued
again. Each does what the real one is documented to do as far as the scripts depend on it, and refuses everything else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import processes_with
from elaswave_spmd.run_dir import read_metrics, read_summary
from tests.multiprocess import patient_model
from tests.multiprocess.real_runs import SMALL, Done, train, write_text
from tests.multiprocess.train_server import new_mark
from tests.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parents[2]
DRAIN = "120"
"""Seconds that an agent may take to drain on a busy machine."""

WORDS = [*(word for word in SMALL if not word.startswith("run.dir=")), "train.steps=100", "train.validate_every=0"]
"""Settings of the runs, but for their mesh, their directory and their model."""
_SOON = "+model.args.longest_s=2"
"""More than five minutes of steps, in which the file `go` is looked for every two seconds."""

_SRUN = '''
"""A stand-in for Slurm's srun: it starts its tasks on this machine."""
import os, signal, subprocess, sys
words = sys.argv[1:]
options = {}
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    options[name] = value
known = {"--nodes", "--ntasks", "--relative", "--kill-on-bad-exit", "--no-kill"}
assert set(options) <= known, f"the stand-in does not know {set(options) - known}"
assert options["--kill-on-bad-exit"] == "0", "one task that fails would end the others"
assert int(options["--relative"]) + int(options["--nodes"]) == int(os.environ["SLURM_JOB_NUM_NODES"])
tasks, is_forced = [], []
def force_termination(*_):  # what srun does with a SIGTERM of its own: it kills its tasks
    is_forced.append(True)
    for task in tasks:
        task.kill()
signal.signal(signal.SIGTERM, force_termination)
for number in range(int(options["--ntasks"])):
    environment = os.environ | {"SLURM_PROCID": str(number)}
    tasks.append(subprocess.Popen(words, env=environment, start_new_session=True))
    if is_forced:  # it came while this one was started
        tasks[-1].kill()
sys.exit(max(abs(task.wait()) for task in tasks))
'''

_SCONTROL = '''
"""A stand-in for Slurm's scontrol."""
import os, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as other programs have it: `| head -n 1`
match sys.argv[1:]:
    case ["show", "hostnames", nodes]:
        print(*nodes.split(","), sep="\\n")
    case ["requeue", job]:
        with open(os.environ["STAND_IN_REQUEUED"], "a") as file:
            print(job, file=file)
    case words:
        sys.exit(f"the stand-in does not know {words}")
'''


@dataclass
class Script:
    """A running script. Its shell leads a process group, as a batch script of Slurm does."""

    process: subprocess.Popen[bytes]
    log: Path

    def signal_shell(self, number: signal.Signals) -> None:
        """A signal to the shell alone, as by --signal=B:."""
        os.kill(self.process.pid, number)

    def signal_all(self, number: signal.Signals) -> None:
        """A signal to all processes of the batch script, as by scancel or a preemption."""
        os.killpg(self.process.pid, number)

    def end(self) -> Done:
        """Wait for the end of the shell."""
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the script does not end:\n{self.log.read_text()}") from None
        return Done(code, self.log.read_text(), "")


@dataclass
class Engine:
    """A folder with programs in front of the PATH, from which scripts are started."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    _mark: str = field(default_factory=new_mark)
    _number: int = 0

    def __post_init__(self) -> None:
        programs = self.folder / "programs"
        programs.mkdir()
        train = "import sys\nfrom elaswave_spmd.cli import main\nsys.exit(main())\n"
        for name, text in {"srun": _SRUN, "scontrol": _SCONTROL, "elaswave-spmd": train}.items():
            (programs / name).write_text(f"#!{sys.executable}\n{text}")
            (programs / name).chmod(0o755)
        name, _, value = self._mark.partition("=")
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS" and not k.startswith("SLURM")}
        self.environment |= inherited | {
            **{name: value, "PYTHONPATH": str(ROOT), "STAND_IN_REQUEUED": str(self.folder / "requeued")},
            "PATH": f"{programs}:{os.environ.get('PATH', os.defpath)}",
        }

    @property
    def requeued(self) -> list[str]:
        """The jobs that the scripts have queued again."""
        file = self.folder / "requeued"
        return file.read_text().split() if file.exists() else []

    @contextmanager
    def start(self, command: list[str], variables: Mapping[str, str], folder: Path | None = None) -> Iterator[Script]:
        """Start a command; what is left of all commands is killed at the end."""
        self._number += 1
        log = self.folder / f"log_{self._number}"
        with ExitStack() as undo:
            undo.callback(self._kill)
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    cwd=folder or self.folder,
                    env=self.environment | dict(variables),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            undo.callback(process.wait)
            undo.callback(self._kill)
            yield Script(process, log)
            undo.pop_all()

    def nothing_is_left(self) -> None:
        """Wait until no process of any command lives."""
        eventually(lambda: not processes_with(self._mark))

    def _kill(self) -> None:
        for pid in processes_with(self._mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def holds(script: Script, condition: Callable[[], object]) -> None:
    """Wait until the condition holds, while the script runs."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert script.process.poll() is None, f"the script has ended early:\n{script.log.read_text()}"
        assert time.monotonic() < deadline, f"the condition does not hold:\n{script.log.read_text()}"
        time.sleep(0.02)


def patient(engine: Engine) -> list[str]:
    """Settings of a run that does not end before the file `go` is there."""
    return [*WORDS, *patient_model.write(engine.folder, engine.folder / "go"), _SOON]


def steps(run_dir: Path) -> int:
    return len(read_metrics(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0


def assert_same_bits(run_dir: Path, wanted: Path) -> None:
    found, expected = read_metrics(run_dir), read_metrics(wanted)
    assert [(line.step, line.loss_hex, line.grad_norm_hex) for line in found] == [
        (line.step, line.loss_hex, line.grad_norm_hex) for line in expected
    ]
    assert read_summary(run_dir)["weights_sha256"] == read_summary(wanted)["weights_sha256"]


def alone(folder: Path) -> Path:
    """The directory of the same run on one worker, in an empty folder."""
    (folder / "go").touch()
    write_text(folder)
    done = train(folder, *WORDS, "mesh=single", "run.dir=run", *patient_model.write(folder, folder / "go"))
    assert done.code == 0, done.err
    return folder / "run"
