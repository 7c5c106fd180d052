"""The group `mesh` of the settings: how many workers there are, on how many stages, and devices inside each of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from elaswave_spmd.conf import checks
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.mesh import MeshShape


@dataclass(frozen=True)
class MeshSettings:
    """The mesh: `dp` workers per stage and `pp` stages (None: 1), or alone `stages`, the workers of each stage.

    `tp` and `fsdp` (None: 1) lie inside each worker, over its local devices: one XLA program over all of them.
    """

    dp: int | None = None
    pp: int | None = None
    stages: tuple[int, ...] | None = None
    tp: int | None = None
    fsdp: int | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "tp", "fsdp"):
            if (size := getattr(self, name)) is not None:
                checks.whole(f"mesh.{name}", size, at_least=1)
        if self.stages is None:
            return
        where = checks.override("mesh.stages", self.stages)
        beside = [checks.override(f"mesh.{n}", v) for n in ("dp", "pp") if (v := getattr(self, n)) is not None]
        if beside:
            raise ConfigError(
                "mesh.stages says how many workers each stage has, and so do dp and pp",
                got=f"{where} beside {' and '.join(beside)}",
                where="mesh",
                fix=f"'{where}' alone, or mesh=dpN_ppM",
            )
        if not isinstance(self.stages, (list, tuple)) or not self.stages:
            raise ConfigError(
                "mesh.stages is a list: the workers of each stage",
                got=self.stages,
                where=where,
                fix="'mesh.stages=[3,2]'",
            )
        sizes = tuple(checks.whole(f"mesh.stages[{i}]", n, at_least=1) for i, n in enumerate(self.stages))
        object.__setattr__(self, "stages", sizes)

    @cached_property
    def shape(self) -> MeshShape:
        """The shape of the mesh; `shape.name` is its name in summaries and run directories."""
        tp, fsdp = self.tp or 1, self.fsdp or 1
        if self.stages is not None:
            return MeshShape.of_stages(self.stages, tp=tp, fsdp=fsdp)
        return MeshShape.of(dp=self.dp or 1, pp=self.pp or 1, tp=tp, fsdp=fsdp)
