"""Limits of the messages of a run: how large the payload of each kind can be, by the layout of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.transport.frames import MessageLimits
from elaswave_spmd.runtime.transport.link_probe import MARK, PROBE_BYTES

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan

# No bound is known before a layer has run, which is up to the model: 64 GiB is more than one micro-batch is anywhere.
_BOUNDARY_BYTES = 1 << 36
_LIMITED = (
    *(m.Activation, m.ActivationGradient, m.PartialSum, m.ReducedGradient, m.Publish, m.PageState, m.FinalPages),
    m.Addend,
    m.PairSent,
)


def payload_limits(plan: RunPlan) -> dict[str, int]:
    """Kind of message -> the most bytes of its payload. Kinds that are not named have no payload.

    Whatever range of pages a payload is, it is of one layer.
    """
    layers, job = plan.description.layout.layers, plan.job
    page = plan.settings.page.size
    states = 1 + len(job.optimizer.state_names)
    most_state = page + max(layer.num_state_elements for layer in layers)  # the page of the loss is besides
    most_gradient = page + max(layer.num_gradient_elements for layer in layers)
    limits = {
        "Activation": _BOUNDARY_BYTES,
        "ActivationGradient": _BOUNDARY_BYTES,
        "PartialSum": 4 * most_gradient,
        "ReducedGradient": 4 * most_gradient,
        "Addend": 4 * most_gradient if job.verify_rate else 0,
        "Publish": job.torch_dtype.itemsize * most_state,
        "PageState": 4 * states * most_state,
        "FinalPages": 4 * most_state,
    }
    if plan.settings.runtime.pairs:
        limits["PairSent"] = max(limits[kind] for kind in ("Activation", "ActivationGradient", "PageState"))
    return limits


def message_limits(payloads: Mapping[str, int]) -> MessageLimits:
    """The limits of a process's links.

    Args:
        payloads: as `payload_limits` gives them.
    """
    known = [kind for kind in _LIMITED if kind.__name__ in payloads]
    kinds = tuple((start, payloads[kind.__name__]) for kind in known for start in _starts_of(kind))
    return MessageLimits(payload_bytes=0, kinds=((MARK, PROBE_BYTES), *kinds))


def _starts_of(kind: type[m.Message]) -> tuple[bytes, ...]:
    """The first bytes that encoded messages of a kind can have: MessagePack's array of so many items, then the name.

    Fields of options that are off are left out, so that messages of a kind may differ in their number of items.
    """
    name, most = kind.__name__.encode(), 1 + len(kind.__struct_fields__)
    return tuple(bytes((0x90 + most - few, 0xA0 + len(name))) + name for few in range(kind.NUM_OPTIONS + 1))
