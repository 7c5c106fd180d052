"""Real runs on a machine that has too little of something: disk, open files. The last event has the reason."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from elaswave_spmd.run_dir.checkpoint_shard import checkpoint_path
from elaswave_spmd.run_dir.checkpoints import newest_complete
from elaswave_spmd.runtime.transport.shared_memory import why_not_shared
from tests.multiprocess import patient_model, still_model
from tests.multiprocess.real_runs import SMALL, eventually, launch, train, write_text
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are set by prlimit")
EVERY = "checkpoint.every=N writes them"
ENDLESS = [*SMALL, "train.steps=1000000", "train.validate_every=0"]


def limit_files(pid: int, size: int) -> None:
    """No file of a running process can grow beyond `size` bytes from now on."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))


def test_a_full_disk_ends_a_run_with_one_line(tmp_path: Path) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *ENDLESS, "mesh=dp2", "run.tensorboard=true") as run:
        run.wait_for_steps(2)
        limit_files(run.process.pid, 12_000)
        done = run.finish()
    message = "the run's files cannot be written: "
    assert done.code == 1
    assert done.err.startswith(f"error: {message}")
    after = done.err.splitlines()[1:]
    if step := newest_complete(tmp_path / "run"):  # what was full was TensorBoard's file: the others had room
        assert after[0] == f"newest checkpoint: {checkpoint_path(tmp_path / 'run', step)}, after step {step}"
        assert len(after) == 2 and after[1].startswith("resume with: ")
    else:
        assert after == [f"nothing to resume: {tmp_path}/run has no good checkpoint ({EVERY})"]
    assert read_metrics(tmp_path / "run"), "every line is whole"
    last = read_events(tmp_path / "run")[-1]
    assert last["event"] == "stop" and last["message"].startswith(message)


