"""The workers that a controller has started and that have neither left nor been lost, and the next free ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType


class Roster:
    """The living workers of a run, newcomers included.

    Args:
        members: ranks of the first mesh. A rank is not reused by this controller.
    """

    def __init__(self, members: Iterable[int]) -> None:
        self._next_rank = max(members) + 1
        self._pids: dict[int, int | None] = {}

    def __contains__(self, rank: int) -> bool:
        return rank in self._pids

    def __len__(self) -> int:
        return len(self._pids)

    @property
    def pids(self) -> Mapping[int, int | None]:
        """Rank -> process id; None: it runs on another machine."""
        return MappingProxyType(self._pids)

    @property
    def num_ranks(self) -> int:
        """All ranks below it have been given to workers, living or not."""
        return self._next_rank

    def begin_at(self, next_rank: int) -> None:
        """All ranks below this one have been given to workers, by a controller before this one."""
        self._next_rank = max(self._next_rank, next_rank)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Ranks for so many newcomers, which are about to be started."""
        ranks = tuple(range(self._next_rank, self._next_rank + count))
        self._next_rank += count
        return ranks

    def add(self, rank: int, pid: int | None) -> None:
        """A worker has been started."""
        self._pids[rank] = pid

    def remove(self, rank: int) -> None:
        """A worker is lost, or was let go. Unknown ranks are ignored."""
        self._pids.pop(rank, None)
