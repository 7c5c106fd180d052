"""Bytes of training state on one worker, by kind, and the peak memory of its process, for the run's summary."""

from __future__ import annotations

import resource
from collections.abc import Mapping

from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.spec import Job
from elaswave_spmd.worker.state_replica import StateReplica


def state_bytes(replica: StateReplica, values: Mapping[int, ValueBuffer], job: Job) -> dict[str, int]:
    """The bytes of state that this worker holds between two steps.

    Args:
        replica: the worker's state.
        values: layer -> its compute buffer.

    Returns:
        `params` (values in the compute dtype), `grads` (their peak within a step), `optim` (master parameters and
        moments of the pages whose primary this worker is) and `mirrors` (the same of the pages that it mirrors).
        Where the optimizer state is replicated by its spec, every worker of the stage has a copy anyway: those copies
        serve as mirrors and count as `optim`.
    """
    held = replica.state.num_bytes(replica.rank)
    if not replica.placement.shardings.optim.axes:
        held["master"] += held.pop("mirror_master")
        held["optimizer"] += held.pop("mirror_optimizer")
    in_place = not replica.state.separate_master
    sharded = replica.drops_params
    # One tensor is then both the master copy and the parameters; it counts as `params` only.
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
    """The peak memory of this process in bytes.

    Returns:
        `rss`; where the device reports its memory also `device`, and `device_total` if it reports its size.
    """
    found = {"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if (memory := device.memory()) is not None:
        found["device"] = memory.peak
        if memory.total is not None:
            found["device_total"] = memory.total
    return found
