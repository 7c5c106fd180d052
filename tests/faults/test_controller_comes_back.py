"""A controller is killed, or stopped, while a run trains: the next one adopts the workers; nothing is done again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.run_dir import read_events, read_summary
from elaswave_spmd.run_dir.journal import read_journal
from elaswave_spmd.run_dir.lock import LOCK
from elaswave_spmd.worker.plan_run import read_profile
from tests.descriptors import unread
from tests.faults.fault_runs import TINY, Bits, go_on
from tests.multiprocess import patient_model
from tests.multiprocess.real_runs import Launched, eventually, kill_at_once, launch, write_text
from tests.waiting import PATIENCE_S
from tests.waiting import eventually as waiting

STEPS = 40
KILLS = 5
UNMEASURED_BANDWIDTH = 1e9  # bytes per second that plans begin with
AT = 10  # the step at which a controller is killed: the ones after it take half a minute, or until `go` is there
Undisturbed = Callable[[int], Bits]
MODEL = ("model.target=patient_model.PatientGPT", "+model.args.go=go", "+model.args.growth=1.1")
ADOPT = "timeouts.adopt=1000"  # however slow this machine is
# Where nobody adopts. Some may wait so long for the votes of one that a busy machine lets stand still: if they gave up
# the step under way, and that one had all votes and applied it, their states would be of two steps.
SHORT_ADOPT = "timeouts.adopt=5"
WORDS = (*TINY, *MODEL, "mesh=dp2_pp2", f"train.steps={STEPS}")


def controller_of(folder: Path) -> int:
    """The process that has locked the run's directory."""
    return int((folder / "run" / LOCK).read_text())


def comebacks(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "run") if event["event"] == "controller"]


def killed_at(run: Launched, step: int, number: int = signal.SIGKILL, comeback: int = 0) -> int:
    """Sends a signal to the controller once so many steps are written. Returns its process id.

    Args:
        comeback: the number of controllers that have taken another one's place before. It is the last of them, and has
            written a step: the supervisor gives up after three deaths without one, and a line of the display follows
            that of the file.
    """
    run.wait_for_steps(step)
    if comeback:
        eventually(lambda: len(comebacks(run.folder)) >= comeback, run.process)
        run.wait_for_steps(max(step, comebacks(run.folder)[-1]["after_step"] + 1))
    os.kill(pid := controller_of(run.folder), number)
    return pid


def assert_nothing_was_done_again(folder: Path, wanted: Bits, generation: int) -> None:
    """Every step has one line, with the bits of a run in which nothing happens; no run was begun again."""
    assert Bits.of(folder / "run") == wanted
    assert read_summary(folder / "run")["controller_generation"] == generation
    events = read_events(folder / "run")
    assert not [event for event in events if event["event"] in ("restart", "resume", "rollback")]
    assert sum(event.get("microbatches_redone", 0) for event in events) == 0
    assert len({line["incarnation"] for line in read_journal(folder / "run")}) == 1, "no life of the run but the first"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_text(tmp_path)
    patient_model.write(tmp_path, tmp_path / "go")
    return tmp_path


def test_a_controller_that_is_killed_five_times_is_adopted_from_five_times(
    folder: Path, undisturbed: Undisturbed
) -> None:
    with launch(folder, "--supervise", *WORDS) as run:
        pids = [killed_at(run, 4 * (number + 1), comeback=number) for number in range(KILLS)]
        go_on(folder)
        done = run.finish()
    assert done.code == 0, done.err
    assert len(set(pids)) == KILLS
    found = comebacks(folder)
    assert [(event["generation"], event["workers"]) for event in found] == [(n + 2, 4) for n in range(KILLS)]
    assert done.err.count("another one takes its place") == KILLS
    assert "controller came back as generation 2 after" in done.out
    assert_nothing_was_done_again(folder, undisturbed(STEPS), KILLS + 1)


def test_what_layers_keep_and_links_take_is_told_to_the_next_controller(folder: Path) -> None:
    measuring = ("schedule.microbatches=true", "schedule.min_gain=0.99", "schedule.every=1", "schedule.window=1")
    with launch(folder, "--supervise", *WORDS, *measuring) as run:
        killed_at(run, AT)
        go_on(folder)
        done = run.finish()
    assert done.code == 0, done.err
    assert len(comebacks(folder)) == 1
    found = read_profile(str(folder / "run" / "costs.json"))
    assert all(layer.boundary_bytes for layer in found.layers[:-1])
    assert any(layer.activation_bytes for layer in found.layers)
    assert found.bandwidth != UNMEASURED_BANDWIDTH


def test_a_controller_that_is_stopped_is_killed_and_writes_nothing_any_more(
    folder: Path, undisturbed: Undisturbed
) -> None:
    with launch(folder, "--supervise", *WORDS) as run:
        killed_at(run, AT, signal.SIGSTOP)
        go_on(folder)
        done = run.finish()
    assert done.code == 0 and "has stood still" in done.err, done
    assert_nothing_was_done_again(folder, undisturbed(STEPS), 2)


