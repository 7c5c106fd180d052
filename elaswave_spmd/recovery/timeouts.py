"""Every waiting time of a run in one value that checks its own order."""

from __future__ import annotations

from dataclasses import dataclass, fields

from elaswave_spmd.conf import checks
from elaswave_spmd.errors import ConfigError

_BEATS = 3
# (lower, times, upper, why): lower * times must be less than upper (or equal to it, where times is not 1).
_LADDER = (
    ("heartbeat", _BEATS, "suspect", f"{_BEATS} late heartbeats in a row are no reason to suspect a worker"),
    ("suspect", 1, "status", "a stopped worker is found by its missing heartbeats before it keeps a PREPARE waiting"),
    ("status", 1, "progress", "what can be asked is asked before a busy worker is taken for one that hangs"),
    ("progress", 1, "start", "a worker's first action may compile; later ones do not"),
    ("status", 1, "join", "a newcomer that still starts outlasts a change of the mesh"),
    ("status", 1, "leave", "a worker that leaves is given the change of the mesh that lets it go"),
    ("controller", 1, "shutdown", "a worker that lost its controller waits, and then has time to write a checkpoint"),
)


@dataclass(frozen=True)
class Timeouts:
    """The ladder of waiting times, in seconds. What is certain (a death, a closed socket) waits for none of them.

    Args:
        heartbeat: period of a worker's heartbeats, and the longest time that one tick of a detector counts.
        suspect: a worker without a heartbeat for so long hangs (SIGSTOP, a machine that is gone).
        status: a worker that has not answered PREPARE for so long hangs, however its heart beats. In the middle of an
            action it has `progress_factor` times the usual time of one, if that is longer.
        progress: a worker that waits for nobody and finishes no action for so long hangs.
        progress_factor: how many times the usual time of an action that is at least: slow actions are no hang.
        start: from a worker's launch, or the last layer that it compiled, until it is ready; also what its first
            action may take instead of `progress`.
        join: the same for a newcomer to a run that is under way: until it is ready, or the run goes on without it.
        leave: from a worker's wish to leave (SIGTERM) until it is let go; then it counts as failed. While it has state
            that nobody else has, it is waited for.
        controller: how long workers wait for a lost controller before they write a checkpoint and end.
        group: of making a stage's process group once all its members are there, and of what goes through it: then links
            take over.
        shutdown: how long workers may take to end, checkpoint included, before they are killed.

    Raises:
        ConfigError: a value that is not above 0, or two in the wrong order: with both and the rule.
    """

    heartbeat: float = 0.1
    suspect: float = 2.0
    status: float = 5.0
    progress: float = 30.0
    progress_factor: float = 20.0
    start: float = 300.0
    join: float = 120.0
    leave: float = 10.0
    controller: float = 5.0
    group: float = 30.0
    shutdown: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            least = {"at_least": 1.0} if field.name == "progress_factor" else {"above": 0.0}
            value = checks.number(f"timeouts.{field.name}", getattr(self, field.name), **least)
            object.__setattr__(self, field.name, value)
        for lower, times, upper, why in _LADDER:
            _check_rung(lower, getattr(self, lower), times, upper, getattr(self, upper), why)

    @property
    def orphan_grace(self) -> float:
        """How long workers may live after their controller: they wait for it, and then they write a checkpoint."""
        return self.controller + self.shutdown


def _check_rung(lower: str, low: float, times: int, upper: str, high: float, why: str) -> None:
    least = low * times
    if high >= least if times > 1 else high > least:
        return
    relation = f"at least {times} times" if times > 1 else "longer than"
    raise ConfigError(
        f"timeouts.{upper} is {relation} timeouts.{lower}: {why}",
        got=f"{upper} {high:g} s, {lower} {low:g} s",
        where=f"timeouts.{upper}={high:g} timeouts.{lower}={low:g}",
        fix=f"timeouts.{upper} of {least:g} or more" if times > 1 else f"timeouts.{upper} above {least:g}",
    )
