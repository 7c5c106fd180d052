"""Many workers in one process, for tests: see README.md."""

from tests.cluster.cluster import SimulatedCluster
from tests.cluster.processes import Trained

__all__ = ["SimulatedCluster", "Trained"]
