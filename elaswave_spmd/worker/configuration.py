"""A configuration: one mesh epoch as a worker sees it, made from a Reconfigure message."""

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
        recovery_plan: the recovery plan of step version + 1: which worker computes what of it. On a large mesh it has
            only the lines that this worker has to do with (C15). None: no member has begun that step, so it runs as
            placed. Empty: nothing is left to compute.
        validate: the version whose validation must be run, as the controller lacks losses of it; None if none must.
        save: write the state of `version` and begin no other step.
        attempt: the number of the attempt of the steps after `version`. Results of older attempts do not count (V5).
        repair: the number of the newest attempt that began because replicas differed (H3); 0 if none did.
        split_layers: the layers whose backward may run in two parts.
        put_off: for each stage the most micro-batches whose weight gradients a worker may put off; (): none on any.
        in_flight: for each stage the most micro-batches that a worker may have between forward and backward; (): the
            numbers of `pipeline.in_flight_limits`.
        is_last: the run ends early, after `version` (`train.stop_patience`).
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
        """The most micro-batches that a worker of this stage may have in flight, and may put off."""
        mesh, counts = self.placement.mesh, self.placement.microbatch_counts
        in_flight = self.in_flight or in_flight_limits([len(members) for members in mesh.stages], counts)
        return KeptLimits(in_flight[stage], self.put_off[stage] if self.put_off else 0)

    def limited(self, message: LimitsMessage) -> Configuration:
        """This configuration with the limits of a Limits message, which may come in the middle of a mesh epoch."""
        layers = frozenset(message.split_layers)
        return replace(self, split_layers=layers, put_off=message.put_off, in_flight=message.in_flight)

    @classmethod
    def from_message(cls, first: Placement, message: Reconfigure) -> Configuration:
        """The configuration that a Reconfigure message describes.

        Args:
            first: the placement that the run began with. What is the same in all epochs is taken from it: the model's
                layers, the specs, the sizes of the axes inside a worker.
        """
        shape = first.mesh.shape
        # The axes of devices inside a worker (tp, fsdp) have the same sizes in every epoch: only workers come and go.
        tp, fsdp = shape.axis_size("tp"), shape.axis_size("fsdp")
        shape = MeshShape.of_stages(map(len, message.stages), tp=tp, fsdp=fsdp)
        mesh = Mesh(shape, message.stages, message.epoch, _topology_of(message))
        placement = replace(
            first,
            mesh=mesh,
            layer_cuts=message.layer_cuts,
            microbatch_counts=message.microbatch_counts,
            # A message without replicas is that of the first epoch: this worker has planned the same ones itself.
            replicas=from_rows(message.replicas) if message.replicas else first.replicas,
        )
        about = message.version, message.recovery_plan, message.validate, message.save, message.attempt, message.repair
        limits = frozenset(message.split_layers), message.put_off, message.in_flight
        return cls(placement, *about, *limits, message.is_last)


def _topology_of(message: Reconfigure) -> Topology:
    """The hosts of the members, if the message has them; otherwise all members count as being on one host."""
    if not message.hosts:
        return Topology(())
    numbered = (zip(members, of, strict=True) for members, of in zip(message.stages, message.hosts, strict=True))
    return Topology.of({rank: (f"host{number}",) for of_stage in numbered for rank, number in of_stage})
