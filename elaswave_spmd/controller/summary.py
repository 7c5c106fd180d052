"""The summary of a finished run: summary.json."""

from __future__ import annotations

import platform
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.conf.schema import EMULATED, NEVER, Settings
from elaswave_spmd.controller.model_checks import split_of_emulated
from elaswave_spmd.controller.validations import Validations
from elaswave_spmd.data import PreparedData
from elaswave_spmd.recovery.checks import CheckDraw
from elaswave_spmd.recovery.messages import FinalPages, Finished
from elaswave_spmd.recovery.sum_checks import drawn_ranges
from elaswave_spmd.run_dir import MetricsLine
from elaswave_spmd.run_dir import weights_sha256 as sha256_of
from elaswave_spmd.run_dir.best import best_weights
from elaswave_spmd.run_dir.faults import FaultCount
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import all_replica_sets
from elaswave_spmd.worker.channel import tensor_of

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan

_PACKAGES = ("elaswave-spmd", "torch", "numpy", "randomgen", "einops")


class RunRecord:
    """The facts about a run that the controller keeps until its end: the last line, timings, final parameters.

    Args:
        averages: the run averages its parameters (optim.ema).
    """

    def __init__(self, layout: ModelLayout, *, averages: bool = False) -> None:
        self._layout = layout
        self.weights: dict[str, np.ndarray] = {}
        self.averages: dict[str, np.ndarray] | None = {} if averages else None
        self._pages: set[tuple[int, int, int]] = set()
        self._averaged: set[tuple[int, int, int]] = set()
        self.finished: dict[int, Finished] = {}
        """By rank: the last report of a worker, once it has sent its final pages."""
        self.generation = 1
        """Of the controller that ends the run: above 1 if it has come back (timeouts.adopt)."""
        self.last: MetricsLine | None = None
        self.num_steps = self.num_updates = 0
        """Steps that were committed, and those of them that changed the weights."""
        self.validation_loss: float | None = None
        self.validation_metrics: dict[str, float] = {}
        """Of the last validation, by name."""
        self.rejected: Counter[str] = Counter()
        """Reason -> number of connections and messages that the run's processes have refused."""
        self.compiled: dict[int, list[int]] = {}
        """By rank: programs compiled before the worker was ready, and afterwards."""
        self.model_check: dict[str, object] | None = None
        """The result of the first worker that has checked the model; None: none has."""
        self.trials: list[dict[str, object]] = []
        """What was found, each time that it was tried whether weight gradients are put off: "kept", and "times"."""
        self._tokens = 0
        self._seconds = 0.0

    def add_step(self, line: MetricsLine, *, after_validation: bool) -> None:
        """Counts a committed step for the speed, except the first (start-up) and those that waited for a validation."""
        # The first step waits for memory and caches, and the one after a validation contains the validation.
        if self.last is not None and not after_validation:
            self._tokens += line.tokens
            self._seconds += line.seconds
        self.last = line

    def add_pages(self, pages: FinalPages, payload: memoryview) -> None:
        """File a range of final master pages, or of their averages."""
        values, key = tensor_of(payload, torch.float32), (pages.layer, pages.first, pages.stop)
        if not pages.average:
            collect_pages(self._layout, pages, values, self.weights)
            self._pages.add(key)
        elif self.averages is not None:
            collect_pages(self._layout, pages, values, self.averages)
            self._averaged.add(key)

    @property
    def has_all_weights(self) -> bool:
        """True if every page of every parameter has come, and its average."""
        has_averages = self.averages is None or is_complete(self._layout, self._averaged)
        return has_averages and is_complete(self._layout, self._pages)

    @property
    def tokens_per_second(self) -> float | None:
        return self._tokens / self._seconds if self._seconds else None


