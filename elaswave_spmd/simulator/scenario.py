"""Scenarios as data, read from YAML and checked before anything is computed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from elaswave_spmd.conf.given_files import yaml_of
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

    Either `event` or `lose` is given.

    Args:
        name: the name of its row.
        mesh: the name of the mesh, as on the command line.
        microbatches: the number of micro-batches of a step.
        event: the event, as on the command line.
        lose: numbers of workers that are lost, with one row for each number. The workers are drawn at random.
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
            what = f"{where} has {'both' if self.lose else 'neither'} of event and lose"
            raise _wrong(
                what, "a case has an event, or numbers of workers to lose", fix="event: fail 6, or lose: [1, 2]"
            )
        if self.event is not None and Change.parse(str(self.event)).check(mesh).joined:
            rule, fix = "policies are compared on workers that are lost or slow", "leave the join to the command plan"
            what = f"{where}: workers join by event: {self.event}"
            raise _wrong(what, rule, exists="fail RANK ..., slow RANK SPEED", fix=fix)
        for number in self.lose:
            _number(number, f"lose of {where}", at_least=1, below=mesh.num_workers, whole=True)

    def _checked_mesh(self, where: str) -> Mesh:
        exists, fix = "dpN_ppM", "mesh: dp4_pp4"
        try:
            mesh = Mesh.initial(MeshShape.parse(str(self.mesh)))
        except MeshError as error:
            raise _wrong(f"{where}: {error.what}", "a case has a mesh", exists=exists, fix=fix) from None
        if len({len(members) for members in mesh.stages}) > 1:
            rule = "policies are compared on whole replicas, stages of equal size"
            raise _wrong(f"{where}: stages of mesh {self.mesh} have different sizes", rule, exists=exists, fix=fix)
        return mesh


@dataclass(frozen=True)
class Events:
    """A scenario of single changes.

    Args:
        title, about: the title and the text of its report.
        cases: its rows.
        model: {alike: LAYERS} or {llama: NAME}, and arguments of shapes.alike or shapes.llama.
        memory: the memory of a worker, as a multiple of what the fullest worker needs on the healthy mesh; None for no
            limit.
        zero: the ZeRO level, 0 to 3.
        steps: the number of remaining steps, over which moves have to pay.
        optimum: True to compute the exact optimum beside the policies.
        draws: the number of random draws of the lost workers.
        seed: the seed of the draws.
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
            fix = "cases: [{name: ..., mesh: ..., microbatches: ...}]"
            raise _wrong(f"cases: {_shown(self.cases)} is no list of cases", "a scenario has cases", fix=fix)
        cases = tuple(c if isinstance(c, EventCase) else _make(EventCase, c, "a case") for c in self.cases)
        object.__setattr__(self, "cases", cases)
        called = [case.name for case in cases]
        if twice := [name for name in called if called.count(name) > 1]:
            what = f"{len(twice)} cases have the name {twice[0]!r}"
            raise _wrong(what, "each case has a name of its own", fix="give one of them another name")
        for name in ("steps", "draws"):
            _number(getattr(self, name), name, at_least=1, whole=True)
        _number(self.seed, "seed", at_least=0, whole=True)
        _number(self.zero, "zero", at_least=0, below=4, whole=True)
        if not isinstance(self.optimum, bool):
            what = f"optimum: {_shown(self.optimum)} is neither true nor false"
            raise _wrong(what, "optimum says whether the exact optimum is computed too", fix="optimum: true")
        if self.memory is not None:
            _number(self.memory, "memory", at_least=1)
        for case in cases:
            if case.model is None and self.model is None:
                what = f"neither case {case.name!r} nor the scenario has a model"
                raise _wrong(what, "a case has a model", fix="model: {llama: 7B}")
            _fits(
                model_of(case.model or self.model or {}), MeshShape.parse(case.mesh).num_stages, f"case {case.name!r}"
            )


