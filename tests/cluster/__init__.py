"""Many workers in one process, for tests: see README.md."""

from tests.cluster.cluster import LocalCluster, Trained

__all__ = ["LocalCluster", "Trained"]