def test_a_run_whose_disk_has_no_room_for_the_weights_has_not_finished(tmp_path: Path) -> None:
    write_text(tmp_path)
    still = tmp_path / "still"
    still_model.stand_still_in(still, 3)
    with launch(tmp_path, *SMALL, "mesh=dp2", *still_model.write(tmp_path, still)) as run:
        run.wait_for_steps(2)
        limit_files(run.process.pid, 8_000)
        still_model.go_on(still)
        done = run.finish()
    assert done.code == 1
    weights = tmp_path / "run" / "weights.safetensors"
    assert done.err.splitlines()[0] == f"error: the run's files cannot be written: {weights} (File too large)"
    assert not weights.exists() and not (tmp_path / "run" / "summary.json").exists()
    assert [line.step for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert [event["event"] for event in read_events(tmp_path / "run")][-1] == "stop"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB: room for some checkpoints of a small run."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path, *, leave: int) -> Path:
    """Fills a disk up to so many bytes. Returns the file that does."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(filler, max(0, filler.stat().st_size - leave))
    return filler


@pytest.mark.parametrize("asked", [False, True])
def test_a_full_disk_names_the_last_good_checkpoint_and_the_run_goes_on_from_it(
    tmp_path: Path, small_disk: Path, asked: bool
) -> None:
    """No line of the metrics can be written; or, asked to end, no part of the last checkpoint."""
    write_text(tmp_path)
    still, run_dir = tmp_path / "still", small_disk / "run"
    # Between two checkpoints: nothing is removed any more that would make room, and nothing is half written.
    still_model.stand_still_in(still, 10)
    model = still_model.write(tmp_path, still)
    arguments = [*SMALL, "train.steps=40", "mesh=dp2", *model, f"run.dir={run_dir}"]
    with launch(tmp_path, *arguments, "checkpoint.every=4", "timeouts.shutdown=1000") as run:
        eventually(lambda: (run_dir / "checkpoints/step_00000008/manifest.json").exists(), run.process)
        filler = fill(small_disk, leave=16_384 if asked else 0)
        if asked:
            run.process.terminate()
            eventually(lambda: "signal" in [event["event"] for event in read_events(run_dir)], run.process)
        still_model.go_on(still)
        done = run.finish()
        assert done.code == (143 if asked else 1) and "Traceback" not in done.err, done.err
        # Workers that see the controller give up save their state, and say so where there is no room for that either.
        of_workers = [line for line in done.err.splitlines() if line.startswith("worker ")]
        assert all("could not be written" in line and "No space left on device" in line for line in of_workers)
        what, newest, command = [line for line in done.err.splitlines() if line not in of_workers]
        if asked:
            assert "could not be written: " in what and "No space left on device" in what
        else:
            assert what.startswith("error: the run's files cannot be written: ")
        filler.unlink()
        assert int(newest.partition(" after step ")[2]) >= 8 and f"train.resume={run_dir} " in command
        words = [*shlex.split(command.removeprefix("resume with: ")), "checkpoint.every=0"]
        resumed = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert resumed.returncode == 0, resumed
    assert [line.step for line in read_metrics(run_dir)] == list(range(1, 41))


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *ENDLESS, "mesh=dp2") as run:
        run.wait_for_steps(2)
        os.killpg(run.process.pid, signal.SIGINT)
        done = run.finish()
    assert done.code == 130
    events = read_events(tmp_path / "run")
    assert [event["event"] for event in events[-4:]] == ["model_check", "signal", "checkpoint", "stop"]
    assert events[-3]["signal"] == "SIGINT" and "it was asked to by SIGINT" in events[-1]["message"]


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("signal.signal(signal.SIGINT, signal.SIG_DFL)", signal.SIGINT),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))", signal.SIGTERM),
    ],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_module_that_takes_a_signal_does_not_keep_the_run_from_saving(
    tmp_path: Path, line: str, number: signal.Signals
) -> None:
    """The signal comes to all processes of the run, each of which has imported the module."""
    write_text(tmp_path)
    go = tmp_path / "go"
    model = [*patient_model.write(tmp_path, go), "model.target=taking.PatientGPT"]
    (tmp_path / "taking.py").write_text(f"import signal, sys\nfrom patient_model import PatientGPT\n{line}\n")
    arguments = [*SMALL, "train.steps=16", "mesh=dp2", *model]
    with launch(tmp_path, *arguments) as run:
        run.wait_for_steps(6)
        os.killpg(run.process.pid, number)
        eventually(lambda: "signal" in [event["event"] for event in read_events(tmp_path / "run")], run.process)
        go.touch()
        done = run.finish()
    assert done.code == 128 + number, done.err
    assert done.err.startswith(f"{number.name}: a module that the run has imported has set a handler (")
    kinds = [event["event"] for event in read_events(tmp_path / "run")]
    assert "checkpoint" in kinds and kinds[-1] == "stop"
    assert newest_complete(tmp_path / "run")
    assert train(tmp_path, "train.resume=run").code == 0
    assert train(tmp_path, *arguments, "run.dir=undisturbed").code == 0
    ends = [tmp_path / name for name in ("run", "undisturbed")]
    went, undisturbed = ([line.loss_hex for line in read_metrics(folder)] for folder in ends)
    assert went == undisturbed and len(went) == 16
    went, undisturbed = (read_summary(folder)["weights_sha256"] for folder in ends)
    assert went == undisturbed


def test_workers_get_room_for_their_links(tmp_path: Path) -> None:
    write_text(tmp_path)
    limits = {resource.RLIMIT_NOFILE: (30, 500)}  # a worker of dp4 has more open files
    with launch(tmp_path, *ENDLESS, "mesh=dp4", limits=limits) as run:
        run.wait_for_steps(1)
        for pid in [run.process.pid, *run.workers()]:
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (500, 500)


def test_a_run_with_ports_has_room_for_the_connections_of_strangers(tmp_path: Path) -> None:
    """As many as the soft limit would do, of anybody, would keep the run from writing its files, which ends it."""
    write_text(tmp_path)
    limits = {resource.RLIMIT_NOFILE: (200, 500)}  # the links of dp2 fit into either
    with launch(tmp_path, *ENDLESS, "mesh=dp2", "runtime.transport=tcp", limits=limits) as run:
        run.wait_for_steps(1)
        for pid in [run.process.pid, *run.workers()]:
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (500, 500)


@pytest.mark.skipif(bool(why_not_shared()), reason=why_not_shared())
def test_where_memory_cannot_be_shared_links_go_over_sockets_and_the_run_says_so(tmp_path: Path) -> None:
    """Its size counts as a file's. Where it can be, nothing is said."""
    write_text(tmp_path)
    words, weights = [*SMALL, "mesh=dp2_pp2"], []
    for name, limits in (("limited", {resource.RLIMIT_FSIZE: (1 << 26, 1 << 26)}), ("free", None)):
        with launch(tmp_path, *words, f"run.dir={name}", limits=limits) as run:
            done = run.finish()
        assert done.code == 0, done.err
        assert ("links go over Unix sockets" in done.out and "File too large" in done.out) == (name == "limited")
        weights.append(read_summary(tmp_path / name)["weights_sha256"])
    assert weights[0] == weights[1]


def test_a_limit_that_is_too_low_is_refused(tmp_path: Path) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *ENDLESS, "mesh=dp4", limits={resource.RLIMIT_NOFILE: (60, 60)}) as run:
        done = run.finish()
    assert done.code == 2 and "4 workers" in done.err and "ulimit -n 128" in done.err and "Traceback" not in done.err
    assert not (tmp_path / "run").exists()
