"""The metrics of one committed step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from elaswave_spmd.errors import DataError
from elaswave_spmd.run_dir.json_lines import float_of_hex, is_count, is_number

_SHOWN = 500  # characters of a malformed line that its error shows


@dataclass(frozen=True)
class MetricsLine:
    """One committed step; a line of metrics.jsonl.

    Attributes:
        step: the number of the step, from 1.
        mesh_epoch: the epoch of the mesh on which the step committed.
        loss: the mean cross entropy per target token of the global batch, in nats; for other models their loss per
            sample, or per unit of weight.
        loss_hex: the loss as `float.hex` gives it. Two runs agree if these agree.
        grad_norm: the global norm of the gradient before clipping.
        grad_norm_hex: the norm as `float.hex` gives it.
        lr: the learning rate of the step.
        tokens: the number of target tokens of the global batch; for other data, of its samples.
        seconds: the wall time since the previous commit; for the first step, since it began.
        workers: the number of members of the mesh when the step committed.
        data_seconds: the longest time that a worker waited for samples of the step. None if nobody waits for the data,
            or if an earlier version of this package has written the line.
        weight: the weight of the loss, over the global batch; None if losses have none.

    Raises:
        ValueError: a number is out of range, or a hex form is of another number.
    """

    step: int
    mesh_epoch: int
    loss: float
    loss_hex: str
    grad_norm: float
    grad_norm_hex: str
    lr: float
    tokens: int
    seconds: float
    workers: int
    data_seconds: float | None = None
    weight: float | None = None

    def __post_init__(self) -> None:
        if self.step < 1 or self.mesh_epoch < 0 or self.tokens < 1 or self.workers < 1 or not self.seconds >= 0:
            raise ValueError(f"metrics out of range: {self}")
        # The decimal forms are for people, the hexadecimal ones for comparing bits; they must agree.
        for value, text in ((self.loss, self.loss_hex), (self.grad_norm, self.grad_norm_hex)):
            if float(value).hex() != text:
                raise ValueError(f"metrics with a hex form of another number: {value!r} is not {text}")

    @classmethod
    def of(
        cls,
        *,
        step: int,
        mesh_epoch: int,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens: int,
        seconds: float,
        workers: int,
        data_seconds: float | None = None,
        weight: float | None = None,
    ) -> MetricsLine:
        """Make a line, with its hex forms computed."""
        loss, grad_norm = float(loss), float(grad_norm)
        return cls(
            step=step,
            mesh_epoch=mesh_epoch,
            loss=loss,
            loss_hex=loss.hex(),
            grad_norm=grad_norm,
            grad_norm_hex=grad_norm.hex(),
            lr=float(lr),
            tokens=tokens,
            seconds=float(seconds),
            workers=workers,
            data_seconds=data_seconds,
            weight=weight,
        )

    def to_dict(self) -> dict[str, object]:
        """The fields as plain JSON, which has no nan or inf: such a loss or norm is null, and its hex form has it."""
        fields = dataclasses.asdict(self)
        if self.data_seconds is None:
            del fields["data_seconds"]
        if self.weight is None:
            del fields["weight"]
        for name in ("loss", "grad_norm"):
            if not math.isfinite(fields[name]):
                fields[name] = None
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, object], where: str = "") -> MetricsLine:
        """Inverse of `to_dict`. The floats are taken from their hex forms.

        Args:
            where: the name of the line in errors.

        Raises:
            DataError: the fields are not those of a metrics line.
        """
        try:
            optional = ("data_seconds", "weight")
            known = {
                f.name: fields[f.name] for f in dataclasses.fields(cls) if f.name not in optional or f.name in fields
            }
            known["loss"] = float_of_hex(known["loss_hex"])
            known["grad_norm"] = float_of_hex(known["grad_norm_hex"])
            if known.get("weight") is not None:
                known["weight"] = float(str(known["weight"]))  # nan and inf are written as text
            for name in ("step", "mesh_epoch", "tokens", "workers"):
                if not is_count(known[name]):
                    raise ValueError(f"{name} is not a count")
            for name in ("lr", "seconds"):
                if not is_number(known[name]):
                    raise ValueError(f"{name} is not a number")
            if known.get("data_seconds") is not None and not is_number(known["data_seconds"]):
                raise ValueError("data_seconds is not a number")
            return cls(**known)  # type: ignore[arg-type]
        except (KeyError, ValueError, TypeError) as error:
            what = f"{str(dict(fields))[:_SHOWN]} is not a line of metrics.jsonl"
            raise DataError(f"{where}: {what}" if where else what, where=where) from error
