"""A small GPT that stands still in one step for as long as a test wants; `write` puts it where a run finds it.

In that step each micro-batch waits before it is computed. All else goes on meanwhile: heartbeats, and the threads that
write checkpoints. So what a disk still owes to steps before comes, however slow it is. No bit depends on the waits.
"""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from elaswave_spmd.models import GPT

_LOOK_S = 0.01


class StillGPT(GPT):
    """A GPT that stands still in the step that `stand_still_in` has named last.

    Args:
        still: the folder.
    """

    def __init__(self, *, still: str, **sizes: Any) -> None:
        super().__init__(**sizes)
        wait_in(self.layers[0], still)


def wait_in(layer: nn.Module, still: str) -> None:
    """Let a layer that is given keys wait before its forward in the step that is named in a folder."""
    layer.register_forward_pre_hook(partial(_wait, Path(still)))


def _wait(still: Path, _: nn.Module, given: tuple[Any, ...]) -> None:
    while (still / f"step_{int(given[1].step)}").exists():
        time.sleep(_LOOK_S)


def stand_still_in(still: Path, step: int) -> None:
    """The run stands still in this step, and in no other. The check of a model takes steps 1 and 2 for its own."""
    still.mkdir(exist_ok=True)
    here = still / f"step_{step}"
    here.touch()  # before the others go, so that a run that stands still does not run past it
    for other in set(still.iterdir()) - {here}:
        other.unlink()


def go_on(still: Path) -> None:
    """The run stands still in no step."""
    for step in still.iterdir():
        step.unlink()


def write(folder: Path, still: Path) -> list[str]:
    """Puts the model into a run's folder; returns the overrides that choose it, and let it stand still for long."""
    shutil.copy(__file__, folder / "still_model.py")
    patience = ["timeouts.progress=1000", "timeouts.start=2000"]
    return ["model.target=still_model.StillGPT", f"+model.args.still={still}", *patience]