def make_summary(
    plan: RunPlan, data: PreparedData, record: RunRecord, weights_sha256: str, faults: FaultCount
) -> dict[str, object]:
    """The fields of summary.json, as docs/run_files.md lists them."""
    assert record.last is not None
    finished = record.finished
    compiled = {str(rank): found for rank, found in sorted(record.compiled.items())}
    return {
        "steps": record.last.step,
        "final_loss": record.last.loss,
        "final_loss_hex": record.last.loss_hex,
        "validation_loss": record.validation_loss,
        **({"validation_metrics": dict(record.validation_metrics)} if record.validation_metrics else {}),
        "weights_sha256": weights_sha256,
        **({"weights_ema_sha256": sha256_of(record.averages)} if record.averages is not None else {}),
        "tokens_per_second": record.tokens_per_second,
        "params": plan.description.layout.num_parameters,
        "mesh": plan.placement.mesh.shape.name,
        "sharding": plan.placement.shardings.name,
        "lost_workers": dict(faults.lost_workers),
        "faults": faults.summary(),
        "state_bytes_per_worker": {str(rank): finished[rank].state_bytes for rank in sorted(finished)},
        "peak_bytes_per_worker": {str(rank): finished[rank].peak_bytes for rank in sorted(finished)},
        "programs_compiled_per_worker": compiled,
        "model_check": record.model_check or {"done": False, "why": _why_unchecked(plan.settings)},
        "split_backward": _split_backward(plan, record),
        **({"checks": _checks(plan, record, faults)} if plan.job.verify_rate else {}),
        **({"replicas": _replicas(plan, faults)} if plan.job.verify_every else {}),
        **({"rejected": dict(sorted(record.rejected.items()))} if record.rejected else {}),
        **({"controller_generation": record.generation} if record.generation > 1 else {}),
        "corpus": {
            "name": data.corpus,
            "sha256": data.sha256,
            "bytes": data.num_bytes,
            "tokenizer": data.tokenizer,
            **({"tokens_sha256": data.tokens_sha256} if data.tokens_sha256 else {}),
            "vocab_size": data.vocab_size,
            **({"attributes": dict(data.attributes)} if data.attributes else {}),
            "train_samples": data.num_train_samples,
            "validation_samples": data.num_validation_samples,
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
    }


def validation_fields(plan: RunPlan, validations: Validations, last: int, run_dir: Path) -> dict[str, object]:
    """The fields of summary.json that early stopping and keeping the best checkpoint add; none without them.

    Args:
        last: the last step of the run.
    """
    fields: dict[str, object] = {}
    if plan.job.early_stop is not None:
        fields["early_stop"] = {"stopped": last < plan.job.steps, **validations.early_stop()}
    if plan.job.saves_validated and (found := best_weights(run_dir, validations.ranked, last)) is not None:
        step, path = found
        loss = validations.loss_at(step)
        fields["best"] = {"step": step, "validation_loss": loss, "validation_loss_hex": loss.hex(), "path": path}
    return fields


def _why_unchecked(settings: Settings) -> str:
    if settings.checks_model:
        return "no worker has reported it"
    device = settings.runtime.device
    computes_nothing = f"runtime.device={device} computes nothing with the model"
    return computes_nothing if settings.runtime.check_model else "runtime.check_model=false"


def _split_backward(plan: RunPlan, record: RunRecord) -> dict[str, object]:
    """The kinds of layers whose backward may be in two parts; if there are none, why not. And whether it is."""
    found = _kinds_split(plan, record)
    if found["kinds"] and plan.settings.schedule.split_backward == NEVER:
        return {**found, "kept": "whole", "trials": 0}
    return {**found, **record.trials[-1], "trials": len(record.trials)} if record.trials else found


def _kinds_split(plan: RunPlan, record: RunRecord) -> dict[str, object]:
    if plan.settings.runtime.device == EMULATED:
        split = split_of_emulated(plan)
        names = [plan.description.layout.layers[layer].name for layer in split.layers] if split is not None else []
        return {"kinds": names} if names else {"kinds": [], "why": "emulated.weight_share=0"}
    check = record.model_check
    if check is None:
        return {"kinds": [], "why": f"no worker has tried it: {_why_unchecked(plan.settings)}"}
    rows = cast(list[dict[str, object]], check["layers"])
    if kinds := [row["layer"] for row in rows if row["put_off_bytes"]]:
        return {"kinds": kinds}
    return {"kinds": [], "why": "no layer puts a weight product off with the bits of its whole backward"}


def _checks(plan: RunPlan, record: RunRecord, faults: FaultCount) -> dict[str, object]:
    """The checks that were made by those who are left at the end, and their share in idle time; and what they miss."""
    made = [finished.checks for finished in record.finished.values() if finished.checks]
    number = sum(checks[0] for checks in made)
    layout = plan.description.layout
    ranges = drawn_ranges(CheckDraw(plan.job.seed, 1.0), 1, layout, plan.placement.replica_map(layout))
    alone = [stage for stage, members in enumerate(plan.placement.mesh.stages) if len(members) == 1]
    return {
        "rate": plan.job.verify_rate,
        "made": number,
        "idle_share": round(sum(checks[1] for checks in made) / number, 4) if number else None,
        "dropped": faults.checks_dropped,
        "transient_only_stages": alone,
        "sums": sum(checks[2] for checks in made),
        "transient_only_pages": sum(not pages.mirrors for pages, _ in ranges),
    }


def _replicas(plan: RunPlan, faults: FaultCount) -> dict[str, object]:
    """The comparisons of replicas. Of fewer than three that differ nobody can tell which is wrong."""
    ranges = all_replica_sets(plan.placement.replica_map(plan.description.layout))
    return {
        "every": plan.job.verify_every,
        "compared": faults.versions_compared,
        "wrong": faults.replicas_wrong,
        "fewest": min(len(pages.replicas) for pages in ranges),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def collect_pages(layout: ModelLayout, pages: FinalPages, payload: Tensor, weights: dict[str, np.ndarray]) -> None:
    """Copy a range of master pages into the parameters that they hold parts of, making those when first met.

    Args:
        payload: fp32 values of state pages [first, stop) of a layer.
        weights: parameter name -> fp32 array of the parameter's shape; extended in place.
    """
    layer = layout.layers[pages.layer]
    start, stop = layer.span(pages.first, pages.stop)
    values = payload.numpy()
    for block in layer.state_blocks:
        for slot in block.slots:
            first, last = max(slot.start, start), min(slot.stop, stop)
            if first < last:
                p = slot.parameter
                if p.name not in weights:
                    weights[p.name] = np.zeros(p.shape, np.float32)
                array = weights[p.name].reshape(-1)
                array[first - slot.start : last - slot.start] = values[first - start : last - start]


def is_complete(layout: ModelLayout, received: set[tuple[int, int, int]]) -> bool:
    """True if the page ranges received cover every state page.

    They may overlap: after a loss pages come again, cut in other ranges.
    """
    pages: list[set[int]] = [set() for _ in layout.layers]
    for layer, first, stop in received:
        pages[layer].update(range(first, stop))
    return all(len(pages[layer.index]) == layer.num_state_pages for layer in layout.layers)
