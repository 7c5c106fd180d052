"""The layout of a model's state: one flat buffer for each layer, cut in pages.

A layer's parameters are flattened into one buffer. The buffer is a sequence of *blocks*, each a whole number of pages:

    | state blocks: tied parameters, each its own | the rest | reader blocks of tied uses | ... | loss block |

A *state* block is owned: its pages have replicas (fp32 master, moments). A *reader* block is this layer's copy of a
parameter that another layer owns; its pages match the owner's one to one, so that gradients go, and published values
come, page by page. The *loss* block, in the last layer only, is one page of gradient buffer whose first element
carries the micro-batch's loss: the loss is reduced, replicated and recovered exactly like a gradient page.

Frozen parameters, which are not trained, lie in state and reader blocks of their own, behind the trained ones of their
kind: so a page is frozen as a whole or not at all. A frozen page has a master and replicas, and nothing else: no
gradient, no norm, no optimizer state. The gradient buffer of a layer leaves frozen blocks out.

Every page has `page_size` elements except the last of a block, which may be shorter; all are multiples of 64 elements.
Page ids (layer, page) never change during a run (docs/protocol.md, "Terms"). No torch in here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from elaswave_spmd.errors import LayoutError

ALIGNMENT = 64
"""Elements. Every parameter starts at a multiple: at least 64 bytes in bf16 and in fp32."""

STATE, READER, LOSS = "state", "reader", "loss"


def _align(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class UpdateRule:
    """The settings of one parameter's update that may differ from those of other parameters.

    Args:
        decay: whether weight decay applies to the parameter.
        lr_scale: the factor by which the scheduled learning rate is multiplied.
        weight_decay: the weight decay in place of the optimizer's; None for the optimizer's own.
    """

    decay: bool = True
    lr_scale: float = 1.0
    weight_decay: float | None = None

    @property
    def order(self) -> tuple[bool, float, float]:
        """The key by which the parameters of a block are sorted: those with weight decay come first."""
        return not self.decay, self.lr_scale, -1.0 if self.weight_decay is None else self.weight_decay


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter without its values: all that planning needs to know. `name` is global, "block0.attn.qkv.weight"."""

    name: str
    shape: tuple[int, ...]
    decay: bool = True
    lr_scale: float = 1.0
    frozen: bool = False
    weight_decay: float | None = None

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def rule(self) -> UpdateRule:
        return UpdateRule(self.decay, self.lr_scale, self.weight_decay)


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: elements [start, start + num_elements) of its layer's buffer."""

    parameter: ParameterInfo
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.num_elements


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a layer's buffer that share one update rule."""

    start: int
    stop: int
    rule: UpdateRule


@dataclass(frozen=True)
class Block:
    """Pages [first_page, first_page + num_pages), elements [start, stop) of the layer's buffer.

    `source` is, for a reader block, (owner layer, owner's first page): pages match one to one. The parameters of a
    frozen block are not trained.
    """

    kind: str
    first_page: int
    num_pages: int
    start: int
    stop: int
    slots: tuple[Slot, ...]
    source: tuple[int, int] | None = None
    frozen: bool = False

    @property
    def has_gradient(self) -> bool:
        """True if the gradient buffer has these pages: they are trained, or carry the loss."""
        return not self.frozen

    @property
    def pages(self) -> range:
        return range(self.first_page, self.first_page + self.num_pages)


