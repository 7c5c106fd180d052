"""A controller that is killed after the last step: its result is there, or all that the run needs to have it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.fault_runs import STEPS, TINY, Bits
from tests.multiprocess.real_runs import launch, train, write_text
from tests.waiting import PATIENCE_S, eventually

MOMENTS: dict[str, Callable[[Path], bool]] = {
    "the last step is written": lambda run: (run / "metrics.jsonl").read_bytes().count(b"\n") >= STEPS,
    "it is validated": lambda run: (run / "events.jsonl").read_text().count('"validation"') >= 2,
    "the weights are written": lambda run: (run / "weights.safetensors").exists(),
    "the summary is written": lambda run: (run / "summary.json").exists(),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_no_step_is_lost(tmp_path: Path, undisturbed: Callable[[int], Bits], moment: str) -> None:
    write_text(tmp_path)
    run = tmp_path / "run"
    with launch(tmp_path, *TINY, "mesh=dp2_pp2") as launched:
        launched.wait_for_steps(1)
        until = time.monotonic() + PATIENCE_S
        while not MOMENTS[moment](run) and launched.process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.0005)  # what comes next comes soon
        with suppress(ProcessLookupError):  # it has ended by then, as ever
            os.kill(launched.process.pid, signal.SIGKILL)
        launched.process.communicate(timeout=PATIENCE_S)
        eventually(lambda: not launched.processes() and not launched.removers())
    if not (run / "summary.json").exists():
        done = train(tmp_path, "train.resume=run")
        assert done.code == 0, done
    assert Bits.of(run) == undisturbed(STEPS)
