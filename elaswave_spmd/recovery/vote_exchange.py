"""An all-reduce of votes for large meshes: each worker hears from some tens of others, and counts the votes of all.

Members are divided into blocks, these into smaller blocks, and so on. Within a smallest block, every member sends its
vote to every other. A member that has all votes of its block adds them up and sends the sum to some members of each
neighbouring block. All members of its block do the same, so that every member of the neighbouring blocks gets the sum
from one of them. With the sums of all neighbouring blocks a member has the votes of the next larger block, and so on,
up to the whole mesh. (This is the dimension exchange of hypercubes, on blocks of any size.)

No member has a special role: no worker waits for a leader, and every member decides for itself, as it does on a small
mesh, which is a single block. On 100,000 workers a member gets 68 messages, in 4 rounds.

The sum contains what a decision needs of the votes (`added`), and it is exact: norms are expansions
(determinism/exact_sum.py), so their sum has the same bits in whatever order votes are added.
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
"""Up to this number of members, every member votes to every other. On larger meshes, no block has more parts."""


@dataclass(frozen=True)
class Round:
    """One round of the exchange, as one worker sees it.

    Args:
        senders: ranks from each of which one vote comes: the sum over a block, or in the first round a worker's own
            vote. These blocks and the block of this worker are, together, the next larger block.
        receivers: ranks to which this worker sends the vote of its own block.
    """

    senders: frozenset[int]
    receivers: tuple[int, ...]


def rounds_of(members: Sequence[int], rank: int, widest: int = WIDEST) -> tuple[Round, ...]:
    """The rounds of the exchange between the members of a mesh, for one of them: at least one.

    Args:
        members: the ranks in the order of the mesh, which is the same on all workers: neighbours share a block.
        rank: the member whose rounds are returned.
        widest: the largest number of parts of a block; at least 2.

    Returns:
        The rounds in the order in which they take place: the smallest blocks first.
    """
    found: list[Round] = []
    block, at = range(len(members)), members.index(rank)
    for left in range(_num_rounds(len(members), widest), 0, -1):
        parts = _divided(block, left)
        own = next(part for part in parts if at in part)
        place = at - own.start
        others = [part for part in parts if part is not own]
        # Blocks may differ in size by one. A member of a smaller block may send to two members of a larger one, so that
        # every member still gets exactly one vote from each of the other blocks.
        senders = frozenset(members[part[place % len(part)]] for part in others)
        receivers = tuple(members[i] for part in others for i in part[place :: len(own)])
        found.append(Round(senders, receivers))
        block = own
    return tuple(reversed(found))


def pairs_of(members: Sequence[int], widest: int = WIDEST, groups: Iterable[int] = ()) -> npt.NDArray[np.int64]:
    """All pairs (sender, receiver) of the rounds of all members (`rounds_of`), as int64 [n, 2].

    On a mesh of 10,000 workers these are a million pairs. They are computed with NumPy, since calling `rounds_of` for
    each member would take minutes.

    Args:
        groups: sizes of consecutive groups of members, for a caller that knows already that all members of a group are
            linked (the workers of a stage). Blocks that lie within one group are skipped, so most pairs within a group
            are missing from the result.
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
    """Divide a block into parts of even size, none of them empty.

    The number of parts is the smallest whose `rounds`-th power is at least the size of the block, so that the blocks of
    all remaining rounds are divided into about the same number of parts.
    """
    width = next(w for w in range(1, len(block) + 1) if w**rounds >= len(block))
    sizes = even_counts(len(block), width)
    return [block[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def added(votes: Sequence[Vote], sender: int, level: int) -> Vote:
    """The vote of a block: the sum of the votes of its parts, in any order.

    Args:
        votes: the votes of the parts, for one step in one mesh epoch; at least one.
        sender: the rank that sends the sum.
        level: the number of the round in which the sum is sent; 0 is the round of single votes.
    """
    norm = expansion(value for vote in votes for value in vote.norm)
    return Vote(votes[0].step, votes[0].epoch, sender, norm, *content_of(votes), level)


def content_of(votes: Sequence[Vote]) -> tuple[float | None, str, float | None]:
    """The (loss, extension, weight) of several votes together.

    Loss and weight come from the vote that has a loss, which is that of the loss page's primary; None if no vote has
    one. The extension is the one that all votes carry, or "" if they differ.
    """
    loss, weight = next(((vote.loss, vote.weight) for vote in votes if vote.loss is not None), (None, None))
    extension = votes[0].extension
    return loss, extension if all(vote.extension == extension for vote in votes) else "", weight
