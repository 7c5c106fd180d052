"""The additions of a step with chains of micro-batches as leaves of the reduction tree: what is held, and waited for.

A chain is a block of consecutive micro-batches that are added from left to right. The tree is over the sums of chains:
it is the project's own (`determinism.reduction_tree`), with a number for each chain. A chain of one micro-batch is a
leaf of today's tree. No run adds up like this; `benchmarks.chains` says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from elaswave_spmd.determinism.reduction_tree import Reduction
from elaswave_spmd.scheduling.microbatch_assignment import assign_by_speed


class ChainedSums:
    """The gradients that one worker holds while it adds up micro-batches, in whatever order they come.

    Args:
        num_microbatches: of a step.
        chain: micro-batches of a chain; the last chain may be shorter.
    """

    def __init__(self, num_microbatches: int, chain: int) -> None:
        self.chain = chain
        self._num_microbatches = num_microbatches
        self.tree = Reduction(-(-num_microbatches // chain))
        """The tree over chains: those that are complete."""
        self._begun: dict[int, int] = {}  # chain -> micro-batches at its beginning whose sum is held
        self._apart: set[int] = set()  # micro-batches that are held by themselves: one before them is missing
        self.most = 0
        """The most gradients of full size that were held at once."""
        self.additions = 0
        """Additions that took a pass of their own: autograd makes the others where a gradient comes to be."""

    @property
    def held(self) -> int:
        """Gradients of full size that are held now."""
        return len(self.tree.held) + len(self._begun) + len(self._apart)

    def begun(self, chain: int) -> int:
        """The micro-batches at the beginning of an incomplete chain whose sum is held."""
        return self._begun.get(chain, 0)

    def receive(self, chain: int, microbatches: int) -> None:
        """The sum of so many micro-batches at the beginning of a chain has come from another worker."""
        assert chain not in self._begun, chain
        self._begun[chain] = microbatches
        self._note()
        self._extend(chain)

    def add(self, microbatch: int) -> None:
        """A micro-batch's gradient is made. Where the sum that it is added to is held, it needs no buffer."""
        chain, at = divmod(microbatch, self.chain)
        if self._length(chain) == 1:
            self._complete(chain, in_place=True)
            return
        begun = self._begun.get(chain, 0)
        if begun == at:
            if not at and microbatch + 1 in self._apart:  # a + b and b + a have the same bits
                self._apart.remove(microbatch + 1)
                self._begun[chain] = 2
            else:
                self._begun[chain] = at + 1
        else:
            self._apart.add(microbatch)
        self._note()
        self._extend(chain)

    def _length(self, chain: int) -> int:
        return min(self.chain, self._num_microbatches - chain * self.chain)

    def _note(self) -> None:
        self.most = max(self.most, self.held)

    def _extend(self, chain: int) -> None:
        """Add to a chain what has waited for it."""
        first = chain * self.chain
        while chain in self._begun and first + self._begun[chain] in self._apart:
            self._apart.remove(first + self._begun[chain])
            self._begun[chain] += 1
            self.additions += 1
        if self._begun.get(chain) == self._length(chain):
            del self._begun[chain]
            self._complete(chain, in_place=False)

    def _complete(self, chain: int, *, in_place: bool) -> None:
        """A chain's sum goes into the tree; a single micro-batch's may be added to its sibling where it is made."""
        added = self.tree.add((chain, chain + 1))
        assert added is not None, f"chain {chain} was added up twice"
        alone = len(added.merges) - in_place if added.merges else 0
        self.additions += alone
        # As `max_open_nodes` counts: before its additions, with a buffer for this sum unless autograd adds it.
        self.most = max(self.most, self.held + alone)


def added_up(order: Iterable[int], num_microbatches: int, chain: int) -> ChainedSums:
    """The sums of a worker that has added up its micro-batches in this order."""
    sums = ChainedSums(num_microbatches, chain)
    for microbatch in order:
        sums.add(microbatch)
    return sums


