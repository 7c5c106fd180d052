"""Callbacks on threads of their own: order, a full queue, exceptions, hanging ones, the end, a second begin."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from elaswave_spmd import Callback, EndRecord, EventRecord, StartRecord, StepRecord, ValidationRecord
from elaswave_spmd.callbacks import CheckpointRecord
from elaswave_spmd.callbacks.named import checked, load_callbacks
from elaswave_spmd.callbacks.queue import Call, CallbackQueue
from elaswave_spmd.callbacks.runner import CallbackRunner
from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.run_dir import RunDir, RunInfo, RunObserver
from tests.waiting import PATIENCE_S, eventually

RECORDS = (StartRecord, StepRecord, EventRecord, ValidationRecord, CheckpointRecord, EndRecord)


def line(step: int) -> StepRecord:
    return StepRecord.of(
        step=step, mesh_epoch=0, loss=1.0 / step, grad_norm=1.0, lr=0.1, tokens=8, seconds=0.1, workers=2
    )


def info(run_dir: Path) -> RunInfo:
    return RunInfo("m", "dp2", "zero2", 10, 20, 2, run_dir=str(run_dir))


class Heard(Callback):
    """Keeps all that it was told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.threads: set[int] = set()

    def _hear(self, record: object) -> None:
        self.told.append(record)
        self.threads.add(threading.get_ident())

    on_start = on_step = on_event = on_validation = on_checkpoint = on_end = _hear

    @property
    def steps(self) -> list[int]:
        return [record.step for record in self.told if isinstance(record, StepRecord)]


class Held(Heard):
    """Does not return from its first call before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.has_begun = threading.Event()

    def _hold(self, record: object) -> None:
        self._hear(record)
        self.has_begun.set()
        self.go_on.wait(PATIENCE_S)

    on_step = on_end = _hold


class Raises(Heard):
    def on_step(self, step: StepRecord) -> None:
        raise KeyError(f"step {step.step}")


class Exits(Heard):
    def on_step(self, step: StepRecord) -> None:
        sys.exit(3)


def runner(*callbacks: Callback, seconds: float = PATIENCE_S, capacity: int = 1000) -> CallbackRunner:
    return CallbackRunner(callbacks, {"seed": 3}, seconds, capacity)


@pytest.fixture
def observer(tmp_path: Path) -> Iterator[tuple[RunObserver, CallbackRunner, Heard]]:
    """A run's observer with one callback."""
    heard = Heard()
    listener = runner(heard)
    run_dir = RunDir.create(tmp_path / "run", "", model="m", mesh="dp2")
    with RunObserver(run_dir, board=False, now=lambda: 7.0, listener=listener) as made:
        yield made, listener, heard


def news(listener: CallbackRunner) -> list[Mapping[str, object]]:
    """Waits for news of callbacks."""
    found: list[Mapping[str, object]] = []
    eventually(lambda: found.extend(listener.pop_news()) or found)
    return found


def test_a_callback_hears_everything_in_order_on_one_thread_of_its_own(
    observer: tuple[RunObserver, CallbackRunner, Heard], tmp_path: Path
) -> None:
    made, listener, heard = observer
    run_dir = made.run_dir.path
    made.on_start(info(run_dir))
    made.on_step(line(1))
    made.on_event("fail", ranks=(3,), message="worker 3 lost")
    made.on_validation(1, 2.5, 4)
    made.on_event("checkpoint", step=1, shards=2, bytes=77, message="")
    made.on_step(line(2))
    made.on_finish({"steps": 2}, {})
    listener.end(None)
    start = StartRecord(run_dir, "m", "dp2", "zero2", 10, 20, 1, 2, {"seed": 3})
    assert heard.told == [
        start,
        line(1),
        EventRecord("fail", 7.0, "fail: worker 3 lost", {"ranks": [3], "message": "worker 3 lost"}),
        ValidationRecord(1, 2.5, (2.5).hex(), 4),
        CheckpointRecord(1, run_dir / "checkpoints" / "step_00000001", 77),
        line(2),
        EndRecord(run_dir, True, 2, {"steps": 2}, ""),
    ]
    assert len(heard.threads) == 1 and threading.get_ident() not in heard.threads
    assert not listener.pop_news()


