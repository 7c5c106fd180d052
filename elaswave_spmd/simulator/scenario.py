"""Scenarios as data, read from YAML and checked before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from elaswave_spmd.errors import ConfigError, MeshError
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.simulator.changes import Change
from elaswave_spmd.simulator.failures import FailureRate, Fleet, Repair
from elaswave_spmd.simulator.shapes import LLAMAS, alike, llama

FOLDER = Path(__file__).parent / "scenarios"


@dataclass(frozen=True)
class EventCase:
    """A mesh of whole replicas, and the workers that are lost or slow.

    Args:
        name: the name of its row.
        mesh: the name of the mesh, as on the command line.
        microbatches: micro-batches of a step.
        event: the event, as on the command line; or else
        lose: numbers of workers that are lost, a row each; the workers are drawn at random.
        model: a model in place of the scenario's.
    """

    name: str
    mesh: str
    microbatches: int
    event: str | None = None
    lose: tuple[int, ...] = ()
    model: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        where = f"case {self.name!r}"
        _text(self.name, f"name of {where}")
        object.__setattr__(self, "lose", _several(self.lose, f"lose of {where}"))
        mesh = self._checked_mesh(where)
        _number(self.microbatches, f"microbatches of {where}", at_least=1, whole=True)
        if (self.event is None) == (not self.lose):
            got = "both" if self.lose else "neither"
            fix = "event: fail 6, or lose: [1, 2]"
            raise _wrong("a case has either an event or numbers to lose", got, where, fix=fix)
        if self.event is not None and Change.parse(str(self.event)).check(mesh).joined:
            rule, fix = "policies are compared on workers that are lost or slow", "leave the join to the command plan"
            raise _wrong(rule, self.event, where, exists="fail RANK ..., slow RANK SPEED", fix=fix)
        for number in self.lose:
            _number(number, f"lose of {where}", at_least=1, below=mesh.num_workers, whole=True)

    def _checked_mesh(self, where: str) -> Mesh:
        exists, fix = "dpN_ppM", "mesh: dp4_pp4"
        try:
            mesh = Mesh.initial(MeshShape.parse(str(self.mesh)))
        except MeshError as error:
            raise _wrong("a case has a mesh", error.what, f"mesh of {where}", exists=exists, fix=fix) from None
        if len({len(members) for members in mesh.stages}) > 1:
            rule = "policies are compared on whole replicas, stages of equal size"
            raise _wrong(rule, self.mesh, f"mesh of {where}", exists=exists, fix=fix)
        return mesh


@dataclass(frozen=True)
class Events:
    """A scenario of single changes.

    Args:
        cases: its rows.
        model: {alike: LAYERS} or {llama: NAME}, and arguments of shapes.alike or shapes.llama.
        memory: bytes of a worker, as a multiple of what the fullest one needs on the healthy mesh; None: no limit.
        zero: ZeRO level, the name of a set of specs.
        steps: remaining steps, over which moves have to pay.
        optimum: compute the exact optimum beside the policies.
        draws: number of random draws of the lost workers.
    """

    title: str
    cases: tuple[EventCase, ...]
    about: str = ""
    model: Mapping[str, Any] | None = None
    memory: float | None = None
    zero: int = 1
    steps: int = 10_000
    optimum: bool = False
    draws: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        _text(self.title, "title")
        _text(self.about, "about")
        if not isinstance(self.cases, (list, tuple)) or not self.cases:
            raise _wrong(
                "a scenario has cases", self.cases, "cases", fix="cases: [{name: ..., mesh: ..., microbatches: ...}]"
            )
        cases = tuple(c if isinstance(c, EventCase) else _make(EventCase, c, "a case") for c in self.cases)
        object.__setattr__(self, "cases", cases)
        called = [case.name for case in cases]
        if twice := [name for name in called if called.count(name) > 1]:
            raise _wrong("each case has a name of its own", twice[0], "cases", fix="another name")
        for name in ("steps", "draws"):
            _number(getattr(self, name), name, at_least=1, whole=True)
        _number(self.seed, "seed", at_least=0, whole=True)
        _number(self.zero, "zero", at_least=0, below=4, whole=True)
        if not isinstance(self.optimum, bool):
            raise _wrong("optimum is true or false", self.optimum, "optimum", fix="optimum: true")
        if self.memory is not None:
            _number(self.memory, "memory", at_least=1)
        for case in cases:
            if case.model is None and self.model is None:
                raise _wrong("a case has a model", "none", f"case {case.name!r}", fix="model: {llama: 7B}")
            _fits(
                model_of(case.model or self.model or {}), MeshShape.parse(case.mesh).num_stages, f"case {case.name!r}"
            )


@dataclass(frozen=True)
class Goodput:
    """A scenario of weeks of failures; fields as in failures.Fleet, Repair and goodput.Stalls.

    Args:
        devices, spares: one number or several; each combination is a row.
        highest_frequency: the highest relative frequency of our policy, which has a row of its own with it.
    """

    title: str
    devices: tuple[int, ...]
    model: Mapping[str, Any]
    about: str = ""
    days: float = 54
    failures: Mapping[str, float] | None = None
    island: int = 8
    stages: int = 16
    microbatches: int = 16
    repair_hours: float = 24
    swap_s: float = 300
    spares: tuple[float, ...] = (0.0,)
    regroup_s: float = 10
    join_s: float = 2
    restart_s: float = 600
    checkpoint_s: float = 5
    highest_frequency: float = 1.1
    seed: int = 0

    def __post_init__(self) -> None:
        _text(self.title, "title")
        _text(self.about, "about")
        for name in ("devices", "spares"):
            object.__setattr__(self, name, _several(getattr(self, name), name))
            if not getattr(self, name):
                raise _wrong(f"a scenario has {name}", "none", name, fix=f"{name}: [...]")
        for name in ("island", "stages", "microbatches"):
            _number(getattr(self, name), name, at_least=1, whole=True)
        _number(self.seed, "seed", at_least=0, whole=True)
        for number in self.devices:
            _number(number, "devices", at_least=1, whole=True)
            Fleet(number, self.island, self.stages, self.microbatches)
        for spares in self.spares:
            _number(spares, "spares", at_least=0)
            _number(self.repair_hours, "repair_hours", at_least=0)
            Repair(self.repair_hours, spares, _number(self.swap_s, "swap_s", at_least=0))
        for name in ("regroup_s", "join_s", "restart_s", "checkpoint_s"):
            _number(getattr(self, name), name, at_least=0)
        if not _number(self.days, "days", at_least=0):
            raise _wrong("a scenario lasts", self.days, "days", fix="days: 54")
        _number(self.highest_frequency, "highest_frequency", at_least=1)
        object.__setattr__(self, "failures", dict(self.failures or {}))
        _make(FailureRate, self.failures, "failures")
        _fits(model_of(self.model), self.stages, "stages")

    @property
    def rate(self) -> FailureRate:
        """The rate of failures."""
        return FailureRate(**dict(self.failures or {}))


def names() -> list[str]:
    """The names of the scenarios that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Events | Goodput:
    """A scenario by its name, or by the path of a YAML file.

    Raises:
        ConfigError: there is none, it is no YAML, or it contradicts itself.
        PlanError: an event, a model or a fleet that cannot be.
    """
    path = FOLDER / f"{name}.yaml" if name in names() else Path(name).expanduser()
    where = f"scenario={name}"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        got = name if isinstance(error, FileNotFoundError) else str(error)
        fix = "one of these, or a YAML file"
        raise _wrong("a scenario exists", got, where, exists=", ".join(names()), fix=fix) from None
    except yaml.YAMLError as error:
        raise _wrong("a scenario is YAML", " ".join(str(error).split()), where, fix="correct the file") from None
    kinds: dict[str, type[Events | Goodput]] = {"events": Events, "goodput": Goodput}
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(data, dict) or kind not in kinds:
        raise _wrong("a scenario has a kind", kind or "none", where, exists=", ".join(kinds), fix="kind: events")
    return _make(kinds[kind], {key: value for key, value in data.items() if key != "kind"}, where)


