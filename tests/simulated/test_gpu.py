"""On a GPU, where there is one: copies, clocks, memory figures, and whole runs with losses and joins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.runtime.devices import Island, ThisMachine, device_of
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
GPU = "cuda"
LACKS = "; ".join(missing.what for missing in device_of(GPU).missing(ThisMachine()))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(LACKS), reason=f"no GPU can be used here: it needs {LACKS}")]


def python(*arguments: str) -> Any:
    """Runs a new Python with the environment variables of workers; returns what it prints, as JSON."""
    environment = os.environ | device_of(GPU).environment(os.environ, Island())
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


PRELUDE = (
    "import json, time, torch\n"
    "from elaswave_spmd.runtime.devices import Island, device_of\n"
    f"device = device_of('{GPU}').open(0, Island())\n"
)


def test_copies_cross_beside_computation_and_have_what_was_there_when_they_began() -> None:
    found = python(
        "-c",
        PRELUDE + "x = torch.ones(1 << 22, device=device.place)\n"
        "y = torch.ones(4096, 4096, device=device.place)\n"
        "for _ in range(20): y = y @ y * 1e-4\n"
        "begun = time.perf_counter()\n"
        "copy = device.copy_to_host(x)\n"
        "asked = time.perf_counter() - begun\n"
        "there = device.from_host(torch.arange(5.0)[1:])\n"
        "host = copy.wait()\n"
        "print(json.dumps([asked, host.is_pinned(), bool((host == 1).all()), there.tolist(), there.data_ptr() % 256]))",
    )
    asked, pinned, same, there, unaligned = found
    assert asked < 0.5 and pinned and same and there == [1, 2, 3, 4] and not unaligned


def test_times_are_those_of_the_device() -> None:
    waited, measured = python(
        "-c",
        PRELUDE + "y = torch.ones(8192, 8192, device=device.place); y @ y; device.synchronize()\n"
        "a = device.mark()\n"
        "for _ in range(10): y @ y\n"
        "b = device.mark()\n"
        "began, ended = device.times([a, b])\n"
        "print(json.dumps([time.perf_counter() - began, ended - began]))",
    )
    assert 0 < measured <= waited * 1.1  # the queue took at least as long as its kernels


def test_memory_figures_are_told() -> None:
    before, after, total = python(
        "-c",
        PRELUDE + "a = device.memory(); x = torch.ones(1 << 24, device=device.place); b = device.memory()\n"
        "print(json.dumps([a.allocated, b.allocated, b.total]))",
    )
    assert after - before >= 1 << 26 and total > after


CASES = [
    ("gpt", "fp32", "dp2_pp2", 0, []),
    ("gpt", "fp32", "dp2_pp2", 3, ["kill", "join"]),
    ("llama", "bf16", "dp3", 1, ["kill", "join"]),
    ("gpt_tied", "fp32", "stages1-3", 2, ["corrupt", "term"]),
]


@pytest.mark.parametrize(("model", "dtype", "mesh", "zero", "events"), CASES)
def test_a_disturbed_run_has_the_bits_of_one_worker(
    model: str, dtype: str, mesh: str, zero: int, events: list[str]
) -> None:
    found = python("-m", "tests.simulated.device_runs", " ".join([GPU, GPU, model, dtype, mesh, str(zero), *events]))
    assert (found["differs"], found["seen"], len(found["losses"])) == ([], [GPU], 4)
    assert found["epochs"] >= len(events), found


def test_losses_are_those_of_the_cpu_within_rounding() -> None:
    found = python("-m", "tests.simulated.device_runs", f"{GPU} cpu gpt fp32 dp2_pp2 1")
    pairs = zip(found["losses"], found["beside"], strict=True)
    assert all(abs(float.fromhex(a) - float.fromhex(b)) < 1e-4 for a, b in pairs), found


def test_a_sum_in_one_kernel_has_the_bits_of_additions_in_turn() -> None:
    assert python("-W", "error:sums:UserWarning", "-m", "tests.simulated.device_sums", GPU) == []
