"""Flat buffers of one layer: parameter values with a version per page, and gradients with a view per parameter.

A layer's parameters lie one behind the other in one flat tensor, in the order and with the padding of its
`LayerLayout`. The tensors that the module computes with are views of it. So a page, which is a slice of the flat
tensor, can be sent, received or updated without knowing which parameters it belongs to.

All buffers belong to the training thread of one worker; nothing here takes a lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd.sharding.layout import LayerLayout

_NO_VERSION = -1
"""The version of a page that has no values: a new one, or one that was dropped. Versions are steps, from 0."""


def bind_parameters(module: nn.Module, layout: LayerLayout, flat: Tensor) -> list[nn.Parameter]:
    """Replaces a module's parameters by views of a flat tensor.

    Args:
        module: a layer; its parameters may be on the meta device.
        layout: the layout of this layer.
        flat: [layout.num_value_elements], any float dtype and device.

    Returns:
        The new parameters, in the order of `layout.slots`. A parameter that the module has under several names is
        replaced under all of them.
    """
    paths: dict[int, list[str]] = {}  # id of a parameter -> its names within the layer
    for path, parameter in module.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(path)
    bound = []
    for slot in layout.slots:
        old = module.get_parameter(slot.parameter.name.removeprefix(layout.name + "."))
        values = flat[slot.start : slot.stop].view(slot.parameter.shape)
        parameter = nn.Parameter(values, requires_grad=not slot.parameter.frozen)
        for path in paths[id(old)]:
            owner, _, leaf = path.rpartition(".")
            setattr(module.get_submodule(owner), leaf, parameter)  # recurrent modules of torch keep a list in step
        bound.append(parameter)
    return bound


def move_constants(module: nn.Module, place: torch.device) -> None:
    """Moves every tensor of a module that is not a parameter to a device: its buffers, and its plain attributes.

    `Module.to` would leave plain attributes behind, and would also replace the parameters, which are bound already.
    """
    for owner in module.modules():
        attributes = [(name, value) for name, value in vars(owner).items() if isinstance(value, Tensor)]
        for name, value in [*owner.named_buffers(recurse=False), *attributes]:
            if value.device != place:
                setattr(owner, name, value.to(place))


class ValueBuffer:
    """The parameters of one layer in the compute dtype, and the version of each page.

    Invariant: a micro-batch of step t runs the layer only when every page is exactly at version t - 1. Mixed versions
    would change the result without any error.

    Frozen pages that have values are right at every version. Their values are copied in once, and their version follows
    that of the worker (`keep_frozen`).

    A new buffer has no values, and its pages have no version. With ZeRO-3 the memory is freed after a step's last
    micro-batch (`drop`), and filled again by the parameters of the next version (`install`).

    Args:
        layout: the layout of the layer.
        module: the layer; its parameters become views of the buffer, and its other tensors move to `place`.
        dtype: the dtype of the values, fp32 or bf16.
        place: the device of the values.
    """

    def __init__(self, layout: LayerLayout, module: nn.Module, dtype: torch.dtype, place: torch.device) -> None:
        self.layout = layout
        self.module = module
        self.flat = torch.empty(layout.num_value_elements, dtype=dtype, device=place)
        move_constants(module, place)
        self.parameters = bind_parameters(module, layout, self.flat)
        slots = zip(layout.slots, self.parameters, strict=True)
        self.trained = [parameter for slot, parameter in slots if not slot.parameter.frozen]
        """The parameters that get gradients, in the order of `layout.gradient_slots`."""
        self._versions = np.full(layout.num_value_pages, _NO_VERSION, dtype=np.int64)
        self._frozen = np.zeros(layout.num_value_pages, dtype=bool)
        for block in layout.blocks:
            if block.frozen:
                self._frozen[block.first_page : block.first_page + block.num_pages] = True
        self._any_frozen = bool(self._frozen.any())
        self._common_version: int | None = None
        self._num_bytes = self.flat.untyped_storage().nbytes()
        self.dropped_at: int | None = None
        """The version that all pages were at when the buffer was dropped. None if it was not dropped, or if its pages
        were requested again since then (`expect`)."""
        self.times_marked = 0
        """Increases whenever pages are marked as having the values of a version. What is derived from the values, such
        as a copy on another device, is valid as long as this number stays the same. The version is not enough for that,
        since after a repair the same version has other values (docs/protocol.md, H3)."""

    def pages(self, first: int, stop: int) -> Tensor:
        """The values of pages [first, stop): a view [elements] in the compute dtype."""
        start, end = self.layout.span(first, stop)
        return self.flat[start:end]

    def install(self, first: int, stop: int, values: Tensor, version: int) -> None:
        """Copies published values into pages [first, stop), and marks these pages as being at `version`.

        A page that is at this version already stays as it is. The same values may be published twice, and the memory
        that the second message was sent from may have been overwritten by the time it is read. A buffer that was
        dropped at this version had all of its pages, and stays dropped.

        Args:
            values: [elements of these pages], of any float dtype (fp32 master into bf16) and on any device.
        """
        if self.dropped_at == version:
            return
        self.allocate()
        fresh = self._versions[first:stop] < version
        # Nearly always all pages or none. They differ only if a change of the mesh has cut the page ranges differently.
        if fresh.all():
            if not self.are_kept(first, stop):
                self.pages(first, stop).copy_(values)
            self.mark(first, stop, version)
        elif fresh.any():
            start, _ = self.layout.span(first, stop)
            for page in range(first, stop):
                a, b = self.layout.span(page, page + 1)
                self.install(page, page + 1, values[a - start : b - start], version)

    def are_at(self, first: int, stop: int, version: int) -> bool:
        """True if all pages [first, stop) are at exactly this version."""
        return bool((self._versions[first:stop] == version).all())

    def are_kept(self, first: int, stop: int) -> bool:
        """True if all pages [first, stop) are frozen and have their values, which never change."""
        return bool(self._any_frozen and (self._frozen & (self._versions != _NO_VERSION))[first:stop].all())

    def keep_frozen(self, version: int) -> None:
        """Raise the version of the frozen pages that have values to the version that this worker is at now."""
        if not self._any_frozen:
            return
        kept = self._frozen & (self._versions != _NO_VERSION)
        self._versions[kept] = np.maximum(self._versions[kept], version)
        self._note_common_version()

    def missing(self, version: int) -> list[tuple[int, int]]:
        """The page ranges [first, stop) that are not at this version: sorted, disjoint, as long as possible."""
        wrong = np.flatnonzero(self._versions != version)
        cuts = np.split(wrong, np.flatnonzero(np.diff(wrong) != 1) + 1)
        return [(int(cut[0]), int(cut[-1]) + 1) for cut in cuts if len(cut)]

    def mark(self, first: int, stop: int, version: int) -> None:
        """Marks pages [first, stop) as being at `version`. The version of a page never decreases."""
        assert (self._versions[first:stop] <= version).all(), (self.layout.name, first, stop, version)
        self.times_marked += 1
        self._versions[first:stop] = version
        # The common version is asked for before every action and changes a few times a step, so it is computed here.
        self._common_version = version if (self._versions == version).all() else None

    def _note_common_version(self) -> None:
        versions = np.unique(self._versions)
        self._common_version = int(versions[0]) if len(versions) == 1 and versions[0] >= 0 else None

    def keep_only(self, page_ranges: Iterable[tuple[int, int]]) -> None:
        """Takes the version away from all pages outside these ranges [first, stop): they must be installed again."""
        kept = np.full_like(self._versions, _NO_VERSION)
        for first, stop in page_ranges:
            kept[first:stop] = self._versions[first:stop]
        self._versions = kept
        self._note_common_version()

    def forget_beyond(self, version: int) -> None:
        """Take the version away from all pages that are at a later version than this one.

        Frozen pages are right at every version, so they are set to this one instead.
        """
        ahead = self._versions > version
        self._versions = np.where(ahead, np.where(self._frozen, version, _NO_VERSION), self._versions)
        self._note_common_version()

    @property
    def versions(self) -> np.ndarray:
        """The version of each page, int64 [pages]; -1 for none. Read-only by convention."""
        return self._versions

    @property
    def version(self) -> int | None:
        """The version that all pages are at; None if they differ, or have none."""
        return self._common_version

    def is_at(self, version: int) -> bool:
        """True if every page is at exactly this version. A layer without parameters is at every version."""
        return self._common_version == version or not len(self._versions)

    def allocate(self) -> None:
        """Allocates the memory of a dropped buffer again. Its content is undefined until pages are installed."""
        if self.flat.untyped_storage().nbytes() == 0:
            self.flat.untyped_storage().resize_(self._num_bytes)

    def expect(self) -> None:
        """Note that the pages of the buffer were requested. If it was dropped, `install` fills it again from now on."""
        self.dropped_at = None

    def drop(self) -> None:
        """Frees the memory. The parameters stay bound to the empty storage, and no page has a version."""
        self.dropped_at = self._common_version
        # Resizing the storage, not replacing the tensor: the module's parameters and saved graphs refer to it.
        self.flat.untyped_storage().resize_(0)
        self._versions[:] = _NO_VERSION
        self._common_version = None


class GradientBuffer:
    """The gradient of one layer at one node of the reduction tree: fp32, flat, with a view per parameter.

    The elements between parameters (padding, and the loss page) are set to zero once and stay zero, except the loss.
    Frozen parameters have no elements in it.

    Args:
        layout: the layout of the layer.
        place: the device of the gradient.
    """

    def __init__(self, layout: LayerLayout, place: torch.device) -> None:
        self.layout = layout
        self.flat = torch.empty(layout.num_gradient_elements, dtype=torch.float32, device=place)
        # Whole pages are added and sent, padding included: garbage there would make norms and hashes differ.
        for start, stop in layout.gradient_gaps:
            self.flat[start:stop] = 0.0
        self.views = [self.flat[s.start : s.stop].view(s.parameter.shape) for s in layout.gradient_slots]
        self._pages: dict[tuple[int, int], Tensor] = {}  # views of `flat`, cached: every step needs the same ones

    def set(self, gradients: Sequence[Tensor | None]) -> None:
        """Overwrites the gradients of all parameters, converting them to fp32.

        A missing gradient is written as +0.0. If it were skipped, the buffer would keep that of an earlier micro-batch.

        Args:
            gradients: one per trained parameter, of its shape, in the order of `layout.gradient_slots`.
        """
        views, made = self.views, [gradient for gradient in gradients if gradient is not None]
        if len(made) < len(views):
            for view in (view for view, gradient in zip(views, gradients, strict=True) if gradient is None):
                view.zero_()
            views = [view for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
        if made:
            torch._foreach_copy_(views, made)  # pyright: ignore[reportPrivateImportUsage]

    @cached_property
    def loss(self) -> Tensor:
        """The element of the loss page that carries the loss: fp32 scalar, a view. Only the last layer has one."""
        return self._loss_page[0]

    @property
    def weight(self) -> float:
        """The weight of the loss in this buffer; 0 if the model's losses have no weights."""
        return float(self._loss_page[1])

    @cached_property
    def _loss_page(self) -> Tensor:
        assert self.layout.loss_block is not None
        page = self.layout.loss_block.first_page
        return self.pages(page, page + 1)

    def add_loss(self, loss: Tensor, *, add: bool) -> None:
        """Puts the loss of a micro-batch into the loss page, or adds it to what is there.

        Args:
            loss: fp32, a scalar; or [3]: the loss, its weight, and 1. After all micro-batches are added up, the last
                element shows whether losses had weights. If they have none, the last two elements stay zero.
        """
        into = self._loss_page[: len(loss)] if loss.ndim else self.loss
        if add:
            into.add_(loss)
        else:
            into.copy_(loss)

    def pages(self, first: int, stop: int) -> Tensor:
        """The gradient of the trained pages [first, stop): a view, fp32 [elements]."""
        if (found := self._pages.get((first, stop))) is None:
            start, end = self.layout.gradient_span(first, stop)
            found = self._pages[first, stop] = self.flat[start:end]
        return found

    def forget_views(self) -> None:
        """Drop the views that `pages` has made."""
        self._pages.clear()


