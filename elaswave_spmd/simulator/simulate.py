"""Loading a scenario as a user asks for it: by name, with settings of `train` in place of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elaswave_spmd.conf.compose import named_settings, settings_from
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.simulator import scenario

_SETTINGS = {"sharding": "zero", "sharding.name": "zero", "train.steps": "steps", "seed": "seed"}
"""Setting of `train` that has the same meaning for a scenario -> the scenario's name for it."""


def scenario_of(name: str, words: Sequence[str]) -> scenario.Events | scenario.Goodput:
    """The scenario with this name or YAML file, with the settings that are named by words of a command line.

    Raises:
        ConfigError: the scenario or a setting is invalid, or the scenario has no such setting.
    """
    if not name:
        raise ConfigError(
            "no scenario is given",
            rule="simulate needs a scenario",
            exists=", ".join(scenario.names()),
            fix=f"simulate scenario={scenario.names()[0]}",
        )
    return with_settings(scenario.load(name), words)


def with_settings(
    chosen: scenario.Events | scenario.Goodput, words: Sequence[str]
) -> scenario.Events | scenario.Goodput:
    """The scenario with the settings that are named by words of a command line in place of its own.

    Raises:
        ConfigError: a setting is invalid, or the scenario has no such setting.
    """
    settings, changes = settings_from(words), {}
    values = {"zero": settings.sharding.zero_level, "steps": settings.train.steps, "seed": settings.seed}
    for name in sorted(named_settings(words)):
        field = _SETTINGS.get(name, "")
        if not hasattr(chosen, field) or values[field] is None:
            exists = ", ".join(name for name, field in _SETTINGS.items() if hasattr(chosen, field))
            what = f"{name} has no meaning for this scenario"
            raise ConfigError(
                what, rule="a scenario says everything else itself", where=name, exists=exists, fix="leave it out"
            )
        changes[field] = values[field]
    return replace(chosen, **changes)
