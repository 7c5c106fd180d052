"""The way of votes on a large mesh: each worker hears from some tens of others, and knows the votes of all.

Members are divided into blocks, these into smaller ones, and so on. In the smallest blocks all vote to all. Whoever has
all votes of its block adds them up, and sends the sum to some members of each neighbouring block, as all in its block
do: so every member gets the sum of each neighbour from somebody. With these it has all votes of the next larger block,
and so on, up to the whole mesh. (The dimension exchange of hypercubes, on blocks of any size.)

Nobody has a place of its own in this: no worker waits for a leader, and every member decides for itself, as it does on
a small mesh, which is one block. On 100,000 workers a member gets 68 messages, in 4 rounds.

Added up is what a decision needs of votes (`added`), and exactly: the norms are expansions, so that the sum of all has
the same bits in whatever order votes were added.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from elaswave_spmd.determinism.exact_sum import expansion
from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.recovery.messages import Vote

WIDEST = 32
"""Members up to which everybody votes to everybody; on larger meshes no block is divided into more parts."""


@dataclass(frozen=True)
class Round:
    """One round of the exchange, as one worker sees it.

    Args:
        senders: from each of them comes the vote of a block, in the first round that of a worker. Together with the
            worker's own block these are the next larger block.
        receivers: to whom the vote of the worker's own block goes.
    """

    senders: frozenset[int]
    receivers: tuple[int, ...]


def rounds_of(members: Sequence[int], rank: int, widest: int = WIDEST) -> tuple[Round, ...]:
    """The rounds of the exchange between the members of a mesh, for one of them: at least one.

    Args:
        members: in the order of the mesh, which is the same everywhere: neighbours are in a block.
        widest: at least 2.
    """
    found: list[Round] = []
    block, at = range(len(members)), members.index(rank)
    for left in range(_num_rounds(len(members), widest), 0, -1):
        parts = _divided(block, left)
        own = next(part for part in parts if at in part)
        place = at - own.start
        others = [part for part in parts if part is not own]
        # Blocks may differ in size by one: in a smaller one some members send to two, and all get one of each.
        senders = frozenset(members[part[place % len(part)]] for part in others)
        receivers = tuple(members[i] for part in others for i in part[place :: len(own)])
        found.append(Round(senders, receivers))
        block = own
    return tuple(reversed(found))


def pairs_of(members: Sequence[int], widest: int = WIDEST, groups: Iterable[int] = ()) -> npt.NDArray[np.int64]:
    """(sender, receiver) of everything that is sent in the rounds of all members (`rounds_of`): [n, 2].

    For a mesh of 10,000 this is a million pairs; to ask for the rounds of each member would take minutes.

    Args:
        groups: the numbers of members that are one group each, from the first on. Of pairs within a group only some are
            made: whole blocks are left out.
    """
    ends = [0, *accumulate(groups)]

    def is_in_a_group(block: range) -> bool:
        last = bisect_right(ends, block.start)
        return last < len(ends) and block.stop <= ends[last]

    senders: list[npt.NDArray[np.int64]] = []
    receivers: list[npt.NDArray[np.int64]] = []
    blocks = [range(len(members))]
    for left in range(_num_rounds(len(members), widest), 1, -1):
        smaller = []
        for block in (block for block in blocks if not is_in_a_group(block)):
            parts = _divided(block, left)
            smaller += parts
            places, offsets = np.arange(block.start, block.stop), np.concatenate([np.arange(len(p)) for p in parts])
            for own in parts:
                others = np.concatenate([places[: own.start - block.start], places[own.stop - block.start :]])
                receivers.append(others)
                senders.append(own.start + offsets[others - block.start] % len(own))
        blocks = smaller
    for block in (block for block in blocks if not is_in_a_group(block)):
        # In the first round, of the smallest blocks, all send to all.
        places = np.arange(block.start, block.stop)
        senders.append(np.repeat(places, len(block)))
        receivers.append(np.tile(places, len(block)))
    none = np.empty(0, np.int64)
    at = np.stack([np.concatenate([none, *senders]), np.concatenate([none, *receivers])], axis=1)
    return np.asarray(members, np.int64)[at[at[:, 0] != at[:, 1]]]


def _num_rounds(number: int, widest: int) -> int:
    rounds = 1
    while widest**rounds < number:
        rounds += 1
    return rounds


def _divided(block: range, rounds: int) -> list[range]:
    """A block as so many smaller ones, of even size, that all rounds have about as many; none is empty."""
    width = next(w for w in range(1, len(block) + 1) if w**rounds >= len(block))
    sizes = even_counts(len(block), width)
    return [block[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def added(votes: Sequence[Vote], sender: int, level: int) -> Vote:
    """The vote of a block: the sum of the votes of its parts, in any order.

    Args:
        votes: of one step and mesh epoch; at least one.
        level: of the round in which it is sent.
    """
    norm = expansion(value for vote in votes for value in vote.norm)
    return Vote(votes[0].step, votes[0].epoch, sender, norm, *content_of(votes), level)


def content_of(votes: Sequence[Vote]) -> tuple[float | None, str, float | None]:
    """Loss, extension and weight of votes together: those of the vote that has any, and what all votes carry, or ""."""
    loss, weight = next(((vote.loss, vote.weight) for vote in votes if vote.loss is not None), (None, None))
    extension = votes[0].extension
    return loss, extension if all(vote.extension == extension for vote in votes) else "", weight
