"""Layer programs of gpt_tiny on torch_xla: as on the CPU, compiled before the first step, split by their specs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.runtime.devices import ThisMachine, device_of
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
LACKS = device_of("xla").missing(ThisMachine())
pytestmark = pytest.mark.skipif(bool(LACKS), reason="; ".join(f"no {lack.what}: {lack.fix}" for lack in LACKS))


def printed(*words: object) -> str:
    """The last line that a module of these tests prints, with these arguments."""
    command = [sys.executable, "-m", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def steps(*arguments: object) -> dict[str, Any]:
    return json.loads(printed("tests.xla.layer_steps", *arguments))


def test_xla_is_here_when_it_is_not_skipped() -> None:
    assert importlib.util.find_spec("torch_xla") is not None


@pytest.fixture(scope="module")
def two_devices() -> dict[str, Any]:
    return steps(2, 1, 0.1)


def check(found: dict[str, Any], devices: int, programs: int) -> None:
    """Of embedding, block and head: forward, backward and evaluation each, and weight gradients of the last two."""
    assert all(abs(cpu - xla) < 1e-5 for cpu, xla in found["losses"])
    assert set(found["compiled"]) == {programs}
    assert found["shards"]["attn.qkv.weight"] == [4 * 3 * 128 * 128 // devices] * devices
    assert found["shards"]["attn_norm.weight"] == [4 * 128] * devices


def test_steps_on_one_device_are_those_of_the_cpu_and_compile_nothing() -> None:
    check(steps(1), 1, 10)  # without dropout the embedding's evaluation is its forward


def test_steps_on_two_devices_too_with_dropout(two_devices: dict[str, Any]) -> None:
    check(two_devices, 2, 11)
    assert two_devices["masks"], "keyed dropout draws other masks on XLA"


def test_parameters_are_split_over_both_axes() -> None:
    check(steps(2, 2), 4, 10)


def test_two_processes_give_the_same_bits(two_devices: dict[str, Any]) -> None:
    assert steps(2, 1, 0.1)["bits"] == two_devices["bits"]


def test_a_program_that_waits_for_another_does_not_hold_the_lock_that_the_other_needs() -> None:
    assert printed("tests.xla.programs_in_turn") == "30 2.0"
