"""The placement of parameters and optimizer state on a mesh: specs, pages, replicas, and the plan of every change."""

from elaswave_spmd.sharding.annotations import Shardings, Tie, shard, specs_of, tie
from elaswave_spmd.sharding.reshard import ReshardPlan, plan_reshard
from elaswave_spmd.sharding.spec import P, check_spec
from elaswave_spmd.sharding.state_sharding import StateSharding
from elaswave_spmd.sharding.tiles import TileMap

__all__ = [
    "P",
    "ReshardPlan",
    "Shardings",
    "StateSharding",
    "Tie",
    "TileMap",
    "check_spec",
    "plan_reshard",
    "shard",
    "specs_of",
    "tie",
]
