"""`python -m elaswave_spmd demo`: two runs on four workers, one of which loses a worker, compared bit for bit."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from elaswave_spmd.demo.comparison import compare
from elaswave_spmd.errors import ConfigError

_SETTINGS = (
    *("mesh=dp2_pp2", "model=gpt_tiny", "model.layers=4", "model.d_model=64"),
    *("train.seq_len=64", "train.global_batch=32", "train.validate_every=0", "run.tensorboard=false"),
    # On a busy machine heartbeats are late, and the one loss of the demonstration is the kill.
    *("timeouts.suspect=20", "timeouts.status=25", "timeouts.leave=30"),
)
_RANK = 2
_LEAST_STEPS = 3


def main(arguments: Sequence[str], program: str) -> int:
    """Train twice, compare, and make a report. Returns the exit code: 0, the bits are equal.

    Raises:
        ConfigError: too few steps; the directory exists.
        DataError: a run's files are malformed.
    """
    options = _parse(arguments, program)
    if options.steps < _LEAST_STEPS:
        given, fix = f"--steps {options.steps}", f"--steps {_LEAST_STEPS}"
        raise ConfigError(
            f"{given} is too few", rule="a worker is killed in the middle of the run", where=given, fix=fix
        )
    # A shell leaves --out=~/d as it is. A run finds the home directory for itself, and the comparison does not.
    folder = Path(os.path.expanduser(options.out)) if options.out else Path("runs", time.strftime("demo-%Y%m%d_%H%M%S"))
    if os.path.exists(folder):  # not folder.exists(), which raises for a name that is too long
        raise ConfigError(
            f"{folder} exists", rule="--out names a new directory", where=f"--out {folder}", fix="another"
        )
    quiet, killed = folder / "undisturbed", folder / "killed"
    at = max(2, options.steps // 3)
    kill = f"chaos.events=[{{step: {at}, kind: kill, rank: {_RANK}, point: backward}}]"
    runs = (
        (quiet, "1 of 2: a small GPT on 4 workers, undisturbed", ()),
        (killed, f"2 of 2: the same, and worker {_RANK} gets SIGKILL in the middle of step {at}", (kill,)),
    )
    from elaswave_spmd.conf.compose import word_of  # Hydra: not before it is needed

    for run_dir, title, words in runs:
        print(f"\n{title}", flush=True)
        code = _run("train", *_SETTINGS, f"train.steps={options.steps}", word_of("run.dir", str(run_dir)), *words)
        if code:
            print(f"the run ended with exit code {code}; its files are in {run_dir}", file=sys.stderr)
            return code if code > 0 else 128 - code
    found = compare(quiet, killed)
    print("", *found.lines(), sep="\n", flush=True)
    _report(killed, program, opens=not options.no_browser)
    return 1 if found.differences else 0


def _run(*words: str) -> int:
    """A command of this package, as a user starts it. Its output is that of this process."""
    started: list[subprocess.Popen[bytes]] = []
    is_asked = False

    def hand_on(*_: object) -> None:
        nonlocal is_asked
        is_asked = True
        for process in started:
            process.terminate()

    # The run answers signals, and says how it ends: SIGTERM is handed on to it, Ctrl-C reaches it anyway.
    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        with subprocess.Popen([sys.executable, "-m", "elaswave_spmd", *words]) as process:
            started.append(process)
            if is_asked:  # just before: it was not among those that have started yet
                process.terminate()
            while True:
                with contextlib.suppress(KeyboardInterrupt):
                    return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(run_dir: Path, program: str, *, opens: bool) -> None:
    """Make the report of a run and name it; open it where there is a screen for it. Nothing here is an error."""
    page = run_dir / "report.html"
    print("\nthe report of the second run:", flush=True)  # the next line is its address
    if _run("report", str(run_dir)):
        print(f"there is no report (see above): {program} report {run_dir} makes it later")
        return
    if opens and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        with contextlib.suppress(webbrowser.Error, OSError):
            webbrowser.open(page.absolute().as_uri())


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        f"{program} demo",
        description="Trains a small model twice on 4 workers, kills one of them in the second run, and compares the "
        "two runs bit for bit. Exit code 1: they differ.",
    )
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="steps of each run (default: 60)")
    parser.add_argument("--out", metavar="DIR", help="a new directory for both runs (default: runs/demo-<time>)")
    parser.add_argument("--no-browser", action="store_true", help="do not open the report")
    return parser.parse_args(arguments)
