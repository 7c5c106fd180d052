"""A small GPT whose user has made a mistake: from some step on it raises an exception; `write` puts it in place.

The mistake is corrected once the file `mistake` is gone. No bit depends on it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from elaswave_spmd.models import GPT, Batch

_FILE = "mistake"
_NEVER = 1_000_000


class MistakenGPT(GPT):
    """A GPT that raises an exception from a step on, or in a validation, or has a loss that is not finite.

    Args:
        folder: of the file.
        fails_from: the first step in which the forward of the first layer raises.
        validates_until: the validations after this step, and later ones, raise in the forward of the first layer.
        overflows: the loss is infinite from the begin.
    """

    def __init__(
        self,
        *,
        folder: str,
        fails_from: int = _NEVER,
        validates_until: int = _NEVER,
        overflows: bool = False,
        **sizes: Any,
    ) -> None:
        super().__init__(**sizes)
        newest = 0  # the step that was trained last
        self._overflows = overflows
        file = Path(folder) / _FILE

        def check(layer: nn.Module, given: tuple[Any, ...]) -> None:
            nonlocal newest
            if layer.training:
                newest = int(given[1].step)
            first = fails_from if layer.training else validates_until
            if newest >= first and file.exists():
                raise ValueError("a sample that nobody had thought of")

        next(iter(self.layers)).register_forward_pre_hook(check)

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return super().loss(output, batch) * (float("inf") if self._overflows else 1.0)


def write(folder: Path, **arguments: object) -> list[str]:
    """Puts the model into a run's folder, with its mistake; returns the overrides that choose it."""
    shutil.copy(__file__, folder / "mistaken_model.py")
    (folder / _FILE).touch()
    given = [f"+model.args.{name}={value}" for name, value in arguments.items()]
    return ["model.target=mistaken_model.MistakenGPT", f"+model.args.folder={folder}", *given]


def correct(folder: Path) -> None:
    """The user corrects the mistake."""
    (folder / _FILE).unlink()