def model_of(model: Mapping[str, Any]) -> CostModel:
    """The cost model that {alike: 24} or {llama: 7B, tokens: 4096} stands for. tflops: of one worker.

    Raises:
        ConfigError: neither, both, or arguments that are none.
        PlanError: a model that there is not.
    """
    data = dict(model) if isinstance(model, Mapping) else {}
    where = f"model: {model}"
    if ("alike" in data) == ("llama" in data):
        exists = f"alike: LAYERS, or llama: {', '.join(LLAMAS)}"
        rule = "a model has layers that are alike, or a Llama shape"
        raise _wrong(rule, model, "model", exists=exists, fix="alike: 24")
    if unknown := sorted(data.keys() - _MODEL["alike" if "alike" in data else "llama"]):
        raise _wrong("arguments of a model are known", unknown[0], where, fix="leave it out")
    for name, value in data.items():
        if name != "llama":
            _number(value, f"{name} of the model", at_least=_LEAST.get(name, 0.0), whole=name in ("alike", "tokens"))
    if "alike" in data:
        return alike(data.pop("alike"), **data)
    if "tflops" in data:
        data["flops"] = data.pop("tflops") * 1e12
    return llama(str(data.pop("llama")), **data)


_LEAST = {"alike": 1, "tokens": 1, "tflops": 1e-6, "bandwidth": 1.0}
"""The smallest value of a number of a model; 0 for others."""

