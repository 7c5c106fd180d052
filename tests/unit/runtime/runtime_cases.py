"""A small layout with everything in it: ties, odd sizes, several rules, pages that end early."""

from __future__ import annotations

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.runtime.devices import device_of
from elaswave_spmd.runtime.devices.host import HostDevice
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.sharding.layout import LayerUse, ModelLayout, ParameterInfo, lay_out

HOST = HostDevice(device_of("cpu"))


def small_layout(page_size: int = 128) -> ModelLayout:
    """Three layers; the last one reads the first one's weight."""
    embed = LayerUse("embed", (ParameterInfo("embed.weight", (29, 8)), ParameterInfo("embed.pos", (5, 8))))
    block = LayerUse(
        "block",
        (
            ParameterInfo("block.bias", (9,), decay=False),
            ParameterInfo("block.weight", (9, 33)),
            ParameterInfo("block.scale", (), decay=False),
        ),
    )
    head = LayerUse("head", (ParameterInfo("head.norm", (8,), decay=False),), (("head.weight", "embed.weight"),))
    return lay_out([embed, block, head], page_size=page_size)


def placed(
    stages: tuple[int, ...], cuts: tuple[int, ...], microbatches: tuple[tuple[int, ...], ...], zero: int
) -> Placement:
    """A placement with these micro-batch counts."""
    mesh = Mesh.initial(MeshShape.of_stages(stages))
    return Placement(mesh, sum(microbatches[0]), cuts, microbatches, Shardings().with_zero(zero))