def test_records_cannot_be_changed(tmp_path: Path) -> None:
    for record in RECORDS:
        assert record.__dataclass_params__.frozen, record  # type: ignore[attr-defined]
    heard = Heard()
    listener = runner(heard)
    listener.started(info(tmp_path))
    listener.event("join", 0.0, "", {"ranks": [1]})
    listener.end(None)
    start, event, _ = heard.told
    assert isinstance(start, StartRecord) and isinstance(event, EventRecord)
    with pytest.raises(TypeError):
        event.fields["ranks"] = []  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        start.mesh = "single"  # type: ignore[misc]


def test_methods_that_a_callback_lacks_cost_nothing() -> None:
    queue = CallbackQueue(Callback())
    queue.put(Call("on_step", line(1)))
    assert queue._thread is None


def test_a_method_that_was_set_on_the_object_is_called_as_one_of_its_class(tmp_path: Path) -> None:
    told: list[object] = []
    callback = Callback()
    callback.on_step = told.append
    listener = runner(callback)
    listener.started(info(tmp_path))
    listener.step(line(1))
    listener.event("fail", 1.0, "lost", {})  # it has no method for this
    listener.finished({})
    listener.end(None)
    assert told == [line(1)] and not listener.pop_news()


def test_a_callback_that_hangs_holds_up_neither_the_run_nor_another_callback(tmp_path: Path) -> None:
    held, heard = Held(), Heard()
    listener = runner(held, heard)
    listener.started(info(tmp_path))
    for step in range(1, 101):
        listener.step(line(step))
    eventually(lambda: heard.steps == [*range(1, 101)])
    assert held.has_begun.wait(PATIENCE_S) and held.steps == [1]
    held.go_on.set()
    listener.end(None)
    assert held.steps == [*range(1, 101)]


def test_a_full_queue_leaves_out_steps_says_how_many_and_keeps_everything_else(tmp_path: Path) -> None:
    held = Held()
    listener = runner(held, capacity=10)
    listener.started(info(tmp_path))
    listener.step(line(1))
    held.has_begun.wait(PATIENCE_S)
    for step in range(2, 14):  # 2 to 11 wait, 12 and 13 have no place
        listener.step(line(step))
    listener.validation(13, 1.5, 1)  # takes the place of the oldest step
    assert [fields["state"] for fields in listener.pop_news()] == ["behind"]
    held.go_on.set()
    (told,) = news(listener)
    assert told["callback"] == "Held" and told["state"] == "left_out" and told["left_out"] == {"on_step": 3}
    listener.end(None)
    assert held.steps == [1, *range(3, 12)]
    assert [type(record) for record in held.told[-2:]] == [ValidationRecord, EndRecord]


def test_calls_other_than_steps_are_left_out_when_no_step_waits_but_never_the_end(tmp_path: Path) -> None:
    held = Held()
    listener = runner(held, capacity=2)
    listener.started(info(tmp_path))
    listener.step(line(1))
    held.has_begun.wait(PATIENCE_S)
    for _ in range(5):
        listener.event("join", 0.0, "", {})
    held.go_on.set()
    listener.end(None)
    assert len([r for r in held.told if isinstance(r, EventRecord)]) == 2 and isinstance(held.told[-1], EndRecord)
    assert {"on_event": 3} in [fields.get("left_out") for fields in listener.pop_news()]


@pytest.mark.parametrize(("kind", "error"), [(Raises, "KeyError: 'step 1'"), (Exits, "SystemExit: 3")])
def test_a_callback_that_raises_is_shown_and_dropped_and_the_others_go_on(
    tmp_path: Path, kind: type[Heard], error: str
) -> None:
    bad, heard = kind(), Heard()
    listener = runner(bad, heard)
    run_dir = RunDir.create(tmp_path / "run", "", model="m", mesh="dp2")
    with RunObserver(run_dir, board=False, listener=listener) as made:
        made.on_start(info(run_dir.path))
        made.on_step(line(1))
        eventually(lambda: (made.on_news(), made.recent_events)[1])
        made.on_step(line(2))
        listener.end(None)
    (shown,) = made.recent_events
    assert f"{kind.__name__}.on_step raised {error} (" in str(shown["text"]) and "test_callbacks.py" in str(
        shown["text"]
    )
    assert [type(record) for record in bad.told] == [StartRecord]
    assert heard.steps == [1, 2] and isinstance(heard.told[-1], EndRecord)
    assert not any(isinstance(record, EventRecord) for record in heard.told)  # what is said about callbacks


