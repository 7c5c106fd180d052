"""Parameters after a step: they go to the workers that compute with them and have no replica of their state.

`Publisher` sends and installs pages in one configuration. `Parameters` lives from configuration to configuration: it
asks for pages that are missing, answers those that ask, and keeps pages that came early.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set

from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.messages import GROUPED, Need, Publish
from elaswave_spmd.recovery.worker_protocol import WorkerProtocol
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import Block, LayerLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap, ReplicaSet
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.context import WorkerContext
from elaswave_spmd.worker.stage_collectives import NoCollectives, StageCollectives
from elaswave_spmd.worker.state import LEARNING, HeldRange, HeldState


class Publisher:
    """Sends a worker's primary pages and installs those of other primaries, in one configuration.

    A page goes to the workers of its stage and, if its parameter is tied, of the stages that read it. Replicas have
    applied the step themselves and receive nothing.

    Args:
        context: of the worker.
        placement: of the configuration.
        values: compute buffers of the layers that this worker computes.
        state: the pages that it holds.
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
        self._readers = {
            part.pages.key: self._readers_of(part.pages) for part in state if part.pages.primary == self._rank
        }

    def _readers_of(self, pages: ReplicaSet) -> tuple[int, ...]:
        block = self._layout.layers[pages.layer].block_of(pages.first)
        layers = [pages.layer, *(layer for layer, _ in self._layout.readers.get((pages.layer, block.first_page), ()))]
        stages = sorted({self._placement.stage_of_layer(layer) for layer in layers})
        workers = [worker for stage in stages for worker in self._placement.mesh.stages[stage]]
        return tuple(worker for worker in dict.fromkeys(workers) if worker not in pages.replicas)

    def ask(self, replica_map: ReplicaMap, layer: int, version: int) -> None:
        """Ask the primaries for the pages of a layer's compute buffer that are not at this version."""
        layout = self._layout.layers[layer]
        for first, stop in self._values[layer].missing(version):
            for block in _blocks_of(layout, first, stop):
                # A tied parameter is published by the layer that owns it, under that layer's page numbers.
                owner, shift = block.source or (layer, block.first_page)
                offset = shift - block.first_page
                for pages in replica_map[owner]:
                    a = max(pages.first, max(first, block.first_page) + offset)
                    b = min(pages.stop, min(stop, block.first_page + block.num_pages) + offset)
                    if a < b and self._rank not in pages.replicas:
                        self._send(pages.primary, Need(version, owner, a, b), None)

    def publish(
        self,
        layer: int,
        version: int,
        reached: Callable[[PageRange], Collection[int]] = lambda key: (),
        *,
        frozen: bool = False,
    ) -> dict[PageRange, Tensor]:
        """Send the layer's new values, in the compute dtype, and copy them to this worker's own readers of a tie.

        Args:
            frozen: those of frozen pages as well. They are sent once, or in every step where parameters are dropped.
            reached: the workers that get the values of a page range in another way, and are not sent them.

        Returns:
            The values of the page ranges that this worker is the primary of and other workers read.
        """
        payloads: dict[PageRange, Tensor] = {}
        for part in self._state.layers.get(layer, ()):
            if part.version != version:  # a learner without state yet
                continue
            if not (frozen or self._drops_params) and self._state.is_frozen(layer, part.pages.first):
                continue  # whoever computes with them has them
            message = Publish(version, *part.pages.key)
            peers = self._readers.get(part.pages.key)  # None: another worker is the primary, and sends them
            if not peers and not self._layout.readers:
                continue
            payload = self._payload(part)
            self._install_readers(message, payload)  # this worker may itself compute with a layer that reads them
            if not peers:
                continue
            payloads[part.pages.key] = payload
            others = reached(part.pages.key)
            for peer in peers:
                if peer not in others:
                    self._send(peer, message, payload)
        return payloads

    def refresh(self, layers: Collection[int]) -> None:
        """Copy what is held here to the compute buffers of these layers, after they or their replicas changed."""
        for layer in layers:
            self._state.to_compute(layer)
        for part in self._state:
            if part.version != LEARNING and self._layout.readers:
                message = Publish(part.version, *part.pages.key)
                self._install_readers(message, self._payload(part), layers)

    def answer(self, peer: int, need: Need) -> bool:
        """Publish again to one worker what it lacks. Returns True if all was here, at that version or the next."""
        layout, answered = self._layout.layers[need.layer], 0
        for part in self._state.layers.get(need.layer, ()):
            first, stop = max(part.pages.first, need.first), min(part.pages.stop, need.stop)
            # State that came from a primary which was ahead may be a step ahead of this worker. It is of no use to
            # compute with; but then all reduced gradients of that step are there, and no worker has to compute it.
            if part.version in (need.step, need.step + 1) and first < stop:
                a, b = layout.span(first, stop)
                values = self._payload(part)[a - part.start : b - part.start]
                self._send(peer, Publish(part.version, need.layer, first, stop), values)
                answered += stop - first
        return answered == need.stop - need.first

    def _payload(self, part: HeldRange) -> Tensor:
        """The values of a page range, in the compute dtype, in memory that stays as it is until all have received them.

        That holds for memory that only an update overwrites, but not for a compute buffer that is dropped in between.
        """
        if part.pages.layer in self._values and not self._drops_params:
            return self._state.compute_values(part)
        return part.master if part.master.dtype == self._dtype else part.master.to(self._dtype)

    def install(self, publish: Publish, payload: Tensor) -> None:
        """Copies published values, flat in the compute dtype, to every buffer of this worker that has those pages."""
        if publish.layer in self._values:
            self._values[publish.layer].install(publish.first, publish.stop, payload, publish.step)
        self._install_readers(publish, payload)

    def will_reach(self, layer: int, version: int, filed: Iterable[Publish]) -> bool:
        """True if each page of a layer's compute buffer is at this version or later, or will be by a filed page."""
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
        """(layer, shift) of the layers that read these pages: a page p lies at p + shift there."""
        block = self._layout.layers[publish.layer].block_of(publish.first)
        for layer, reader in self._layout.readers.get((publish.layer, block.first_page), ()):
            yield layer, reader.first_page - block.first_page


