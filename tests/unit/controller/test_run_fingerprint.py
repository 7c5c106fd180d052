"""The identity of a run: all that its bits depend on, as it stands in checkpoints."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller import run_fingerprint as module
from elaswave_spmd.controller.run_fingerprint import as_far_as_saved, identity_of
from tests.unit.devices.made_up_machines import GPU


def identity(**runtime: object) -> dict[str, Any]:
    names = ("sha256", "tokenizer", "vocab_size", "num_train_samples", "target")
    data: Any = SimpleNamespace(**dict.fromkeys(names, 1), kwargs={}, attributes={}, tokens_sha256="")
    return identity_of(Settings.from_dict({"runtime": runtime}), data)


def test_compiled_programs_are_other_programs_with_the_compiler_that_made_them() -> None:
    plain, compiled = identity(), identity(compile=True)
    assert "compile" not in plain["runtime"] and "cxx" not in plain["versions"]
    assert compiled["runtime"].pop("compile") == 2
    assert isinstance(compiled["versions"].pop("cxx"), str)
    assert compiled == plain


def test_programs_of_islands_have_other_bits_since_backwards_are_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.metadata, "version", lambda name: "2.9.0")
    assert "island_programs" not in identity()["runtime"]
    assert identity(device="xla")["runtime"]["island_programs"] == 2


def test_another_model_of_gpu_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "model" not in identity()["hardware"]
    texts = ("Model: \t\t NVIDIA A100\nIRQ: 1\n", "Model: \t\t NVIDIA H100\n", "Model: \t\t NVIDIA A100\n")
    machine = GPU.without(contents={"/proc/driver/nvidia/gpus/*/information": texts})
    monkeypatch.setattr(module, "ThisMachine", lambda: machine)
    assert identity(device="cuda")["hardware"]["model"] == "NVIDIA A100, NVIDIA H100"


def test_checkpointing_is_no_part_of_it_and_threads_are() -> None:
    assert identity(activation_checkpointing=True) == identity()
    assert identity(threads_per_worker=2) != identity()


def test_settings_of_the_model_that_shapes_do_not_show_are_part_of_it() -> None:
    model = identity()["model"]
    assert (model["target"], model["heads"], model["dropout"], model["args"]) == ("gpt", 4, 0.0, {})


def test_arguments_that_json_has_no_numbers_for_are_part_of_it_by_name() -> None:
    names = ("sha256", "tokenizer", "vocab_size", "num_train_samples", "target")
    data: Any = SimpleNamespace(**dict.fromkeys(names, 1), kwargs={"most": -math.inf}, attributes={}, tokens_sha256="")
    given = identity_of(Settings.from_dict({"model": {"args": {"bound": [math.inf, math.nan]}}}), data)
    assert (given["model"]["args"], given["data"]["args"]) == ({"bound": ["inf", "nan"]}, {"most": "-inf"})


def test_given_weights_are_part_of_it_where_they_are_given() -> None:
    names = ("sha256", "tokenizer", "vocab_size", "num_train_samples", "target")
    data: Any = SimpleNamespace(**dict.fromkeys(names, 1), kwargs={}, attributes={}, tokens_sha256="")
    given = identity_of(Settings.from_dict({"model": {"init_from": "a"}}), data)
    assert "init_from" not in identity()["model"], "only where it is given"
    assert given["model"].pop("init_from") == "a" and given == identity()


def test_tokens_are_part_of_it_by_their_hash_unless_the_saved_one_does_not_know_it() -> None:
    names = ("sha256", "tokenizer", "vocab_size", "num_train_samples", "target")
    data: Any = SimpleNamespace(**dict.fromkeys(names, 1), kwargs={}, attributes={}, tokens_sha256="abc")
    present = identity_of(Settings(), data)
    assert present["data"]["tokens_sha256"] == "abc" and "tokens_sha256" not in identity()["data"]
    assert as_far_as_saved(present, identity()) == identity()
    other = {**present, "data": {**present["data"], "tokens_sha256": "def"}}
    assert as_far_as_saved(present, other) == present
