"""Texts that a run generates: of which weights, what is told where there is none, and the end of their process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import command_lines
from elaswave_spmd.conf.schema import GenerateSettings, Settings
from elaswave_spmd.controller.text_samples import TextSampler, in_one_line
from elaswave_spmd.data import PreparedData
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.run_dir import RunInfo
from elaswave_spmd.weights.generate import check_prompt
from tests.waiting import PATIENCE_S, eventually

# Answers as elaswave_spmd.weights.generate_process does. A file beside the checkpoint says what else it does.
PROCESS = """
import json, os, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    path = asked["path"]
    if os.path.exists(path + ".dies"):
        sys.exit("no memory")
    open(path + ".asked", "w").close()
    while os.path.exists(path + ".held"):
        time.sleep(0.01)
    if os.path.exists(path + ".gone"):
        answer = {"gone": True, "error": "no such file"}
    else:
        answer = {"text": f"{asked['prompt']} {os.path.basename(path)} {asked['tokens']}", "seconds": 0.5}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def sampler(tmp_path: Path) -> Iterator[TextSampler]:
    settings = GenerateSettings(prompt="Once", tokens=7, temperature=0.5, seed=3)
    made = TextSampler(settings, [sys.executable, "-c", PROCESS])
    made.started(RunInfo("m", "dp2", "zero2", 10, 20, 2, run_dir=str(tmp_path)))
    (tmp_path / "checkpoints").mkdir()
    yield made
    made.close()


def saved(sampler: TextSampler, step: int) -> None:
    """A checkpoint is on the disk."""
    sampler.event("checkpoint", 0.0, "", {"step": step, "bytes": 1})


def beside(folder: Path, step: int, what: str) -> Path:
    return folder / "checkpoints" / f"step_{step:08}.{what}"


def wait(sampler: TextSampler) -> list[Mapping[str, object]]:
    """Waits for the texts that were asked for. Returns what is told."""
    assert sampler.wait(time.monotonic() + PATIENCE_S)
    return [*sampler.pop_news()]


def test_a_text_is_made_of_each_checkpoint_and_of_the_weights_at_the_end(sampler: TextSampler, tmp_path: Path) -> None:
    saved(sampler, 2)
    (first,) = wait(sampler)
    assert first == {
        "event": "generated",
        "step": 2,
        "prompt": "Once",
        "text": "Once step_00000002 7",
        "temperature": 0.5,
        "seed": 3,
        "seconds": 0.5,
        "message": "step 2: Once step_00000002 7",
    }
    sampler.finished({"steps": 3})
    (last,) = wait(sampler)
    assert (last["step"], last["text"]) == (3, f"Once {tmp_path.name} 7")


def test_while_one_text_is_made_only_the_newest_checkpoint_waits(sampler: TextSampler, tmp_path: Path) -> None:
    beside(tmp_path, 2, "held").touch()
    for step in (2, 4, 6):
        saved(sampler, step)
        if step == 2:
            eventually(beside(tmp_path, 2, "asked").exists)
    assert not sampler.wait(time.monotonic())
    beside(tmp_path, 2, "held").unlink()
    told = wait(sampler)
    assert [(news["event"], news["step"]) for news in told] == [("generated", 2), ("generated", 6)]
    assert [news.get("left_out") for news in told] == [[4], None]


def test_a_process_that_has_ended_is_told_with_its_last_words_and_started_again(
    sampler: TextSampler, tmp_path: Path
) -> None:
    beside(tmp_path, 2, "dies").touch()
    saved(sampler, 2)
    (told,) = wait(sampler)
    assert told["reason"] == "the process that generates text has ended (no memory)"
    saved(sampler, 4)
    assert [news["event"] for news in wait(sampler)] == ["generated"]


def test_a_checkpoint_that_was_removed_meanwhile_is_told_as_such(sampler: TextSampler, tmp_path: Path) -> None:
    beside(tmp_path, 2, "gone").touch()
    saved(sampler, 2)
    (told,) = wait(sampler)
    assert "removed, since there are newer ones" in str(told["reason"])


def test_a_run_that_begins_again_tells_no_text_twice_and_after_going_back_it_does(sampler: TextSampler) -> None:
    saved(sampler, 4)
    assert len(wait(sampler)) == 1
    saved(sampler, 4)
    assert not wait(sampler)
    sampler.given_up(2)
    saved(sampler, 4)
    assert len(wait(sampler)) == 1


