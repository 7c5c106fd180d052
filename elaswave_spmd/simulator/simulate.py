"""A scenario as it is asked for: by its name, and with settings of `train` in place of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elaswave_spmd.conf.compose import named_settings, settings_from
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.simulator import scenario

_SETTINGS = {"sharding": "zero", "sharding.name": "zero", "train.steps": "steps", "seed": "seed"}
"""Settings of `train` that mean the same for a scenario, and the scenario's name for each."""


def scenario_of(name: str, words: Sequence[str]) -> scenario.Events | scenario.Goodput:
    """The scenario of a name or YAML file, with the settings that words of a command line name.

    Raises:
        ConfigError: a scenario or a setting that cannot be; a setting that this scenario has no use for.
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
    """The scenario with the settings that the command line names in place of its own.

    Raises:
        ConfigError: a setting that this scenario has no use for.
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
