"""Many workers in one process, for tests: see README.md."""

from elaswave_spmd.testing.cluster import LocalCluster, Trained

__all__ = ["LocalCluster", "Trained"]