class GradientPool:
    """Gradient buffers of one layer, reused from step to step.

    Args:
        layout: the layout of the layer.
        place: the device of the buffers.
    """

    def __init__(self, layout: LayerLayout, place: torch.device) -> None:
        self._layout = layout
        self._place = place
        self._free: list[GradientBuffer] = []
        self._in_use: list[GradientBuffer] = []
        self.peak = 0
        """The largest number of buffers that were in use at the same time so far."""

    def acquire(self) -> GradientBuffer:
        """Returns a buffer that nobody uses. Its gradients are those of an earlier tree node: overwrite them."""
        buffer = self._free.pop() if self._free else GradientBuffer(self._layout, self._place)
        self._in_use.append(buffer)
        self.peak = max(self.peak, len(self._in_use))
        return buffer

    def release(self, buffer: GradientBuffer) -> None:
        """Returns a buffer to the pool."""
        self._in_use.remove(buffer)
        self._free.append(buffer)

    def remove(self, buffer: GradientBuffer) -> None:
        """Removes a buffer from the pool for good: a message that is still being sent refers to its memory."""
        self._in_use.remove(buffer)

    def release_all(self) -> None:
        """Returns all buffers to the pool. Called when a step is decided, as its gradients are not needed any more."""
        self._free += self._in_use
        self._in_use = []

    def forget_views(self) -> None:
        """Drop the cached views of all buffers. Called when the page ranges have changed."""
        for buffer in (*self._free, *self._in_use):
            buffer.forget_views()

    @property
    def num_bytes(self) -> int:
        """The peak memory of this pool so far, in bytes."""
        return self.peak * self._layout.num_gradient_elements * 4
