"""The workers of a run on an agent's machine: they outlive the controller, where another one may adopt them.

An agent holds the write end of their life pipe, so their fork server needs nothing new: as long as the agent lives,
they live, and they notice the end of a controller by its link. What the next controller has to be told of them is here
(docs/protocol.md, A1 to A7).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elaswave_spmd.runtime.processes import agent_messages as am
from elaswave_spmd.runtime.processes.adoption import read_address

_GRACE_S = 20.0  # until the run's own is known


def relay_path(directory: str) -> str:
    """Where the relay of their heartbeats listens, in the directory of the sockets."""
    return f"{directory}/beats"


class AgentWorkers:
    """The workers of one run on this machine, whatever controllers the run has. For the agent's thread.

    Args:
        own: the keys that replace those of the controller in the specification of each worker here.

    Attributes:
        ranks: of the workers whose end has not been reported.
        adopt_s: for how long they wait for another controller (`timeouts.adopt`); None: they end with theirs.
        grace_s: for which they are waited for when they have to end.
    """

    def __init__(self, own: dict[str, Any]) -> None:
        self.own = own
        self.ranks: set[int] = set()
        self.adopt_s: float | None = None
        self.grace_s = _GRACE_S
        self._ended: set[int] = set()  # all that have ended here
        self._unheard: set[int] = set()  # those of them that no controller has made good
        self._life: tuple[str, int] | None = None  # the run's id, and the incarnation
        self._is_settled = True  # the controller has made good all that died with the one before
        self._lost_at: float | None = None  # since when nobody has adopted them
        self._waits_from = 0.0  # when the last controller was lost

    def __str__(self) -> str:
        return f"{len(self.ranks)} worker{'s' * (len(self.ranks) != 1)}"

    @property
    def may_wait(self) -> bool:
        """True if they are kept when the controller is lost."""
        return self.adopt_s is not None and self._life is not None

    @property
    def are_waiting(self) -> bool:
        """True from the loss of a controller until another one has adopted all of them."""
        return self._lost_at is not None

    def set_timeouts(self, adopt_s: float | None, grace_s: float) -> None:
        """Set `adopt_s` and `grace_s` to those of the run, which come when the agent prepares it."""
        self.adopt_s = adopt_s
        self.grace_s = grace_s

    def specification(self, spec: Mapping[str, Any], directory: str, *, relays: bool) -> dict[str, Any]:
        """The specification of a worker here, made of the controller's.

        Args:
            directory: of the sockets on this machine.
            relays: its heartbeats go by this machine's agent.
        """
        changed = {**spec, **self.own, "directory": directory}
        options: dict[str, Any] = {"has_agent": True} if self.adopt_s is not None else {}
        if relays:
            options["beats"] = relay_path(directory)
        if options:
            changed["options"] = {**spec["options"], **options}
        return changed

    def started(self, rank: int, spec: Mapping[str, Any]) -> None:
        """A worker is about to be started, with the controller's specification."""
        self.ranks.add(rank)
        if (orders := spec.get("checkpoints")) is not None:
            self._life = orders["run"], orders["incarnation"]

    def ended(self, rank: int) -> None:
        """A worker's process has ended."""
        self.ranks.discard(rank)
        self._ended.add(rank)
        self._unheard.add(rank)

    def controller_lost(self, now: float) -> None:
        """The connection to the controller has ended, also to one that had not adopted all of them yet.

        The time for which they wait begins anew: so it does for those that it had adopted, and the others end by
        themselves when theirs is over.
        """
        if self._is_settled:
            self._unheard.clear()
        self._is_settled = False
        self._lost_at = now if self._lost_at is None else self._lost_at
        self._waits_from = now

    def settled(self) -> None:
        """They are adopted, and what had died meanwhile is made good."""
        self._is_settled, self._lost_at = True, None

    @property
    def wait_until(self) -> float:
        """The time until which they wait for another controller."""
        assert self._lost_at is not None and self.adopt_s is not None
        return self._waits_from + self.adopt_s

    def offered(self, hello: am.Hello, directory: str, now: float) -> am.Hello | am.Back:
        """The first message to a controller: of an agent that joins, or comes back with the workers that it has kept.

        Args:
            directory: of the sockets, where members of the mesh write their addresses.
        """
        if self._lost_at is None or self._life is None:
            return hello
        addresses = {rank: read_address(directory, rank) or "" for rank in sorted(self.ranks)}
        newcomers = {rank for rank in self._unheard if read_address(directory, rank) is None}
        gone = tuple(sorted(self._ended - newcomers))
        return am.Back(hello, *self._life, addresses, tuple(sorted(newcomers)), gone, now - self._lost_at)