def _blocks_of(layout: LayerLayout, first: int, stop: int) -> list[Block]:
    """The blocks that pages [first, stop) touch."""
    return [b for b in layout.blocks if b.first_page < stop and first < b.first_page + b.num_pages]


def collectives_of(context: WorkerContext) -> StageCollectives | None:
    """The collectives that go through the process group of a worker's stage; None with the option off."""
    if (group := context.hooks.stage_group) is None:
        return None
    job, place = context.job, context.device.place
    return StageCollectives(context.rank, context.model.layout, place, job.torch_dtype, context.channel.send, group)


class Parameters:
    """The parameters that one worker publishes, asks for, keeps for later and installs.

    Args:
        context: of the worker.
        values: compute buffers of the layers that this worker computes; they change between configurations.
        state: the pages that it holds, of the same configuration.
        protocol: knows the version.
        unsure: peers that may not get what is sent to them before the next configuration; changed by the replica.
        grouped: what goes through the process group of the worker's stage, if it has one.
        may_answer: True unless the parameters that are asked for are not what this worker has written.
    """

    def __init__(
        self,
        context: WorkerContext,
        values: Mapping[int, ValueBuffer],
        state: HeldState,
        protocol: WorkerProtocol,
        unsure: Set[int],
        grouped: StageCollectives | NoCollectives,
        may_answer: Callable[[Need], bool],
    ) -> None:
        self._context = context
        self._values = values
        self._state = state
        self._protocol = protocol
        self._unsure = unsure
        # By `enter_epoch`, which is called before anything else.
        self._replica_map: ReplicaMap
        self._publisher: Publisher
        self._filed: dict[m.Publish, Tensor] = {}
        # (sender, request) in the order in which they came, each once: to be answered, and answered at this version.
        self._needs: dict[tuple[int, m.Need], None] = {}
        self._answered: dict[tuple[int, m.Need], None] = {}
        self.layers: list[int] = []
        """The layers that are computed or held here."""
        self.grouped = grouped
        self._may_answer = may_answer

    def enter_epoch(self, placement: Placement, replica_map: ReplicaMap) -> None:
        """Publish to the readers of a newer configuration.

        Args:
            replica_map: of the layers that this worker computes, or reads parameters of, and of all that it holds.
        """
        self._replica_map = replica_map
        self._publisher = Publisher(self._context, placement, self._values, self._state)
        self.layers = sorted({*self._values, *self._state.layers})
        self.grouped.enter_epoch(placement, replica_map)

    # ---- out

    def publish(self, layer: int, version: int, *, extension: str = "", frozen: bool = False) -> None:
        """Send a layer's new values: through the group of the stage if all members agreed to and it has not failed.

        Args:
            extension: that all votes carried.
            frozen: the values of frozen pages as well: nobody has them yet.
        """
        if not (extension == GROUPED and self.grouped.serves):
            self._publisher.publish(layer, version, frozen=frozen)
            return
        payloads = self._publisher.publish(layer, version, self.grouped.reached)
        self.grouped.gather(layer, version, payloads)

    def published(self, version: int, *, extension: str) -> None:
        """This worker is at a version now, and has published it."""
        self._answered = {(sender, need): None for sender, need in self._answered if need.step >= version}
        self.answer()  # to workers that asked for this version before it was here
        if extension == GROUPED and not self.grouped.serves:
            # The group failed after the votes. A primary that did not know it yet has sent its pages through the group
            # alone, where they do not arrive.
            self.ask_for_rest()
        self._filed = {publish: payload for publish, payload in self._filed.items() if publish.step >= version}

    def needed(self, sender: int, need: m.Need) -> None:
        """A worker asks for pages.

        If they are not here yet, at this version or in this epoch, the answer is given later: the worker may have
        entered the next epoch first, in which a lost link is made again, or the first one to it is made. So it is if
        they are damaged: in the epoch that follows they are asked for again.
        """
        if need.step < self._protocol.version:
            return  # the step after it is applied, so its sender has voted, and has all that it asked for
        reaches = sender not in self._unsure and self._context.channel.reaches(sender)
        if reaches and self._may_answer(need) and self._publisher.answer(sender, need):
            self._answered[sender, need] = None
        else:
            self._needs[sender, need] = None

    def link_lost(self, peer: int) -> None:
        """A link has ended: what was answered over it may not have come, and is answered again.

        Mostly the peer asks again, in the mesh epoch in which the link is made again. It does not if it had entered
        that epoch before it asked.
        """
        self._needs |= {asked: None for asked in self._answered if asked[0] == peer}

    def answer(self) -> None:
        """Give the answers that could not be given before."""
        needs, self._needs = self._needs, {}
        for sender, need in needs:
            self.needed(sender, need)

    # ---- in

    def refresh(self, layers: Collection[int], version: int) -> None:
        """Bring the compute buffers of these layers to a version: from the pages held here, and from the primaries."""
        for layer in layers:
            self._values[layer].expect()
        self._publisher.refresh(layers)
        self._ask_for(layers, version)

    def _ask_for(self, layers: Iterable[int], version: int) -> None:
        for layer in layers:
            if not self._values[layer].is_at(version):
                self._publisher.ask(self._replica_map, layer, version)

    def ask_for_rest(self) -> None:
        """Ask the primaries for what has not come through the group. Buffers that were dropped since were complete."""
        version = self._protocol.version
        self._ask_for((layer for layer, values in self._values.items() if values.dropped_at != version), version)

    def file(self, publish: m.Publish, payload: Tensor) -> None:
        """Keep a page that came over a link until the protocol returns Install for it."""
        self._filed[publish] = payload

    def forget_filed(self) -> None:
        """Give up what came early: it may come from a wrong replica. It is asked for again."""
        self._filed.clear()
        self._needs.clear()

    def install(self, publish: m.Publish) -> None:
        """Copy a filed page into the compute buffers; a page that came twice is filed no more."""
        if (payload := self._filed.pop(publish, None)) is not None:
            self._publisher.install(publish, payload)

    def install_arrived(self, publish: m.Publish, values: Tensor) -> None:
        """Install a page that has come through the group."""
        self._publisher.install(publish, values)

    def group_lost(self, lost: m.GroupLost) -> None:
        """Another worker of the stage reports that their group has failed."""
        if lost.epoch == self.grouped.epoch and self.grouped.serves:
            self.grouped.give_up()
            self.ask_for_rest()

    def needs_no_more(self, layer: int, version: int) -> bool:
        """True if nothing at `version` is to come for a layer's compute buffer: all is there, or a step ahead."""
        return self._values[layer].is_at(version) or self._publisher.will_reach(layer, version, self._filed)
