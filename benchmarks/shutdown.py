"""Time from Ctrl-C until a run is gone.

    python -m benchmarks.shutdown [--quick] [--repeats N] [--mesh dp4] [--json PATH]

`python train.py` is started as a user would, in a session of its own, with a temporary directory of its own. SIGINT
goes to the whole process group, as a terminal sends it. Measured: from the signal until no process of the session is
left, zombies and re-parented ones included. Moments: some delays after the start (interpreter, imports, data, workers
starting), and steady state, a few committed steps into the run. Required each time: exit code 130, no traceback, no
process that had to be killed, and no file left outside the run's own directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Result, parser, say

STEADY = "steady state"
_DELAYS_S = (0.1, 0.5, 1.0, 2.0, 3.0, 4.0)
_GIVE_UP_S = 30.0
_STEPS_FIRST = 5
_LOOK_S = 0.002
_OF_TORCH = (
    "torchinductor_"  # a cache directory that an import of torch._dynamo may make; it does not belong to this project
)


@dataclass(frozen=True)
class Stop:
    """One interrupted run."""

    seconds: float
    exit_code: int
    problems: tuple[str, ...]
    reached: str


def session_processes(session: int) -> list[int]:
    """The processes of a session (Linux), zombies included."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session:
                found.append(int(entry))
    return found


def interrupt(mesh: str, delay_s: float | None) -> Stop:
    """Starts a run, interrupts it after `delay_s` seconds (None: in steady state), and waits until all is gone."""
    directory = Path(tempfile.mkdtemp(prefix="shutdown-"))
    (temporary := directory / "tmp").mkdir()
    metrics = directory / "run" / "metrics.jsonl"
    command = [sys.executable, "train.py", f"mesh={mesh}", "train.steps=1000000", f"run.dir={directory / 'run'}"]
    environment = {**os.environ, "TMPDIR": str(temporary), "XDG_RUNTIME_DIR": str(temporary)}
    with (directory / "output").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        _wait_for_moment(process, metrics, delay_s)
        reached = _reached(process.pid, metrics)
        began = time.perf_counter()
        os.killpg(process.pid, signal.SIGINT)
        killed = _wait_until_gone(process, began)
        seconds = time.perf_counter() - began
        problems = [] if not killed else [f"{killed} processes had to be killed"]
        text = (directory / "output").read_text(errors="replace")
        if process.returncode != 130:
            problems.append(f"exit code {process.returncode}")
        if "Traceback" in text:
            problems.append("traceback: " + text.strip().splitlines()[-1])
        if left := sorted(p.name for p in temporary.iterdir() if not p.name.startswith(_OF_TORCH)):
            problems.append(f"left behind: {', '.join(left)}")
        return Stop(seconds, process.returncode, tuple(problems), reached)
    finally:
        for pid in session_processes(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _wait_for_moment(process: subprocess.Popen[bytes], metrics: Path, delay_s: float | None) -> None:
    if delay_s is not None:
        time.sleep(delay_s)
        return
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < _STEPS_FIRST:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the run did not get to its first steps")
        time.sleep(0.05)


def _reached(session: int, metrics: Path) -> str:
    """The progress of the run at the signal: number of processes, and whether it had committed a step."""
    steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    return f"{len(session_processes(session))} processes, {steps} steps"


def _wait_until_gone(process: subprocess.Popen[bytes], began: float) -> int:
    """Waits until no process is left. Returns the number of processes that had to be killed."""
    while True:
        process.poll()  # reaps it
        left = session_processes(process.pid)
        if not left:
            return 0
        if time.perf_counter() - began > _GIVE_UP_S:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            process.wait()
            return len(left)
        time.sleep(_LOOK_S)


def row(moment: str, stops: Sequence[Stop]) -> list[str]:
    """One line of the table."""
    seconds = [stop.seconds for stop in stops]
    problems = sorted({problem for stop in stops for problem in stop.problems})
    return [
        moment,
        str(len(stops)),
        f"{statistics.median(seconds):.2f}",
        f"{max(seconds):.2f}",
        stops[-1].reached,
        "; ".join(problems) or "none",
    ]


def main() -> int:
    """Command line. Returns the exit code: 1 if a run left something behind, or ended in a wrong way."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int)
    options.add_argument("--mesh", default="dp2_pp2")
    args = options.parse_args()
    repeats = args.repeats or (1 if args.quick else 5)
    result = Result("shutdown", {"mesh": args.mesh, "repeats": repeats})
    moments: dict[str, float | None] = {STEADY: None, **{f"{delay:g} s after the start": delay for delay in _DELAYS_S}}
    rows, failed = [], False
    for moment, delay in moments.items():
        stops = [interrupt(args.mesh, delay) for _ in range(repeats)]
        rows.append(row(moment, stops))
        failed = failed or any(stop.problems for stop in stops)
        result.data[moment] = [stop.__dict__ for stop in stops]
        say(f"{moment}: {rows[-1][2]} s; problems: {rows[-1][-1]}")
    columns = ("Ctrl-C at", "runs", "median s", "max s", "reached (last run)", "problems")
    result.table(f"From Ctrl-C until no process is left, mesh={args.mesh}", columns, rows)
    result.finish(args.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
