"""A made-up accelerator: the CPU under another name, by torch's PrivateUse1 key, in pure Python.

It shows that code is free of assumptions about the CPU: its tensors are no CPU tensors, mixing the two is an error, and
numpy cannot read them. It shows nothing about any real accelerator. One per process, and never to be given back: so it
lives in a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from elaswave_spmd.runtime.devices import Capabilities, Device, Island, Machine, Missing
from elaswave_spmd.runtime.devices.kind import WithoutGroups

NAME = "madeup"

_CREATED = (
    *("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step"),
    *("full", "ones", "zeros", "scalar_tensor"),
)
_FUSED = ("silu_backward",)  # else made of other operators, with other bits, where a device has no kernel for it
_CROSSING = ("aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize")


class MadeUpTensor(torch.Tensor):
    """A tensor of the made-up device: says that it lies there, and computes with `behind`, a CPU tensor."""

    behind: Tensor

    @staticmethod
    def __new__(cls, behind: Tensor) -> MadeUpTensor:
        tensor = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            behind.size(),
            strides=behind.stride(),
            storage_offset=behind.storage_offset(),
            dtype=behind.dtype,
            device=torch.device(NAME, 0),
        )
        tensor.behind = behind
        return tensor

    def data_ptr(self) -> int:
        return self.behind.data_ptr()

    def untyped_storage(self) -> Any:
        return self.behind.untyped_storage()

    def tolist(self) -> Any:
        return self.behind.tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"MadeUpTensor({self.behind!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return _run(func, args, dict(kwargs or {}))


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator on what is behind its tensors; the results lie on the device, but for copies to the CPU."""
    leaves = pytree.tree_leaves((args, kwargs))
    crossing = func.name().split(".")[0] in _CROSSING
    strangers = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, MadeUpTensor) and t.ndim]
    if strangers and not crossing:
        raise RuntimeError(f"{func.name()}: expected all tensors on {NAME}, got one on {strangers[0].device}")
    wrapped = {id(t.behind): t for t in leaves if isinstance(t, MadeUpTensor)}
    target = kwargs.get("device")
    leaves_device = crossing and target is not None and torch.device(target).type != NAME

    def lower(x: Any) -> Any:
        if isinstance(x, MadeUpTensor):
            return x.behind
        return torch.device("cpu") if isinstance(x, torch.device) else x

    def lift(x: Any) -> Any:
        if not isinstance(x, Tensor) or leaves_device:
            return x
        if id(x) in wrapped:
            return wrapped[id(x)]  # it was changed in place
        stranger = next((t for t in strangers if t is x), None)
        return MadeUpTensor(x) if stranger is None else stranger

    return pytree.tree_map(lift, func(*pytree.tree_map(lower, args), **pytree.tree_map(lower, kwargs)))


def register() -> list[torch.library.Library]:
    """Makes torch know the device. Once per process; what is returned has to live as long as it is used."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_module())
    library = torch.library.Library("aten", "IMPL")
    library.impl("_copy_from", _copy_from, "PrivateUse1")  # torch.tensor(data, device=...) calls it past any dispatch
    for name in _FUSED:
        func = getattr(torch.ops.aten, name).default
        library.impl(name, lambda *args, func=func, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    for name in _CREATED:
        base, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, base), overload or "default")
        library.impl(name, _creator(func), "PrivateUse1")
    return [library]


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    behind = [t.behind if isinstance(t, MadeUpTensor) else t for t in (source, target)]
    behind[1].copy_(behind[0])
    return target


def _creator(func: Any) -> Any:
    def create(*args: Any, **kwargs: Any) -> MadeUpTensor:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        return MadeUpTensor(func(*args, **kwargs, device=torch.device("cpu")))

    return create


def _module() -> Any:
    """What torch asks of a device's module, for one device without streams."""
    return SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.empty(0, dtype=torch.uint8),
        set_rng_state=lambda state, device=None: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
    )


class MadeUp(WithoutGroups):
    """The kind of the made-up device; not one that `runtime.device` names."""

    name = NAME
    capabilities = Capabilities(
        streams=False,
        pinned_copies=False,
        dtypes=("fp32", "bf16"),
        collectives=None,
        state="device",
        compiles=False,
        islands=False,
        forks=True,
    )

    def missing(self, machine: Machine) -> tuple[Missing, ...]:
        return ()

    def model(self, machine: Machine) -> str:
        return ""

    def environment(self, given: Mapping[str, str], island: Island) -> dict[str, str]:
        return {}

    def open(self, index: int, island: Island) -> Device:
        from elaswave_spmd.runtime.devices.accelerator import AcceleratorDevice

        torch.set_num_threads(island.threads)
        return AcceleratorDevice(self, torch.device(NAME, 0), getattr(torch, NAME))
