"""The assignment of micro-batches to the workers of each stage, by measured speed (ElasWave's "dataflow" axis).

Two aims, the second within what the first leaves open:

1. the smallest largest load, where a worker's load is its micro-batches divided by its speed;
2. the fewest tree nodes over all workers. A worker adds up its own micro-batches as far as the reduction tree allows;
   each sum that is left is a message to the primaries. With links of 25 GB/s this changes modelled steps by up to 4 %,
   with links of 2.5 GB/s by up to 20 %. In time-major order every gradient is sent by itself, so nothing is to be
   chosen.

With `align` (`schedule.align`) the second aim may exceed the first by that share of the load: more cuts are at borders
of the tree, so workers send fewer sums. Such an assignment is one more to choose from, by the time of its step.

A large mesh is assigned in blocks of neighbours. The first aim leaves open which workers get the micro-batches of a
lost worker. If the first workers got them, the micro-batches of everybody up to the lost worker would shift, and the
action list of one worker would depend on those of thousands. Blocks keep the change near the lost worker.

Moving micro-batches moves no state, so a new assignment takes effect at the next step. numpy only, no torch: planning
for 100,000 workers runs in seconds on a laptop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise

import numpy as np

from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.scheduling.equal_stages import once_each, with_equal_shared
from elaswave_spmd.scheduling.placement import CONTIGUOUS

MOST_WORK = 20_000_000
"""The most array elements that the second aim may look at for one stage. Beyond it only the first aim counts, and the
first workers get the micro-batches that are left over."""

SMALLEST_BLOCK = 16
"""The smallest stage of a block has at least this many workers, on average over the blocks."""

_FEWEST_BLOCKS = 4  # a mesh with fewer blocks is assigned as a whole

Counts = tuple[int, ...]
"""The number of micro-batches of each worker of a stage, in stage order."""


@dataclass(frozen=True)
class MicrobatchAssignment:
    """The micro-batches of each worker, by stage, with the figures that it was chosen by.

    Args:
        counts: per stage, the number of micro-batches of each worker.
        loads: per stage, the largest load: micro-batches / speed.
        num_tree_nodes: tree nodes that workers send, over all workers.
    """

    counts: tuple[Counts, ...]
    loads: tuple[float, ...]
    num_tree_nodes: int

    def __str__(self) -> str:
        idle = sum(counts.count(0) for counts in self.counts)
        loads = ", ".join(f"{load:.4g}" for load in self.loads[:12]) + (", ..." if len(self.loads) > 12 else "")
        text = f"largest loads {loads}; {self.num_tree_nodes:,} tree nodes"
        return text + (f"; {idle} workers without micro-batches" if idle else "")


# ---- one stage


def balanced_counts(num_microbatches: int, speeds: np.ndarray) -> np.ndarray:
    """The micro-batches of each worker with the smallest largest load: int64 [workers]. The first workers win ties.

    For equal jobs on machines of different speeds, giving one job after another to the machine on which it would end
    first is optimal (Graham's list rule on uniform machines). The jobs that a machine has in every optimum are given at
    once, and then, in each round, all jobs whose machines come before any machine could get a second one.

    Args:
        speeds: float64 [workers], above 0.
    """
    assert num_microbatches >= 0 and len(speeds) and (speeds > 0).all(), (num_microbatches, speeds)
    # The proportional share, rounded down, is in every optimum. The factor is there for rounding errors.
    counts = np.floor(num_microbatches / speeds.sum() * (1 - 1e-9) * speeds).astype(np.int64)
    while left := num_microbatches - int(counts.sum()):
        loads = (counts + 1) / speeds
        order = np.argsort(loads, kind="stable")
        # Up to the smallest load that a second micro-batch would make, one each can be given without looking again.
        once = np.searchsorted(loads[order], ((counts + 2) / speeds).min(), "right")
        counts[order[: min(left, int(once))]] += 1
    return counts


def least_load(num_microbatches: int, speeds: np.ndarray) -> float:
    """The smallest largest load, micro-batches / speed, of any assignment to workers of these speeds."""
    return float((balanced_counts(num_microbatches, speeds) / speeds).max())


def max_counts(load: float, speeds: np.ndarray) -> np.ndarray:
    """The most micro-batches that each worker can have without exceeding a load: int64 [workers]."""
    found = np.floor(load * speeds).astype(np.int64)
    found += (found + 1) / speeds <= load  # the floor of a rounded product may be one too small or one too large
    found -= found / speeds > load
    return found


def assign_by_speed(
    num_microbatches: int,
    speeds: Sequence[float] | np.ndarray,
    *,
    microbatch_order: str = CONTIGUOUS,
    fewest_nodes: bool = True,
    align: float = 0.0,
    block: tuple[int, int] | None = None,
) -> Counts:
    """The micro-batches of each worker of a stage, optimal in the first aim and then in the second.

    Ties that are left go to the first workers.

    Args:
        num_microbatches: micro-batches of a step, 0 or more.
        speeds: speeds of the workers in stage order, above 0.
        microbatch_order: Placement.microbatch_order.
        fewest_nodes: False: only the first aim counts.
        align: the share by which the largest load may exceed the least possible one, for fewer tree nodes.
        block: the first of these micro-batches in the tree, and the micro-batches of the tree; None: these are all.
    """
    v = np.asarray(speeds, np.float64)
    counts = balanced_counts(num_microbatches, v)
    if fewest_nodes and microbatch_order == CONTIGUOUS:
        return _with_fewest_nodes(num_microbatches, v, counts, align, block or (0, num_microbatches))
    return tuple(counts.tolist())


def _with_fewest_nodes(
    num_microbatches: int, speeds: np.ndarray, counts: np.ndarray, align: float, block: tuple[int, int]
) -> Counts:
    """The counts with the fewest tree nodes among those with the largest load of `counts`, or a share `align` more.

    Dynamic programming over (worker, micro-batches by which the workers so far are below their maximum). `slack` is the
    sum of these differences over all workers. It is less than one micro-batch for each worker, and what `align` adds,
    so there are few choices.
    """
    n, caps = len(speeds), max_counts(float((counts / speeds).max()) * (1 + align), speeds)
    slack = int(caps.sum()) - num_microbatches
    lowest = int(np.maximum(caps - slack, 0).min())
    options = np.minimum(caps, slack) + 1
    table_size = (int(caps.max()) - lowest + 1) * (num_microbatches + 1)
    # Without slack all workers are at their maximum. Beyond MOST_WORK the table would take longer than it gains.
    if not slack or max(int(options.sum()) * (slack + 1), table_size) > MOST_WORK:
        return tuple(counts.tolist())
    table = _node_table(num_microbatches, range(lowest, int(caps.max()) + 1), *block)
    # What begins before the first micro-batch or after the last one is in the table, too: it is never chosen.
    prices = np.pad(table, ((0, 0), (slack, 2 * slack)), constant_values=_NEVER)
    # Where a worker's range begins depends only on how far the workers before it are below their maximum, so
    # (worker, difference so far) is all the state that the dynamic program needs.
    ends, after = np.cumsum(caps), np.arange(slack + 1)
    best = np.full(2 * slack + 1, _NEVER)  # [difference so far] -> fewest nodes; those from -slack to -1 cannot be
    best[0] = 0
    given_up = np.zeros((n, slack + 1), np.int32)
    # From many to few: of equal choices the later worker has fewer micro-batches, as in `balanced_counts`.
    choices = np.arange(int(options.max()) - 1, -1, -1)[:, None]
    for i, cap in enumerate(caps.tolist()):
        less = choices[-int(options[i]) :]
        before = after - less  # [choices, difference with this worker]: the difference without it
        start = int(ends[i]) - cap - before  # the worker's first micro-batch
        total = best[before] + prices[cap - lowest - less, slack + start]
        chosen = total.argmin(axis=0)
        best[: slack + 1] = np.minimum(total[chosen, after], _NEVER)
        given_up[i] = less[chosen, 0]
    assert best[slack] < _NEVER, "`counts` is one of the choices"
    below, result = slack, []
    for i in range(n - 1, -1, -1):
        less = int(given_up[i, below])
        result.append(int(caps[i]) - less)
        below -= less
    return tuple(reversed(result))


_NEVER = np.int64(1 << 60)  # the price of what cannot be; two of them can be added without overflow


def _node_table(num_microbatches: int, counts: range, first: int, of_tree: int) -> np.ndarray:
    """int64 [counts, num_microbatches + 1]: tree nodes of so many micro-batches from each first micro-batch on.

    _NEVER where there are not so many.

    Args:
        first: the first of the micro-batches in the tree.
        of_tree: micro-batches of the tree.
    """
    start, last = np.arange(first, first + num_microbatches + 1), first + num_microbatches
    stop = start + np.array(counts)[:, None]
    starts, stops = np.broadcast_to(start, stop.shape), np.minimum(stop, last)
    return np.where(stop <= last, count_tree_nodes(starts, stops, of_tree), _NEVER)


def count_tree_nodes(starts: np.ndarray, stops: np.ndarray, num_microbatches: int) -> np.ndarray:
    """len(maximal_nodes(range(start, stop), num_microbatches)) for each pair of `starts` and `stops`: int64, same
    shape.

    The nodes of the reduction tree are the aligned blocks of 2^k micro-batches, truncated at num_microbatches. A range
    splits at the one number in it with the most trailing zeros; the blocks on both sides have the sizes of the binary
    digits of the rest. Truncated blocks count once, so a range that ends at num_microbatches is looked up by its start.
    """
    # A range that does not touch the end splits at the number in it with the most trailing zeros; on each side the
    # blocks are the binary digits of the distance to it.
    ones, width, tails = _bit_tables(num_microbatches)
    highest = np.maximum(width[starts ^ stops] - 1, 0)
    middle = (stops >> highest) << highest
    inside = ones[middle - starts] + ones[stops - middle]
    return np.where(starts == stops, 0, np.where(stops == num_microbatches, tails[starts], inside))


def most_open_sums(starts: np.ndarray, stops: np.ndarray, num_microbatches: int) -> np.ndarray:
    """max_open_nodes(range(start, stop), num_microbatches) for each pair of `starts` and `stops`: int64, same shape.

    A worker that has added up the micro-batches from `start` to before t holds the tree nodes of this range, those that
    it has sent included. While it adds the next one it holds no more than before or afterwards. So the result is the
    largest number of tree nodes of a range [start, t) with t up to `stop`.
    """
    ones, width, tails = _bit_tables(num_microbatches)
    most = np.where((starts < stops) & (stops == num_microbatches), tails[starts], 0)
    last = np.minimum(stops, num_microbatches - 1)
    longest = int((stops - starts).max(initial=0))
    for height in range(min(longest.bit_length() + 1, num_microbatches.bit_length())):
        # The ranges that end in [middle, middle + 2^height) split at `middle` (`count_tree_nodes`). Of the numbers up
        # to `rest`, 2^k - 1 with the largest k has the most bits set.
        middle = ((starts >> height) + 1) << height
        rest = np.minimum(last - middle, (1 << height) - 1)
        nodes = ones[middle - starts] + width[np.maximum(rest + 1, 0)] - 1
        most = np.maximum(most, np.where(rest >= 0, nodes, 0))
    return most


@lru_cache(maxsize=8)
def _bit_tables(num_microbatches: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bits set, bit length) of every number that occurs; and, for each a, the tree nodes of [a, num_microbatches)."""
    size = 1 << max(1, num_microbatches.bit_length())
    ones, width = np.zeros(size, np.int64), np.zeros(size, np.int64)
    at = 1
    while at < size:
        ones[at : 2 * at] = ones[:at] + 1
        width[at : 2 * at] = at.bit_length()
        at *= 2
    tails = np.zeros(num_microbatches + 1, np.int64)
    # The largest aligned block that begins at a, then whatever follows it. 0 is aligned to every size.
    for a in range(num_microbatches - 1, -1, -1):
        after = a + (a & -a or size)
        tails[a] = 1 + (tails[after] if after < num_microbatches else 0)
    return ones, width, tails


# ---- all stages


def assign_microbatches(
    num_microbatches: int,
    speeds: Sequence[np.ndarray],
    *,
    microbatch_order: str = CONTIGUOUS,
    starts: Sequence[np.ndarray] | None = None,
    fewest_nodes: bool = True,
    align: float = 0.0,
) -> MicrobatchAssignment:
    """The micro-batches of all stages. Stages with equal speeds are computed once.

    Large stages are assigned block by block. The largest load of a stage is still the least possible; the second aim is
    optimal within each block.

    Args:
        speeds: per stage, float64 [workers].
        microbatch_order: Placement.microbatch_order.
        starts: per stage, what `first_microbatches` returns; None: there was no assignment before.
        fewest_nodes: False: only the first aim counts.
        align: as for `assign_by_speed`.
    """
    counts = None
    if microbatch_order == CONTIGUOUS:
        counts = _assign_blocks(num_microbatches, speeds, starts, fewest_nodes, align)
    counts = counts or _assign_stages(num_microbatches, speeds, microbatch_order, fewest_nodes, align)
    return _described(counts, speeds, microbatch_order)


def _described(counts: tuple[Counts, ...], speeds: Sequence[np.ndarray], microbatch_order: str) -> MicrobatchAssignment:
    one_of = {of_stage: of_stage for of_stage in counts}
    shared = tuple(one_of[of_stage] for of_stage in counts)  # equal stages have the same object (`once_each`)
    arrays = once_each(np.array, shared)
    loads = tuple(float((some / v).max()) for some, v in zip(arrays, speeds, strict=True))
    nodes = once_each(lambda of_stage: _count_nodes(of_stage, microbatch_order), arrays)
    return MicrobatchAssignment(shared, loads, sum(nodes))


def candidate_assignments(
    num_microbatches: int,
    speeds: Sequence[np.ndarray],
    *,
    microbatch_order: str = CONTIGUOUS,
    starts: Sequence[np.ndarray] | None = None,
    align: float = 0.0,
) -> Iterator[MicrobatchAssignment]:
    """The assignments to choose from, without doubles: the caller times them, and prefers the first of equal ones.

    They are the one by both aims; the one by the first aim alone, since fewer tree nodes sometimes make the pipeline
    wait longer; `level_assignments`, which park workers; and the one with more load and fewer tree nodes, if `align` is
    above 0. Each is made when it is asked for: on a large mesh all of them take seconds. Arguments as for
    `assign_microbatches`.
    """
    seen: set[tuple[Counts, ...]] = set()
    for each in _with_doubles(num_microbatches, speeds, microbatch_order, starts, align):
        if each.counts not in seen:
            seen.add(each.counts)
            yield each


def _with_doubles(
    num_microbatches: int,
    speeds: Sequence[np.ndarray],
    microbatch_order: str,
    starts: Sequence[np.ndarray] | None,
    align: float,
) -> Iterator[MicrobatchAssignment]:
    for fewest in (True, False):
        yield assign_microbatches(
            num_microbatches, speeds, microbatch_order=microbatch_order, starts=starts, fewest_nodes=fewest
        )
    yield from level_assignments(num_microbatches, speeds, microbatch_order=microbatch_order)
    if align:
        yield assign_microbatches(
            num_microbatches, speeds, microbatch_order=microbatch_order, starts=starts, align=align
        )


def even_assignment(
    num_microbatches: int, speeds: Sequence[np.ndarray], *, microbatch_order: str = CONTIGUOUS
) -> MicrobatchAssignment:
    """The assignment that gives the workers of a stage equally many micro-batches, or one more, whatever their speeds.

    By speed, a fast worker may have more micro-batches than its memory has room for gradient sums.
    """
    counts = tuple(even_counts(num_microbatches, len(v)) for v in speeds)
    return _described(counts, speeds, microbatch_order)


def level_assignments(
    num_microbatches: int, speeds: Sequence[np.ndarray], *, microbatch_order: str = CONTIGUOUS
) -> list[MicrobatchAssignment]:
    """Assignments in which larger stages use no more workers than a smaller one has: the others are parked.

    A parked worker has no micro-batch. It keeps its place in the stage, with its share of the state, and works again in
    the next plan that needs it. Stages with the same number of workers can cut the micro-batches at the same places;
    then no worker waits for those of two others, which may be worth more than the parked ones.
    """
    sizes, found = [len(v) for v in speeds], []
    for level in sorted(set(sizes))[:-1]:
        active = [fastest(v, level) for v in speeds]
        used = [v[at] for v, at in zip(speeds, active, strict=True)]
        ways = [used]
        if len(set(map(len, used))) == 1 and any((v != used[0]).any() for v in used[1:]):
            # The same counts in all stages: a column of workers is as fast as its slowest.
            ways.append([np.min(used, axis=0)] * len(used))
        for some in ways:
            counts = assign_microbatches(num_microbatches, some, microbatch_order=microbatch_order).counts
            found.append(with_parked(counts, active, speeds, microbatch_order))
    return found


def fastest(speeds: np.ndarray, number: int) -> np.ndarray:
    """The positions of so many of the fastest workers of a stage, ascending; all, if there are no more."""
    return np.sort(np.argsort(-speeds, kind="stable")[:number])


def with_parked(
    counts: Sequence[Counts], active: Sequence[np.ndarray], speeds: Sequence[np.ndarray], microbatch_order: str
) -> MicrobatchAssignment:
    """The assignment with these counts at these positions, by stage, and no micro-batch elsewhere."""
    whole: list[Counts] = []
    for of_stage, at, v in zip(counts, active, speeds, strict=True):
        row = np.zeros(len(v), np.int64)
        row[at] = of_stage
        whole.append(tuple(row.tolist()))
    return _described(tuple(whole), speeds, microbatch_order)


def first_microbatches(
    stages: Sequence[Sequence[int]], old_stages: Sequence[Sequence[int]], old_counts: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Per stage, the first micro-batch that each worker had before: int64 [workers].

    A newcomer has that of the worker to its left.
    """
    firsts = [np.cumsum(of_stage) - of_stage for of_stage in once_each(np.array, old_counts)]
    found = values_before(stages, old_stages, np.concatenate(firsts), 0)
    return [np.maximum.accumulate(of_stage) for of_stage in found]


def values_before(
    stages: Sequence[Sequence[int]], old_stages: Sequence[Sequence[int]], values: np.ndarray, of_newcomers: int
) -> list[np.ndarray]:
    """Per stage, the value that each worker had before: int64 [workers].

    Args:
        values: int64, of the workers of the old stages, stage by stage.
        of_newcomers: the value of workers that no old stage has.
    """
    old_ranks, ranks = (np.fromiter(chain.from_iterable(some), np.int64) for some in (old_stages, stages))
    order = np.argsort(old_ranks, kind="stable")
    at = order[np.minimum(np.searchsorted(old_ranks, ranks, sorter=order), len(order) - 1)]
    found = np.where(old_ranks[at] == ranks, values[at], of_newcomers)
    return np.split(found, np.cumsum([len(members) for members in stages])[:-1])


def _assign_stages(
    num_microbatches: int,
    speeds: Sequence[np.ndarray],
    microbatch_order: str,
    fewest_nodes: bool,
    align: float,
    block: tuple[int, int] | None = None,
) -> tuple[Counts, ...]:
    """Each stage as a whole."""

    def counts_of(v: np.ndarray) -> Counts:
        return assign_by_speed(
            num_microbatches, v, microbatch_order=microbatch_order, fewest_nodes=fewest_nodes, align=align, block=block
        )

    return tuple(once_each(counts_of, with_equal_shared(speeds)))


def _count_nodes(counts: np.ndarray, microbatch_order: str) -> int:
    """The tree nodes that the workers of a stage send, in total."""
    num_microbatches = int(counts.sum())
    if microbatch_order != CONTIGUOUS:
        return num_microbatches
    stops = np.cumsum(counts)
    return int(count_tree_nodes(stops - counts, stops, num_microbatches).sum())


# ---- blocks of neighbours


@dataclass(frozen=True)
class Block:
    """Neighbouring workers of all stages that share micro-batches with nobody outside the block.

    Args:
        microbatches: the first micro-batch and the one after the last.
        parts: per stage, the positions of its workers: the first and the one after the last.
    """

    microbatches: tuple[int, int]
    parts: tuple[tuple[int, int], ...]


def _assign_blocks(
    num_microbatches: int,
    speeds: Sequence[np.ndarray],
    starts: Sequence[np.ndarray] | None,
    fewest_nodes: bool,
    align: float,
) -> tuple[Counts, ...] | None:
    """Each block as if it were a mesh of its own; None if the mesh is too small.

    Equal blocks are computed once: those with equal workers that lie alike in the tree, which is in the next larger
    power of two, since no sum of a worker is of more micro-batches.
    """
    caps = once_each(lambda v: max_counts(least_load(num_microbatches, v), v), with_equal_shared(speeds))
    blocks = cut_blocks(num_microbatches, caps, starts)
    if not blocks:
        return None
    known: dict[tuple[object, ...], tuple[Counts, ...]] = {}
    found: list[tuple[Counts, ...]] = []
    as_bytes = [v.tobytes() for v in speeds]  # 8 of each worker
    for block in blocks:
        first, stop = block.microbatches
        number = stop - first
        workers = [v[8 * a : 8 * b] for v, (a, b) in zip(as_bytes, block.parts, strict=True)]
        key = number, first % (1 << number.bit_length()), stop == num_microbatches, *workers
        if key not in known:
            some, at = [v[a:b] for v, (a, b) in zip(speeds, block.parts, strict=True)], (first, num_microbatches)
            known[key] = _assign_stages(number, some, CONTIGUOUS, fewest_nodes, align, at)
        found.append(known[key])
    return tuple(tuple(chain.from_iterable(of_block[s] for of_block in found)) for s in range(len(speeds)))


def cut_blocks(
    num_microbatches: int, caps: Sequence[np.ndarray], starts: Sequence[np.ndarray] | None = None
) -> tuple[Block, ...]:
    """The smallest blocks whose workers can take all micro-batches without exceeding `caps`; () if there are none.

    Args:
        caps: per stage, int64 [workers]: the most micro-batches that each worker may have.
        starts: per stage, int64 [workers], ascending: about where the micro-batches of each worker are to begin; None:
            evenly. Blocks are cut at these, so that most workers keep the micro-batches that they had.
    """
    if starts is None:
        starts = [np.arange(len(of_stage)) * num_microbatches // len(of_stage) for of_stage in caps]
    sums = [np.concatenate([np.zeros(1, np.int64), np.cumsum(of_stage)]) for of_stage in caps]
    number = min(map(len, caps)) // SMALLEST_BLOCK
    while number >= _FEWEST_BLOCKS:
        bounds = np.arange(number + 1) * num_microbatches // number
        cuts = [np.searchsorted(first, bounds) for first in starts]
        for cut, of_stage in zip(cuts, caps, strict=True):
            # Workers before the first start and after the last one belong to the outer blocks.
            cut[0], cut[-1] = 0, len(of_stage)
        room = np.min([np.diff(total[cut]) for total, cut in zip(sums, cuts, strict=True)], axis=0)
        # Every block needs workers in every stage, and all blocks together room for all micro-batches.
        if all((np.diff(cut) > 0).all() for cut in cuts) and int(room.sum()) >= num_microbatches:
            ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(_share_by_room(num_microbatches, room))])
            parts = zip(*(pairwise(cut.tolist()) for cut in cuts), strict=True)
            return tuple(map(Block, pairwise(ends.tolist()), parts))
        number //= 2  # larger blocks have more room for the micro-batches of their lost workers
    return ()


def _share_by_room(num_microbatches: int, room: np.ndarray) -> np.ndarray:
    """int64 [blocks]: the micro-batches of each block, in proportion to its room and within it."""
    total = int(room.sum())
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(room)])
    return np.diff(before * num_microbatches // total)
