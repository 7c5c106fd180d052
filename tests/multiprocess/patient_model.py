"""A small GPT for runs that must not end before something has happened to them; `write` puts it where a run finds it.

From step 6 on, each micro-batch waits before it is computed, longer in every step, until the file `go` is there. So a
test that waits for a newcomer has as much time as a busy machine takes, in few steps. No bit depends on the waits.
"""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from elaswave_spmd.models import GPT

FAST_STEPS, FIRST_S, GROWTH, LONGEST_S = 5, 0.02, 1.3, 5.0


class PatientGPT(GPT):
    """A GPT that waits for the file `go`.

    Args:
        growth: of the waits, from one step to the next.
        longest_s: the longest of them.
    """

    def __init__(self, *, go: str, growth: float = GROWTH, longest_s: float = LONGEST_S, **sizes: Any) -> None:
        super().__init__(**sizes)
        wait_for(next(iter(self.layers)), go, growth, longest_s)


def wait_for(layer: nn.Module, go: str, growth: float = GROWTH, longest_s: float = LONGEST_S) -> None:
    """Let a layer that is given keys wait for the file `go` before its forward."""
    layer.register_forward_pre_hook(partial(_wait, Path(go), growth, longest_s))


def _wait(go: Path, growth: float, longest_s: float, _: nn.Module, given: tuple[Any, ...]) -> None:
    slow_steps = int(given[1].step) - FAST_STEPS
    if slow_steps > 0 and not go.exists():
        time.sleep(min(FIRST_S * growth**slow_steps, longest_s))


def write(folder: Path, go: Path) -> list[str]:
    """Puts the model into a run's folder; returns the overrides that choose it."""
    shutil.copy(__file__, folder / "patient_model.py")
    return ["model.target=patient_model.PatientGPT", f"+model.args.go={go}"]
