"""Text that a real run generates: of its checkpoints and of its result, through a kill, and no number shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elaswave_spmd.report.page import page_of
from elaswave_spmd.report.recorded import RunReader
from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from elaswave_spmd.weights.generate_command import main
from tests.multiprocess.real_runs import SMALL, train, write_text
from tests.waiting import PATIENCE_S

RUN = [*SMALL, "mesh=dp2", "checkpoint.every=2"]
PROMPT = ["generate.prompt=the quick", "generate.tokens=8", "generate.temperature=0", "timeouts.callbacks=300"]


def test_a_run_with_a_kill_tells_the_text_of_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for folder in (tmp_path, plain):
        write_text(folder)
    kill = "chaos.events=[{step: 3, kind: kill, rank: 1, point: backward}]"
    done = train(tmp_path, *RUN, *PROMPT, kill, "run.tensorboard=true")
    assert done.code == 0, done.err
    assert train(plain, *RUN).code == 0
    run = tmp_path / "run"
    assert [line.loss_hex for line in read_metrics(run)] == [line.loss_hex for line in read_metrics(plain / "run")]
    assert read_summary(run)["weights_sha256"] == read_summary(plain / "run")["weights_sha256"]

    events = read_events(run)
    told = {event["step"]: event for event in events if event["event"] in ("generated", "not_generated")}
    saved = [event["step"] for event in events if event["event"] == "checkpoint"]
    # A checkpoint may be gone, or a newer one there, before its turn has come; the end is waited for.
    assert {*told, *(step for event in told.values() for step in event.get("left_out", []))} == {*saved, 6}
    assert told[6]["event"] == "generated"
    assert told[6]["prompt"] == "the quick" and f"generated: step 6: {told[6]['text'].split()[0]}" in done.out
    assert main([str(run), "the quick", "--tokens", "8"], "elaswave-spmd") == 0
    assert capsys.readouterr().out == told[6]["text"] + "\n"
    assert _texts(run / "tensorboard")[6] == told[6]["text"]
    assert "Generated text" in page_of(RunReader(run).read())


def _texts(folder: Path) -> dict[int, str]:
    """Step -> text, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loaded = EventAccumulator(str(folder))
    loaded.Reload()
    (tag,) = loaded.Tags()["tensors"]
    return {event.step: event.tensor_proto.string_val[0].decode() for event in loaded.Tensors(tag)}


def test_a_prompt_for_a_model_without_text_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    write_text(tmp_path)
    done = train(tmp_path, *RUN, *PROMPT, "model.target=my_file.MyModel")
    assert done.code == 2 and "generate.prompt=the quick is given with model.target=my_file.MyModel" in done.err
    assert not (tmp_path / "run").exists()


def test_the_process_that_generates_ends_when_its_input_does() -> None:
    process = subprocess.Popen([sys.executable, "-m", "elaswave_spmd.weights.generate_process"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0