def test_the_text_of_a_step_that_was_given_up_is_not_told(sampler: TextSampler, tmp_path: Path) -> None:
    beside(tmp_path, 4, "held").touch()
    saved(sampler, 4)
    eventually(beside(tmp_path, 4, "asked").exists)
    sampler.given_up(2)
    beside(tmp_path, 4, "held").unlink()
    assert not wait(sampler)


def test_the_end_kills_the_process_and_says_what_was_not_made(sampler: TextSampler, tmp_path: Path) -> None:
    beside(tmp_path, 2, "held").touch()
    saved(sampler, 2)
    eventually(beside(tmp_path, 2, "asked").exists)
    process = sampler._process
    assert process is not None
    sampler.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    assert [(news["event"], news["step"]) for news in sampler.pop_news()] == [("not_generated", 2)]
    sampler.stop_waiting()
    assert not sampler.wait(time.monotonic() + PATIENCE_S)  # a signal has come: it does not wait
    saved(sampler, 4)
    sampler.close()
    assert not sampler.pop_news()


# A controller whose callback has forked a process that outlives it.
CONTROLLER = """
import os, signal, sys, time
from pathlib import Path
from elaswave_spmd.conf.schema import GenerateSettings
from elaswave_spmd.controller.text_samples import TextSampler
from elaswave_spmd.run_dir import RunInfo
sampler = TextSampler(GenerateSettings(prompt="Once"), [sys.executable, "-c", sys.argv[1]])
sampler.started(RunInfo("m", "dp2", "zero2", 10, 20, 2, run_dir=sys.argv[2]))
sampler.event("checkpoint", 0.0, "", {"step": 2})
assert sampler.wait(time.monotonic() + float(sys.argv[3]))
fork = os.fork()
if not fork:
    os.close(1)
    while True:
        signal.pause()
print(sampler._process.pid, fork, flush=True)
sampler.event("checkpoint", 0.0, "", {"step": 4})
assert sampler.wait(time.monotonic() + float(sys.argv[3]))
print(*(news["event"] for news in sampler.pop_news()), flush=True)
signal.pause()
"""


def test_the_process_ends_with_its_controller_though_a_fork_of_that_lives(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    command = [sys.executable, "-c", CONTROLLER, PROCESS, str(tmp_path), str(PATIENCE_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller, ExitStack() as ended:
        ended.callback(controller.kill)
        assert controller.stdout is not None
        process, fork = map(int, controller.stdout.readline().split())
        ended.callback(os.kill, fork, signal.SIGKILL)
        assert controller.stdout.readline() == "generated generated\n", "and the controller still has it"
        controller.kill()
        eventually(lambda: process not in command_lines())
        assert fork in command_lines()


def test_a_line_of_a_terminal_has_nothing_that_a_terminal_obeys() -> None:
    assert in_one_line("a\n\tb \x1b[2J\u202ec") == "a b ·[2J·c"


def settings(**groups: Any) -> Settings:
    return Settings.from_dict({"generate": {"prompt": "Once"}, **groups})


def data(tokenizer: str, name: str = "text", target: str = "") -> PreparedData:
    file = ("", "", 0) if target else ("/tokens", "uint8", 9)
    return PreparedData(target or name, "", 9, tokenizer, 0 if target else 256, 8, 1, 1, *file, target=target)


@pytest.mark.parametrize(
    ("given", "tokenizer", "what"),
    [
        ({"model": {"target": "my_file.MyModel"}}, "bytes", "is given with model.target=my_file.MyModel"),
        ({"data": {"name": "bin", "path": "a.bin"}}, "uint16", "data=bin, which has tokens and no tokenizer"),
        ({"data": {"name": "arrow", "path": "a", "column": "ids"}}, "tokens", "data=arrow, which has tokens"),
        ({"data": {"target": "my_file.MyData"}}, "", "data.target=my_file.MyData, which has no tokenizer"),
    ],
)
def test_a_prompt_is_refused_where_there_is_no_text(given: dict[str, Any], tokenizer: str, what: str) -> None:
    named = given.get("data", {})
    prepared = data(tokenizer, named.get("name", "text"), named.get("target", ""))
    with pytest.raises(ConfigError, match=what) as caught:
        check_prompt(settings(**given), prepared)
    assert caught.value.where == "generate.prompt=Once" and "on_checkpoint" in caught.value.fix
    check_prompt(Settings.from_dict(given), prepared)  # nobody has asked for text


def test_a_prompt_is_taken_where_there_is_a_tokenizer() -> None:
    check_prompt(settings(), data("bytes"))
    check_prompt(settings(), data("tokenizer.json:0123456789ab"))
