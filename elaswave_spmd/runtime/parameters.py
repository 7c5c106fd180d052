"""New parameters, from mesh epoch to mesh epoch: what this worker publishes, asks for, keeps for later and installs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set

import torch
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.worker_protocol import WorkerProtocol
from elaswave_spmd.scheduling.placement import HolderMap, Placement
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.parameter_broadcast import GroupedPublications, StageGroup
from elaswave_spmd.worker.parameters import Publisher, Send
from elaswave_spmd.worker.state import HeldState


class Parameters:
    """The ways of one worker's parameters.

    Args:
        values: compute buffers of the layers that this worker computes; changed by the executor between epochs.
        state: what it holds, bound to the same epochs.
        place, dtype: of the compute buffers.
        unsure: peers that may not get what is sent to them before the next mesh epoch; changed by the replica.
        protocol: knows the version.
        group: of its stage; None: links alone.
    """

    def __init__(
        self,
        rank: int,
        layout: ModelLayout,
        values: Mapping[int, ValueBuffer],
        state: HeldState,
        place: torch.device,
        dtype: torch.dtype,
        send: Send,
        unsure: Set[int],
        protocol: WorkerProtocol,
        group: StageGroup | None,
    ) -> None:
        self._rank, self._layout, self._values, self._state = rank, layout, values, state
        self._dtype, self._send, self._unsure, self._protocol = dtype, send, unsure, protocol
        self._filed: dict[m.Publish, Tensor] = {}
        self._needs: list[tuple[int, m.Need]] = []
        self.layers: list[int] = []
        """Those that are computed or held here."""
        self.grouped = GroupedPublications(rank, layout, place, dtype, send, group)

    def bind(self, placement: Placement, holder_runs: HolderMap) -> None:
        """A new mesh epoch.

        Args:
            holder_runs: of the layers that this worker computes, or reads parameters of, and of all that it holds.
        """
        self._holder_runs = holder_runs
        self._publisher = Publisher(
            self._rank, placement, self._layout, self._values, self._state, self._dtype, self._send
        )
        self.layers = sorted({*self._values, *self._state.layers})
        self.grouped.bind(placement, holder_runs)

    # ---- out

    def publish(self, layer: int, version: int, *, grouped: bool = False) -> None:
        """Sends a layer's new values, through the group of the stage if all have agreed to and it still serves."""
        if not (grouped and self.grouped.serves):
            self._publisher.publish(layer, version)
            return
        payloads = self._publisher.publish(layer, version, self.grouped.reached)
        self.grouped.broadcast(layer, version, payloads)

    def published(self, version: int, *, grouped: bool) -> None:
        """This worker is at a version now, and has published it."""
        self.answer()
        if grouped and not self.grouped.serves:
            self._ask_for_rest()  # who knew less has sent it through the group alone
        self._filed = {publish: payload for publish, payload in self._filed.items() if publish.step >= version}

    def needed(self, sender: int, need: m.Need) -> None:
        """Somebody asks for pages.

        What cannot be answered yet, in this version or mesh epoch, will be: who asks in the next mesh epoch, in which a
        lost link is made again, may be there first.
        """
        if need.step < self._protocol.version:
            return
        if sender in self._unsure or not self._publisher.answer(sender, need):
            self._needs.append((sender, need))

    def answer(self) -> None:
        """What was asked for before, and can be answered now."""
        needs, self._needs = self._needs, []
        for sender, need in needs:
            self.needed(sender, need)

    # ---- in

    def refresh(self, layers: Collection[int], version: int) -> None:
        """Has these layers' compute buffers brought to a version: from what is held here, and from the primaries."""
        self._publisher.refresh(layers)
        self._ask_for(layers, version)

    def _ask_for(self, layers: Iterable[int], version: int) -> None:
        for layer in layers:
            if not self._values[layer].is_at(version):
                self._publisher.asks(self._holder_runs, layer, version)

    def _ask_for_rest(self) -> None:
        """Asks the primaries for what has not come through the group. What was dropped since had come."""
        version = self._protocol.version
        self._ask_for((layer for layer, values in self._values.items() if values.dropped_at != version), version)

    def file(self, publish: m.Publish, payload: Tensor) -> None:
        """Keeps what came over a link until the protocol has it installed."""
        self._filed[publish] = payload

    def install(self, publish: m.Publish) -> None:
        """Takes what was filed into the compute buffers; nothing, when it came twice."""
        if (payload := self._filed.pop(publish, None)) is not None:
            self._publisher.install(publish, payload)

    def collect(self) -> None:
        """Installs what has come through the group. If the group has failed, asks for the rest over links."""
        self.grouped.look()
        if self.grouped.idle:
            return
        for publish, values in self.grouped.arrived():
            self._publisher.install(publish, values)
        if not self.grouped.serves:
            self._ask_for_rest()

    def group_lost(self, lost: m.GroupLost) -> None:
        """Another worker of the stage says that their group has failed."""
        if lost.epoch == self.grouped.epoch and self.grouped.serves:
            self.grouped.give_up()
            self._ask_for_rest()

    def needs_no_more(self, layer: int, version: int) -> bool:
        """Whether nothing at `version` is to come for a layer's compute buffer: all is there, or a step ahead."""
        return self._values[layer].is_at(version) or self._publisher.will_reach(layer, version, self._filed)
