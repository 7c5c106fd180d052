"""Dataflow: micro-batches over the workers of each stage, by measured speed (ElasWave, the dataflow axis).

Three aims, each within what the one before leaves open:

1. the smallest largest load, micro-batches / speed of a worker;
2. the fewest tree nodes over all workers: sums that stay open when a worker has added up its own micro-batches, each of
which
   is a message to the primaries. Time-major dealing sends every leaf by itself, so that there is nothing to choose;
3. the least traffic to the stage before: micro-batches whose worker there is on another host, then links in use.

The first two are aims of each stage alone. The third ties a stage to the one before: stages are dealt left to right,
each best for the stage before as that was dealt; all stages at once would be a search over all dealings.

Nothing moves but micro-batches: changing the dataflow moves no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain

import numpy as np

from elaswave_spmd.mesh import Topology
from elaswave_spmd.scheduling.placement import CONTIGUOUS

MOST_WORK = 20_000_000
"""Elements that settling the ties of one stage may look at; beyond that the first workers get the micro-batches left
over.
"""

MOST_MICROBATCHES = 1 << 18
"""So many micro-batches of a step, at most, have their ties settled: prices are single numbers of 60 bits."""

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Before:
    """The stage before, as its micro-batches were dealt.

    Args:
        counts: micro-batches of its workers.
        hosts: host number of its workers; empty: all on one.
    """

    counts: Counts
    hosts: Counts = ()


@dataclass(frozen=True)
class Dataflow:
    """Micro-batches of each worker, by stage, and what they come to.

    Args:
        counts: per stage, the micro-batches of each worker.
        loads: per stage, the largest load: micro-batches / speed.
        nodes: open tree nodes of all workers.
        crossing: micro-batches that go to another host between stages.
        links: links that micro-batches go over between stages.
    """

    counts: tuple[Counts, ...]
    loads: tuple[float, ...]
    nodes: int
    crossing: int
    links: int

    def __str__(self) -> str:
        idle = sum(count == 0 for counts in self.counts for count in counts)
        words = [f"largest loads {', '.join(f'{load:.4g}' for load in self.loads[:12])}"]
        words += ["..."] if len(self.loads) > 12 else []
        words.append(f"{self.nodes:,} tree nodes, {self.crossing:,} micro-batches between hosts, {self.links:,} links")
        return f"dataflow: {'; '.join(words)}" + (f"; {idle} workers without micro-batches" if idle else "")


def fewest_possible(num_microbatches: int, speeds: np.ndarray) -> np.ndarray:
    """int64[n]: micro-batches of each worker, with the smallest largest load; of equals the first ones get more.

    One micro-batch after another to whom it would load least is optimal for equal micro-batches on workers of any speed
    (Graham's list rule on uniform machines). What everybody has in any optimum is dealt at once, and then in turns all
    micro-batches whose workers come before anybody could get a second one.
    """
    assert num_microbatches >= 0 and len(speeds) and (speeds > 0).all(), (num_microbatches, speeds)
    counts = np.floor(num_microbatches / speeds.sum() * (1 - 1e-9) * speeds).astype(np.int64)
    while left := num_microbatches - int(counts.sum()):
        loads = (counts + 1) / speeds
        order = np.argsort(loads, kind="stable")
        once = np.searchsorted(loads[order], ((counts + 2) / speeds).min(), "right")
        counts[order[: min(left, int(once))]] += 1
    return counts


def least_load(num_microbatches: int, speeds: np.ndarray) -> float:
    """The smallest largest load, micro-batches / speed, of any dealing."""
    return float((fewest_possible(num_microbatches, speeds) / speeds).max())


def deal_by_speed(
    num_microbatches: int,
    speeds: Sequence[float] | np.ndarray,
    *,
    dealing: str = CONTIGUOUS,
    before: Before | None = None,
    hosts: Sequence[int] = (),
    settle: bool = True,
) -> Counts:
    """Micro-batches of each worker of a stage; optimal in the three aims above, one after another.

    Ties that are left go to the first workers. A stage whose ties would take more than MOST_WORK to settle keeps only
    the first aim. Time-major: of the dealing above and that of the stage before, if it has the smallest largest load
    too, the one with less traffic.

    Args:
        num_microbatches: micro-batches of a step, 0 or more.
        speeds: of the workers in the order of their positions, above 0.
        dealing: Placement.dealing.
        before: the stage before; None for the first.
        hosts: host number of each worker; empty: all on one.
        settle: False: keep to the first aim.
    """
    v = np.asarray(speeds, np.float64)
    counts = fewest_possible(num_microbatches, v)
    plain, load = tuple(counts.tolist()), (counts / v).max()
    if not settle:
        return plain
    if dealing == CONTIGUOUS:
        return _fewest_nodes(num_microbatches, v, counts, before, tuple(hosts))
    if before is None or len(before.counts) != len(v) or (np.array(before.counts) / v).max() > load:
        return plain
    return min(plain, before.counts, key=lambda found: traffic(found, dealing, before, hosts))


def caps_of(load: float, speeds: np.ndarray) -> np.ndarray:
    """int64[n]: the most micro-batches of each worker whose load is no larger."""
    caps = np.floor(load * speeds).astype(np.int64)
    caps += (caps + 1) / speeds <= load  # floor of a rounded product may be one off, either way
    caps -= caps / speeds > load
    return caps


def owners(counts: Sequence[int], dealing: str) -> np.ndarray:
    """int64[micro-batches]: the position of each micro-batch's worker; placement.deal_microbatches as an array."""
    found = np.asarray(counts, np.int64)
    position = np.repeat(np.arange(len(found)), found)
    if dealing == CONTIGUOUS:
        return position
    turn = np.arange(len(position)) - np.repeat(np.cumsum(found) - found, found)
    return position[np.lexsort((position, turn))]


def traffic(counts: Sequence[int], dealing: str, before: Before, hosts: Sequence[int] = ()) -> tuple[int, int]:
    """(micro-batches that come from another host, links they come over) if this stage follows `before`."""
    here, there = owners(counts, dealing), owners(before.counts, dealing)
    crossing = 0
    if hosts and before.hosts:
        crossing = int((np.array(hosts)[here] != np.array(before.hosts)[there]).sum())
    return crossing, len(np.unique(here * len(before.counts) + there))


def num_nodes(starts: np.ndarray, stops: np.ndarray, num_microbatches: int) -> np.ndarray:
    """len(maximal_nodes(range(start, stop), num_microbatches)) of each run of micro-batches; int64.

    The tree's nodes are the aligned blocks of 2^k micro-batches, cut off at num_microbatches. A run splits at the one
    number in it with the most zeros at its end; the blocks on both sides have the sizes of the binary digits of what is
    left. Cut off blocks count once, so a run that ends at num_microbatches is counted from its start.
    """
    ones, width, tails = _bits(num_microbatches)
    highest = np.maximum(width[starts ^ stops] - 1, 0)
    middle = (stops >> highest) << highest
    inside = ones[middle - starts] + ones[stops - middle]
    return np.where(starts == stops, 0, np.where(stops == num_microbatches, tails[starts], inside))


@lru_cache(maxsize=8)
def _bits(num_microbatches: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ones in and width of all numbers that occur; nodes of [a, num_microbatches) for each a."""
    size = 1 << max(1, num_microbatches.bit_length())
    ones, width = np.zeros(size, np.int64), np.zeros(size, np.int64)
    at = 1
    while at < size:
        ones[at : 2 * at] = ones[:at] + 1
        width[at : 2 * at] = at.bit_length()
        at *= 2
    tails = np.zeros(num_microbatches + 1, np.int64)
    for a in range(num_microbatches - 1, -1, -1):
        after = a + (a & -a or size)
        tails[a] = 1 + (tails[after] if after < num_microbatches else 0)
    return ones, width, tails


def _fewest_nodes(
    num_microbatches: int, speeds: np.ndarray, counts: np.ndarray, before: Before | None, hosts: Counts
) -> Counts:
    """Dynamic programming over (worker, micro-batches that those up to it are below their most).

    `slack` is how much all are below their most together: less than one micro-batch each, so that there is little to
    choose.
    """
    n, caps = len(speeds), caps_of(float((counts / speeds).max()), speeds)
    slack = int(caps.sum()) - num_microbatches
    lowest = int(np.maximum(caps - slack, 0).min())
    options = np.minimum(caps, slack) + 1
    table_size = (int(caps.max()) - lowest + 1) * (num_microbatches + 1)
    work = max(int(options.sum()) * (slack + 1), table_size)
    if not slack or work > MOST_WORK or num_microbatches > MOST_MICROBATCHES:
        return tuple(counts.tolist())
    prices = _Prices(num_microbatches, range(lowest, int(caps.max()) + 1), before, hosts)
    ends = np.cumsum(caps)
    best = np.full(slack + 1, _NEVER)  # by how much the workers so far are below their most
    best[0] = 0
    gave_up = np.zeros((n, slack + 1), np.int32)
    for i, cap in enumerate(caps.tolist()):
        start = int(ends[i]) - cap  # micro-batches before this worker, if all before it have their most
        found = np.full(slack + 1, _NEVER)
        for less in range(int(options[i]) - 1, -1, -1):  # of equals, those with less for the later worker
            least = max(0, start - num_microbatches)
            most = min(slack - less, start)
            if least > most:
                continue
            price = prices.of(i, cap - less, start - most, start - least)
            total = best[least : most + 1] + price[::-1]
            part = slice(least + less, most + less + 1)
            better = total < found[part]
            found[part][better] = total[better]
            gave_up[i, part][better] = less
        best = found
    assert best[slack] < _NEVER, "the dealing that is there already is one of them"
    below, result = slack, []
    for i in range(n - 1, -1, -1):
        less = int(gave_up[i, below])
        result.append(int(caps[i]) - less)
        below -= less
    return tuple(reversed(result))


_NEVER = np.int64(1 << 60)  # two of them can be added


class _Prices:
    """What it costs that a worker has `count` micro-batches from each micro-batch on: nodes, then crossing
    micro-batches, then links.
    """

    def __init__(self, num_microbatches: int, counts: range, before: Before | None, hosts: Counts) -> None:
        self._counts, self._hosts = counts, hosts
        start = np.arange(num_microbatches + 1)
        stop = start + np.array(counts)[:, None]
        self._stop = np.minimum(stop, num_microbatches)
        nodes = num_nodes(np.broadcast_to(start, stop.shape), self._stop, num_microbatches)
        self._there: np.ndarray | None = None
        links: np.ndarray | int = 0
        if before is not None:
            owner = owners(before.counts, CONTIGUOUS)
            new_owner = np.cumsum(np.diff(owner, prepend=-1) != 0)
            run = np.concatenate([new_owner, new_owner[-1:]])  # number of each micro-batch's run; one more for the end
            links = np.where(self._stop > start, run[np.maximum(self._stop - 1, 0)] - run[start] + 1, 0)
            if hosts and before.hosts:
                self._there = np.array(before.hosts)[owner]
        self._microbatch = (
            2 * num_microbatches + 2
        )  # more than all links of a stage: one for each micro-batch, one for each worker's run
        self._table = np.where(
            stop <= num_microbatches, nodes * self._microbatch * (num_microbatches + 1) + links, _NEVER
        )
        self._host, self._crossing = -1, np.zeros(0)

    def of(self, worker: int, count: int, first: int, last: int) -> np.ndarray:
        """int64[last + 1 - first], by the worker's first micro-batch; _NEVER where the micro-batches end before."""
        row, part = count - self._counts[0], slice(first, last + 1)
        if self._there is None:
            return self._table[row, part]
        if self._hosts[worker] != self._host:
            self._host = self._hosts[worker]
            self._crossing = np.concatenate([[0], np.cumsum(self._there != self._host)])
        return self._table[row, part] + self._microbatch * (
            self._crossing[self._stop[row, part]] - self._crossing[part]
        )


def deal_stages(
    num_microbatches: int,
    speeds: Sequence[np.ndarray],
    *,
    dealing: str = CONTIGUOUS,
    hosts: Sequence[Counts] | None = None,
    starts: Sequence[np.ndarray] | None = None,
    settle: bool = True,
) -> Dataflow:
    """All stages, left to right; stages that are alike, after stages that are alike, are worked out once.

    Large stages are dealt block by block (scheduling.blocks): the first aim is kept, the other two are of each block.

    Args:
        speeds: per stage, float64[workers].
        hosts: per stage, what host_numbers says; None: all on one.
        starts: per stage, what first_microbatches says; None: nothing was dealt before.
        settle: False: keep to the first aim.
    """
    of_stages = list(hosts or [()] * len(speeds))
    counts = _deal_blocks(num_microbatches, speeds, of_stages, starts, settle) if dealing == CONTIGUOUS else None
    counts = counts or _deal(num_microbatches, speeds, of_stages, dealing, settle)
    measured: dict[tuple[Counts, Before | None, Counts], tuple[int, int, int]] = {}
    before: Before | None = None
    nodes = crossing = links = 0
    for dealt, of_stage in zip(counts, of_stages, strict=True):
        if (dealt, before, of_stage) not in measured:
            measured[dealt, before, of_stage] = _measure(num_microbatches, dealt, dealing, before, of_stage)
        more = measured[dealt, before, of_stage]
        nodes, crossing, links = nodes + more[0], crossing + more[1], links + more[2]
        before = Before(dealt, of_stage)
    loads = tuple(float((np.array(dealt) / v).max()) for dealt, v in zip(counts, speeds, strict=True))
    return Dataflow(counts, loads, nodes, crossing, links)


def _deal(
    num_microbatches: int, speeds: Sequence[np.ndarray], hosts: Sequence[Counts], dealing: str, settle: bool
) -> tuple[Counts, ...]:
    """Micro-batches of each worker, by stage."""
    found: dict[tuple[bytes, Before | None, Counts], Counts] = {}
    before: Before | None = None
    counts: list[Counts] = []
    for v, of_stage in zip(speeds, hosts, strict=True):
        key = v.tobytes(), before, of_stage
        if key not in found:
            found[key] = deal_by_speed(
                num_microbatches, v, dealing=dealing, before=before, hosts=of_stage, settle=settle
            )
        counts.append(found[key])
        before = Before(found[key], of_stage)
    return tuple(counts)


def _deal_blocks(
    num_microbatches: int,
    speeds: Sequence[np.ndarray],
    hosts: Sequence[Counts],
    starts: Sequence[np.ndarray] | None,
    settle: bool,
) -> tuple[Counts, ...] | None:
    """Block by block; None: there are none. Blocks that are alike are worked out once."""
    blocks = cut_blocks(num_microbatches, [caps_of(least_load(num_microbatches, v), v) for v in speeds], starts)
    if not blocks:
        return None
    found: dict[tuple[object, ...], tuple[Counts, ...]] = {}
    dealt: list[tuple[Counts, ...]] = []
    for block in blocks:
        first, stop = block.microbatches
        some = [v[a:b] for v, (a, b) in zip(speeds, block.parts, strict=True)]
        near, numbers = [], dict[int, int]()  # hosts by the order in which they come: blocks are alike on other hosts
        for of_stage, (a, b) in zip(hosts, block.parts, strict=True):
            near.append(tuple(numbers.setdefault(host, len(numbers)) for host in of_stage[a:b]))
        key = stop - first, *(v.tobytes() for v in some), *near
        if key not in found:
            found[key] = _deal(stop - first, some, near, CONTIGUOUS, settle)
        dealt.append(found[key])
    return tuple(tuple(chain.from_iterable(of_block[s] for of_block in dealt)) for s in range(len(speeds)))


def dealings(
    num_microbatches: int,
    speeds: Sequence[np.ndarray],
    *,
    dealing: str = CONTIGUOUS,
    hosts: Sequence[Counts] | None = None,
    starts: Sequence[np.ndarray] | None = None,
) -> tuple[Dataflow, ...]:
    """By all aims, and by the first alone where that is another dealing: which is faster, a step's actions show.

    Arguments as for `deal_stages`.
    """
    settled = deal_stages(num_microbatches, speeds, dealing=dealing, hosts=hosts, starts=starts)
    plain = deal_stages(num_microbatches, speeds, dealing=dealing, hosts=hosts, starts=starts, settle=False)
    return (settled,) if plain.counts == settled.counts else (settled, plain)


def _measure(
    num_microbatches: int, counts: Counts, dealing: str, before: Before | None, hosts: Counts
) -> tuple[int, int, int]:
    """(nodes, crossing micro-batches, links) of a stage."""
    nodes = num_microbatches
    if dealing == CONTIGUOUS:
        stops = np.cumsum(counts)
        nodes = int(num_nodes(stops - np.array(counts), stops, num_microbatches).sum())
    crossing, links = traffic(counts, dealing, before, hosts) if before is not None else (0, 0)
    return nodes, crossing, links


def host_numbers(stages: Sequence[Sequence[int]], topology: Topology) -> list[Counts] | None:
    """A number for the host of each worker, by stage; None where there is one host, or one is not known."""
    if len({path for _, path in topology.domains}) < 2:
        return None
    if not all(rank in topology for members in stages for rank in members):
        return None
    numbers: dict[tuple[str, ...], int] = {}
    found = [tuple(numbers.setdefault(topology.path(rank), len(numbers)) for rank in ranks) for ranks in stages]
    return found if len(numbers) > 1 else None


# Blocks of neighbours: micro-batches of a large mesh dealt so that a lost worker is felt by those beside it only.
SMALLEST_BLOCK = 16
"""Workers of the smallest stage in a block, on average at least."""

_FEWEST_BLOCKS = 4  # a mesh of fewer is dealt as a whole


@dataclass(frozen=True)
class Block:
    """Neighbours in all stages, who share micro-batches with nobody else.

    Args:
        micro-batches: the first and the one after the last.
        parts: per stage, positions of its workers: the first and the one after the last.
    """

    microbatches: tuple[int, int]
    parts: tuple[tuple[int, int], ...]


def first_microbatches(
    stages: Sequence[Sequence[int]], old_stages: Sequence[Sequence[int]], old_counts: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Per stage, int64[workers]: the first micro-batch that each had before; of newcomers, that of the one to their
    left.
    """
    had: dict[int, int] = {}
    for members, counts in zip(old_stages, old_counts, strict=True):
        had |= dict(zip(members, accumulate(counts, initial=0), strict=False))
    return [np.maximum.accumulate(np.array([had.get(rank, 0) for rank in members], np.int64)) for members in stages]


def cut_blocks(
    num_microbatches: int, caps: Sequence[np.ndarray], starts: Sequence[np.ndarray] | None = None
) -> tuple[Block, ...]:
    """The smallest blocks in which all micro-batches find a place; () where there are none.

    Args:
        caps: per stage, int64[workers]: the most micro-batches that each may have.
        starts: per stage, int64[workers]: about where the micro-batches of each are to begin, ascending; None: evenly.
    """
    if starts is None:
        starts = [np.arange(len(of_stage)) * num_microbatches // len(of_stage) for of_stage in caps]
    sums = [np.concatenate([np.zeros(1, np.int64), np.cumsum(of_stage)]) for of_stage in caps]
    number = min(map(len, caps)) // SMALLEST_BLOCK
    while number >= _FEWEST_BLOCKS:
        bounds = np.arange(number + 1) * num_microbatches // number
        cuts = [np.searchsorted(first, bounds) for first in starts]
        for cut, of_stage in zip(cuts, caps, strict=True):
            cut[0], cut[-1] = 0, len(of_stage)
        room = np.min([np.diff(total[cut]) for total, cut in zip(sums, cuts, strict=True)], axis=0)
        if all((np.diff(cut) > 0).all() for cut in cuts) and int(room.sum()) >= num_microbatches:
            ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(_shares(num_microbatches, room))])
            return tuple(
                Block((int(ends[b]), int(ends[b + 1])), tuple((int(cut[b]), int(cut[b + 1])) for cut in cuts))
                for b in range(number)
            )
        number //= 2
    return ()


def _shares(num_microbatches: int, room: np.ndarray) -> np.ndarray:
    """int64[blocks]: micro-batches of each, as evenly by their room as whole micro-batches allow, and within it."""
    total = int(room.sum())
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(room)])
    return np.diff(before * num_microbatches // total)