def shares(num_microbatches: int, workers: int, cut_at: int = 1) -> list[range]:
    """The micro-batches of each of so many equal workers, cut at multiples of `cut_at` only, by the project's planner.

    A worker's load is a whole number of blocks, the last of which may be shorter.
    """
    counts = assign_by_speed(-(-num_microbatches // cut_at), np.ones(workers))
    ends = [min(end * cut_at, num_microbatches) for end in accumulate(counts, initial=0)]
    return [range(first, stop) for first, stop in pairwise(ends)]


# ---- chains that span workers


@dataclass(frozen=True)
class HandedOn:
    """A step in which a worker that ends within a chain hands the chain's sum on to the next one.

    Args:
        sums: those that are handed on.
        waiting_s: seconds of the step, in micro-batches, if all workers go on in ascending order and hold no more: a
            gradient is added when the sum before it is there.
        apart: gradients that the worst worker holds if nobody waits: each gradient is held by itself until the sum
            before it has come.
        ordered_s: seconds if each worker begins with what the next one needs, and ends with what it needs itself.
        waits: how often a worker waits even so.
        ordered: gradients that the worst worker holds then, with the sum that it has handed on, which is kept until
            the step is decided, as any sum that was sent.
    """

    sums: int
    waiting_s: int
    apart: int
    ordered_s: int
    waits: int
    ordered: int


def hand_on(parts: Sequence[range], num_microbatches: int, chain: int) -> HandedOn:
    """Runs a step of workers with these micro-batches, each of which takes a second; messages take no time."""
    ordered = [_next_first(part, chain) for part in parts]
    ends_now, _ = _ends(parts, chain)
    ends_then, waits = _ends(ordered, chain)
    seconds = range(max(map(len, parts)))
    together = [(worker, part[i]) for i in seconds for worker, part in enumerate(parts) if i < len(part)]
    return HandedOn(
        sum(bool(part.start % chain and part) for part in parts),
        max(ends_now.values()),
        max(held_in_order(parts, together, num_microbatches, chain)),
        max(ends_then.values()),
        waits,
        max(_in_turn(part, num_microbatches, chain) for part in ordered),
    )


def _next_first(part: range, chain: int) -> list[int]:
    """A worker's micro-batches: those of the chain that the next one ends, whole chains, those of one begun before."""
    begun = [u for u in part if u // chain == part.start // chain] if part.start % chain else []
    last = [u for u in part if u // chain == part.stop // chain and u not in begun]
    return [*last, *(u for u in part if u not in begun and u not in last), *begun]


def _ends(orders: Sequence[Sequence[int]], chain: int) -> tuple[dict[int, int], int]:
    """The second at which each micro-batch has been added, and how often a worker waited for another one's sum."""
    worker_of = {u: worker for worker, order in enumerate(orders) for u in order}
    ends: dict[int, int] = {}
    done, now, waits = [0] * len(orders), [0] * len(orders), 0
    while len(ends) < len(worker_of):
        before = len(ends)
        for worker, order in enumerate(orders):
            while done[worker] < len(order):
                u = order[done[worker]]
                comes_from = worker_of[u - 1] if u % chain else worker
                if comes_from != worker and u - 1 not in ends:
                    break
                there = ends[u - 1] if comes_from != worker else 0
                waits += there > now[worker] + 1
                ends[u] = now[worker] = max(now[worker] + 1, there)
                done[worker] += 1
        assert len(ends) > before, "workers wait for each other"
    return ends, waits


def held_in_order(
    parts: Sequence[range], added: Iterable[tuple[int, int]], num_microbatches: int, chain: int
) -> list[int]:
    """The most gradients that each worker holds if nobody waits: a sum is handed on when it is complete there.

    Args:
        parts: the micro-batches of each worker of a stage.
        added: (worker, micro-batch), in the order in which the gradients are made.
    """
    sums = [ChainedSums(num_microbatches, chain) for _ in parts]
    handed_on: set[int] = set()  # the micro-batches before which a sum ends
    for worker, microbatch in added:
        sums[worker].add(microbatch)
        stop = parts[worker].stop
        # The next worker may have nothing but the middle of this chain, and pass it on in its turn.
        while (
            stop % chain
            and stop < num_microbatches
            and stop not in handed_on
            and sums[worker].begun(stop // chain) == stop % chain
        ):
            handed_on.add(stop)
            worker = next(other for other, part in enumerate(parts) if stop in part)
            sums[worker].receive(stop // chain, stop % chain)
            stop = parts[worker].stop
    return [each.most for each in sums]


def _in_turn(order: Sequence[int], num_microbatches: int, chain: int) -> int:
    """Gradients that a worker holds if it is sent the sum of a begun chain when it comes to it."""
    sums, mine, first = ChainedSums(num_microbatches, chain), set(order), min(order, default=0)
    for u in order:
        if u == first and u % chain and u - 1 not in mine:
            sums.receive(u // chain, u % chain)
        sums.add(u)
    return sums.most
