"""Bytes of training state on one worker, by kind."""

from __future__ import annotations

import resource
from collections.abc import Mapping

from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.replica import StateReplica
from elaswave_spmd.worker.spec import Job


def state_bytes(replica: StateReplica, values: Mapping[int, ValueBuffer], job: Job) -> dict[str, int]:
    """Bytes between steps: params, grads (their peak within a step), optim, mirrors.

    State that a spec replicates is its own mirror, and counts as optim.
    """
    held = replica.state.num_bytes(replica.rank)
    if not replica.placement.shardings.optim.axes:
        held["master"] += held.pop("mirror_master")
        held["optimizer"] += held.pop("mirror_optimizer")
    in_place = not replica.state.separate_master
    sharded = replica.drops_params
    master_is_params = in_place or (sharded and job.dtype == "fp32")
    params = sum(v.flat.numel() * v.flat.element_size() for v in values.values())
    if sharded:
        params = held["master"] if master_is_params else 0
    return {
        "params": params,
        "grads": replica.reducer.num_bytes,
        "optim": held["optimizer"] + (0 if master_is_params else held["master"]),
        "mirrors": held.get("mirror_optimizer", 0) + (0 if in_place else held.get("mirror_master", 0)),
    }


def peak_bytes(device: Device) -> dict[str, int]:
    """The most memory that this process has had: `rss`, and where the device tells, `device` and its `device_total`."""
    found = {"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if (memory := device.memory()) is not None:
        found["device"] = memory.peak
        if memory.total is not None:
            found["device_total"] = memory.total
    return found
