"""PUBLISH: after a step is applied, its new parameters go to whoever computes with them and does not hold them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set

from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.messages import Need, Publish
from elaswave_spmd.recovery.worker_protocol import WorkerProtocol
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import Block, LayerLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap, ReplicaSet
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.context import WorkerContext
from elaswave_spmd.worker.parameter_broadcast import GroupedPublications
from elaswave_spmd.worker.state import LEARNING, HeldRange, HeldState


class Publisher:
    """Sends a worker's primary pages and installs those of others.

    A page goes to the workers of its stage and, if its parameter is tied, of the stages that read it. Replicas have
    applied the step themselves and receive nothing.
    """

    def __init__(
        self, context: WorkerContext, placement: Placement, values: Mapping[int, ValueBuffer], state: HeldState
    ) -> None:
        self._rank = context.rank
        self._placement = placement
        self._layout = context.model.layout
        self._values = values
        self._state = state
        self._dtype = context.job.torch_dtype
        self._send = context.channel.send
        self._drops_params = bool(placement.shardings.params.axes)
        self._readers = {part.run.key: self._readers_of(part.run) for part in state if part.run.primary == self._rank}

    def _readers_of(self, run: ReplicaSet) -> tuple[int, ...]:
        block = self._layout.layers[run.layer].block_of(run.first)
        layers = [run.layer, *(layer for layer, _ in self._layout.readers.get((run.layer, block.first_page), ()))]
        stages = sorted({self._placement.stage_of_layer(layer) for layer in layers})
        workers = [worker for stage in stages for worker in self._placement.mesh.stages[stage]]
        return tuple(worker for worker in dict.fromkeys(workers) if worker not in run.replicas)

    def asks(self, replica_map: ReplicaMap, layer: int, version: int) -> None:
        """Asks the primaries for the pages of a layer's compute buffer that are not at this version."""
        layout = self._layout.layers[layer]
        for first, stop in self._values[layer].missing(version):
            for block in _blocks_of(layout, first, stop):
                owner, shift = block.source or (layer, block.first_page)
                offset = shift - block.first_page
                for run in replica_map[owner]:
                    a = max(run.first, max(first, block.first_page) + offset)
                    b = min(run.stop, min(stop, block.first_page + block.num_pages) + offset)
                    if a < b and self._rank not in run.replicas:
                        self._send(run.primary, Need(version, owner, a, b), None)

    def publish(
        self, layer: int, version: int, reached: Callable[[PageRange], Collection[int]] = lambda key: ()
    ) -> dict[PageRange, Tensor]:
        """Sends the layer's new values, in the compute dtype; copies them to this worker's own readers of a tie.

        Args:
            reached: who gets the values of a run in another way, and is not sent them.

        Returns: the values of the runs that this worker is the primary of and others read.
        """
        payloads: dict[PageRange, Tensor] = {}
        for part in self._state.layers.get(layer, ()):
            if part.version != version:  # a learner without state yet
                continue
            message = Publish(version, *part.run.key)
            peers = self._readers.get(part.run.key)
            if not peers and not self._layout.readers:
                continue
            payload = self._payload(part)
            self._install_readers(message, payload)
            if not peers:
                continue
            payloads[part.run.key] = payload
            others = reached(part.run.key)
            for peer in peers:
                if peer not in others:
                    self._send(peer, message, payload)
        return payloads

    def refresh(self, layers: Collection[int]) -> None:
        """Brings what is held here to the compute buffers of these layers, after they or their replicas changed."""
        for layer in layers:
            self._state.to_compute(layer)
        for part in self._state:
            if part.version != LEARNING and self._layout.readers:
                message = Publish(part.version, *part.run.key)
                self._install_readers(message, self._payload(part), layers)

    def answer(self, peer: int, need: Need) -> bool:
        """Publishes again to one worker what it lacks. Returns whether all was here, at that version or the next."""
        layout, answered = self._layout.layers[need.layer], 0
        for part in self._state.layers.get(need.layer, ()):
            first, stop = max(part.run.first, need.first), min(part.run.stop, need.stop)
            # State that was learned of somebody ahead may be a step ahead of this worker: of no use for computing, but
            # then all entries of that step are there, and nobody has to.
            if part.version in (need.step, need.step + 1) and first < stop:
                a, b = layout.span(first, stop)
                values = self._payload(part)[a - part.start : b - part.start]
                self._send(peer, Publish(part.version, need.layer, first, stop), values)
                answered += stop - first
        return answered == need.stop - need.first

    def _payload(self, part: HeldRange) -> Tensor:
        """The run's values, in the compute dtype, in memory that stays as it is until everybody has received them.

        That holds for memory that only an update overwrites, but not for a compute buffer that is dropped in between.
        """
        if part.run.layer in self._values and not self._drops_params:
            return self._state.compute_values(part)
        return part.master if part.master.dtype == self._dtype else part.master.to(self._dtype)

    def install(self, publish: Publish, payload: Tensor) -> None:
        """Copies published values, flat in the compute dtype, to every buffer of this worker that has those pages."""
        if publish.layer in self._values:
            self._values[publish.layer].install(publish.first, publish.stop, payload, publish.step)
        self._install_readers(publish, payload)

    def will_reach(self, layer: int, version: int, filed: Iterable[Publish]) -> bool:
        """Whether each page of a layer's compute buffer is at this version or later, or will be by one of these."""
        versions = self._values[layer].versions.copy()
        for publish in filed:
            if publish.layer == layer:
                versions[publish.first : publish.stop] = publish.step
            for reader, shift in self._readers_in(publish):
                if reader == layer:
                    versions[publish.first + shift : publish.stop + shift] = publish.step
        return bool((versions >= version).all())

    def _install_readers(self, publish: Publish, values: Tensor, layers: Collection[int] | None = None) -> None:
        for layer, shift in self._readers_in(publish):
            if layer in self._values and (layers is None or layer in layers):
                self._values[layer].install(publish.first + shift, publish.stop + shift, values, publish.step)

    def _readers_in(self, publish: Publish) -> Iterator[tuple[int, int]]:
        """Layers that read these pages, and by how much the pages of each lie further on there."""
        block = self._layout.layers[publish.layer].block_of(publish.first)
        for layer, reader in self._layout.readers.get((publish.layer, block.first_page), ()):
            yield layer, reader.first_page - block.first_page


