"""How arrays lie on a mesh: specs, annotations, tiles, and plans from one sharding to another. No torch."""

from elaswave_spmd.sharding.annotations import Shardings, Tie, shard, specs_of, tie
from elaswave_spmd.sharding.reshard import PagePlan, ReshardPlan, plan_pages, plan_reshard
from elaswave_spmd.sharding.spec import P, check_spec
from elaswave_spmd.sharding.tiles import Coordinate, Sharding, TileMap
from elaswave_spmd.sharding.transfers import Transfer, Transfers

__all__ = [
    "Coordinate",
    "P",
    "PagePlan",
    "ReshardPlan",
    "Sharding",
    "Shardings",
    "Tie",
    "TileMap",
    "Transfer",
    "Transfers",
    "check_spec",
    "plan_pages",
    "plan_reshard",
    "shard",
    "specs_of",
    "tie",
]
