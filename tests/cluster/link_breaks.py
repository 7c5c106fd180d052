"""Links that are lost between two living workers, in random schedules: when, which of them, and when that is noticed.

A link of the product goes one way: each worker has a connection of its own to each of its peers, and its sender alone
notices its end. So one direction may be lost, or both, which two workers then notice one after the other; or all links
of one worker, as by a fault of its network. What was on the link is lost, or some last part of it; so is all that is
sent on it until its sender has noticed, and has made it again with the next Reconfigure (docs/protocol.md, C11).

What is drawn here comes from random streams of its own. A schedule without such losses is what it would be without this
module, turn by turn.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.cluster.faults import Link

SHARE = 0.3
"""Of the schedules so many have links that are lost; of those with `links`, all."""
RECONFIGURED = "links made"
"""A worker has a Reconfigure, and has made its links for it; it may be in the middle of an action of the step before,
and enters the mesh epoch after that."""

# The messages at which a link is lost that they are sent on, and how often that is in a typical schedule; then those to
# the controller, and the points, at which a link of their worker is.
_SENT = {
    "Activation": 20,
    "ActivationGradient": 15,
    "PartialSum": 30,
    "ReducedGradient": 20,
    "Publish": 30,
    "Need": 10,
    "Vote": 16,
    "PageState": 6,
}
_SENT_TO_CHECK = {"Addend": 20, "CheckDigests": 6}
_TO_CONTROLLER = {"StepReport": 8, "CaughtUp": 2, "Applied": 10, "ValidationLoss": 2, "LinkClosed": 1}
_TO_THE_NEXT_CONTROLLER = {"Adopted": 3}
_POINTS = {"forward": 16, "backward": 16, "reduce": 30, "norm": 16, "apply": 8, "publish": 20}
Links = Mapping[Link, int]
"""The links that may be lost -> how many messages are on them."""
_TAKEN = "taken "
"""Before the name of a message that a worker takes."""


@dataclass(frozen=True)
class LinkBreak:
    """One loss of a link, or of several at once.

    Args:
        moment: a message by name (a worker sends one on the link, or to the controller), the same after "taken " (a
            worker takes one), a FaultPoint by name (a worker passes it), or RECONFIGURED.
        count: so many such moments have been when it happens, of all workers together; if there is no such link then,
            at the next one.
        ways: the link that the message is sent on, or another one of that worker, drawn: "one" direction, "both", or
            "all" links of that worker, as far as they were never lost; or "again", those that were lost last, as soon
            as all of them are made again: then one of their ends is given up.
    """

    moment: str
    count: int
    ways: str

    def __post_init__(self) -> None:
        assert self.ways in ("one", "both", "all", "again"), self


@dataclass(frozen=True)
class LostLink:
    """How one direction is lost.

    Args:
        kept: the share of what is on it, from the oldest message on, that arrives all the same.
        noticed_after: turns until its sender can notice.
        is_behind: it notices that after what arrives at the same time, a Reconfigure among it perhaps.
    """

    link: Link
    kept: float
    noticed_after: int
    is_behind: bool


def draw_breaks(
    r: random.Random, workers: int, *, checks: bool = False, adopts: bool = False, again: bool = True
) -> tuple[LinkBreak, ...]:
    """Losses of links for a mesh of so many workers.

    Args:
        checks: what is computed is checked.
        adopts: controllers come back.
        again: now and then the same link is lost a second time, and with it one of its ends.
    """
    sent = _SENT | (_SENT_TO_CHECK if checks else {})
    to_controller = _TO_CONTROLLER | (_TO_THE_NEXT_CONTROLLER if adopts else {})
    of_change = {RECONFIGURED: 4 * workers}, {_TAKEN + "Prepare": 2 * workers}
    moments = sent, to_controller, _POINTS, *of_change
    found = [_draw_break(r, moments) for _ in range(r.choices((1, 2, 3, 6), (6, 3, 2, 1))[0])]
    if again and r.random() < 0.1:
        moment = r.choice(("Vote", "PartialSum", "forward", RECONFIGURED))
        found.append(LinkBreak(moment, r.randint(1, 40), "again"))
    return tuple(found)


def _draw_break(r: random.Random, moments: Sequence[Mapping[str, int]]) -> LinkBreak:
    ways = r.choices(("one", "both", "all"), (6, 3, 1))[0]
    where = r.choices(moments, (8, 3, 3, 5, 1))[0]
    moment = r.choice(list(where))
    return LinkBreak(moment, r.randint(1, where[moment]), ways)


class LinkBreaks:
    """The losses of links of a run that have not happened yet, and how they happen.

    Args:
        breaks: what is drawn for the run.
        seed: of which links they are, and of when their senders notice.
    """

    def __init__(self, breaks: Sequence[LinkBreak], seed: int) -> None:
        self._left = list(breaks)
        self._draw = random.Random(f"lost links {seed}")
        self._moments: Counter[str] = Counter()
        self._last: list[Link] = []  # that were lost by the last one
        self.lost: Counter[Link] = Counter()
        """How often each direction of a link was lost."""

    def sent(self, message: str, rank: int, link: Link, links: Callable[[], Links]) -> list[LostLink]:
        """The links that are lost when a worker is about to send a message on `link`."""
        return self._at(message, rank, link, links) if self._left else []

    def taken(self, message: str, rank: int, links: Callable[[], Links]) -> list[LostLink]:
        """The links that are lost when a worker takes a message."""
        return self._at(_TAKEN + message, rank, None, links) if self._left else []

    def at(self, moment: str, rank: int, links: Callable[[], Links]) -> list[LostLink]:
        """The links that are lost when a worker passes a point of its step, or has made its links."""
        return self._at(moment, rank, None, links) if self._left else []

    def _at(self, moment: str, rank: int, link: Link | None, links: Callable[[], Links]) -> list[LostLink]:
        self._moments[moment] += 1
        found: list[LostLink] = []
        for drawn in [b for b in self._left if b.moment == moment and self._moments[moment] >= b.count]:
            lost = self._links_of(drawn, rank, link, links())
            if lost:
                self._left.remove(drawn)
                self._last = lost
                found += [self._how(it, at_once=moment == RECONFIGURED and it[0] == rank) for it in lost]
        self.lost.update(it.link for it in found)
        return found

    def _links_of(self, drawn: LinkBreak, rank: int, link: Link | None, links: Links) -> list[Link]:
        """The links that are lost, of those that there are."""
        if drawn.ways == "again":
            return self._last if {*self._last} <= {*links} else []
        of_worker = sorted(it for it in links if rank in it and it not in self.lost)
        if drawn.ways == "all" or not of_worker:
            return of_worker
        # Those that it has made just now are its own. What is on a link is lost with it: better one with something on.
        own = [it for it in of_worker if drawn.moment != RECONFIGURED or it[0] == rank] or of_worker
        able = [it for it in own if links[it]] or own
        one = link if link in of_worker else self._draw.choice(able)
        assert one is not None
        return [it for it in of_worker if it in ((one,) if drawn.ways == "one" else (one, one[::-1]))]

    def _how(self, link: Link, *, at_once: bool) -> LostLink:
        """How a link is lost. `at_once`: mostly in time for its sender to notice before it enters the mesh epoch."""
        draw = self._draw
        soon = 0 if at_once else draw.randint(0, 40)
        return LostLink(
            link,
            draw.choice((0.0, 0.0, draw.random(), 1.0)),
            draw.choice((0, soon, soon, draw.randint(40, 400))),
            draw.random() < 0.5,
        )