def test_the_event_of_a_callback_that_raised_has_its_name_method_error_and_traceback(tmp_path: Path) -> None:
    listener = runner(Raises())
    listener.started(info(tmp_path))
    listener.step(line(1))
    (fields,) = news(listener)
    assert fields["callback"] == "Raises" and fields["method"] == "on_step" and fields["error"] == "KeyError: 'step 1'"
    assert "Traceback" in str(fields["report"]) and "not called any more" in str(fields["message"])


def test_the_end_waits_for_a_callback_with_a_bound_and_names_who_was_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, heard = Held(), Heard()
    listener = runner(held, heard, seconds=0.2)
    wait, (_, other) = listener._wait, listener._queues

    def until_the_other_has_ended(until: float) -> None:
        """The bound is for the one that hangs, and not for the other one's thread on a busy machine."""
        eventually(lambda: other.is_over)
        wait(until)

    monkeypatch.setattr(listener, "_wait", until_the_other_has_ended)
    listener.started(info(tmp_path))
    for step in range(1, 4):
        listener.step(line(step))
    held.has_begun.wait(PATIENCE_S)
    listener.end(None)
    assert isinstance(heard.told[-1], EndRecord)
    states = {fields["callback"]: fields["state"] for fields in listener.pop_news()}
    assert states == {"Held": "unfinished"}
    held.go_on.set()  # it is not called any more
    assert held.steps == [1]


def test_halfway_through_the_wait_the_end_overtakes_what_still_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    listener = runner(held, seconds=2 * PATIENCE_S)
    wait, bounds = listener._wait, []

    def halves(until: float) -> None:
        """The first half passes while the callback is held in a step; it goes on in the second one."""
        bounds.append(until)
        if len(bounds) == 2:
            held.go_on.set()
            wait(until)

    monkeypatch.setattr(listener, "_wait", halves)
    listener.started(info(tmp_path))
    listener.step(line(1))
    held.has_begun.wait(PATIENCE_S)
    for step in range(2, 1001):
        listener.step(line(step))
    listener.end(None)
    assert isinstance(held.told[-1], EndRecord) and held.steps == [*range(1, len(held.steps) + 1)]
    (left_out,) = [fields["left_out"] for fields in listener.pop_news() if fields["state"] == "left_out"]
    assert left_out == {"on_step": 1000 - len(held.steps)} == {"on_step": 999}
    assert bounds[1] - bounds[0] == pytest.approx(PATIENCE_S)


def test_a_signal_ends_the_wait(tmp_path: Path) -> None:
    held = Held()
    listener = runner(held)
    listener.started(info(tmp_path))
    listener.step(line(1))
    held.has_begun.wait(PATIENCE_S)
    threading.Timer(0.05, listener.stop_waiting).start()
    listener.end(None)
    assert [fields["state"] for fields in listener.pop_news()] == ["unfinished"]
    held.go_on.set()


def test_a_run_that_begins_again_neither_loses_nor_doubles_steps(tmp_path: Path) -> None:
    heard = Heard()
    listener = runner(heard)
    for first in (1, 3):
        listener.started(info(tmp_path))
        for step in range(first, first + 4):
            listener.step(line(step))
            listener.validation(step, 1.0, 1)
    listener.end(RunError("nobody is left"))
    assert heard.steps == [1, 2, 3, 4, 5, 6]
    assert [r.step for r in heard.told if isinstance(r, ValidationRecord)] == [1, 2, 3, 4, 5, 6]
    assert [type(r) for r in heard.told].count(StartRecord) == 1
    end = heard.told[-1]
    assert isinstance(end, EndRecord) and not end.is_finished and (end.step, end.error) == (6, "nobody is left")