_MODEL = {
    "alike": {"alike", "forward_s", "backward_s", "bandwidth", "latency_s", "tokens"},
    "llama": {"llama", "tokens", "tflops", "bandwidth", "latency_s"},
}


_Made = TypeVar("_Made", bound="EventCase | Events | Goodput | FailureRate")


def _make(kind: type[_Made], data: object, where: str) -> _Made:
    """A dataclass of a mapping with its fields' names."""
    known = {field.name: field for field in fields(kind)}
    needed = {name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING}
    if not isinstance(data, Mapping):
        raise _wrong("it is a mapping from names to values", data, where)
    if unknown := [str(name) for name in data if name not in known]:
        raise _wrong("its fields are known", unknown[0], where, exists=", ".join(known), fix="correct the name")
    if missing := sorted(needed - data.keys()):
        raise _wrong("all fields that are needed are there", f"no {missing[0]}", where, exists=", ".join(known))
    try:
        return kind(**data)
    except TypeError as error:
        raise _wrong("its values are of the right kind", str(error), where) from None


def _fits(costs: CostModel, stages: int, where: str) -> None:
    if stages > len(costs.layers):
        got = f"{stages} stages, {len(costs.layers)} layers"
        raise _wrong("every stage has at least one layer", got, where, fix=f"at most {len(costs.layers)} stages")


def _text(value: object, where: str) -> None:
    if not isinstance(value, str):
        raise _wrong("titles and names are text", value, where, fix="put it in quotes")


def _several(value: object, where: str) -> tuple[Any, ...]:
    """A list, or one value as a list of it."""
    if isinstance(value, (str, Mapping)) or value is None:
        raise _wrong("it is a number or a list of numbers", value, where, fix="[1, 2]")
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _number(value: object, name: str, *, at_least: float, below: float = math.inf, whole: bool = False) -> float:
    good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if good and math.isfinite(value) and at_least <= value < below:  # type: ignore[operator,arg-type]
        return value  # type: ignore[return-value]
    kind = "a whole number" if whole else "a number"
    limits = f"of {at_least:g} or more" + (f" and below {below:g}" if below < math.inf else "")
    raise _wrong(f"{name.split(' of ')[0]} is {kind} {limits}", value, name)


def _wrong(rule: str, value: object, where: str, *, exists: str = "", fix: str = "correct it") -> ConfigError:
    shown = value if isinstance(value, str) else repr(value)
    return ConfigError(f"{where}: {shown}", rule=rule, where=where, exists=exists, fix=fix)
