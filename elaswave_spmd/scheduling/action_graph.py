"""The actions of a step as a graph: which one waits for which, how long each takes, and the longest paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from elaswave_spmd.scheduling.pipeline import FORWARD, WEIGHTS, PipelineAction, Schedule


@dataclass(frozen=True)
class ActionGraph:
    """The actions of a step with their seconds, in an order in which each comes after all that it waits for.

    Args:
        ranks: row r belongs to worker ranks[r].
        order: the actions. All others are by action.
        rows: the row of its worker, whose actions run one after the other.
        seconds: float64 [actions].
        waits: the index of the action of another worker that it waits for, or -1.
        delays: seconds from the end of that one until its result is here.
    """

    ranks: tuple[int, ...]
    order: tuple[PipelineAction, ...]
    rows: tuple[int, ...]
    seconds: np.ndarray
    waits: tuple[int, ...]
    delays: tuple[float, ...]

    @classmethod
    def of(
        cls, actions: Schedule, seconds: Mapping[int, Sequence[float]], boundary_delays: Sequence[float]
    ) -> ActionGraph:
        """The graph of a schedule.

        Args:
            actions: rank -> action list, as `pipeline.schedule` makes them.
            seconds: rank -> seconds of each action of its list.
            boundary_delays: per boundary between stages, seconds from the end of an action to the arrival of its
                result.
        """
        last_stage = max((a.stage for todo in actions.values() for a in todo), default=0)
        lists = list(actions.values())
        order, rows, takes, waits, delays = [], [], [], [], []
        place: dict[tuple[int, str, int], int] = {}
        waiting: dict[tuple[int, str, int], int] = {}
        at, runnable = [0] * len(lists), list(range(len(lists)))
        of_rank = [seconds[rank] for rank in actions]
        while runnable:
            row = runnable.pop()
            while at[row] < len(lists[row]):
                action = lists[row][at[row]]
                stage, kind, microbatch = action.stage, action.kind, action.microbatch
                forward = kind == FORWARD
                needed = (stage - 1, kind, microbatch) if forward else (stage + 1, kind, microbatch)
                # Weight gradients wait for the backward of this worker alone, which stands before them in its list.
                first = kind == WEIGHTS or stage == (0 if forward else last_stage)
                # The list of a worker stops here until another worker's list has reached what it waits for.
                if not first and needed not in place:
                    waiting[needed] = row
                    break
                place[stage, kind, microbatch] = len(order)
                order.append(action)
                rows.append(row)
                takes.append(of_rank[row][at[row]])
                waits.append(-1 if first else place[needed])
                delays.append(0.0 if first else boundary_delays[min(stage, needed[0])])
                at[row] += 1
                if (stage, kind, microbatch) in waiting:
                    runnable.append(waiting.pop((stage, kind, microbatch)))
        stuck = [row for row, todo in enumerate(lists) if at[row] < len(todo)]
        assert not stuck, "pipeline.check names the workers that wait for ever"
        return cls(tuple(actions), tuple(order), tuple(rows), np.array(takes), tuple(waits), tuple(delays))

    @cached_property
    def lists(self) -> tuple[tuple[int, ...], ...]:
        """By row, the indices of its actions in their order."""
        found: list[list[int]] = [[] for _ in self.ranks]
        for action, row in enumerate(self.rows):
            found[row].append(action)
        return tuple(map(tuple, found))

    @cached_property
    def before(self) -> tuple[int, ...]:
        """By action, the one that its worker runs before it, or -1."""
        found = [-1] * len(self.rows)
        for todo in self.lists:
            for earlier, action in pairwise(todo):
                found[action] = earlier
        return tuple(found)

    def work(self) -> np.ndarray:
        """float64 [rows]: the seconds that each worker computes."""
        return np.bincount(self.rows, self.seconds, len(self.ranks))

    def ends(self, seconds: np.ndarray | None = None) -> list[float]:
        """By action, the time at which it ends.

        Args:
            seconds: float64 [actions], in place of those of the graph.
        """
        takes = (self.seconds if seconds is None else seconds).tolist()
        free, found = [0.0] * len(self.ranks), []
        for row, takes_s, other, delay in zip(self.rows, takes, self.waits, self.delays, strict=True):
            start = free[row]
            if other >= 0 and found[other] + delay > start:
                start = found[other] + delay
            free[row] = start + takes_s
            found.append(free[row])
        return found

    def makespan(self, seconds: np.ndarray | None = None) -> float:
        """The time at which the last action ends. Further arguments as for `ends`."""
        return max(self.ends(seconds), default=0.0)

    def longest_paths(self, seconds: np.ndarray) -> LongestPaths:
        """The longest paths if the actions take so many seconds: float64 [actions]."""
        size, takes = len(self.rows), seconds.tolist()
        ends, comes_from = [0.0] * size, [-1] * size
        for action, (earlier, other, delay) in enumerate(zip(self.before, self.waits, self.delays, strict=True)):
            start, via = (ends[earlier], earlier) if earlier >= 0 else (0.0, -1)
            if other >= 0 and ends[other] + delay > start:
                start, via = ends[other] + delay, other
            ends[action], comes_from[action] = start + takes[action], via
        rest, goes_to = [0.0] * size, [-1] * size  # seconds from the end of an action to the end of the step
        for action in range(size - 1, -1, -1):
            takes_on = rest[action] + takes[action]
            earlier, other = self.before[action], self.waits[action]
            if earlier >= 0 and takes_on > rest[earlier]:
                rest[earlier], goes_to[earlier] = takes_on, action
            if other >= 0 and takes_on + self.delays[action] > rest[other]:
                rest[other], goes_to[other] = takes_on + self.delays[action], action
        return LongestPaths(self, np.array(ends) + np.array(rest), comes_from, goes_to)


@dataclass(frozen=True)
class LongestPaths:
    """The longest path through each action of a step.

    Args:
        through: float64 [actions], the seconds of the longest path through an action.
        comes_from, goes_to: by action, the one before and after it on that path, or -1.
    """

    graph: ActionGraph
    through: np.ndarray
    comes_from: list[int]
    goes_to: list[int]

    def path(self, action: int) -> tuple[list[int], float]:
        """The actions on the longest path through this one, and the seconds of the messages between them."""
        found, at = [action], action
        while (at := self.comes_from[at]) >= 0:
            found.append(at)
        found.reverse()
        at = action
        while (at := self.goes_to[at]) >= 0:
            found.append(at)
        waits, delays = self.graph.waits, self.graph.delays
        return found, sum(delays[to] for one, to in pairwise(found) if waits[to] == one)