def test_a_resumed_run_that_commits_no_further_step_ends_at_the_step_that_it_went_on_from(tmp_path: Path) -> None:
    heard = Heard()
    listener = runner(heard)
    listener.started(replace(info(tmp_path), first_step=5))
    listener.end(RunError("nobody is left"))
    end = heard.told[-1]
    assert isinstance(end, EndRecord) and (end.is_finished, end.step) == (False, 4)


def test_a_run_that_is_resumed_after_its_last_step_ends_at_that_step(tmp_path: Path) -> None:
    heard = Heard()
    listener = runner(heard)
    listener.started(replace(info(tmp_path), first_step=10))  # of 10
    listener.finished({"steps": 10})
    listener.end(None)
    end = heard.told[-1]
    assert isinstance(end, EndRecord) and (end.is_finished, end.step) == (True, 10)


def test_steps_that_were_given_up_come_again(tmp_path: Path) -> None:
    heard = Heard()
    listener = runner(heard)
    listener.started(info(tmp_path))
    for step in (1, 2, 3):
        listener.step(line(step))
    listener.given_up(1)
    listener.step(line(2))
    listener.end(None)
    listener.end(None)
    assert heard.steps == [1, 2, 3, 2]
    assert [type(r) for r in heard.told].count(EndRecord) == 1


def test_a_run_that_was_refused_before_it_began_calls_nothing() -> None:
    heard = Heard()
    runner(heard).end(ConfigError("no"))
    assert not heard.told


# ---- named on a command line

OWN = """
from elaswave_spmd import Callback

class Good(Callback):
    pass

class Needs(Callback):
    def __init__(self, what):
        pass

class Other:
    pass

class Misspelt(Callback):
    def on_stpe(self, step):
        pass

made = Good()
number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_hooks.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import math\nmath.nothing\n")
    (tmp_path / "own_ends.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("own_hooks", "own_broken", "own_ends"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("own")
def test_callbacks_are_named_by_class_or_by_object() -> None:
    first, second = load_callbacks(["own_hooks.Good", "own_hooks.made"])
    assert first.name == second.name == "Good" and first is not second


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("target", "what", "more"),
    [
        ("Good", "run.callbacks=[Good] does not name a class in a module", "fix"),
        ("own_hook.Good", "the module of run.callbacks=[own_hook.Good] cannot be imported", "own_hooks"),
        ("own_broken.Good", "cannot be imported (AttributeError", "own_broken.py:2"),
        ("own_ends.Good", "cannot be imported (SystemExit: 3)", "own_ends.py:2"),
        ("builtins.exit", "run.callbacks=[builtins.exit] cannot be made (SystemExit", "defaults"),
        ("own_hooks.God", "module own_hooks has no God", "Good, Needs"),
        ("own_hooks.Needs", "run.callbacks=[own_hooks.Needs] cannot be made (TypeError", "defaults"),
        ("own_hooks.Other", "which is no callback", "derived from elaswave_spmd.Callback"),
        ("own_hooks.number", "which is no callback", "derived from elaswave_spmd.Callback"),
        ("own_hooks.Misspelt", "Misspelt has on_stpe, which no run calls", "fix:    def on_step(self, record)"),
    ],
)
def test_what_cannot_be_imported_or_made_is_refused_with_what_would_do(target: str, what: str, more: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_callbacks([target])
    assert what in str(caught.value) and more in str(caught.value)


def test_what_a_caller_gives_must_be_callbacks_each_once() -> None:
    good = Callback()
    assert checked([good]) == [good]
    for wrong in ([Callback], [good, good], [print]):
        with pytest.raises(ConfigError):
            checked(wrong)
    for no_list in (good, Callback, None, 3):
        with pytest.raises(ConfigError, match=r"callbacks is .*, which is no list(.|\n)*callbacks=\[Watch\(\)\]"):
            checked(no_list)


def test_a_misspelt_method_that_was_set_on_the_object_is_refused() -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.on_gpu = True  # no method
            self.on_stpe = print

    with pytest.raises(ConfigError, match=r"Watch has on_stpe, which no run calls(.|\n)*def on_step\(self, record\)"):
        checked([Watch()])
