"""A small GPT for runs that must not end before something has happened to them; `write` puts it where a run finds it.

From step 6 on, each micro-batch waits before it is computed, longer in every step, until the file `go` is there. So a
test that waits for a newcomer has as much time as a busy machine takes, in few steps. No bit depends on the waits.

One step can be held for another file: what has happened when that file is made has happened before the step ends.
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
        held_step: the step that lasts until the file `held_for` is there; 0: none does.
    """

    def __init__(
        self,
        *,
        go: str,
        growth: float = GROWTH,
        longest_s: float = LONGEST_S,
        held_step: int = 0,
        held_for: str = "",
        **sizes: Any,
    ) -> None:
        super().__init__(**sizes)
        first = next(iter(self.layers))
        wait_for(first, go, growth, longest_s)
        if held_step:
            first.register_forward_pre_hook(partial(_hold, held_step, Path(held_for)))


def wait_for(layer: nn.Module, go: str, growth: float = GROWTH, longest_s: float = LONGEST_S) -> None:
    """Let a layer that is given keys wait for the file `go` before its forward."""
    layer.register_forward_pre_hook(partial(_wait, Path(go), growth, longest_s))


def _wait(go: Path, growth: float, longest_s: float, _: nn.Module, given: tuple[Any, ...]) -> None:
    slow_steps = int(given[1].step) - FAST_STEPS
    if slow_steps > 0 and not go.exists():
        time.sleep(min(FIRST_S * growth**slow_steps, longest_s))


def _hold(held_step: int, held_for: Path, _: nn.Module, given: tuple[Any, ...]) -> None:
    while int(given[1].step) == held_step and not held_for.exists():
        time.sleep(FIRST_S)


def held(step: int, held_for: Path) -> list[str]:
    """More overrides of the model: this step lasts until the file is there, and no worker counts as hanging in it."""
    model = [f"+model.args.held_step={step}", f"+model.args.held_for={held_for}"]
    return [*model, "timeouts.progress=1000", "timeouts.start=2000"]


def write(folder: Path, go: Path) -> list[str]:
    """Puts the model into a run's folder; returns the overrides that choose it."""
    shutil.copy(__file__, folder / "patient_model.py")
    return ["model.target=patient_model.PatientGPT", f"+model.args.go={go}"]
