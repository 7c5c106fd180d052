"""The output of a run and the files in its directory are those of docs/run_files.md."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from elaswave_spmd.conf.format_version import FORMAT_VERSION
from elaswave_spmd.controller.io import _ManifestWriter
from elaswave_spmd.controller.orphaned_run import NEXT_RANK
from elaswave_spmd.recovery.messages import Prepare
from elaswave_spmd.run_dir import weights_sha256
from tests.multiprocess.real_runs import SMALL, Done, train, write_text

DOCS = Path(__file__).parents[2] / "docs" / "run_files.md"


@dataclass(frozen=True)
class Run:
    folder: Path
    done: Done

    @property
    def metrics(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run with TensorBoard, bf16 and ZeRO-1, on ragged stages."""
    folder = tmp_path_factory.mktemp("files")
    write_text(folder)
    done = train(folder, *SMALL, "mesh.stages=[2,1]", "sharding=zero1", "run.tensorboard=true", "runtime.dtype=bf16")
    assert done.code == 0, done.err
    return Run(folder / "run", done)


def documented(section: str) -> set[str]:
    """The fields that the table of a section of the document lists."""
    text = DOCS.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    return {name for row in re.findall(r"^\| (`[^|]*) \|", text, re.M) for name in re.findall(r"`(\w+)`", row)}


def test_metrics_have_one_line_per_step_with_the_documented_fields(run: Run) -> None:
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    only_of_own_data = {"data_seconds", "weight"}
    for line in run.metrics:
        assert set(line) == documented("metrics.jsonl") - only_of_own_data
        assert float(str(line["loss"])).hex() == line["loss_hex"]
        assert float(str(line["grad_norm"])).hex() == line["grad_norm_hex"]
        assert (line["workers"], line["tokens"], line["mesh_epoch"]) == (3, 8 * 12, 0)


def test_events_tell_the_start_the_validations_and_the_finish(run: Run) -> None:
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "model_check", "validation", "validation", "finish"]
    assert [event.get("step") for event in events] == [None, None, 3, 6, None]
    assert all(a["time"] <= b["time"] for a, b in itertools.pairwise(events))
    start = events[0]
    assert (start["workers"], start["total_steps"], start["sharding"]) == (3, 6, "zero1")


def test_the_summary_has_the_documented_fields(run: Run) -> None:
    # Messages of strangers, options (mirrors, optim.ema, metrics of a model, early stopping), other controllers.
    only_if_any = {"rejected", "replicas", "weights_ema_sha256", "validation_metrics", "early_stop", "best"}
    only_if_any.add("controller_generation")
    assert documented("summary.json") - {"sha256", "bytes"} - only_if_any <= set(run.summary) | {
        *run.summary["corpus"],
        *run.summary["state_bytes_per_worker"]["0"],
    }
    assert set(run.summary) <= documented("summary.json")
    assert run.summary["steps"] == 6 and run.summary["final_loss_hex"] == run.metrics[-1]["loss_hex"]
    assert sorted(run.summary["state_bytes_per_worker"]) == ["0", "1", "2"]
    assert set(run.summary["state_bytes_per_worker"]["0"]) == {"params", "grads", "optim", "mirrors"}
    assert re.fullmatch(r"[0-9a-f]{64}", run.summary["corpus"]["sha256"]) and run.summary["corpus"]["bytes"] > 1000


def test_the_lines_of_the_journal_have_fields_that_are_told_of(run: Run) -> None:
    (first,) = map(json.loads, (run.folder / "epochs.jsonl").read_text().splitlines())
    lines = [first]
    journal = SimpleNamespace(
        append=lambda incarnation, epoch, reason, **fields: lines.append({"reason": reason, **fields})
    )
    writer = SimpleNamespace(_journal=journal, _incarnation=1)
    _ManifestWriter.journal(cast(Any, writer), Prepare(1, 6), {NEXT_RANK: 4})
    assert [line["reason"] for line in lines] == ["start", "prepare"]
    section = DOCS.read_text(encoding="utf-8").split("\n## epochs.jsonl\n")[1].split("\n## ")[0]
    told = set(re.findall(r"`(\w+)`", section))
    assert told >= {name for line in lines for name in line} | {line["reason"] for line in lines}


def test_the_weights_are_those_of_the_hash(run: Run) -> None:
    weights = load_file(run.folder / "weights.safetensors")
    assert weights_sha256(weights) == run.summary["weights_sha256"]
    assert sum(w.size for w in weights.values()) == run.summary["params"]
    assert all(w.dtype == np.float32 for w in weights.values())


def test_the_config_says_everything_again(run: Run) -> None:
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert config["format"] == FORMAT_VERSION
    assert config["mesh"]["stages"] == [2, 1] and config["runtime"]["dtype"] == "bf16"
    assert config["runtime"]["threads_per_worker"] == 1
    assert config["train"]["microbatch_size"] == 2 and config["train"]["steps"] == 6


def test_a_run_leaves_its_directory_and_nothing_else(run: Run) -> None:
    files = {"config.yaml", "metrics.jsonl", "events.jsonl", "summary.json", "weights.safetensors", "tensorboard"}
    files |= {"epochs.jsonl", "controller.lock", "workers.lock"}
    assert {path.name for path in run.folder.iterdir()} == files
    assert {path.name for path in run.folder.parent.iterdir()} == {"run", "text.txt", "cache"}
    assert list((run.folder / "tensorboard").iterdir())


def test_output_that_is_no_terminal_is_plain_lines(run: Run) -> None:
    assert "\x1b" not in run.done.out and "\r" not in run.done.out
    lines = run.done.out.splitlines()
    assert sum(bool(re.match(r"step 1/6  loss \d\.\d{4}  grad norm ", line)) for line in lines) == 1
    assert any(re.match(r"step 6/6  loss \d\.\d{4}  .* tokens/s  3 workers  0:00 left$", line) for line in lines)
    assert any(re.match(r"step 6  validation loss \d\.\d{4}$", line) for line in lines)
    assert any(run.summary["weights_sha256"] in line for line in lines)
    assert run.done.err == "", "no warning reaches the user"
