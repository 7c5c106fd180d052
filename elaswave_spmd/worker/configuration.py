"""A configuration of the mesh as a worker sees it: the content of a Reconfigure message, worked out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.mesh.topology import Topology
from elaswave_spmd.recovery.messages import Limits as LimitsMessage
from elaswave_spmd.recovery.messages import Recompute, Reconfigure
from elaswave_spmd.scheduling.pipeline import in_flight_limits
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.replicas import from_rows
from elaswave_spmd.worker.ready_order import KeptLimits


@dataclass(frozen=True)
class Configuration:
    """One mesh epoch: who is a member, who computes what, and where the run stood when it began.

    Args:
        placement: the mesh, the cuts between stages, micro-batches and replicas.
        version: the highest version of any member when the epoch began.
        recovery_plan: who recomputes what of step version + 1, as far as this worker has to know. None: nothing of that
            step was begun, so that it runs as placed. Empty: everything of it is done.
        validate: the version whose validation is to be run, since the controller lacks losses of it; None if none is.
        save: write the state of `version` and begin no other step.
        attempt: of the steps after `version`; what was computed of them in older attempts counts no more.
        repair: the newest attempt that began since replicas differed; 0: none did.
        split_layers: layers whose backward may be in two parts.
        put_off: per stage, the most micro-batches whose weight gradients a worker may put off; (): none on any stage.
        in_flight: per stage, the most micro-batches that a worker may have between forward and backward; (): as
            `pipeline.in_flight_limits` has it.
        is_last: the run ends early, after `version`.
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
    in_flight: tuple[int, ...] = ()
    is_last: bool = False

    @property
    def epoch(self) -> int:
        """The mesh epoch, which fences control messages."""
        return self.placement.mesh.epoch

    def limits_of(self, stage: int) -> KeptLimits:
        """The most micro-batches that a worker of a stage keeps anything of."""
        mesh, counts = self.placement.mesh, self.placement.microbatch_counts
        in_flight = self.in_flight or in_flight_limits([len(members) for members in mesh.stages], counts)
        return KeptLimits(in_flight[stage], self.put_off[stage] if self.put_off else 0)

    def limited(self, message: LimitsMessage) -> Configuration:
        """The same mesh epoch with the limits of the controller's message."""
        layers = frozenset(message.split_layers)
        return replace(self, split_layers=layers, put_off=message.put_off, in_flight=message.in_flight)

    @classmethod
    def from_message(cls, first: Placement, message: Reconfigure) -> Configuration:
        """The configuration that the controller's message describes.

        Args:
            first: the placement that the run began with: specs and layers are the same in all epochs.
        """
        shape = first.mesh.shape
        # The devices inside a worker (tp, fsdp) are the same in every epoch: only workers come and go.
        tp, fsdp = shape.axis_size("tp"), shape.axis_size("fsdp")
        shape = MeshShape.of_stages(map(len, message.stages), tp=tp, fsdp=fsdp)
        mesh = Mesh(shape, message.stages, message.epoch, _topology_of(message))
        placement = replace(
            first,
            mesh=mesh,
            layer_cuts=message.layer_cuts,
            microbatch_counts=message.microbatch_counts,
            # Without rows it is the first epoch, whose replica map this worker has planned as the controller did.
            replicas=from_rows(message.replicas) if message.replicas else first.replicas,
        )
        about = message.version, message.recovery_plan, message.validate, message.save, message.attempt, message.repair
        limits = frozenset(message.split_layers), message.put_off, message.in_flight
        return cls(placement, *about, *limits, message.is_last)


def _topology_of(message: Reconfigure) -> Topology:
    """The hosts of the members, if workers are told; else all count as on one."""
    if not message.hosts:
        return Topology(())
    numbered = (zip(members, of, strict=True) for members, of in zip(message.stages, message.hosts, strict=True))
    return Topology.of({rank: (f"host{number}",) for of_stage in numbered for rank, number in of_stage})
