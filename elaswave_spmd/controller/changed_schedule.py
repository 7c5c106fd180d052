"""A run that is resumed with another length, or another schedule of the learning rate, than it was saved with.

Of all that `train.steps` and the schedule say, bits depend on the learning rates alone. So a run may go on with others
of these settings if they give the steps that it has done the rates that these had: then it is the run that would have
been begun with them. `train.reschedule` allows other rates from the checkpoint on; what is done stays.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.run_dir import MetricsLine
from elaswave_spmd.run_dir.run_identity import check_identity
from elaswave_spmd.worker.learning_rate import LearningRate

_OF_RATES = (
    ("train", "steps"),
    ("optim", "lr"),
    ("optim", "schedule"),
    ("optim", "warmup_steps"),
    ("optim", "decay_steps"),
    ("optim", "schedule_steps"),
    ("optim", "final_lr_ratio"),
)
"""The fields of an identity that bits depend on only by the learning rates that they give."""


@dataclass(frozen=True)
class ScheduleChange:
    """The settings of length and learning rate that a run goes on with, beside those that it was saved with.

    Args:
        changed: setting -> its values, saved and now; null where there is none.
        same_until: the last committed step up to which all steps have the learning rates of the run that goes on.
        is_stretched: the steps up to the checkpoint have not.
    """

    changed: Mapping[str, tuple[Any, Any]]
    same_until: int
    is_stretched: bool = False

    @property
    def message(self) -> str:
        """For the event `resume`; empty if nothing has changed."""
        if not self.changed:
            return ""
        text = ", ".join(
            f"{name}={checks.shown(now)} in place of {checks.shown(old)}" for name, (old, now) in self.changed.items()
        )
        return text + ("; from here on with other learning rates than the run so far" if self.is_stretched else "")


def check_schedule_change(
    saved: Mapping[str, Any],
    present: Mapping[str, Any],
    settings: Settings,
    lines: Mapping[int, MetricsLine],
    step: int,
    *,
    where: str,
) -> ScheduleChange:
    """Check that a run goes on with the bits that it was saved with, and with learning rates that it may have.

    Args:
        saved: the identity in the checkpoint.
        present: that of the run that goes on.
        settings: of the run that goes on.
        lines: of metrics.jsonl, by step; all up to the checkpoint's are there.
        step: of the checkpoint.
        where: the setting that asked for it.

    Raises:
        ConfigError: other bits, another schedule, or fewer steps than are done.
    """
    old, new = _rate_fields(saved), _rate_fields(present)
    changed = {name: (old[name], new[name]) for name in old if old[name] != new[name]}
    if not changed:
        check_identity(saved, present, where=where)
        return ScheduleChange({}, max(lines, default=step))
    steps = settings.train.steps
    if steps < step:
        raise ConfigError(
            f"train.steps={steps} is less than the {step} steps that the checkpoint has",
            rule="a run that is resumed is at least as long as what is done",
            where=checks.override("train.steps", steps),
            fix=f"train.steps of {step} or more, or train.resume_at={steps} and another run.dir",
        )
    rate, last = LearningRate.of(settings.optim, steps), max(lines, default=step)
    others = [number for number in sorted(lines) if lines[number].lr != rate.at(number)]
    same = others[0] - 1 if others else last
    if same < step and not settings.train.reschedule:
        # All of these together give other rates. Listed as every other difference is, with the ways that are open.
        check_identity(saved, present, where=where, fix=_ways(settings, old, same))
    check_identity(saved, _with_rates_of(present, saved), where=where)
    until = next((number - 1 for number in others if number > step), last)
    return ScheduleChange(changed, until, is_stretched=same < step)


def _ways(settings: Settings, old: Mapping[str, Any], same: int) -> str:
    """The ways out, in words, where the learning rates of steps that are done would be others."""
    ways = [f"the saved values, which gave step {same + 1} another learning rate"]
    if settings.optim.schedule in ("linear", "cosine", "wsd") and settings.optim.schedule_steps is None:
        ways.append(f"optim.schedule_steps={old['train.steps']} to stay at the last rate in the steps after these")
    ways.append("train.reschedule=true to go on from the checkpoint with the new learning rates")
    if same:
        ways.append(f"train.resume_at={same} with another run.dir, if there is a checkpoint so old")
    return "; ".join(ways)


def _rate_fields(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{group}.{name}": identity.get(group, {}).get(name) for group, name in _OF_RATES}


def _with_rates_of(present: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """An identity with another one's fields of length and learning rate."""
    found = copy.deepcopy(dict(present))
    for group, name in _OF_RATES:
        found[group].pop(name, None)
        if name in saved.get(group, {}):
            found[group][name] = saved[group][name]
    return found
