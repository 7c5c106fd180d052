"""The pages of training state that a worker holds: fp32 master parameters and optimizer state, and their update.

A frozen page range has a master and no optimizer state. No update changes it, but its version advances with that of the
other pages.

A held page range is one contiguous slice of its layer, so that an update is a few kernel calls on whole ranges. If
parameters are fp32 and replicated, the master *is* the slice of the compute buffer on workers that compute with the
layer. In all other cases it lies in a buffer of its own.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.sharding.layout import LayerLayout, ModelLayout, UpdateRule
from elaswave_spmd.sharding.replicas import PageIndex, PageRange, ReplicaSet
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.optimizers import AVERAGE, PageOptimizer, Update

Saved = Callable[[PageRange, str], Tensor]
"""(page range, kind of state: "master" or the optimizer's) -> fp32 [elements]."""

LEARNING = -1
"""The version of a page range whose state has not come yet."""

MASTER = "master"
"""The kind of state that is not the optimizer's: the fp32 master parameters."""


@dataclass(frozen=True)
class Written:
    """Hashes of a page range as it was written: of its parameters alone, and of all its state."""

    master: bytes
    state: bytes


_MOST_UNUSED = 1.25
"""If memory is larger than the slices of it that are still held by more than this factor, the slices are copied and the
memory is freed."""


@dataclass
class HeldRange:
    """The state of one page range, at `version`.

    Args:
        pages: the page range, with its primary, mirrors and learners.
        start, stop: the elements [start, stop) of the layer's flat state that the range has.
        master: fp32 [stop - start], may be a slice of a compute buffer.
        optimizer_state: kind of state -> fp32 [stop - start]; empty if the pages are frozen.
        version: the step that was applied to the state last; LEARNING if there is no state yet.
        written: hashes of the state as it was written at `version`; None if they were not made.
    """

    pages: ReplicaSet
    start: int
    stop: int
    master: Tensor
    optimizer_state: dict[str, Tensor]
    version: int = LEARNING
    written: Written | None = None

    @property
    def rows(self) -> list[Tensor]:
        """All state, in the order in which it is sent and hashed: the master, then each optimizer state."""
        return [self.master, *self.optimizer_state.values()]

    def at(self, version: int) -> None:
        """Set the version after the state was changed, so that older hashes do not count; LEARNING gives it up."""
        self.version, self.written = version, None

    def part(self, pages: ReplicaSet, start: int, stop: int) -> HeldRange:
        """The part of this range that lies in elements [start, stop) of the layer, as slices of the same memory.

        Args:
            pages: the page range that the part belongs to from now on.
        """
        a, b = max(0, start - self.start), min(stop, self.stop) - self.start
        states = {name: values[a:b] for name, values in self.optimizer_state.items()}
        written = self.written if pages.key == self.pages.key else None
        return HeldRange(pages, self.start + a, self.start + b, self.master[a:b], states, self.version, written)


@dataclass(frozen=True)
class _Cut:
    """The arguments of one call of the optimizer: pieces [first, stop) of held ranges that share an update rule."""

    rule: UpdateRule
    pieces: list[tuple[PageRange, int, int]]
    masters: list[Tensor]
    optimizer_states: dict[str, list[Tensor]]


class HeldState:
    """All page ranges that one worker holds, by layer.

    Args:
        layout: the layers and pages of the model.
        optimizer: computes the update.
        device: the device that all state lies on.
        separate_master: keep masters apart from the compute buffers, as these are bf16 or are dropped (sharded
            parameters).
    """

    def __init__(self, layout: ModelLayout, optimizer: PageOptimizer, device: Device, *, separate_master: bool) -> None:
        self.optimizer = optimizer
        self.separate_master = separate_master
        self._layout = layout
        self._device = device
        self._values: Mapping[int, ValueBuffer] = {}
        self.layers: dict[int, list[HeldRange]] = {}
        self._cuts: dict[int, list[_Cut]] = {}

    def rebind(self, ranges: Iterable[ReplicaSet], values: Mapping[int, ValueBuffer]) -> None:
        """Hold exactly these page ranges from now on.

        Args:
            ranges: each is a range that was held, a part of one, or several of them joined; or it is new, and has no
                state and version LEARNING.
            values: layer -> compute buffer, of the layers that this worker computes.
        """
        self._values = values
        found: dict[int, list[HeldRange]] = {}
        # Layer by layer, so that the old memory of a layer is freed before the next layer's state is copied.
        for layer, of_layer in groupby(sorted(ranges, key=lambda pages: pages.key), key=lambda pages: pages.layer):
            old = {part.pages.key: part for part in self.layers.pop(layer, ())}
            index = PageIndex(old)
            found[layer] = [self._held_as(pages, old, index) for pages in of_layer]
            for held in found[layer]:
                self._settle(held)
        self.layers = found
        self._free_what_is_held_in_part()
        self._cuts = {layer: self._cut(layer, held) for layer, held in found.items()}

    def _free_what_is_held_in_part(self) -> None:
        """Copy the remaining parts of old ranges to memory of their own, if much of the old memory is not held now.

        A slice keeps all of its memory alive: without this, a worker that hands half of its pages to a newcomer would
        use as much memory as before.
        """
        slices: dict[int, list[tuple[HeldRange, str, Tensor]]] = defaultdict(list)  # address of the memory -> slices
        for part in self:
            own = {} if self._in_compute_buffer(part.pages) else {MASTER: part.master}
            for name, values in {**own, **part.optimizer_state}.items():
                slices[values.untyped_storage().data_ptr()].append((part, name, values))
        for found in slices.values():
            if found[0][2].untyped_storage().nbytes() <= _MOST_UNUSED * sum(values.nbytes for *_, values in found):
                continue
            for part, name, values in found:
                if name == MASTER:
                    part.master = values.clone()
                else:
                    part.optimizer_state[name] = values.clone()

    def _held_as(self, pages: ReplicaSet, old: Mapping[PageRange, HeldRange], index: PageIndex) -> HeldRange:
        """A page range with the state of it that this worker has, taken from the ranges that it held before.

        Args:
            old: the ranges of this layer that were held before.
            index: finds ranges of `old` by their pages.
        """
        layout = self._layout.layers[pages.layer]
        start, stop = layout.span(pages.first, pages.stop)
        # The remaining part of an old range is a slice of the same memory: nothing is copied.
        parts = [old[key].part(pages, start, stop) for key in index.covering(pages.key)]
        versions = {part.version for part in parts}
        if not parts or (len(parts) > 1 and LEARNING in versions):
            # If one part was given up, the whole range is learned anew: its sender cannot know which part is missing.
            return self._new(pages, layout, start, stop)
        assert len(versions) == 1, (pages, versions, "state is joined between two steps")
        return parts[0] if len(parts) == 1 else self._joined(pages, parts)

    def _joined(self, pages: ReplicaSet, parts: Sequence[HeldRange]) -> HeldRange:
        """One page range whose state is that of neighbouring ranges, joined."""
        first, last = parts[0], parts[-1]
        states = {name: _concatenated([part.optimizer_state[name] for part in parts]) for name in first.optimizer_state}
        master = _concatenated([part.master for part in parts])
        return HeldRange(pages, first.start, last.stop, master, states, first.version)

    def _new(self, pages: ReplicaSet, layout: LayerLayout, start: int, stop: int) -> HeldRange:
        names = () if layout.is_frozen(pages.first) else self.optimizer.state_names
        states = {name: self._empty(stop - start) for name in names}
        master = self._empty(0 if self._in_compute_buffer(pages) else stop - start)
        return HeldRange(pages, start, stop, master, states)

    def _empty(self, size: int) -> Tensor:
        """Uninitialised memory: the state of a new range is received, drawn or restored later."""
        return torch.empty(size, device=self._device.place)

    def _in_compute_buffer(self, pages: ReplicaSet) -> bool:
        return not self.separate_master and pages.layer in self._values

    def _settle(self, held: HeldRange) -> None:
        """Move a master into, or out of, the compute buffer, if this worker began or ceased to compute its layer."""
        if self._in_compute_buffer(held.pages):
            place = self._values[held.pages.layer].pages(held.pages.first, held.pages.stop)
            if held.version != LEARNING and held.master.data_ptr() != place.data_ptr():
                place.copy_(held.master)  # this worker computes the layer from now on
            held.master = place
            return
        # The master may be a slice of a compute buffer that this worker does not need any more. It is copied, as the
        # slice would keep the memory of the whole buffer alive.
        whole = held.master.untyped_storage().nbytes() > 4 * held.master.numel()
        if whole and not self.separate_master:
            held.master = held.master.clone()

    def average_of(self, part: HeldRange) -> Tensor:
        """The moving average of a page range's parameters, a view. Frozen parameters are their own average."""
        return part.optimizer_state.get(AVERAGE, part.master)

    def is_frozen(self, layer: int, page: int) -> bool:
        """True if a page is not trained: it has a master and no optimizer state."""
        return self._layout.layers[layer].is_frozen(page)

    def __iter__(self) -> Iterator[HeldRange]:
        return (part for _, held in sorted(self.layers.items()) for part in held)

    def initialise(self, draw: Callable[[str, int, int], Tensor]) -> None:
        """Fill the masters with initial values: version 0.

        Args:
            draw: (parameter name, first, stop) -> fp32 elements [first, stop) of the flattened parameter.
        """
        for part in self:
            for values in (part.master, *part.optimizer_state.values()):
                values.zero_()  # also the elements between parameters, where nothing else is written
            for slot in self._layout.layers[part.pages.layer].slots:
                first, stop = max(slot.start, part.start), min(slot.stop, part.stop)
                if first < stop:
                    values = draw(slot.parameter.name, first - slot.start, stop - slot.start)
                    part.master[first - part.start : stop - part.start].copy_(values)
            if (average := part.optimizer_state.get(AVERAGE)) is not None:
                average.copy_(part.master)
            part.at(0)
        for layer in self.layers:
            self.to_compute(layer)

    def restore(self, saved: Saved, version: int) -> None:
        """Fill all held page ranges from a checkpoint of this version."""
        for part in self:
            for kind, target in {MASTER: part.master, **part.optimizer_state}.items():
                target.copy_(saved(part.pages.key, kind))
            part.at(version)
        for layer in self.layers:
            self.to_compute(layer)

    def apply(
        self,
        layer: int,
        gradients: Mapping[PageRange, Tensor],
        *,
        step: int,
        lr: float,
        divisor: float,
    ) -> None:
        """Update all held pages of a layer, and copy their new values into the compute buffer.

        Args:
            gradients: (layer, first, stop) -> reduced gradient of that page range, fp32 [elements]; may be overwritten.
            step: the step to apply. Ranges at another version than step - 1 are left alone.
            lr: the learning rate of the step.
            divisor: divide the gradients by this number (clipping, and the weight of the loss).
        """
        held = self.layers.get(layer, ())
        current = [part for part in held if part.version == step - 1]
        # Not updated are ranges whose state has not come yet, and ranges that are at `step` already, since a primary
        # that had applied it has sent their state.
        cuts = self._cuts.get(layer, []) if len(current) == len(held) else self._cut(layer, current)
        for cut in cuts:
            self.optimizer.update(
                cut.masters,
                [gradients[key][first:stop] for key, first, stop in cut.pieces],
                cut.optimizer_states,
                Update(step, lr * cut.rule.lr_scale, cut.rule.decay, divisor, cut.rule.weight_decay),
            )
        self.keep(layer, step)

    def _cut(self, layer: int, held: list[HeldRange]) -> list[_Cut]:
        return _cut_by_rule(self._layout.layers[layer], held)

    def keep(self, layer: int, step: int) -> None:
        """Advance the version of a layer's pages to `step`, without an update.

        Called after an update, or instead of one if the step is skipped, as its gradient is not finite (S6). All
        workers skip the same steps.
        """
        for part in self.layers.get(layer, ()):
            # State that this worker learns may be missing still, or may be one step ahead of this worker's version.
            assert part.version in (LEARNING, step - 1, step), (part.pages, part.version, step)
            if part.version == step - 1:
                part.at(step)
        self.to_compute(layer)

    def ahead_of(self, version: int) -> tuple[PageRange, ...]:
        """The trained page ranges whose state is at version + 1: a primary that had applied that step has sent it."""
        parts = (part for part in self if part.version == version + 1)
        return tuple(sorted(p.pages.key for p in parts if not self.is_frozen(p.pages.layer, p.pages.first)))

    def forget_beyond(self, version: int) -> frozenset[PageRange]:
        """Give up state that is ahead of a version, since the step after it begins anew (V5).

        Frozen pages keep their state, which is right at every version.

        Returns:
            The page ranges whose state was given up.
        """
        ahead = [part for part in self if part.version > version]
        for part in ahead:
            part.at(version if self.is_frozen(part.pages.layer, part.pages.first) else LEARNING)
        return frozenset(part.pages.key for part in ahead if part.version == LEARNING)

    def compute_values(self, part: HeldRange) -> Tensor:
        """The parameters of a page range in the compute buffer: a view, in the compute dtype."""
        return self._values[part.pages.layer].pages(part.pages.first, part.pages.stop)

    def to_compute(self, layer: int) -> None:
        """Copy the held pages of a layer to its compute buffer, if this worker computes the layer."""
        values = self._values.get(layer)
        if values is None:
            return
        for part in self.layers.get(layer, ()):
            if part.version == LEARNING:
                continue
            if self.separate_master:
                values.install(part.pages.first, part.pages.stop, part.master, part.version)
            else:
                values.mark(part.pages.first, part.pages.stop, part.version)

    # ---- state transfer, and damage

    def copy_state(self, part: HeldRange, into: Tensor) -> Iterator[None]:
        """Copy the state of a page range: the master, then each optimizer state. Yields after every piece.

        Args:
            into: fp32 [`state_size(part)`].
        """
        return _copy_in_pieces(zip(into.view(len(part.rows), -1), part.rows, strict=True))

    def state_size(self, part: HeldRange) -> int:
        """Number of elements of the state of a page range."""
        return (1 + len(part.optimizer_state)) * (part.stop - part.start)

    def receive(
        self,
        layer: int,
        first: int,
        stop: int,
        version: int,
        payload: Tensor,
        received: Callable[[ReplicaSet], None],
        *,
        hashed: bool = False,
    ) -> Iterator[None]:
        """Copy received state of pages [first, stop) to the ranges that lack it. Yields after every piece.

        Args:
            version: the version of the state.
            payload: fp32, flat, as `copy_state` makes it.
            received: called with each page range whose state is complete now.
            hashed: make hashes of what has come, so that `damaged` finds later changes of it.
        """
        start, end = self._layout.layers[layer].span(first, stop)
        rows = payload.view(-1, end - start)
        found = False
        for part in self.layers.get(layer, ()):
            if part.version != LEARNING or not (first <= part.pages.first and part.pages.stop <= stop):
                continue
            a, b = part.start - start, part.stop - start
            in_buffer = self._in_compute_buffer(part.pages)
            pairs = [(target, row[a:b]) for target, row in zip(part.rows, rows, strict=True)]
            yield from _copy_in_pieces(pairs[in_buffer:])
            # The master may be the compute buffer itself. If these pages were published to it at this version already,
            # the same bits are there, and must not be written again: a saved forward may refer to them.
            if in_buffer and not self._is_there(part, version):
                part.master.copy_(rows[0, a:b])
            part.at(version)
            if hashed:
                part.written = self._hashes([row for _, row in pairs])
            received(part.pages)
            found = True
        if found:
            self.to_compute(layer)

    def _is_there(self, part: HeldRange, version: int) -> bool:
        """True if the compute buffer has the values of a page range at a version; those of frozen pages stay."""
        values, pages = self._values[part.pages.layer], part.pages
        return values.are_at(pages.first, pages.stop, version) or values.are_kept(pages.first, pages.stop)

    def fingerprints(self) -> dict[PageRange, bytes]:
        """Page range -> hash of its state, for all ranges that have state. `damaged` finds later changes of it."""
        for part in self:
            if part.version != LEARNING and part.written is None:
                part.written = self._hashes(part.rows)
        return {part.pages.key: part.written.state for part in self if part.written is not None}

    @property
    def is_hashed(self) -> bool:
        """True if there are hashes of any state, so that `damaged` can find changes of it."""
        return any(part.written is not None for part in self)

    def damaged(self) -> list[HeldRange]:
        """The page ranges whose state is no longer what this worker wrote, as after a fault of its memory."""
        return [part for part in self if part.written is not None and part.written != self._hashes(part.rows)]

    def damaged_parameters(self, among: Callable[[ReplicaSet], bool]) -> list[HeldRange]:
        """The page ranges whose parameters are no longer what this worker wrote.

        The optimizer's state, which is mostly twice as much, is not looked at.

        Args:
            among: says which page ranges to look at.
        """
        known = [(part, part.written) for part in self if part.written is not None and among(part.pages)]
        return [part for part, written in known if written.master != self._hash(part.master).digest()]

    def is_as_written(self, part: HeldRange, copied: Tensor) -> bool:
        """True if a copy of a page range's state (`copy_state`) has what this worker wrote, or if that is not known."""
        return part.written is None or part.written.state == self._hash(copied).digest()

    def _hashes(self, rows: Sequence[Tensor]) -> Written:
        found = self._hash(rows[0])  # to hash all state costs about as much as an update
        of_master = found.digest()
        for values in rows[1:]:
            self._hash(values, found)
        return Written(of_master, found.digest())

    def _hash(self, values: Tensor, into: hashlib.blake2b | None = None) -> hashlib.blake2b:
        found = hashlib.blake2b(digest_size=8) if into is None else into
        found.update(self._device.to_host(values).numpy().data)
        return found

    def disown(self, parts: Iterable[HeldRange]) -> list[PageRange]:
        """Give up the state of page ranges, so that other replicas send it anew. Returns the ranges that had state."""
        had = [part for part in parts if part.version != LEARNING]
        for part in had:
            part.at(LEARNING)
        return [part.pages.key for part in had]

    def flip_a_bit(self, kinds: Collection[str] = (), draw: random.Random | None = None) -> None:
        """Damage the state of a trained page range, as failing memory would (fault injection).

        Args:
            kinds: the kinds of state to choose from: MASTER (the parameters), or names of optimizer state; (): all.
            draw: chooses the page range, the kind and the element; None: the first of each.
        """
        trained = [part for part in self if not self.is_frozen(part.pages.layer, part.pages.first)]
        found = [
            values
            for part in trained
            for kind, values in {MASTER: part.master, **part.optimizer_state}.items()
            if kind in kinds or not kinds
        ]
        if found:  # a worker that has just joined may hold nothing
            values = found[0] if draw is None else draw.choice(found)
            # By `data`, so that autograd does not notice the change, as it would not notice a fault of the memory.
            values.data.view(torch.int32)[0 if draw is None else draw.randrange(len(values))] ^= 1 << 20

    def num_bytes(self, rank: int) -> dict[str, int]:
        """Bytes of state by kind.

        `master` (whether or not it lies in a compute buffer) and `optimizer` are of pages that this worker is the
        primary of; `mirror_master` and `mirror_optimizer` are of all other pages that it holds.
        """
        found = {"master": 0, "optimizer": 0, "mirror_master": 0, "mirror_optimizer": 0}
        for part in self:
            prefix = "" if part.pages.primary == rank else "mirror_"
            found[prefix + "master"] += part.master.numel() * 4
            found[prefix + "optimizer"] += sum(t.numel() * 4 for t in part.optimizer_state.values())
        return found


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Flat tensors, one after another. Without a copy if they are neighbouring slices of one tensor, as parts of a page
    range that was cut are."""
    base, at = parts[0]._base, parts[0].storage_offset()
    if base is not None and base.dim() == 1 and all(part._base is base for part in parts):
        ends = list(accumulate((len(part) for part in parts), initial=at))
        if [part.storage_offset() for part in parts] == ends[:-1]:
            return base[at - base.storage_offset() : ends[-1] - base.storage_offset()]
    return torch.cat(list(parts))


def _copy_in_pieces(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Copy the second tensor of each pair to the first. Yields after every piece of COPY_ELEMENTS."""
    for target, source in pairs:
        for at in range(0, len(source), COPY_ELEMENTS):
            target[at : at + COPY_ELEMENTS].copy_(source[at : at + COPY_ELEMENTS])
            yield


def _cut_by_rule(layout: LayerLayout, held: list[HeldRange]) -> list[_Cut]:
    """The held elements of a layer, grouped by update rule."""
    cuts: dict[UpdateRule, _Cut] = {}
    for part in held:
        for segment in layout.segments:
            first, stop = max(segment.start, part.start) - part.start, min(segment.stop, part.stop) - part.start
            if first >= stop:
                continue
            states = {name: [] for name in part.optimizer_state}
            cut = cuts.setdefault(segment.rule, _Cut(segment.rule, [], [], states))
            cut.pieces.append((part.pages.key, first, stop))
            cut.masters.append(part.master[first:stop])
            for name, values in part.optimizer_state.items():
                cut.optimizer_states[name].append(values[first:stop])
    return list(cuts.values())


COPY_ELEMENTS = 1 << 18
"""fp32 elements that one piece of a background copy moves. That takes about a millisecond on a host, and a message may
have to wait for it."""


class BackgroundCopies:
    """Copies that the training thread makes while it waits for messages, one small piece at a time.

    Each copy is an iterator that does one piece whenever it is asked for its next item. `finish` must be called before
    anything changes what a copy reads, or needs what it writes. There is no second thread, so a copy sees what any
    other part of the training thread would see between two messages.
    """

    def __init__(self) -> None:
        self._copies: deque[tuple[Iterator[None], PageRange | None]] = deque()

    def __bool__(self) -> bool:
        """True if anything is left to copy."""
        return bool(self._copies)

    def add(self, copy: Iterator[None], sent: PageRange | None = None) -> None:
        """Begin a copy.

        Args:
            copy: does one piece for each item.
            sent: the page range whose state the copy sends; None if it sends none.
        """
        self._copies.append((copy, sent))

    def do_one(self) -> bool:
        """Do one piece of the oldest copy. Returns True if there was one."""
        if not self._copies:
            return False
        copy, _ = self._copies[0]
        if next(copy, copy) is copy:
            self._copies.popleft()
        return True

    def finish(self) -> None:
        """Do everything that is left."""
        while self:
            self.do_one()

    def finish_sending(self, key: PageRange) -> None:
        """Finish the copies that send the state of a page range, ahead of all others."""
        for one in [one for one in self._copies if one[1] == key]:
            deque(one[0], maxlen=0)
            self._copies.remove(one)

    def give_up(self) -> None:
        """Drop all copies, however far they have come."""
        self._copies.clear()


def contains(whole: PageRange, part: PageRange) -> bool:
    """True if all pages of `part` are pages of `whole`."""
    return whole[0] == part[0] and whole[1] <= part[1] and part[2] <= whole[2]


def cut(
    layout: ModelLayout, ranges: Collection[PageRange], whole: PageRange, payload: Tensor
) -> dict[PageRange, Tensor]:
    """Cut the payload of `whole` into parts: one for each of `ranges` that lies inside it.

    Messages may be for page ranges of an older or a newer configuration than that of the receiver.

    Args:
        payload: one value for each element of `whole`, flat.
    """
    if whole in ranges:
        return {whole: payload}
    inside = [key for key in ranges if contains(whole, key)]
    if not inside:
        return {}
    of_layer = layout.layers[whole[0]]
    start, _ = of_layer.span(whole[1], whole[2])
    spans = {key: of_layer.span(key[1], key[2]) for key in inside}
    return {key: payload[a - start : b - start] for key, (a, b) in spans.items()}
