"""A small GPT one of whose workers kills itself in the middle of a validation; `write` puts it where a run finds it.

The first worker that comes to the chosen layer in a validation, once the file `allowed` is there, takes that file away,
and is killed by SIGKILL. No bit depends on it.
"""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from elaswave_spmd.models import GPT


class KillerGPT(GPT):
    """A GPT that ends its worker in a validation.

    Args:
        allowed: the file.
        at: the number of the layer, -1 for the last one.
    """

    def __init__(self, *, allowed: str, at: int, **sizes: Any) -> None:
        super().__init__(**sizes)
        [*self.layers][at].register_forward_pre_hook(partial(_kill, allowed))


def _kill(allowed: str, layer: nn.Module, _: tuple[Any, ...]) -> None:
    if layer.training:
        return
    with suppress(FileNotFoundError):
        os.unlink(allowed)
        os.kill(os.getpid(), signal.SIGKILL)


def write(folder: Path, at: int) -> list[str]:
    """Puts the model into a run's folder; returns the overrides that choose it."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(__file__, folder / "validation_killer.py")
    return [
        "model.target=validation_killer.KillerGPT",
        f"+model.args.allowed={folder / 'allowed'}",
        f"+model.args.at={at}",
    ]
