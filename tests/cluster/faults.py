"""Faults for the simulated cluster: their kinds, the workers that they happen to, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.worker.fault_points import FaultPoint

KINDS = (
    *("kill", "stop", "term", "join", "replace", "pause", "corrupt", "rebalance", "device", "unlink", "silent"),
    *("miscompute", "flip"),
)
LOSSES = ("kill", "replace", "stop", "silent")
"""Kinds that take a worker, and the state that it holds, away without notice."""

SENDER, RECEIVER = "sender", "receiver"
TARGETS = ("any", "mirror", "newcomer", "ahead")


@dataclass(frozen=True)
class Fault:
    """Something that happens once, the first time that the worker passes the point.

    Args:
        step: the step that is under way.
        kind: kill (the process is gone), stop (it stands still and comes back later), term (it asks to leave), join
            (one more worker comes), replace (kill, and a new worker comes), pause (the controller stands still),
            corrupt (a bit of its optimizer state flips), flip (a bit of its parameters does), rebalance
            (micro-batches, layers and workers go elsewhere, drawn), device (its device fails, and is
            reset), silent (a stop, and its heartbeats do not arrive any more: it is taken for lost and goes
            on all the same, as on a machine that the controller cannot reach), miscompute (a bit of what it
            computes there is wrong: forward, backward, reduce, sum, norm or apply). unlink (the link that a
            message is sent on is lost, with what is on it, and both ends live) happens at messages only, on
            the side of the sender.
        rank: the worker that it happens to; of a join or a pause: the worker whose passing of the point begins it.
        point: a FaultPoint by name.
        count: at which passage of this point in this step it happens, from 1.
        turns: how long a stop or a pause lasts.
    """

    step: int
    kind: str
    rank: int
    point: str
    count: int = 1
    turns: int = 400

    def __post_init__(self) -> None:
        assert self.kind in KINDS and self.point in [p.value for p in FaultPoint], self


@dataclass(frozen=True)
class MessageFault:
    """Something that happens to the sender, or the receiver, of the `count`-th message of a kind in the whole run.

    Args:
        message: name of the class in recovery.messages.
        side: "sender" or "receiver".
        after: the message arrives, whatever becomes of its sender; or its receiver has done all that it asks for.
    """

    kind: str
    message: str
    side: str
    after: bool
    count: int = 1
    turns: int = 400

    def __post_init__(self) -> None:
        assert self.kind in KINDS and self.side in (SENDER, RECEIVER) and hasattr(m, self.message), self


@dataclass(frozen=True)
class ThenFault:
    """Something that happens some turns after the fault before it in the list: for several faults that belong together.

    Args:
        target: "any" member; a "mirror" of the one lost last; the last "newcomer", member or not yet; one that is
            "ahead": it has applied a step that another member has not. The fault waits until there is such a worker.
        settled: first wait until no change of the mesh is under way and every page has its mirrors again.
    """

    kind: str
    target: str = "any"
    delay: int = 0
    settled: bool = False
    turns: int = 400

    def __post_init__(self) -> None:
        assert self.kind in KINDS and self.target in TARGETS, self


AnyFault: TypeAlias = Fault | MessageFault | ThenFault

Link: TypeAlias = tuple[int, int]
"""(sender, receiver)."""
Cell: TypeAlias = tuple[str, str, bool]
"""(message kind, side, after): where a worker can be lost, as far as its peers can tell."""


class Plan:
    """The faults that have not happened yet, and when they do."""

    def __init__(self, faults: Sequence[AnyFault]) -> None:
        at_points = [f for f in faults if isinstance(f, Fault)]
        self._at_points = [f for f in at_points if f.kind != "miscompute"]
        self._wrong = [f for f in at_points if f.kind == "miscompute"]
        self._at_messages = [f for f in faults if isinstance(f, MessageFault)]
        self._chain = [(f, i) for i, f in enumerate(faults) if isinstance(f, ThenFault)]
        self._passed: Counter[tuple[int, str, int]] = Counter()
        self._computed: Counter[tuple[int, str, int]] = Counter()
        self._messages: Counter[tuple[str, str]] = Counter()
        self._since: int | None = None
        self.num_injected = 0
        self.lost_at: Counter[Cell] = Counter()

    @property
    def waits(self) -> bool:
        """Whether a ThenFault is to come, and all faults before it have happened."""
        return bool(self._chain) and self._chain[0][1] <= self.num_injected

    def injected(self, turn: int) -> None:
        """A fault has happened."""
        self.num_injected += 1
        self._since = turn

    def at_point(self, rank: int, point: FaultPoint, step: int) -> list[Fault]:
        """The faults that happen when a worker passes this point."""
        if not self._at_points:
            return []
        self._passed[rank, point.value, step] += 1
        count = self._passed[rank, point.value, step]
        due = [f for f in self._at_points if (f.rank, f.point, f.step, f.count) == (rank, point.value, step, count)]
        self._at_points = [f for f in self._at_points if f not in due]
        return due

    def at_result(self, rank: int, point: FaultPoint, step: int) -> Fault | None:
        """The miscompute that happens to what a worker has computed at this point."""
        if not self._wrong:
            return None
        self._computed[rank, point.value, step] += 1
        count = self._computed[rank, point.value, step]
        for fault in self._wrong:
            if (fault.rank, fault.point, fault.step, fault.count) == (rank, point.value, step, count):
                self._wrong.remove(fault)
                return fault
        return None

    def at_message(self, message: str, side: str, *, after: bool) -> MessageFault | None:
        """The fault that happens at this message. To be called before the message, and then after it."""
        if not after:
            self._messages[message, side] += 1
        at = (message, side, after, self._messages[message, side])
        for fault in self._at_messages:
            if (fault.message, fault.side, fault.after, fault.count) == at:
                self._at_messages.remove(fault)
                if fault.kind in ("kill", "replace"):
                    self.lost_at[message, side, after] += 1
                return fault
        return None

    def due(self, turn: int, settled: bool) -> ThenFault | None:
        """The next ThenFault, if it is time for it. `remove_due` follows once there is a worker for it."""
        fault = self._chain[0][0]
        if fault.settled and not settled:
            self._since = None
            return None
        if self._since is None:
            self._since = turn
        if turn < self._since + fault.delay:
            return None
        return fault

    def remove_due(self) -> None:
        """The ThenFault that is due happens."""
        self._chain.pop(0)
