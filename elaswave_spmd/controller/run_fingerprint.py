"""The identity of a run: all that its bits depend on. Saved in every checkpoint, compared before a run is resumed."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.data import PreparedData
from elaswave_spmd.mesh import ISLAND_AXES
from elaswave_spmd.run_dir.json_lines import plain
from elaswave_spmd.runtime.devices import ThisMachine
from elaswave_spmd.runtime.devices.selection import cxx, kind_of
from elaswave_spmd.version import __version__
from elaswave_spmd.worker.programs.inductor import compiler_version

_COMPILED_BITS = 2
"""Raised when layers that are compiled get other bits than before. 1, or true: backwards were one program."""

_ISLAND_BITS = 2
"""The same for the programs of islands. Nothing: backwards were one program."""

_PACKAGES = ("torch", "numpy", "randomgen")


def identity_of(settings: Settings, data: PreparedData) -> dict[str, Any]:
    """The identity of a run but for its layout (`manifest.layout_fingerprint`): settings, data, versions, hardware.

    The mesh of workers, the sharding, mirrors and transports are no part of it; nor is activation checkpointing, which
    computes the same numbers twice; nor how often and on how much of the held-out split is validated, which only reads,
    unless the run may end early by it.
    """
    model, optim = dataclasses.asdict(settings.model), dataclasses.asdict(settings.optim)
    # What is frozen is in the layout, by names: it may be the model's own choice as well as that of `optim.freeze`.
    # So is what groups of parameters have of their own, as several lists of groups may say the same.
    del model["name"], model["named"], optim["max_skipped"], optim["freeze"], optim["groups"]
    # What is not given is left out, as it was before there were these settings.
    for group, name in ((model, "init_from"), (optim, "decay_steps"), (optim, "schedule_steps"), (optim, "ema")):
        if group[name] is None:
            del group[name]
    model["args"] = plain(model["args"])  # inf and nan as their names: JSON has no numbers for them
    train, runtime = settings.train, settings.runtime
    versions = {"elaswave-spmd": __version__} | {name: metadata.version(name) for name in _PACKAGES}
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
    stop: dict[str, Any] = {}
    if train.stop_patience:  # then the last step depends on what is validated, and when
        names = ("stop_patience", "stop_min_delta", "validate_every", "validate_microbatches")
        stop = {name: getattr(train, name) for name in names}
    return {
        "seed": settings.seed,
        "train": {
            "steps": train.steps,
            "global_batch": train.global_batch,
            "microbatch_size": train.microbatch_size,
            "seq_len": train.seq_len,
            **stop,
        },
        "model": model,
        "optim": optim,
        "runtime": numbers,
        "data": {
            "sha256": data.sha256,
            **({"tokens_sha256": data.tokens_sha256} if data.tokens_sha256 else {}),
            "tokenizer": data.tokenizer,
            "vocab_size": data.vocab_size,
            "train_samples": data.num_train_samples,
            "target": data.target,
            "args": plain(data.kwargs),
            **({"attributes": dict(data.attributes)} if data.attributes else {}),
        },
        "versions": versions,
        "hardware": hardware,
    }


def without_average(saved: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """A saved identity without `optim.ema`, if the run that goes on has none: the average is read by nothing else.

    It cannot be begun later: the steps that are done would be missing in it.
    """
    if "ema" in present["optim"] or "ema" not in saved.get("optim", {}):
        return dict(saved)
    return {**saved, "optim": {name: value for name, value in saved["optim"].items() if name != "ema"}}


def as_far_as_saved(present: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """An identity without the hash of its tokens, if the saved one is of a version that did not know it."""
    if "tokens_sha256" in saved.get("data", {}):
        return dict(present)
    return {**present, "data": {name: value for name, value in present["data"].items() if name != "tokens_sha256"}}
