"""A mesh epoch as a worker sees it: what a PLACE says, worked out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery.messages import Recompute, Reconfigure
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.replicas import from_rows


@dataclass(frozen=True)
class Epoch:
    """One mesh epoch.

    Args:
        version: the highest of any member when the epoch began.
        work: who runs what of step version + 1; None: nothing of it was begun, the placement holds for it too.
        validate: the version whose validation is to be run again, or -1.
        save: write the state of `version` and begin no other step.
    """

    placement: Placement
    version: int = 0
    work: tuple[Recompute, ...] | None = None
    validate: int = -1
    save: bool = False

    @classmethod
    def of(cls, healthy: Placement, place: Reconfigure) -> Epoch:
        """What `place` says.

        Args:
            healthy: the placement of the first epoch: what is the same in all of them.
        """
        shape = healthy.mesh.shape
        tp, fsdp = shape.axis_size("tp"), shape.axis_size("fsdp")
        mesh = Mesh(MeshShape.of_stages(map(len, place.stages), tp=tp, fsdp=fsdp), place.stages, place.epoch)
        placement = replace(
            healthy,
            mesh=mesh,
            layer_cuts=place.layer_cuts,
            microbatch_counts=place.microbatch_counts,
            replicas=from_rows(place.replicas) if place.replicas else healthy.replicas,
        )
        return cls(placement, place.version, place.work, place.validate, place.save)
