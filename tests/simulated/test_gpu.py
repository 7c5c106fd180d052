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
    "import json, torch\n"
    "from elaswave_spmd.runtime.devices import Island, device_of\n"
    f"device = device_of('{GPU}').open(0, Island())\n"
    # Products in the device's queue. It may have done some by the time that what is looked at is called, on a machine
    # that is busy: then more of them are tried.
    "LONGER_AND_LONGER = (20, 80, 320, 1280)\n"
)


def test_copies_cross_beside_computation_and_have_what_was_there_when_they_began() -> None:
    """They have begun when what is in the queue is done, and the calls return before that."""
    found = python(
        "-c",
        PRELUDE + "y = torch.ones(4096, 4096, device=device.place)\n"
        "for products in LONGER_AND_LONGER:\n"
        "    x = torch.zeros(1 << 22, device=device.place)\n"
        "    device.to_host(x); device.from_host(torch.zeros(4)); device.synchronize()  # pinned memory is at hand\n"
        "    for _ in range(products): y = y @ y * 1e-4\n"
        "    x.fill_(1)\n"
        "    copy = device.copy_to_host(x)\n"
        "    there = device.from_host(torch.arange(5.0)[1:])\n"
        "    returned = not copy.done()\n"
        "    if returned: break\n"
        "host = copy.wait()\n"
        "same = bool((host == 1).all())\n"
        "print(json.dumps([returned, copy.done(), host.is_pinned(), same, there.tolist(), there.data_ptr() % 256]))",
    )
    returned, done, pinned, same, there, unaligned = found
    assert returned, "a call has waited for the queue"
    assert done and pinned and same and there == [1, 2, 3, 4] and not unaligned


def test_times_are_those_of_the_device() -> None:
    """Marks wait for nothing, `times` for all that is before the last one, and seconds are the device's own."""
    returned, done, first, times, milliseconds = python(
        "-c",
        PRELUDE + "y = torch.ones(8192, 8192, device=device.place); y @ y\n"
        "for products in LONGER_AND_LONGER:\n"
        "    device.synchronize()\n"
        "    marks = [device.mark()]\n"
        "    for _ in range(2):\n"
        "        for _ in range(products): y @ y\n"
        "        marks.append(device.mark())\n"
        "    returned = not marks[-1].event.query()\n"
        "    if returned: break\n"
        "times = device.times(marks)\n"
        "done = all(mark.event.query() for mark in marks)\n"
        "milliseconds = [marks[0].event.elapsed_time(mark.event) for mark in marks[1:]]\n"
        "print(json.dumps([returned, done, marks[0].queued, times, milliseconds]))",
    )
    assert returned, "a mark has waited for the queue"
    assert done and 0 < milliseconds[0] < milliseconds[1]
    assert times == [first, *(first + 1e-3 * each for each in milliseconds)]


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
