"""Planning: pure functions from meshes, layouts and costs to placements, schedules and changes. No torch."""

from elaswave_spmd.determinism.exact_sum import exact_sum, expansion
from elaswave_spmd.determinism.reduction_tree import Merge, Node, Reduction, maximal_nodes
from elaswave_spmd.scheduling.partition import balance_layers
from elaswave_spmd.scheduling.pipeline import PipelineAction, Schedule, schedule
from elaswave_spmd.scheduling.placement import Placement, place
from elaswave_spmd.sharding.replicas import ReplicaSet

__all__ = [
    "Merge",
    "Node",
    "PipelineAction",
    "Placement",
    "Reduction",
    "ReplicaSet",
    "Schedule",
    "balance_layers",
    "exact_sum",
    "expansion",
    "maximal_nodes",
    "place",
    "schedule",
]
