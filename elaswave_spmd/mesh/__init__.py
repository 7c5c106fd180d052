"""Which workers there are and how they are arranged. Values only: no process, no communicator, no torch."""

from elaswave_spmd.mesh.mesh import Mesh
from elaswave_spmd.mesh.shape import AXES, ISLAND_AXES, WORKER_AXES, Axis, MeshShape
from elaswave_spmd.mesh.topology import Topology

__all__ = ["AXES", "ISLAND_AXES", "WORKER_AXES", "Axis", "Mesh", "MeshShape", "Topology"]
