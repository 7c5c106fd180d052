"""The controller's half: it decides membership, never the outcome of a step (protocol.md, rule 2).

In a healthy run it places the workers once, and checks that what they report of a step agrees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery.messages import Applied, Place, Ready, ValidationLoss
from elaswave_spmd.scheduling.placement import Placement


@dataclass
class ControllerProtocol:
    """State of the controller over one run. All methods return what is new, or None."""

    placement: Placement
    num_validation_units: int = 0
    addresses: dict[int, str] = field(default_factory=dict)
    version: int = 0
    _reports: dict[int, Applied] = field(default_factory=dict)
    _validation: dict[int, dict[int, float]] = field(default_factory=dict)

    def ready(self, message: Ready) -> Place | None:
        """The PLACE for all, once every member of the mesh is listening."""
        self.addresses[message.rank] = message.address
        p = self.placement
        if set(self.addresses) != set(p.mesh.members):
            return None
        return Place(p.mesh.epoch, p.mesh.stages, p.layer_cuts, p.unit_counts, dict(self.addresses))

    def applied(self, message: Applied) -> Applied | None:
        """The first report of a step; later ones must agree with it bit for bit.

        Raises:
            RunError: two workers applied different steps under one number.
        """
        first = self._reports.setdefault(message.step, message)
        if (first.loss.hex(), first.grad_norm.hex()) != (message.loss.hex(), message.grad_norm.hex()):
            raise RunError(
                f"workers {first.rank} and {message.rank} disagree about step {message.step}: "
                f"loss {first.loss.hex()} and {message.loss.hex()}, "
                f"gradient norm {first.grad_norm.hex()} and {message.grad_norm.hex()}"
            )
        for old in [s for s in self._reports if s < message.step - 2]:
            del self._reports[old]
        if message.step <= self.version:
            return None
        self.version = message.step
        return message

    def validation(self, message: ValidationLoss) -> tuple[int, float] | None:
        """(step, exactly rounded sum of all units' losses), once all units have been reported."""
        found = self._validation.setdefault(message.step, {})
        found.update(zip(message.units, message.losses, strict=True))
        if len(found) < self.num_validation_units:
            return None
        del self._validation[message.step]
        return message.step, math.fsum(found.values())
