"""What runs where and in which order: pure functions from meshes, layouts and costs to plans. No torch."""

from elaswave_spmd.scheduling.actions import Action, Schedule, schedule
from elaswave_spmd.scheduling.exact import exact_sum, expansion
from elaswave_spmd.scheduling.graph import balance_layers
from elaswave_spmd.scheduling.learning_rate import LearningRate
from elaswave_spmd.scheduling.placement import HolderRun, Placement, place
from elaswave_spmd.scheduling.tree import Merge, Node, Reduction, maximal_nodes

__all__ = [
    "Action",
    "HolderRun",
    "LearningRate",
    "Merge",
    "Node",
    "Placement",
    "Reduction",
    "Schedule",
    "balance_layers",
    "exact_sum",
    "expansion",
    "maximal_nodes",
    "place",
    "schedule",
]