@dataclass(frozen=True)
class Goodput:
    """A scenario of weeks of failures. The fields not listed here are as in failures.Fleet, Repair and goodput.Stalls.

    Args:
        title, about: the title and the text of its report.
        devices, spares: one number or several. There is a table for each number of spares, with a row for each number
            of devices.
        model: as for `Events`.
        days: the time that is simulated.
        failures: the fields of failures.FailureRate that differ from its defaults.
        highest_frequency: the highest relative frequency of our policy, in a column of its own.
        seed: the seed of the failures.
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
                raise _wrong(f"{name}: [] has no number", f"a scenario has {name}", fix=f"{name}: [...]")
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
            raise _wrong("days: 0 is no time", "a scenario lasts", fix="days: 54")
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
    """Load a scenario by its name, or by the path of a YAML file.

    Raises:
        ConfigError: there is no such scenario, it is not YAML, or it contradicts itself.
        PlanError: an event, a model or a fleet in it is invalid.
    """
    path = FOLDER / f"{name}.yaml" if name in names() else Path(os.path.expanduser(name))
    where = f"scenario={name}"
    try:
        data = yaml_of(path)
    except (OSError, UnicodeError) as error:
        what = f"{where} is no scenario and no file" if isinstance(error, FileNotFoundError) else f"{where}: {error}"
        rule, fix = "a scenario is named, or is a file", "one of these, or a YAML file"
        raise _wrong(what, rule, exists=", ".join(names()), fix=fix) from None
    except ValueError as error:
        what = f"{where} is no YAML: {' '.join(str(error).split())}"
        raise _wrong(what, "a scenario is YAML", fix="correct the file") from None
    kinds: dict[str, type[Events | Goodput]] = {"events": Events, "goodput": Goodput}
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(data, dict) or kind not in kinds:
        what = f"{where} has {f'the kind {kind!r}' if kind else 'no kind'}"
        raise _wrong(what, "a scenario has a kind", exists=", ".join(kinds), fix="kind: events")
    return _make(kinds[kind], {key: value for key, value in data.items() if key != "kind"}, where)


def model_of(model: Mapping[str, Any]) -> CostModel:
    """The cost model that a mapping such as {alike: 24} or {llama: 7B, tokens: 4096} stands for.

    Args:
        model: `alike` or `llama`, and arguments of shapes.alike or shapes.llama. `tflops`, of one worker, takes the
            place of `flops`.

    Raises:
        ConfigError: it has neither or both, or another argument is unknown or invalid.
        PlanError: the model does not exist.
    """
    data = dict(model) if isinstance(model, Mapping) else {}
    where = f"model: {model}"
    if ("alike" in data) == ("llama" in data):
        exists = f"alike: LAYERS, or llama: {', '.join(LLAMAS)}"
        rule = "a model has layers that are alike, or a Llama shape"
        what = f"model: {_shown(model)} has {'both' if 'alike' in data else 'neither'}"
        raise _wrong(what, rule, exists=exists, fix="alike: 24")
    if unknown := sorted(data.keys() - _MODEL["alike" if "alike" in data else "llama"]):
        known = ", ".join(sorted(_MODEL["alike" if "alike" in data else "llama"]))
        raise _wrong(f"{where} has {unknown[0]!r}", "a model has these arguments", exists=known, fix="leave it out")
    for name, value in data.items():
        if name != "llama":
            _number(value, f"{name} of the model", at_least=_LEAST.get(name, 0.0), whole=name in ("alike", "tokens"))
    if "alike" in data:
        return alike(data.pop("alike"), **data)
    if "tflops" in data:
        data["flops"] = data.pop("tflops") * 1e12
    return llama(str(data.pop("llama")), **data)


_LEAST = {"alike": 1, "tokens": 1, "tflops": 1e-6, "bandwidth": 1.0}
"""Argument of a model -> its smallest value. It is 0 for arguments that are not here."""

_MODEL = {
    "alike": {"alike", "forward_s", "backward_s", "bandwidth", "latency_s", "tokens", "weight_share"},
    "llama": {"llama", "tokens", "tflops", "bandwidth", "latency_s", "weight_share"},
}


_Made = TypeVar("_Made", bound="EventCase | Events | Goodput | FailureRate")


def _make(kind: type[_Made], data: object, where: str) -> _Made:
    """Make a dataclass from a mapping with the names of its fields.

    Raises:
        ConfigError: the data is no mapping, or a field is unknown, missing or invalid.
    """
    known = {field.name: field for field in fields(kind)}
    needed = {name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING}
    if not isinstance(data, Mapping):
        raise _wrong(f"{where}: {_shown(data)} is no mapping", "it is a mapping from names to values")
    if unknown := [str(name) for name in data if name not in known]:
        what = f"{where} has a field {unknown[0]!r}"
        raise _wrong(what, "it has these fields", exists=", ".join(known), fix="correct the name")
    if missing := sorted(needed - data.keys()):
        what = f"{where} has no {missing[0]}"
        raise _wrong(what, "all fields that are needed are there", exists=", ".join(known), fix=f"{missing[0]}: ...")
    try:
        return kind(**data)
    except TypeError as error:
        raise _wrong(f"{where}: {error}", "its values are of the right kind") from None


def _fits(costs: CostModel, stages: int, where: str) -> None:
    if stages > len(costs.layers):
        what = f"{where}: {stages} stages, but the model has {len(costs.layers)} layers"
        raise _wrong(what, "every stage has at least one layer", fix=f"at most {len(costs.layers)} stages")


def _text(value: object, where: str) -> None:
    if not isinstance(value, str):
        raise _wrong(f"{where}: {_shown(value)} is no text", "titles and names are text", fix="put it in quotes")


def _several(value: object, where: str) -> tuple[Any, ...]:
    """A list as a tuple, or a single value as a tuple of one."""
    if isinstance(value, (str, Mapping)) or value is None:
        raise _wrong(f"{where}: {_shown(value)} is no number", "it is a number or a list of numbers", fix="[1, 2]")
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _number(value: object, name: str, *, at_least: float, below: float = math.inf, whole: bool = False) -> float:
    good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if good and math.isfinite(value) and at_least <= value < below:  # type: ignore[operator,arg-type]
        return value  # type: ignore[return-value]
    kind = "a whole number" if whole else "a number"
    limits = f"of {at_least:g} or more" + (f" and below {below:g}" if below < math.inf else "")
    raise _wrong(f"{name}: {_shown(value)} is not {kind} {limits}", f"{name.split(' of ')[0]} is {kind} {limits}")


def _shown(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def _wrong(what: str, rule: str, *, exists: str = "", fix: str = "correct it") -> ConfigError:
    return ConfigError(what, rule=rule, exists=exists, fix=fix)
