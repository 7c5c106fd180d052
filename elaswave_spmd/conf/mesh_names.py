"""A Hydra config source that spells out the names of meshes, so that `mesh=dp3_pp2` needs no YAML file."""

from __future__ import annotations

import difflib
import re
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from elaswave_spmd.errors import ConfigError, MeshError
from elaswave_spmd.mesh import ISLAND_AXES, WORKER_AXES, MeshShape

_SCHEME = "elaswave-mesh"
_GROUP = "mesh"
FORMS = ("dpN", "dpN_ppM", "ppM", "single")
"""The forms of names that `--help` shows for `mesh=`."""


def spell_out(name: str) -> dict[str, Any]:
    """The settings of the group `mesh` that a name stands for.

    "dp3_pp2" is {"dp": 3, "pp": 2, "stages": None, "tp": None, "fsdp": None}.

    Raises:
        ConfigError: the name is not that of a mesh. The error shows the closest one.
    """
    group: dict[str, Any] = {"dp": None, "pp": None, "stages": None, "tp": None, "fsdp": None}
    try:
        shape = MeshShape.parse(name)
    except MeshError as error:
        like = _closest(name)
        raise ConfigError(
            f"mesh={name} is not the name of a mesh",
            rule=error.what[:1].lower() + error.what[1:],
            where=f"mesh={name}",
            exists="single, dpN, ppM, dpN_ppM (dp3, pp4, dp3_pp2), stagesN-M; on XLA also dpN_ppM_tpK",
            fix=f"mesh={like}" if like else "use one of these forms, or 'mesh.stages=[3,2]' for ragged stages",
        ) from None
    words = [word.rstrip("0123456789") for word in name.split("_")]
    sizes = {axis: shape.axis_size(axis) for axis in ISLAND_AXES if axis in words}
    if any(word.startswith("stages") for word in words):
        return group | {"stages": list(shape.stage_sizes)} | sizes
    return group | {axis: shape.axis_size(axis) for axis in WORKER_AXES if axis in words} | sizes


def _closest(name: str) -> str:
    """The name of the mesh that `name` probably means: "dp2_pp2" for "dp2_p2"; "" if none is close."""
    if difflib.get_close_matches(name.rstrip("0123456789"), ["single"], cutoff=0.7):
        return "single"
    words = []
    free = ["dp", "pp", "tp", "fsdp"]
    for word in re.split(r"[_\-,x]", name):
        found = re.fullmatch(r"([a-z]*)([0-9]+)", word)
        if found is None or not free:
            return ""
        letters, size = found.groups()
        axis = max(free, key=lambda axis, letters=letters: difflib.SequenceMatcher(None, letters, axis).ratio())
        free.remove(axis)
        words.append(f"{axis}{size}")
    try:
        return MeshShape.parse("_".join(words)).name
    except MeshError:
        return ""


class MeshNames(ConfigSource):
    """The config source of the group `mesh`, which makes the settings from the name.

    Hydra passes arguments by keyword, so the parameters of the methods have the names that Hydra gives them.
    """

    @staticmethod
    def scheme() -> str:
        return _SCHEME

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") == _GROUP

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        return group == _GROUP and bool(name)

    def load_config(self, config_path: str) -> ConfigResult:
        name = config_path.removesuffix(".yaml").partition("/")[2]
        config = OmegaConf.create(spell_out(name))
        return ConfigResult(provider=self.provider, path=config_path, config=config, header={"package": None})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if self.is_group(config_path):
            return [] if results_filter is ObjectType.GROUP else [*FORMS]
        return [_GROUP] if not config_path and results_filter is not ObjectType.CONFIG else []


class MeshNamesPath(SearchPathPlugin):
    """Adds `MeshNames` to Hydra's search path, after the files of conf/."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="elaswave_spmd", path=f"{_SCHEME}://")


def register_mesh_names() -> None:
    """Make `mesh=<any name>` known to Hydra in this process. Calling it again is harmless."""
    plugins = Plugins.instance()
    plugins.register(MeshNames)
    plugins.register(MeshNamesPath)
