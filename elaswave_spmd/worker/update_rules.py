"""The update rule of each parameter: the model's own choice of weight decay, and what `optim.groups` say of it."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.schema import OptimGroup
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import LayeredModel, close_names, decays_of
from elaswave_spmd.sharding.layout import UpdateRule

_FIELDS = ("lr_scale", "weight_decay")


@dataclass(frozen=True)
class _Said:
    """A setting that one group gives to a parameter."""

    value: float
    where: str


def update_rules(model: LayeredModel, groups: Sequence[OptimGroup]) -> Mapping[str, UpdateRule]:
    """Parameter name -> its update rule; one that reads another layer's parameter has that of its owner.

    A parameter that a layer has under several names has one rule, and a group may match any of its names.

    Each of the two settings is looked up by itself: one group may give the learning rate and another one the weight
    decay of the same parameter.

    Raises:
        ModelError: a pattern that matches no parameter; a group of frozen parameters only; two groups that say
            different things of one parameter, or of two that are tied; the model's own `decays` fails.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    first = _first_names(model)
    owner_of = {tie.reader: tie.owner for tie in model.ties}
    said: dict[tuple[str, str], _Said] = {}  # (parameter, setting) ->
    for group in groups:
        where = _where(group)
        names = _matches(model, group.patterns, named, where)
        if not any(named[name].requires_grad for name in names):
            raise ModelError(
                f"all parameters of {where} are frozen",
                rule="a group has parameters that are trained",
                where=where,
                exists=", ".join(names),
                fix="leave the group out, or train some of them",
            )
        for name in names:
            for setting in _FIELDS:
                if (value := getattr(group, setting)) is not None:
                    _say(said, first[name], setting, _Said(value, where))
    for reader, owner in owner_of.items():
        _check_tie(said, reader, owner)
    return {
        name: _rule(model, said, owner_of.get(first[name], first[name]), tuple(named[name].shape)) for name in named
    }


def _first_names(model: LayeredModel) -> Mapping[str, str]:
    """Each name of a parameter -> the name under which its layer is laid out and saved: the first one that it has."""
    names: dict[str, str] = {}
    for layer in model.layer_names:
        first: dict[int, str] = {}  # not over layers: two that are tied may be one object already
        for name, parameter in model.get_submodule(layer).named_parameters(prefix=layer, remove_duplicate=False):
            names[name] = first.setdefault(id(parameter), name)
    return names


def _where(group: OptimGroup) -> str:
    """The group as it is given on the command line."""
    fields = {name: value for name in _FIELDS if (value := getattr(group, name)) is not None}
    return checks.override("optim.groups", [{"match": f'"{group.match}"', **fields}])


def _matches(model: LayeredModel, patterns: Sequence[str], named: Mapping[str, object], where: str) -> list[str]:
    """The names that match one of the patterns, in the model's order."""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in named):
            raise ModelError(
                f"{pattern} in {where} matches no parameter of {type(model).__name__}",
                rule="each pattern of optim.groups matches the name of a parameter",
                where=where,
                exists=close_names(pattern, named),
                fix=f'match: "{model.layer_names[0]}.*" for all parameters of a layer',
            )
    return [name for name in named if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _say(said: dict[tuple[str, str], _Said], name: str, setting: str, new: _Said) -> None:
    known = said.setdefault((name, setting), new)
    if known.value != new.value:
        raise ModelError(
            f"{known.where} and {new.where} both match {name}, with another {setting} each",
            rule="groups that match the same parameter say the same of it",
            where=f"{known.where} {new.where}",
            fix="narrower patterns in one of the two",
        )


def _check_tie(said: Mapping[tuple[str, str], _Said], reader: str, owner: str) -> None:
    """Tied parameters are one array, with one rule: that of the owner. A group may match the owner alone."""
    for setting in _FIELDS:
        of_reader, of_owner = said.get((reader, setting)), said.get((owner, setting))
        if of_reader is None or (of_owner is not None and of_owner.value == of_reader.value):
            continue
        other = f"has {setting}={of_owner.value:g}" if of_owner is not None else "is in no such group"
        raise ModelError(
            f"{reader} is in {of_reader.where}, and {owner}, to which it is tied, {other}",
            rule="tied parameters are one array, which has the settings of its owner",
            where=of_reader.where,
            fix=f'match: "{owner}" with {setting}: {of_reader.value:g}, or patterns that leave {reader} out',
        )


def _rule(model: LayeredModel, said: Mapping[tuple[str, str], _Said], name: str, shape: tuple[int, ...]) -> UpdateRule:
    scale, decay = (said.get((name, setting)) for setting in _FIELDS)
    lr_scale = scale.value if scale is not None else 1.0
    if decay is None:
        return UpdateRule(decays_of(model, name, shape), lr_scale)
    # A group's 0 is the rule of parameters without weight decay: they go into one call of the optimizer.
    return UpdateRule(True, lr_scale, decay.value) if decay.value else UpdateRule(False, lr_scale)
