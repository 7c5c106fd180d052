"""The memory part of steady_state: both sides train a few steps, each alone on the machine."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gate import Member, anonymous
from benchmarks.harness import say
from benchmarks.steady_launch import OURS, PLAIN, Case, launch, settings_of

_STEPS = 4
_PERIOD_S = 0.001
_MIB = 2**20
COLUMNS = (
    "model",
    "row",
    "micro-batches a worker",
    "ours rss",
    "plain rss",
    "rss ratio",
    "ours anon",
    "plain anon",
    "anon ratio",
    "open nodes",
    "grads measured",
)


class AnonSampler:
    """A thread that samples the anonymous resident memory of workers, and keeps the peak of each one, in bytes."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._peak = {member.pid: member.anon_at_entry for member in members}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            for pid in self._peak:
                self._peak[pid] = max(self._peak[pid], anonymous(pid))

    def __enter__(self) -> AnonSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def growth(self) -> list[int]:
        """The growth of each worker beyond its imports, in bytes."""
        return [self._peak[member.pid] - member.anon_at_entry for member in self._members]


def measure(case: Case, microbatches_per_worker: int) -> dict[str, Any]:
    """The peak growth of both sides, worst worker, and the bytes of open tree nodes by formula and as measured."""
    found: dict[str, Any] = {}
    pipelined = case.mesh.get("pp", 1) > 1
    microbatches = microbatches_per_worker * (1 if pipelined else case.workers)
    for name in (OURS, PLAIN):
        with launch(case, microbatches, _STEPS, (name,)) as sides:
            side = sides[name]
            with AnonSampler(side.team.members) as sampler:
                side.team.block(_STEPS)
            found[name] = {
                "rss": max(member.growth for member in side.team.members),
                "anon": max(sampler.growth),
            }
            side.team.go(1)  # no step is left, so they end by themselves
            side.wait()
            if name == OURS:
                summary = json.loads((side.log.parent / "run" / "summary.json").read_text())
                state = summary["state_bytes_per_worker"]
                found["grads"] = max(worker["grads"] for worker in state.values())
                found["state_bytes_per_worker"] = state
    found["open_nodes"] = open_node_bytes(case, microbatches)
    return found


def open_node_bytes(case: Case, microbatches: int) -> int:
    """The bytes of tree nodes that the worst worker holds at once, derived from the placement.

    A worker's own sums: the gradient elements of its layers times the nodes open while it adds up its micro-batches in
    the order of its actions. Under time-major assignment (sharded gradients) its leaves are sent at once; what stays is
    its share of the pages, times the nodes open over all micro-batches of the step, and one layer's leaf on its way
    out.
    """
    from elaswave_spmd.conf.schema import Settings
    from elaswave_spmd.controller.launching import data_spec
    from elaswave_spmd.data import prepare_data
    from elaswave_spmd.determinism.reduction_tree import max_open_nodes
    from elaswave_spmd.scheduling.placement import TIME_MAJOR
    from elaswave_spmd.worker.plan_run import plan_run

    settings = Settings.from_dict(settings_of(case, microbatches, _STEPS, Path("unused")))
    plan = plan_run(settings, prepare_data(data_spec(settings)))
    placement, layers = plan.placement, plan.description.layout.layers
    worst = 0
    for rank in placement.mesh.members:
        stage = placement.mesh.stage_of(rank)
        sizes = [4 * layers[ly].num_gradient_elements for ly in placement.layers_of_stage(stage)]
        if placement.microbatch_order == TIME_MAJOR and len(placement.mesh.stages[stage]) > 1:
            share = math.ceil(sum(sizes) / len(placement.mesh.stages[stage]))
            worst = max(worst, share * max_open_nodes(range(microbatches), microbatches) + max(sizes))
        else:
            worst = max(worst, sum(sizes) * max_open_nodes(placement.microbatches_of(rank), microbatches))
    return worst


def memory_rows(
    chosen: Sequence[Case], microbatches_per_worker: Sequence[int]
) -> tuple[Sequence[str], list[list[str]], list[dict[str, Any]]]:
    """(columns, rows, plain data)."""
    rows, data = [], []
    for case in chosen:
        for microbatches in microbatches_per_worker:
            found = measure(case, microbatches)
            ours, plain = found[OURS], found[PLAIN]
            sizes = (ours["rss"], plain["rss"], ours["anon"], plain["anon"], found["open_nodes"], found["grads"])
            a, b, c, d, e, f = (f"{size / _MIB:.1f}" for size in sizes)
            ratios = f"{ours['rss'] / plain['rss']:.2f}", f"{ours['anon'] / plain['anon']:.2f}"
            rows.append([case.model, case.title, str(microbatches), a, b, ratios[0], c, d, ratios[1], e, f])
            data.append({"model": case.model, "row": case.title, "microbatches_per_worker": microbatches, **found})
            say(f"{case.model} {case.title}, {microbatches} micro-batches a worker: rss {ratios[0]}, anon {ratios[1]}")
    return COLUMNS, rows, data