def _blocks_of(layout: LayerLayout, first: int, stop: int) -> list[Block]:
    """The blocks that pages [first, stop) touch."""
    return [b for b in layout.blocks if b.first_page < stop and first < b.first_page + b.num_pages]


# New parameters, from mesh epoch to mesh epoch: what this worker publishes, asks for, keeps for later and installs.
class Parameters:
    """The ways of one worker's parameters.

    Args:
        context: of the worker.
        values: compute buffers of the layers that this worker computes; they change between configurations.
        state: the pages that it holds, of the same configuration.
        protocol: knows the version.
        unsure: peers that may not get what is sent to them before the next configuration; changed by the replica.
    """

    def __init__(
        self,
        context: WorkerContext,
        values: Mapping[int, ValueBuffer],
        state: HeldState,
        protocol: WorkerProtocol,
        unsure: Set[int],
    ) -> None:
        self._context = context
        self._values = values
        self._state = state
        self._protocol = protocol
        self._unsure = unsure
        self._filed: dict[m.Publish, Tensor] = {}
        self._needs: list[tuple[int, m.Need]] = []
        self.layers: list[int] = []
        """Those that are computed or held here."""
        self.grouped = GroupedPublications(
            context.rank,
            context.model.layout,
            context.device.place,
            context.job.torch_dtype,
            context.channel.send,
            context.hooks.stage_group,
        )

    def bind(self, placement: Placement, replica_map: ReplicaMap) -> None:
        """A new mesh epoch.

        Args:
            replica_map: of the layers that this worker computes, or reads parameters of, and of all that it holds.
        """
        self._replica_map = replica_map
        self._publisher = Publisher(self._context, placement, self._values, self._state)
        self.layers = sorted({*self._values, *self._state.layers})
        self.grouped.bind(placement, replica_map)

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
                self._publisher.asks(self._replica_map, layer, version)

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
