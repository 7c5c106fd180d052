"""A configuration of the mesh as a worker sees it: the content of a Reconfigure message, worked out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery.messages import Recompute, Reconfigure
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.replicas import from_rows


@dataclass(frozen=True)
class Configuration:
    """One mesh epoch: who is a member, who computes what, and where the run stood when it began.

    Args:
        placement: the mesh, the cuts between stages, micro-batches and replicas.
        version: the highest version of any member when the epoch began.
        recovery_plan: who recomputes what of step version + 1. None: nothing of that step was begun, so that it runs as
            placed. Empty: everything of it is done.
        validate: the version whose validation is to be run, since the controller lacks losses of it; None if none is.
        save: write the state of `version` and begin no other step.
        attempt: of the steps after `version`; what was computed of them in older attempts counts no more.
        repair: the newest attempt that began since replicas differed; 0: none did.
        split_layers: layers whose backward may be in two parts.
        put_off: per stage, the most micro-batches whose weight gradients a worker may put off; (): none on any stage.
    """

    placement: Placement
    version: int = 0
    recovery_plan: tuple[Recompute, ...] | None = None
    validate: int | None = None
    save: bool = False
    attempt: int = 0
    repair: int = 0
    split_layers: frozenset[int] = frozenset()
    put_off: tuple[int, ...] = ()

    @property
    def epoch(self) -> int:
        """The mesh epoch, which fences control messages."""
        return self.placement.mesh.epoch

    @classmethod
    def from_message(cls, first: Placement, message: Reconfigure) -> Configuration:
        """The configuration that the controller's message describes.

        Args:
            first: the placement that the run began with: specs, topology and layers are the same in all epochs.
        """
        shape = first.mesh.shape
        # The devices inside a worker (tp, fsdp) are the same in every epoch: only workers come and go.
        tp, fsdp = shape.axis_size("tp"), shape.axis_size("fsdp")
        mesh = Mesh(MeshShape.of_stages(map(len, message.stages), tp=tp, fsdp=fsdp), message.stages, message.epoch)
        placement = replace(
            first,
            mesh=mesh,
            layer_cuts=message.layer_cuts,
            microbatch_counts=message.microbatch_counts,
            # Without rows it is the first epoch, whose replica map this worker has planned as the controller did.
            replicas=from_rows(message.replicas) if message.replicas else first.replicas,
        )
        about = message.version, message.recovery_plan, message.validate, message.save, message.attempt, message.repair
        return cls(placement, *about, frozenset(message.split_layers), message.put_off)
