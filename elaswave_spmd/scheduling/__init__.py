"""Planning: pure functions from meshes, layouts and costs to placements, schedules and changes. No torch."""

from elaswave_spmd.scheduling.placement import Placement

__all__ = ["Placement"]
