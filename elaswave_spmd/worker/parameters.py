"""Publishes parameters after a step to the workers that compute with them and have no replica of their state.

`Publisher` sends and installs pages in one configuration. `Parameters` lives through all configurations: it asks for
pages that are missing, answers workers that ask, and keeps published pages that came early.
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
    """Sends the pages that a worker is the primary of, and installs pages of other primaries, in one configuration.

    A page goes to the workers of its stage and, if its parameter is tied, to those of the stages that read it. Replicas
    have applied the step themselves and are sent nothing.

    Args:
        context: what all parts of the worker share.
        placement: the mesh and what runs where, in this configuration.
        values: layer -> compute buffer, of the layers that this worker computes.
        state: the pages that this worker holds.
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
        """Send Need to the primaries of those pages of a layer's compute buffer that are not at this version."""
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
        """Send a layer's new values, and copy those of a tied parameter to this worker's own layers that read it.

        Args:
            version: the version of the values. Held ranges at another version are left out.
            reached: returns the workers that get the values of a page range in another way, and are not sent them.
            frozen: send frozen pages as well. They do not change, so they are sent once; but if parameters are dropped
                (ZeRO-3) they are sent in every step, whatever this says.

        Returns:
            Page range -> values, flat in the compute dtype, of the ranges that this worker is the primary of and other
            workers read.
        """
        payloads: dict[PageRange, Tensor] = {}
        for part in self._state.layers.get(layer, ()):
            if part.version != version:  # this worker learns the range and has no state of it yet
                continue
            if not (frozen or self._drops_params) and self._state.is_frozen(layer, part.pages.first):
                continue  # all workers that compute with frozen pages have them already
            message = Publish(version, *part.pages.key)
            peers = self._readers.get(part.pages.key)  # None: another worker is the primary of the range, and sends it
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
        """Copy the values of all held pages to the compute buffers of these layers, in a new configuration."""
        for layer in layers:
            self._state.to_compute(layer)
        for part in self._state:
            if part.version != LEARNING and self._layout.readers:
                message = Publish(part.version, *part.pages.key)
                self._install_readers(message, self._payload(part), layers)

    def answer(self, peer: int, need: Need) -> bool:
        """Publish pages again to one worker that has asked for them.

        Returns:
            True if all of them were sent. False if this worker does not have all of them at that version or the next.
        """
        layout, answered = self._layout.layers[need.layer], 0
        for part in self._state.layers.get(need.layer, ()):
            first, stop = max(part.pages.first, need.first), min(part.pages.stop, need.stop)
            # State that this worker has learned from a primary which was ahead may be one version newer than asked for.
            # The step cannot be computed with it. But it need not be: the step has been decided, so all of its reduced
            # gradients are there.
            if part.version in (need.step, need.step + 1) and first < stop:
                a, b = layout.span(first, stop)
                values = self._payload(part)[a - part.start : b - part.start]
                self._send(peer, Publish(part.version, need.layer, first, stop), values)
                answered += stop - first
        return answered == need.stop - need.first

    def _payload(self, part: HeldRange) -> Tensor:
        """The values of a page range, in the compute dtype, in memory that stays as it is until all have received them.

        That is memory which only an update overwrites (S5). A compute buffer that is dropped within a step is not.
        """
        if part.pages.layer in self._values and not self._drops_params:
            return self._state.compute_values(part)
        return part.master if part.master.dtype == self._dtype else part.master.to(self._dtype)

    def install(self, publish: Publish, payload: Tensor) -> None:
        """Copy published values, flat in the compute dtype, to every compute buffer of this worker with these pages."""
        if publish.layer in self._values:
            self._values[publish.layer].install(publish.first, publish.stop, payload, publish.step)
        self._install_readers(publish, payload)

    def will_reach(self, layer: int, version: int, filed: Iterable[Publish]) -> bool:
        """True if every page of a layer's compute buffer is at this version or later, or will be once all filed pages
        are installed."""
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
        context: what all parts of the worker share.
        values: layer -> compute buffer, of the layers that this worker computes; the dict changes between
            configurations.
        state: the pages that this worker holds, cut as in the same configuration.
        protocol: knows the version.
        unsure: peers that may not get what they are sent before the next configuration. `StateReplica` changes the set.
        grouped: sends parameters through the process group of the worker's stage, if there is one.
        may_answer: returns False if the parameters that a Need asks for are damaged in this worker's memory (H5).
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
        # `enter_epoch` sets these two, and is called before anything else.
        self._replica_map: ReplicaMap
        self._publisher: Publisher
        self._filed: dict[m.Publish, Tensor] = {}  # published pages that the protocol does not let be installed yet
        # (sender, request), in the order in which they came: requests that are still to be answered, and requests that
        # were answered at the present version. The dicts serve as ordered sets.
        self._needs: dict[tuple[int, m.Need], None] = {}
        self._answered: dict[tuple[int, m.Need], None] = {}
        self.layers: list[int] = []
        """The layers that this worker computes or holds pages of, ascending."""
        self.grouped = grouped
        self._may_answer = may_answer

    def enter_epoch(self, placement: Placement, replica_map: ReplicaMap) -> None:
        """Publish to the readers of a newer configuration.

        Args:
            replica_map: the replicas of the layers that this worker computes, whose parameters it reads, or whose pages
                it holds.
        """
        self._replica_map = replica_map
        self._publisher = Publisher(self._context, placement, self._values, self._state)
        self.layers = sorted({*self._values, *self._state.layers})
        self.grouped.enter_epoch(placement, replica_map)

    # ---- out

    def publish(self, layer: int, version: int, *, extension: str = "", frozen: bool = False) -> None:
        """Send a layer's new values: through the group of the stage, if all members have agreed to and it has not
        failed; else over links.

        Args:
            extension: the value that all votes of the step carried (`Apply.extension`).
            frozen: send frozen pages as well, as no worker has them yet.
        """
        if not (extension == GROUPED and self.grouped.serves):
            self._publisher.publish(layer, version, frozen=frozen)
            return
        payloads = self._publisher.publish(layer, version, self.grouped.reached)
        self.grouped.gather(layer, version, payloads)

    def published(self, version: int, *, extension: str) -> None:
        """Called when this worker has applied the step `version` and has published all of its layers."""
        self._answered = {(sender, need): None for sender, need in self._answered if need.step >= version}
        self.answer()  # to workers that asked for this version before it was here
        if extension == GROUPED and not self.grouped.serves:
            # The group has failed after the votes. A primary that did not know this yet has sent its pages only through
            # the group, where they do not arrive.
            self.ask_for_rest()
        self._filed = {publish: payload for publish, payload in self._filed.items() if publish.step >= version}

    def needed(self, sender: int, need: m.Need) -> None:
        """Handle Need: a worker asks for pages. Answer now, or keep the request for later.

        The answer is given later if the pages are not here yet, at this version or in this epoch, or if there is no
        link to the worker yet: it may have entered the next epoch first, in which the link is made. It is also given
        later if the pages are damaged here: in the epoch that follows the worker asks for them again.
        """
        if need.step < self._protocol.version:
            return  # this worker has applied the step after it, for which the sender has voted: it has these pages
        reaches = sender not in self._unsure and self._context.channel.reaches(sender)
        if reaches and self._may_answer(need) and self._publisher.answer(sender, need):
            self._answered[sender, need] = None
        else:
            self._needs[sender, need] = None

    def link_lost(self, peer: int) -> None:
        """A link has ended: answer again the requests of this peer, since the answers may not have arrived.

        Mostly the peer asks again itself, in the mesh epoch in which the link is made again. But it does not if it had
        entered that epoch before it asked.
        """
        self._needs |= {asked: None for asked in self._answered if asked[0] == peer}

    def answer(self) -> None:
        """Try again to answer the requests that could not be answered before."""
        needs, self._needs = self._needs, {}
        for sender, need in needs:
            self.needed(sender, need)

    # ---- in

    def refresh(self, layers: Collection[int], version: int) -> None:
        """Bring the compute buffers of these layers to a version: copy held pages, and ask primaries for the others."""
        for layer in layers:
            self._values[layer].expect()
        self._publisher.refresh(layers)
        self._ask_for(layers, version)

    def _ask_for(self, layers: Iterable[int], version: int) -> None:
        for layer in layers:
            if not self._values[layer].is_at(version):
                self._publisher.ask(self._replica_map, layer, version)

    def ask_for_rest(self) -> None:
        """Ask the primaries for the pages that have not come through the group.

        A buffer that was dropped at this version is left out: it was complete before.
        """
        version = self._protocol.version
        self._ask_for((layer for layer, values in self._values.items() if values.dropped_at != version), version)

    def file(self, publish: m.Publish, payload: Tensor) -> None:
        """Keep a page that came over a link until the protocol returns Install for it."""
        self._filed[publish] = payload

    def forget_beyond(self, version: int) -> None:
        """Drop published pages of steps that no member had applied when this epoch began.

        Whoever has sent them is no member any more. The members apply these steps, and publish them, in this epoch.
        """
        self._filed = {publish: payload for publish, payload in self._filed.items() if publish.step <= version}

    def forget_filed(self) -> None:
        """Drop published pages that came early, as they may come from a wrong replica (H3), and requests of others.

        In the new epoch every worker asks again for what it lacks.
        """
        self._filed.clear()
        self._needs.clear()

    def install(self, publish: m.Publish) -> None:
        """Copy filed pages into the compute buffers. Does nothing if they came twice and are installed already."""
        if (payload := self._filed.pop(publish, None)) is not None:
            self._publisher.install(publish, payload)

    def install_arrived(self, publish: m.Publish, values: Tensor) -> None:
        """Install pages that have come through the group of the stage."""
        self._publisher.install(publish, values)

    def group_lost(self, lost: m.GroupLost) -> None:
        """Handle GroupLost: another worker of the stage reports that the group of this epoch has failed (E4)."""
        if lost.epoch == self.grouped.epoch and self.grouped.serves:
            self.grouped.give_up()
            self.ask_for_rest()

    def needs_no_more(self, layer: int, version: int) -> bool:
        """True if no page of `version` is still to come for a layer's compute buffer: all are here or filed, at that
        version or the next."""
        return self._values[layer].is_at(version) or self._publisher.will_reach(layer, version, self._filed)
