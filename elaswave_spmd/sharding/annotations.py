"""The declarations of model code: `Shardings` of the model, `shard` for a parameter, `tie` for one in two layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from elaswave_spmd.errors import SpecError
from elaswave_spmd.mesh import ISLAND_AXES, WORKER_AXES
from elaswave_spmd.sharding.spec import P, check_spec

_Module = TypeVar("_Module")
_ATTRIBUTE = "__elaswave_specs__"
_STATE = ("params", "grads", "optim")


@dataclass(frozen=True, kw_only=True)
class Shardings:
    """The specs of a model on the worker axes. Data parallelism, pipeline and ZeRO are specs, not modes.

    All of them are read by the tile maps (`tiles.py`). What a mesh cannot run, such as `batch=P(None)` with several
    workers in a stage, is refused when the run is planned.

    Args:
        batch: spec of the global batch; `P("dp")` assigns its micro-batches to the workers of each stage.
        layers: spec of the stack of layers; `P("pp")` assigns layers to stages.
        params, grads, optim: specs of the sequence of pages of each layer, over the workers of its stage: `P(None)`
            (whole) or `P("dp")`. None of them sharded is ZeRO-0; optim ZeRO-1; grads too ZeRO-2; params too ZeRO-3.

    Raises:
        SpecError: an axis that a field cannot lie on, more than one dim, or a combination that is no ZeRO level.
    """

    batch: P = P("dp")
    layers: P = P("pp")
    params: P = P(None)
    grads: P = P(None)
    optim: P = P(None)

    def __post_init__(self) -> None:
        for field in ("batch", *_STATE):
            self._check(field, "dp")
        self._check("layers", "pp")
        # Whole optimizer state is updated from whole gradients, so sharded gradients need a sharded optim; and a worker
        # that has only a part of the parameters has no use for whole gradients.
        sharded = [field for field in _STATE if getattr(self, field).axes]
        if sharded != list(_STATE[len(_STATE) - len(sharded) :]):
            raise SpecError(
                f"{', '.join(f'{field}={getattr(self, field)}' for field in _STATE)} is no ZeRO level",
                rule="sharded params need sharded grads, and sharded grads need a sharded optim",
                where="Shardings",
                exists="ZeRO-0 none on dp; ZeRO-1 optim; ZeRO-2 grads, optim; ZeRO-3 params, grads, optim",
                fix="add " + ", ".join(f'{field}=P("dp")' for field in _implied(sharded)),
            )

    def _check(self, field: str, axis: str) -> None:
        spec = getattr(self, field)
        if not isinstance(spec, P):
            raise SpecError(f"Shardings.{field}={spec!r} is no spec", fix=f'write P("{axis}") or P(None)')
        if len(spec.entries) > 1 or not set(spec.axes) <= {axis}:
            island = set(spec.axes) & set(ISLAND_AXES)
            raise SpecError(
                f"Shardings.{field}={spec} is not one entry on {axis!r}",
                rule=f"Shardings.{field} is one entry, on {axis!r} or whole",
                exists=f'P("{axis}"), P(None)',
                fix=f"{', '.join(sorted(island))} split single parameters: name them by shard()"
                if island
                else "use one of these",
            )

    @property
    def name(self) -> str:
        """The shorthand of these specs in settings, in files and on the screen: `zero2`, as in `sharding=zero2`."""
        return f"zero{sum(getattr(self, field).splits_workers for field in _STATE)}"

    def with_zero(self, level: int | None) -> Shardings:
        """These shardings with the specs that a ZeRO level stands for; batch and layers stay.

        This is where the name of a level becomes specs. A run looks at the specs alone.

        Args:
            level: 0 to 3; None: the specs as they are.

        Raises:
            SpecError: there is no such level.
        """
        if level is None:
            return self
        if level not in range(4):
            raise SpecError(f"ZeRO has no level {level!r}", exists="0, 1, 2, 3", fix="use one of these")
        params, grads, optim = (P("dp") if level >= needed else P(None) for needed in (3, 2, 1))
        return replace(self, params=params, grads=grads, optim=optim)


def shard(module: _Module, **specs: P) -> _Module:
    """Declare how parameters of `module` are split inside a worker's island: `shard(self.up, weight=P("tp", None))`.

    Returns the module itself. Another call for the same parameter replaces its spec.

    Raises:
        SpecError: no such parameter, more entries than its dims, or a worker axis (dp, pp).
    """
    checked: dict[str, P] = {}
    for name, spec in specs.items():
        where = f"shard({type(module).__name__}, {name}=...)"
        shape = getattr(getattr(module, name, None), "shape", None)
        # Other attributes of a torch module that have a shape, such as a buffer or a weight that is computed from
        # others, are not parameters.
        registered = getattr(module, "_parameters", None)
        if shape is None or (registered is not None and name not in registered):
            exists = ", ".join(_parameter_names(module)) or "none in this module itself"
            raise SpecError(
                f"{type(module).__name__} has no parameter {name!r}", where=where, exists=exists, fix="use one of these"
            )
        if not isinstance(spec, P):
            raise SpecError(f"{spec!r} is no spec", where=where, fix='write P("tp", None)')
        if outside := [axis for axis in spec.axes if axis in WORKER_AXES]:
            raise SpecError(
                f"{spec} splits over {outside[0]!r}, and {outside[0]!r} lies across workers",
                rule="shard() splits inside one worker; across workers state is cut in pages",
                where=where,
                exists=f"axes {', '.join(ISLAND_AXES)}",
                fix='declare it for the whole model: Shardings(params=P("dp"), ...) or layers=P("pp")',
            )
        check_spec(spec, tuple(shape), name=where)
        checked[name] = spec
    setattr(module, _ATTRIBUTE, {**getattr(module, _ATTRIBUTE, {}), **checked})
    return module


def specs_of(module: Any) -> dict[str, P]:
    """The specs that `shard` declared for `module` and all modules below it: `{"attn.qkv.weight": P("tp", None)}`."""
    modules: Iterable[tuple[str, Any]] = module.named_modules() if hasattr(module, "named_modules") else [("", module)]
    return {
        f"{path}.{name}" if path else name: spec
        for path, owner in modules
        for name, spec in getattr(owner, _ATTRIBUTE, {}).items()
    }


@dataclass(frozen=True)
class Tie:
    """Parameter `reader` is parameter `owner`: one array, used by two layers; names are `<layer>.<path>`.

    Several layers may read one owner, each through one tie: what a layer uses in two places is one parameter there.

    Raises:
        SpecError: a name without layer and path, or one name twice.
    """

    reader: str
    owner: str

    def __post_init__(self) -> None:
        for name in (self.reader, self.owner):
            if not isinstance(name, str) or "." not in name.strip("."):
                raise SpecError(f"tie() got {name!r}, which is not <layer>.<path>", fix='write "head.weight"')
        if self.reader == self.owner:
            raise SpecError(
                f"tie() got {self.reader!r} twice", rule="tie() joins two parameters", fix="name reader and owner"
            )

    def __str__(self) -> str:
        return f"{self.reader} = {self.owner}"


def tie(reader: str, owner: str) -> Tie:
    """Declare that `reader` uses the array of `owner`: `tie("head.weight", "embed.weight")`."""
    return Tie(reader, owner)


def _implied(sharded: list[str]) -> tuple[str, ...]:
    first = min(_STATE.index(field) for field in sharded)
    return tuple(field for field in _STATE[first:] if field not in sharded)


def _parameter_names(module: object) -> list[str]:
    if hasattr(module, "named_parameters"):
        return [name for name, _ in module.named_parameters(recurse=False)]  # type: ignore[attr-defined]
    return [name for name, value in vars(module).items() if hasattr(value, "shape")]
