"""The settings of a run as Hydra groups, and the names of meshes. See README.md."""

from __future__ import annotations

from elaswave_spmd.conf.mesh_names import register_mesh_names

__all__ = ["register_mesh_names"]
