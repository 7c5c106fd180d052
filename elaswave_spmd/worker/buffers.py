"""Flat buffers of a layer: parameter values with a version per page, and gradients with a view per parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd.sharding.layout import LayerLayout


def bind_parameters(module: nn.Module, layout: LayerLayout, flat: Tensor) -> list[nn.Parameter]:
    """Replaces the module's parameters by views of `flat`, as the layout says.

    Returns: the new parameters in the order of `layout.slots`.
    """
    paths: dict[int, list[str]] = {}  # a parameter may stand under several names within its layer
    for path, parameter in module.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(path)
    bound = []
    for slot in layout.slots:
        old = module.get_parameter(slot.parameter.name.removeprefix(layout.name + "."))
        parameter = nn.Parameter(flat[slot.start : slot.stop].view(slot.parameter.shape))
        for path in paths[id(old)]:
            owner, _, leaf = path.rpartition(".")
            module.get_submodule(owner).register_parameter(leaf, parameter)
        bound.append(parameter)
    return bound


def move_constants(module: nn.Module, place: torch.device) -> None:
    """What modules keep besides parameters, as buffers or attributes, goes to `place`."""
    for owner in module.modules():
        attributes = [(name, value) for name, value in vars(owner).items() if isinstance(value, Tensor)]
        for name, value in [*owner.named_buffers(recurse=False), *attributes]:
            if value.device != place:
                setattr(owner, name, value.to(place))


class ValueBuffer:
    """The parameters of one layer in the compute dtype, and the version of each page.

    A micro-batch of step t may run the layer only when every page is exactly at t - 1: mixing versions would change the
    result silently. A new buffer has no values, and no version. Sharded parameters are dropped after a step's last
    micro-batch and filled again by the next versions.

    Args:
        module: of the layer; its parameters become views of the buffer, and its constants go to `place` too.
        place: the device of the values.
    """

    def __init__(self, layout: LayerLayout, module: nn.Module, dtype: torch.dtype, place: torch.device) -> None:
        self.layout = layout
        self.module = module
        self.flat = torch.empty(layout.num_value_elements, dtype=dtype, device=place)
        move_constants(module, place)
        self.parameters = bind_parameters(module, layout, self.flat)
        self._versions = np.full(layout.num_value_pages, -1, dtype=np.int64)
        self._common_version: int | None = None
        self._num_bytes = self.flat.untyped_storage().nbytes()
        self.dropped_at: int | None = None
        """The version that all pages were at when the buffer was dropped last."""

    def pages(self, first: int, stop: int) -> Tensor:
        """The values of pages [first, stop), a view."""
        start, end = self.layout.span(first, stop)
        return self.flat[start:end]

    def install(self, first: int, stop: int, values: Tensor, version: int) -> None:
        """Copies published values in.

        `values` may be of another float dtype (fp32 master into bf16), and may lie on another device.

        Pages that are at this version already stay as they are: what came twice may be under way for so long that the
        memory which it was sent from has moved on.
        """
        self.allocate()
        fresh = self._versions[first:stop] < version
        if fresh.all():
            self.pages(first, stop).copy_(values)
            self.mark(first, stop, version)
        elif fresh.any():
            start, _ = self.layout.span(first, stop)
            for page in range(first, stop):
                a, b = self.layout.span(page, page + 1)
                self.install(page, page + 1, values[a - start : b - start], version)

    def are_at(self, first: int, stop: int, version: int) -> bool:
        """Whether pages [first, stop) are at exactly this version."""
        return bool((self._versions[first:stop] == version).all())

    def missing(self, version: int) -> list[tuple[int, int]]:
        """The stretches [first, stop) of pages that are not at this version."""
        wrong = np.flatnonzero(self._versions != version)
        cuts = np.split(wrong, np.flatnonzero(np.diff(wrong) != 1) + 1)
        return [(int(cut[0]), int(cut[-1]) + 1) for cut in cuts if len(cut)]

    def mark(self, first: int, stop: int, version: int) -> None:
        """Pages [first, stop) are now at `version`; versions never go back."""
        assert (self._versions[first:stop] <= version).all(), (self.layout.name, first, stop, version)
        self._versions[first:stop] = version
        # Looked at before every action, changed a few times a step: so it is worked out here.
        self._common_version = version if (self._versions == version).all() else None

    def keep_only(self, runs: Iterable[tuple[int, int]]) -> None:
        """Only these stretches [first, stop) of pages have a version from now on; the others are to come again."""
        kept = np.full_like(self._versions, -1)
        for first, stop in runs:
            kept[first:stop] = self._versions[first:stop]
        self._versions = kept
        versions = np.unique(kept)
        self._common_version = int(versions[0]) if len(versions) == 1 and versions[0] >= 0 else None

    @property
    def versions(self) -> np.ndarray:
        """Of each page; -1: none. Not to be changed."""
        return self._versions

    @property
    def version(self) -> int | None:
        """The one version that all pages are at; None if there is none."""
        return self._common_version

    def is_at(self, version: int) -> bool:
        """Whether every page is at exactly this version."""
        return self._common_version == version or not len(self._versions)

    def allocate(self) -> None:
        """Gives a dropped buffer its memory back; its content is undefined until installed."""
        if self.flat.untyped_storage().nbytes() == 0:
            self.flat.untyped_storage().resize_(self._num_bytes)

    def drop(self) -> None:
        """Frees the memory; the parameters stay bound to it, and no page has a version."""
        self.dropped_at = self._common_version
        self.flat.untyped_storage().resize_(0)
        self._versions[:] = -1
        self._common_version = None


class GradientBuffer:
    """One tree node's gradient of one layer: fp32, flat, with a view per parameter. What lies between stays zero."""

    def __init__(self, layout: LayerLayout, place: torch.device) -> None:
        self.layout = layout
        self.flat = torch.empty(layout.num_gradient_elements, dtype=torch.float32, device=place)
        for start, stop in layout.gradient_gaps:
            self.flat[start:stop] = 0.0
        self.views = [self.flat[s.start : s.stop].view(s.parameter.shape) for s in layout.slots]

    def set(self, gradients: Sequence[Tensor | None]) -> None:
        """Overwrites all parameters' gradients, converting to fp32. A missing gradient is +0.0, never skipped."""
        present = [(view, g) for view, g in zip(self.views, gradients, strict=True) if g is not None]
        if present:
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [view for view, _ in present], [g for _, g in present]
            )
        for view, gradient in zip(self.views, gradients, strict=True):
            if gradient is None:
                view.zero_()

    @property
    def loss(self) -> Tensor:
        """The element of the loss page that carries the loss, a view; last layer only."""
        assert self.layout.loss_block is not None
        return self.flat[self.layout.loss_block.start]

    def pages(self, first: int, stop: int) -> Tensor:
        start, end = self.layout.span(first, stop)
        return self.flat[start:end]


class GradientPool:
    """Gradient buffers of one layer, used again from step to step."""

    def __init__(self, layout: LayerLayout, place: torch.device) -> None:
        self._layout, self._place = layout, place
        self._free: list[GradientBuffer] = []
        self._lent: list[GradientBuffer] = []
        self.peak = 0

    def acquire(self) -> GradientBuffer:
        """A buffer whose parameters' gradients are those of an earlier node: to be overwritten."""
        buffer = self._free.pop() if self._free else GradientBuffer(self._layout, self._place)
        self._lent.append(buffer)
        self.peak = max(self.peak, len(self._lent))
        return buffer

    def release(self, buffer: GradientBuffer) -> None:
        self._lent.remove(buffer)
        self._free.append(buffer)

    def forget(self, buffer: GradientBuffer) -> None:
        """Gives the buffer up to whoever still refers to it (a message on its way)."""
        self._lent.remove(buffer)

    def release_all(self) -> None:
        """Once a step is decided nobody can ask for its contributions again."""
        self._free += self._lent
        self._lent = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers held at the same time, at most so far."""
        return self.peak * self._layout.num_gradient_elements * 4