def test_nobody_reads_the_output_and_the_next_controller_starts_a_fork_server(
    folder: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a terminal that has closed. All workers end with their fork server."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with unread() as output, launch(folder, "--supervise", *WORDS, "checkpoint.every=5", output=output) as run:
        run.wait_for_steps(AT)
        controller = controller_of(folder)
        (fork_server,) = [pid for pid, parent in run.processes().items() if parent == controller]
        kill_at_once([controller, fork_server])
        go_on(folder)
        assert run.finish().code == 0
    assert [event for event in read_events(folder / "run") if event["event"] == "resume"]
    assert Bits.of(folder / "run") == undisturbed(STEPS)


def test_a_worker_that_dies_while_there_is_no_controller_is_lost_as_ever(
    folder: Path, undisturbed: Undisturbed
) -> None:
    with launch(folder, *WORDS, ADOPT) as first:
        first.wait_for_steps(1)
        victim = first.workers()[1]
        first.wait_for_steps(AT)
        os.kill(first.process.pid, signal.SIGKILL)
        os.kill(victim, signal.SIGKILL)
        go_on(folder)
        first.process.wait(PATIENCE_S)
        mark = first.mark
        with launch(folder, *_resuming(), mark=mark) as run:
            out, err = run.process.communicate(timeout=PATIENCE_S)
            assert run.process.returncode == 0, (out, err)
        waiting(lambda: not first.processes() and not first.removers())
    (back,) = comebacks(folder)
    assert back["workers"] == 3 and "worker 1 ended meanwhile" in back["message"]
    assert Bits.of(folder / "run") == undisturbed(STEPS)
    lost = [event["ranks"] for event in read_events(folder / "run") if event["event"] == "fail"]
    assert lost == [[1]]


def test_workers_whom_nobody_adopts_save_their_state_and_end(folder: Path, undisturbed: Undisturbed) -> None:
    with launch(folder, *WORDS, SHORT_ADOPT, "checkpoint.every=1000") as run:
        killed_at(run, AT)
        go_on(folder)
        run.process.communicate(timeout=PATIENCE_S)
        waiting(lambda: not run.processes() and not run.removers())
    assert not comebacks(folder)
    with launch(folder, *_resuming(), "checkpoint.every=1000") as run:
        assert run.finish().code == 0
    assert not comebacks(folder), "they had ended"
    assert [event for event in read_events(folder / "run") if event["event"] == "resume"]
    assert Bits.of(folder / "run") == undisturbed(STEPS)


def test_a_stop_that_was_asked_for_ends_the_supervisor_as_well(folder: Path) -> None:
    with launch(folder, "--supervise", *WORDS, "train.steps=2000") as run:
        run.wait_for_steps(5)
        run.process.send_signal(signal.SIGTERM)
        done = run.finish()
    assert done.code == 128 + signal.SIGTERM, done
    assert "its state after step" in done.err.lower() and not comebacks(folder)
    assert "--supervise train.resume=" in done.err.splitlines()[-1], "it goes on with a supervisor, too"


def test_other_settings_or_another_model_are_refused_and_the_workers_live_on(
    folder: Path, undisturbed: Undisturbed
) -> None:
    with launch(folder, *WORDS, ADOPT) as first, contextlib.ExitStack() as left:
        killed_at(first, AT)
        go_on(folder)
        first.process.wait(PATIENCE_S)

        def tried(*words: str) -> tuple[int | None, str]:
            # The end of this context ends what is left of the run, its workers as well.
            other = left.enter_context(launch(folder, *_resuming(), *words, mark=first.mark))
            _, err = other.process.communicate(timeout=PATIENCE_S)
            assert len(first.processes()) >= 4, err
            return other.process.returncode, err

        code, err = tried("optim.lr=0.5")
        assert code == 2 and "other settings" in err
        text = (folder / "patient_model.py").read_text()
        (folder / "patient_model.py").write_text(text.replace("(**sizes)", "(**{**sizes, 'd_model': 64})"))
        code, err = tried()
        assert code == 2 and "layout.layers[0].parameters[0].shape: saved" in err, err
        assert "as they were when its workers began" in err
        (folder / "patient_model.py").write_text(text)
        run = left.enter_context(launch(folder, *_resuming(), mark=first.mark))
        eventually(lambda: comebacks(folder), run.process)
        out, err = run.process.communicate(timeout=PATIENCE_S)
        assert run.process.returncode == 0, (out, err)
        waiting(lambda: not first.processes() and not first.removers())
    assert_nothing_was_done_again(folder, undisturbed(STEPS), 2)


def test_workers_of_a_run_that_was_going_back_are_not_adopted(folder: Path, undisturbed: Undisturbed) -> None:
    """Their state may be wrong: the controller that was killed had said so, and had not ended them yet."""
    with launch(folder, *WORDS, ADOPT, "checkpoint.every=2") as first:
        first.wait_for_steps(AT)
        manifests = (folder / "run" / "checkpoints").glob("*/manifest.json")
        step = min(int(path.parent.name.removeprefix("step_")) for path in manifests)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait(PATIENCE_S)
        assert len(first.processes()) >= 4
        with (folder / "run" / "events.jsonl").open("a") as events:
            events.write(json.dumps({"event": "rollback", "time": 1.0, "step": step}) + "\n")
        go_on(folder)
        with launch(folder, *_resuming(), mark=first.mark) as run:
            out, err = run.process.communicate(timeout=PATIENCE_S)
            assert run.process.returncode == 0, (out, err)
        assert "are ended" in out and f"going back to step {step}" in out
        waiting(lambda: not first.processes() and not first.removers())
    assert not comebacks(folder)
    assert [event["step"] for event in read_events(folder / "run") if event["event"] == "resume"] == [step]
    assert Bits.of(folder / "run") == undisturbed(STEPS)


def test_a_signal_while_workers_are_taken_over_stops_the_run_with_its_state_saved(folder: Path) -> None:
    with launch(folder, *WORDS, "train.steps=2000", ADOPT, "checkpoint.every=1000") as first:
        killed_at(first, 5)
        first.process.wait(PATIENCE_S)
        with launch(folder, *_resuming(), "train.steps=2000", "checkpoint.every=1000", mark=first.mark) as run:
            eventually(lambda: _has_lock(folder, run.process.pid), run.process)
            run.process.send_signal(signal.SIGTERM)
            out, err = run.process.communicate(timeout=PATIENCE_S)
            assert run.process.returncode == 128 + signal.SIGTERM, (out, err)
            assert "its state after step" in err.lower(), err
        waiting(lambda: not first.processes() and not first.removers())


def test_a_signal_while_a_worker_does_not_answer_is_told_and_a_second_one_ends_the_run_at_once(folder: Path) -> None:
    """A worker that stands still is waited for, for five minutes: whoever wants the run to end hears of it."""
    words = ("train.steps=2000", "checkpoint.every=1000")
    with launch(folder, *WORDS, *words, ADOPT) as first:
        first.wait_for_steps(5)
        os.kill(first.workers()[1], signal.SIGSTOP)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait(PATIENCE_S)
        with launch(folder, *_resuming(), *words, mark=first.mark) as run:
            eventually(lambda: _has_lock(folder, run.process.pid), run.process)
            run.process.send_signal(signal.SIGTERM)
            eventually(
                lambda: [event for event in read_events(folder / "run") if event["event"] == "signal"], run.process
            )
            run.process.send_signal(signal.SIGINT)
            out, err = run.process.communicate(timeout=PATIENCE_S)
        assert run.process.returncode == 128 + signal.SIGTERM, (out, err)
        assert "SIGTERM: the run saves its state and ends once its workers are adopted" in out, (out, err)
        assert "the run stops at once, after a second signal (SIGINT)" in err, (out, err)
        waiting(lambda: not first.processes() and not first.removers())
    assert not comebacks(folder)


def test_a_controller_that_cannot_begin_leaves_the_workers_to_the_next_one(
    folder: Path, undisturbed: Undisturbed
) -> None:
    with launch(folder, *WORDS, ADOPT) as first:
        killed_at(first, AT)
        go_on(folder)
        first.process.wait(PATIENCE_S)
        (folder / "text.txt").rename(folder / "elsewhere.txt")
        (folder / "cache").rename(folder / "elsewhere")
        with launch(folder, *_resuming(), mark=first.mark) as failing:
            out, err = failing.process.communicate(timeout=PATIENCE_S)
            assert failing.process.returncode == 2, (out, err)
            assert len(first.processes()) >= 4
            (folder / "elsewhere.txt").rename(folder / "text.txt")
            if not (folder / "cache").exists():
                (folder / "elsewhere").rename(folder / "cache")
            with launch(folder, *_resuming(), mark=first.mark) as run:
                out, err = run.process.communicate(timeout=PATIENCE_S)
                assert run.process.returncode == 0, (out, err)
        waiting(lambda: not first.processes() and not first.removers())
    assert Bits.of(folder / "run") == undisturbed(STEPS)
    assert [(event["generation"], event["workers"]) for event in comebacks(folder)] == [(2, 4)]
    assert not [event for event in read_events(folder / "run") if event["event"] in ("restart", "resume", "fail")]


def test_a_signal_after_a_death_is_passed_on_to_a_controller_that_saves_the_state(folder: Path) -> None:
    with launch(folder, "--supervise", *WORDS, "train.steps=2000", "checkpoint.every=1000") as run:
        killed_at(run, 5)
        run.process.send_signal(signal.SIGTERM)
        done = run.finish()
    assert done.code == 128 + signal.SIGTERM, done
    assert "its state after step" in done.err.lower(), done


def _has_lock(folder: Path, pid: int) -> bool:
    return (folder / "run" / LOCK).read_text().strip() == str(pid)


def _resuming() -> list[str]:
    """The words of a command that goes on with the run."""
    return [*(word for word in WORDS if not word.startswith("run.dir")), "train.resume=run", ADOPT]
