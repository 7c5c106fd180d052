"""Many workers in one process, for tests: see README.md."""

from tests.cluster.cluster import ControlledCluster, Trained

__all__ = ["ControlledCluster", "Trained"]
