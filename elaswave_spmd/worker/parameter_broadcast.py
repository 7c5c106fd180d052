"""New parameters of a stage's pages through a process group of its workers, instead of one link after the other.

A group only copies: sums have an order of their own (see devices/groups.py). It is used for what is published in a step
that all members of the mesh epoch have voted for with the mark `grouped`. Then every worker of the stage applies the
step in this epoch, or nobody goes on in it, and all issue the same broadcasts in the same order: by step, layer and
page. What a broadcast brings lies in memory of its own until it is complete, as one that a dead peer has left half done
may still write. A new mesh epoch gives up all that is under way; what is missing then is asked for, over links.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from elaswave_spmd.recovery.messages import GroupLost, Message, Publish
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import LOSS, ModelLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap, ReplicaSet


class Recompute(Protocol):
    """A broadcast under way, as c10d has it."""

    def is_completed(self) -> bool:
        """Whether it has ended, in success or failure; does not wait."""
        ...

    def wait(self) -> object:
        """Of one that has ended: raises RuntimeError if it failed; else what is queued from now on sees its values."""
        ...


class StageGroup(Protocol):
    """The group of one worker's stage, made anew for every mesh epoch while links serve."""

    def change(self, epoch: int, members: Sequence[int], rank: int) -> None:
        """The members in a newer epoch; one alone has no group. The one before is given up. Returns at once."""
        ...

    @property
    def ready(self) -> int | None:
        """The newest epoch if its group is made: all members have met."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """Why the newest epoch's group could not be made."""
        ...

    def broadcast(self, values: Tensor, root: int) -> Recompute:
        """Worker `root` sends `values`, contiguous; all other members receive into theirs. All call it alike.

        The group keeps the memory as long as it may be written, whatever becomes of the work.

        Raises:
            RuntimeError: the library refuses.
        """
        ...

    def give_up(self) -> None:
        """It has failed: what is under way in it ends, and it is not used again."""
        ...


@dataclass(frozen=True)
class _UnderWay:
    publish: Publish
    values: Tensor
    work: Recompute
    sent: bool


class GroupedPublications:
    """One worker's broadcasts.

    Args:
        group: of its stage; None: links serve always.
        place: where parameters lie.
        dtype: that they travel in.
    """

    def __init__(
        self,
        rank: int,
        layout: ModelLayout,
        place: torch.device,
        dtype: torch.dtype,
        send: Callable[[int, Message, Tensor | None], None],
        group: StageGroup | None,
    ) -> None:
        self._rank, self._layout, self._place, self._dtype, self._send = rank, layout, place, dtype, send
        self._group = group
        self._under_way: deque[_UnderWay] = deque()
        self._runs: dict[int, tuple[ReplicaSet, ...]] = {}
        self.epoch, self._lost = -1, False
        self._members: frozenset[int] = frozenset()
        self._keys: frozenset[PageRange] = frozenset()

    def bind(self, placement: Placement, replica_map: ReplicaMap) -> None:
        """A new mesh epoch. What is under way is given up.

        Args:
            replica_map: of the layers of this worker's stage, at least.
        """
        self._under_way.clear()
        self.epoch, self._lost = placement.mesh.epoch, False
        stage = placement.mesh.stage_of(self._rank)
        members = placement.mesh.stages[stage]
        self._members = frozenset(members)
        layers = placement.layers_of_stage(stage) if self._group is not None else ()
        runs = {layer: tuple(filter(self._is_for_all, replica_map[layer])) for layer in layers}
        self._runs = {layer: found for layer, found in runs.items() if found}
        self._keys = frozenset(run.key for found in self._runs.values() for run in found)
        if self._group is not None:
            self._group.change(self.epoch, members if self._runs else (self._rank,), self._rank)

    def _is_for_all(self, run: ReplicaSet) -> bool:
        """Whether the run comes from a member of the stage, and another one does not hold it. All of them agree."""
        if self._layout.layers[run.layer].block_of(run.first).kind == LOSS:
            return False
        return run.primary in self._members and not self._members <= run.replicas

    def reached(self, run: PageRange) -> frozenset[int]:
        """The workers that a run comes to through the group; a reader of a tie may belong to another stage."""
        return self._members if run in self._keys else frozenset()

    @property
    def ready(self) -> bool:
        """Whether this worker can publish through the group, or has nothing to, in this epoch."""
        if self._group is None or self._lost:
            return False
        return not self._runs or self._group.ready == self.epoch

    def look(self) -> None:
        """Gives up a group that could not be made."""
        if self._group is not None and self._runs and not self._lost and self._group.failure is not None:
            self.lose(str(self._group.failure))

    @property
    def serves(self) -> bool:
        """Whether a step for which all were ready is published through the group here; else it has failed since."""
        return not self._lost

    @property
    def has_news(self) -> bool:
        """Whether `arrived` would tell of something."""
        return bool(self._under_way) and self._under_way[0].work.is_completed()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way. Who votes says so: roots overwrite what they have sent when all have voted."""
        return not self._under_way

    def broadcast(self, layer: int, version: int, payloads: dict[PageRange, Tensor]) -> None:
        """Begins the broadcasts of one layer.

        Args:
            payloads: values, in the dtype they travel in, of the runs that this worker is the primary of.
        """
        for run in self._runs.get(layer, ()):
            if self._lost:
                return
            values, sent = payloads.get(run.key), run.primary == self._rank
            if not sent:
                first, stop = self._layout.layers[layer].span(run.first, run.stop)
                values = torch.empty(stop - first, dtype=self._dtype, device=self._place)
            if values is None:  # given up as damaged: the others must not take the next run for this one
                self.lose("this worker has no state of a run that it is the primary of")
                return
            assert self._group is not None
            try:
                work = self._group.broadcast(values, run.primary)
            except RuntimeError as error:  # a backend may refuse at once, once it knows that a peer is gone
                self.lose(str(error))
                return
            self._under_way.append(_UnderWay(Publish(version, *run.key), values, work, sent))

    def arrived(self) -> list[tuple[Publish, Tensor]]:
        """What others have sent and is complete since the last call, in order."""
        found = []
        while self.has_news:
            done = self._under_way[0]
            try:
                done.work.wait()
            except RuntimeError as error:
                self.lose(str(error))
                break
            self._under_way.popleft()
            if not done.sent:
                found.append((done.publish, done.values))
        return found

    def lose(self, reason: str) -> None:
        """The group has failed here: all others of the stage give it up too, for the rest of the epoch."""
        for peer in (*sorted(self._members - {self._rank}), CONTROLLER) if not self._lost else ():
            self._send(peer, GroupLost(self.epoch, self._rank, reason), None)
        self.give_up()

    def give_up(self) -> None:
        """Links serve for the rest of the epoch."""
        if self._group is not None and not self._lost and self._runs:
            self._group.give_up()
        self._lost = True
        self._under_way.clear()
