"""The identity of a run: all that its bits depend on. Saved in every checkpoint, compared before a run is resumed."""

from __future__ import annotations

import dataclasses
import os
import platform
from importlib import metadata
from typing import Any

import torch

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.data import PreparedData
from elaswave_spmd.mesh import ISLAND_AXES
from elaswave_spmd.runtime.devices import ThisMachine
from elaswave_spmd.runtime.devices.selection import cxx, kind_of
from elaswave_spmd.worker.programs.inductor import compiler_version

_COMPILED_BITS = 2
"""Raised when layers that are compiled get other bits than before. 1, or true: backwards were one program."""

_ISLAND_BITS = 2
"""The same for the programs of islands. Nothing: backwards were one program."""

_PACKAGES = ("elaswave-spmd", "torch", "numpy", "randomgen")


def identity_of(settings: Settings, data: PreparedData) -> dict[str, Any]:
    """The identity of a run but for its layout (`manifest.layout_fingerprint`): settings, data, versions, hardware.

    The mesh of workers, the sharding, mirrors and transports are no part of it; nor is activation checkpointing, which
    computes the same numbers twice; nor how often and on how much of the held-out split is validated, which only reads.
    """
    model, optim = dataclasses.asdict(settings.model), dataclasses.asdict(settings.optim)
    # What is frozen is in the layout, by names: it may be the model's own choice as well as that of `optim.freeze`.
    del model["name"], optim["max_skipped"], optim["freeze"]
    if settings.model.init_from is None:
        del model["init_from"]
    train, runtime = settings.train, settings.runtime
    versions = {name: metadata.version(name) for name in _PACKAGES}
    hardware = {
        "device": runtime.device,
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    kind = kind_of(settings)
    if processor := kind.model(ThisMachine()):
        hardware["model"] = processor
    if kind.capabilities.islands:
        # Devices inside a worker split its sums: unlike the mesh of workers, they are part of the bits.
        hardware |= {axis: settings.mesh.shape.axis_size(axis) for axis in ISLAND_AXES}
        hardware["client"] = os.environ.get("PJRT_DEVICE", "CPU")
        versions["torch_xla"] = metadata.version("torch_xla")
    numbers: dict[str, Any] = {"dtype": runtime.dtype, "threads_per_worker": runtime.threads_per_worker}
    if runtime.compile:
        numbers["compile"] = _COMPILED_BITS
        versions["cxx"] = compiler_version(cxx(ThisMachine()))
    if kind.capabilities.islands:
        numbers["island_programs"] = _ISLAND_BITS
    return {
        "seed": settings.seed,
        "train": {
            "steps": train.steps,
            "global_batch": train.global_batch,
            "microbatch_size": train.microbatch_size,
            "seq_len": train.seq_len,
        },
        "model": model,
        "optim": optim,
        "runtime": numbers,
        "data": {
            "sha256": data.sha256,
            "tokenizer": data.tokenizer,
            "vocab_size": data.vocab_size,
            "train_samples": data.num_train_samples,
            "target": data.target,
            "args": dict(data.kwargs),
        },
        "versions": versions,
        "hardware": hardware,
    }
