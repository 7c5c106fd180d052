"""The demonstration as a user starts it, with few steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

from elaswave_spmd.run_dir import read_events
from tests.waiting import PATIENCE_S, eventually


@contextmanager
def demo(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a session of its own; where it has not ended, it is killed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    command = [sys.executable, "-m", "elaswave_spmd", "demo", "--out", "demo", *words]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its runs as well


def test_the_demo_kills_a_worker_and_finds_the_bits_equal(tmp_path: Path) -> None:
    with demo(tmp_path, "--steps", "6") as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, ""), out
    assert "worker 2 was killed after step 1 was done and before step 2 was\n3 workers finished the run\n" in out
    assert "all 6 losses are equal, bit for bit" in out
    assert "demo/killed/report.html" in out and (tmp_path / "demo" / "killed" / "report.html").is_file()
    assert "fail" in [event["event"] for event in read_events(tmp_path / "demo" / "killed")]
    assert "fail" not in [event["event"] for event in read_events(tmp_path / "demo" / "undisturbed")]


def test_a_demo_that_is_asked_to_end_ends_its_run(tmp_path: Path) -> None:
    with demo(tmp_path, "--steps", "1000000") as process:
        metrics = tmp_path / "demo" / "undisturbed" / "metrics.jsonl"
        eventually(lambda: metrics.exists() and metrics.stat().st_size > 0)
        process.terminate()
        out, err = process.communicate(timeout=PATIENCE_S)  # to the end of all that has its output open
    assert process.returncode == 143, (out, err)
    assert "it was asked to by SIGTERM" in out + err and "the run ended with exit code 143" in err
