"""The whole worker loop on a device that is no CPU, with losses and joins: the bits of the CPU.

The device is made up (tests.cluster.made_up_device): it computes on the CPU, under another name and with
tensors that no CPU operator takes. So this shows that the loop, the state and the links ask no device by name and mix
none; it shows nothing about any hardware.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]

CASES: list[tuple[str, str, str, int, list[str]]] = [
    ("gpt", "fp32", "dp3", 1, ["kill", "join"]),
    ("gpt_tied", "fp32", "dp2_pp2", 2, ["kill", "join"]),
    ("llama", "fp32", "dp2_pp2", 3, ["kill", "join"]),
    ("mlp", "bf16", "stages1-3", 3, ["kill", "join", "rebalance"]),
    ("mlp", "fp32", "dp3", 0, ["corrupt", "term"]),
]


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    """The results of all cases, from one process of their own: the made-up device stays registered in it."""
    cases = [
        " ".join(["madeup", "cpu", model, dtype, mesh, str(zero), *events])
        for model, dtype, mesh, zero, events in CASES
    ]
    command = [sys.executable, "-m", "tests.simulated.device_runs", *cases]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(CASES)), ids=["-".join(map(str, case[:4])) for case in CASES])
def test_a_run_on_the_made_up_device(runs: list[dict[str, Any]], number: int) -> None:
    found, events = runs[number], CASES[number][-1]
    assert (found["differs"], found["seen"], len(found["losses"])) == ([], ["madeup"], 4)
    assert found["epochs"] >= len(events), found