@dataclass(frozen=True)
class LayerLayout:
    """The flat buffer of one layer. Sizes are in elements; bytes follow from the dtype of the buffer at hand."""

    index: int
    name: str
    page_size: int
    blocks: tuple[Block, ...]

    @cached_property
    def state_blocks(self) -> tuple[Block, ...]:
        return tuple(b for b in self.blocks if b.kind == STATE)

    @cached_property
    def reader_blocks(self) -> tuple[Block, ...]:
        return tuple(b for b in self.blocks if b.kind == READER)

    @cached_property
    def loss_block(self) -> Block | None:
        return next((b for b in self.blocks if b.kind == LOSS), None)

    @cached_property
    def num_state_pages(self) -> int:
        return sum(b.num_pages for b in self.state_blocks)

    @cached_property
    def num_trained_pages(self) -> int:
        """State pages that are trained. They come first: the state pages from this one on are frozen."""
        return sum(b.num_pages for b in self.state_blocks if not b.frozen)

    @property
    def trained_pages(self) -> range:
        """The state pages that are trained."""
        return range(self.num_trained_pages)

    @property
    def frozen_pages(self) -> range:
        """The state pages that are frozen."""
        return range(self.num_trained_pages, self.num_state_pages)

    @cached_property
    def num_state_elements(self) -> int:
        """Elements of owned state, padding included: what one copy of the master parameters takes."""
        return sum(b.stop - b.start for b in self.state_blocks)

    @cached_property
    def num_frozen_elements(self) -> int:
        """Elements of owned state that are frozen: they have a master and no optimizer state."""
        return sum(b.stop - b.start for b in self.state_blocks if b.frozen)

    def state_elements(self, kinds: int) -> int:
        """The number of values in one copy of all state, if a trained element has `kinds` values; a frozen one has one.

        Args:
            kinds: values of a trained element: 3 with AdamW (fp32 master and two moments).
        """
        return kinds * self.num_state_elements - (kinds - 1) * self.num_frozen_elements

    @cached_property
    def is_trained(self) -> bool:
        """True if the layer has a parameter, its own or one that it reads, which is trained."""
        return any(b.has_gradient and b.kind != LOSS for b in self.blocks)

    def is_frozen(self, page: int) -> bool:
        """True if a page, of state or of a reader, is frozen."""
        return self.block_of(page).frozen

    @cached_property
    def num_value_pages(self) -> int:
        """Pages of the parameter buffer: state and reader pages, without the loss page."""
        return sum(b.num_pages for b in self.blocks if b.kind != LOSS)

    @cached_property
    def num_value_elements(self) -> int:
        return sum(b.stop - b.start for b in self.blocks if b.kind != LOSS)

    @cached_property
    def num_gradient_elements(self) -> int:
        return sum(b.stop - b.start for b in self.blocks if b.has_gradient)

    @cached_property
    def gradient_slots(self) -> tuple[Slot, ...]:
        """The places of the trained parameters in the gradient buffer."""
        return tuple(
            Slot(s.parameter, s.start - self._frozen_before(b)) for b in self.blocks if b.has_gradient for s in b.slots
        )

    @cached_property
    def gradient_gaps(self) -> tuple[tuple[int, int], ...]:
        """Elements [start, stop) of the gradient buffer outside all parameters: padding, and the loss page."""
        starts = [*(s.start for s in self.gradient_slots), self.num_gradient_elements]
        stops = [0, *(s.stop for s in self.gradient_slots)]
        return tuple((a, b) for a, b in zip(stops, starts, strict=True) if a < b)

    def gradient_span(self, first: int, stop: int) -> tuple[int, int]:
        """Elements [start, stop) of the gradient buffer that belong to the trained pages [first, stop) of one block."""
        start, end = self.span(first, stop)
        before = self._frozen_before(self.block_of(first))
        return start - before, end - before

    def _frozen_before(self, block: Block) -> int:
        """Elements of frozen blocks before a block, which the gradient buffer leaves out."""
        assert block.has_gradient, (self.name, block)
        return sum(b.stop - b.start for b in self.blocks if b.frozen and b.start < block.start)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(s for b in self.blocks for s in b.slots)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The owned elements that are trained, by update rule; padding goes with the parameter before it."""
        found: list[Segment] = []
        for block in (b for b in self.state_blocks if not b.frozen):
            ends = [s.start for s in block.slots[1:]] + [block.stop]
            for slot, end in zip(block.slots, ends, strict=True):
                rule, last = slot.parameter.rule, found[-1] if found else None
                if last and last.stop == slot.start and last.rule == rule:
                    found[-1] = Segment(last.start, end, rule)
                else:
                    found.append(Segment(slot.start, end, rule))
        return tuple(found)

    def block_of(self, page: int) -> Block:
        return next(b for b in self.blocks if b.first_page <= page < b.first_page + b.num_pages)

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """Elements [start, stop) of the pages [first, stop), which lie in one block."""
        block = self.block_of(first)
        assert stop <= block.first_page + block.num_pages, (self.name, first, stop, block)
        start = block.start + (first - block.first_page) * self.page_size
        end = block.start + (stop - block.first_page) * self.page_size
        return start, min(end, block.stop)

    def num_elements(self, first: int, stop: int) -> int:
        """The number of elements of the pages [first, stop), which lie in one block."""
        start, end = self.span(first, stop)
        return end - start

    def __str__(self) -> str:
        kinds = ", ".join(f"{'frozen ' * b.frozen}{b.kind} {b.num_pages}" for b in self.blocks)
        return f"{self.index} {self.name}: {self.num_state_elements} elements, pages: {kinds}"


@dataclass(frozen=True)
class LayerUse:
    """A model's declaration of one layer: its own parameters, and the parameters of other layers that it reads.

    `reads` maps the name of the parameter inside this layer ("head.weight") to the owner's ("embed.weight").
    """

    name: str
    parameters: tuple[ParameterInfo, ...]
    reads: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ModelLayout:
    """The layouts of a model's layers, first to last."""

    layers: tuple[LayerLayout, ...]
    page_size: int

    @cached_property
    def num_parameters(self) -> int:
        return sum(s.parameter.num_elements for layer in self.layers for b in layer.state_blocks for s in b.slots)

    @cached_property
    def frozen(self) -> tuple[str, ...]:
        """The names of all parameters that are not trained, readers of ties included, in layer order."""
        return tuple(s.parameter.name for layer in self.layers for b in layer.blocks if b.frozen for s in b.slots)

    @cached_property
    def first_trained(self) -> int:
        """The first layer that needs a backward: all layers before it have only frozen parameters, or none at all.

        In a model without frozen parameters it is always layer 0, even if the first layers have no parameters.
        """
        if not self.frozen:
            return 0
        return next((layer.index for layer in self.layers if layer.is_trained), 0)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Relative times of the layers before anything is measured, by their numbers of elements.

        A forward, the gradient of the input and those of the weights take about equally long. Frozen parameters have no
        weight gradient, and layers before the first trained one have no backward.
        """
        found = []
        for layer in self.layers:
            frozen = sum(b.stop - b.start for b in layer.blocks if b.frozen)
            share = 1 / 3 if layer.index < self.first_trained else 2 / 3
            trained = layer.num_value_elements - frozen
            found.append(max(1.0, float(trained) if not frozen else trained + share * frozen))
        return tuple(found)

    @cached_property
    def readers(self) -> Mapping[tuple[int, int], tuple[tuple[int, Block], ...]]:
        """(owner layer, owner's first page) -> the reader blocks of that parameter, in layer order."""
        found: dict[tuple[int, int], list[tuple[int, Block]]] = {}
        for layer in self.layers:
            for block in layer.reader_blocks:
                assert block.source is not None
                found.setdefault(block.source, []).append((layer.index, block))
        return {source: tuple(blocks) for source, blocks in found.items()}

    def uses_of(self, layer: int, page: int) -> tuple[int, ...]:
        """The layers whose gradients add up to that of a page of `layer`, in layer order: two for a tied parameter."""
        block = self.layers[layer].block_of(page)
        assert block.kind != READER, (layer, page)
        readers = self.readers.get((layer, block.first_page), ()) if block.kind != LOSS else ()
        return tuple(sorted({layer, *(reader for reader, _ in readers)}))

    def __str__(self) -> str:
        return "\n".join([f"pages of {self.page_size} elements", *map(str, self.layers)])


def lay_out(uses: Sequence[LayerUse], *, page_size: int = 4096) -> ModelLayout:
    """Lay a model's parameters out in pages.

    Inside a block, parameters are ordered by update rule (those with weight decay first), then as declared, so that a
    layer has few segments. A tied parameter has a block of its own, at the front of its owner. Frozen parameters have
    blocks of their own, behind the trained ones. A reader block is frozen if the owner's block is.

    Args:
        uses: the layers of the model, first to last, with the parameters that each owns and reads.
        page_size: elements of a page; a multiple of 64.

    Raises:
        LayoutError: a page size that is not a multiple of 64; a tie to a parameter that no layer owns, or two ties of a
            layer to one parameter; a parameter without elements.
    """
    if page_size <= 0 or page_size % ALIGNMENT:
        raise LayoutError(
            f"page.size={page_size} is no positive multiple of {ALIGNMENT}",
            rule=f"a page is a positive multiple of {ALIGNMENT} elements",
            where="page.size",
            fix=f"page.size={max(ALIGNMENT, _align(max(page_size, 1)))}",
        )
    shapes = {p.name: p for use in uses for p in use.parameters}
    for p in shapes.values():
        if p.num_elements == 0:
            raise LayoutError(
                f"parameter {p.name} has shape {p.shape}",
                rule="a parameter has at least one element",
                where=p.name,
                fix="leave it out where one of its sizes is 0",
            )
    for use in uses:
        _check_reads(use, shapes)
    tied = {owner for use in uses for _, owner in use.reads}
    home: dict[str, tuple[int, int]] = {}
    layers = [_lay_out_state(i, use, tied, page_size, home) for i, use in enumerate(uses)]
    viewed = (
        _add_views(layer, use, shapes, home, is_last=layer is layers[-1])
        for layer, use in zip(layers, uses, strict=True)
    )
    return ModelLayout(tuple(viewed), page_size)


def _check_reads(use: LayerUse, owned: Mapping[str, ParameterInfo]) -> None:
    """Refuse ties of a layer to a parameter that no layer owns, and two ties to one parameter.

    Gradients of a tied parameter are added up by the layer that they come from (`ModelLayout.uses_of`), so a layer has
    one of them: of two readers in a layer one would be left out.

    Args:
        owned: the parameters of all layers, by name.
    """
    reader_of: dict[str, str] = {}
    for reader, owner in use.reads:
        if owner not in owned:
            raise LayoutError(
                f"{reader} is tied to {owner}, which no layer has",
                rule="a tied parameter is owned by a layer",
                exists=", ".join(sorted(owned)),
            )
        if other := reader_of.get(owner):
            raise LayoutError(
                f"{other} and {reader} of layer {use.name} are both tied to {owner}",
                rule="a layer reads the parameter of another layer through one tie: it has one gradient of it",
                where=reader,
                fix=f"leave out {reader}, and use {other} twice within the layer",
            )
        reader_of[owner] = reader


def _lay_out_state(
    index: int, use: LayerUse, tied: Set[str], page_size: int, home: dict[str, tuple[int, int]]
) -> LayerLayout:
    """The state blocks of one layer. Writes the first page of each tied parameter to `home`."""
    blocks: list[Block] = []
    for frozen in (False, True):
        own = [p for p in use.parameters if p.frozen == frozen]
        # A tied parameter has a block of its own, so that the pages of its readers' blocks match its pages one to one.
        for parameter in own:
            if parameter.name in tied:
                blocks.append(_block(STATE, (parameter,), blocks, page_size))
                home[parameter.name] = (index, blocks[-1].first_page)
        # Sorted by update rule, so that a page range has one or two segments: the optimizer is called once for each.
        rest = sorted((p for p in own if p.name not in tied), key=lambda p: p.rule.order)
        if rest:
            blocks.append(_block(STATE, rest, blocks, page_size))
    return LayerLayout(index, use.name, page_size, tuple(blocks))


def _add_views(
    layer: LayerLayout,
    use: LayerUse,
    shapes: Mapping[str, ParameterInfo],
    home: Mapping[str, tuple[int, int]],
    *,
    is_last: bool,
) -> LayerLayout:
    """The same layer with its reader blocks and, in the last layer, the loss block."""
    blocks = list(layer.blocks)
    for reader, owner in sorted(use.reads, key=lambda read: shapes[read[1]].frozen):
        info = replace(shapes[owner], name=reader)
        blocks.append(_block(READER, (info,), blocks, layer.page_size, source=home[owner]))
    if is_last:
        blocks.append(_block(LOSS, (), blocks, layer.page_size))
    return LayerLayout(layer.index, layer.name, layer.page_size, tuple(blocks))


def _block(
    kind: str,
    parameters: Sequence[ParameterInfo],
    before: Sequence[Block],
    page_size: int,
    source: tuple[int, int] | None = None,
) -> Block:
    start = before[-1].stop if before else 0
    first = before[-1].first_page + before[-1].num_pages if before else 0
    slots, at = [], start
    for p in parameters:
        slots.append(Slot(p, at))
        at += _align(p.num_elements)
    stop = max(at, start + ALIGNMENT)  # the loss block has no parameter, but takes one unit of alignment
    frozen = any(p.frozen for p in parameters)
    return Block(kind, first, -(-(stop - start) // page_size), start, stop, tuple(slots), source, frozen)
