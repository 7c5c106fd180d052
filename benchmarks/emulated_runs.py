"""Runs of `python train.py` on the emulated accelerator, for `rescheduling`, `simulated` and `frequency_emulated`.

Layers are all alike, eight for each stage (embedding and head included): a forward through a stage of the healthy mesh
sleeps 24 ms, a backward 48 ms. Everything else is real: processes, links, protocol, bytes, the update. The model is
small (width 8), so that the work of the programs besides sleeping (hashes, keyed numbers) and of the protocol fits on
two cores with 16 workers. Each run measures whether it did: `Run.busy` is the number of cores that its processes kept
busy on the healthy mesh.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.processes import new_directory, processes_with, program
from benchmarks.recovery_runs import json_lines
from elaswave_spmd.mesh import Mesh
from elaswave_spmd.scheduling.cost_model import WEIGHT_SHARE, CostModel, LayerCost, MemoryRule
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.split_backward import SplitBackward, executed
from elaswave_spmd.scheduling.step_time import Assignment
from elaswave_spmd.sharding import P, Shardings
from elaswave_spmd.simulator import Wires, Work, execute

LAYERS = 8  # of each stage of the healthy mesh
WIDTH, SEQ_LEN = 8, 4
FORWARD_S = 0.024  # of a stage of the healthy mesh; backward takes twice as long
WARM_STEPS = 3
BANDWIDTH, LATENCY_S = 1e9, 1e-4  # of links, where they are not measured
_PATIENCE_S = 300.0
FOLLOWING: Mapping[str, object] = {
    "schedule__every": 2,
    "schedule__window": 3,
    "schedule__patience": 1,
    "schedule__lasting": 0,
    "schedule__min_gain": 0.02,
}
"""Settings of a run that looks for gains more often than by default, and accepts them from 2 %."""


@dataclass(frozen=True)
class Run:
    """The files of a finished run, and its use of the processor.

    Args:
        metrics, events: lines of metrics.jsonl and events.jsonl.
        costs: of layers and workers as the run measured them; None if it did not.
        busy: cores that its processes kept busy between steps WARM_STEPS and the one that was asked for.
        weights: their sha256 at the end.
        trace: events of trace.json; empty without run.trace=true.
    """

    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]
    costs: CostModel | None
    busy: float
    weights: str
    trace: list[dict[str, Any]]

    @property
    def losses(self) -> dict[int, str]:
        """loss_hex by step."""
        return {line["step"]: line["loss_hex"] for line in self.metrics}

    def seconds(self, first: int, last: int) -> list[float]:
        """The durations of steps `first` to `last`, both included."""
        return [line["seconds"] for line in self.metrics if first <= line["step"] <= last]

    @property
    def last_change(self) -> int:
        """The step after which the mesh was changed last; 0 if it never was."""
        return max((event["after_step"] for event in self.events if "after_step" in event), default=0)

    def assignment(self, first: Placement) -> Assignment:
        """The assignment at the end of the run. `first`: the placement that the run began with."""
        placed = [event for event in self.events if "layer_cuts" in event]
        if not placed:
            return Assignment.of(first)
        last = placed[-1]
        stages, counts = (tuple(map(tuple, last[name])) for name in ("stages", "microbatch_counts"))
        return Assignment(stages, tuple(last["layer_cuts"]), counts, first.microbatch_order)


def costs_of(num_stages: int, times: float = 1.0) -> CostModel:
    """The configured costs of the layers: `times` as long as FORWARD_S, and about the bytes that they have.

    Backwards of all but the first are in two parts, as runs have it with the setting `emulated.weight_share`.
    """
    parameters = 2 * WIDTH * WIDTH + 4 * WIDTH
    seconds = times * FORWARD_S / LAYERS
    layer = LayerCost(
        "layer",
        seconds,
        2 * seconds,
        state_bytes=12 * parameters,
        value_bytes=4 * parameters,
        gradient_bytes=4 * parameters,
        activation_bytes=4 * SEQ_LEN * WIDTH,
        boundary_bytes=4 * SEQ_LEN * WIDTH,
        put_off_bytes=4 * parameters,
        weight_share=WEIGHT_SHARE,
    )
    first = replace(layer, put_off_bytes=0, weight_share=0.0)
    return CostModel((first, *(layer,) * (LAYERS * num_stages - 1)), BANDWIDTH, LATENCY_S)


def emulated(mesh: Mesh, microbatches: int, steps: int, times: float = 1.0, /, **settings: object) -> dict[str, object]:
    """The settings of a run by name. In `settings`, __ stands for the dot.

    Args:
        microbatches: of a step.
        times: as for costs_of.
    """
    layer = costs_of(len(mesh.stages), times).layers[0]
    found: dict[str, object] = {
        "mesh.stages": f"[{','.join(str(len(members)) for members in mesh.stages)}]",
        "sharding": "zero1",
        "model": "mlp_tiny",
        "model.layers": LAYERS * len(mesh.stages) - 2,
        "model.d_model": WIDTH,
        "+model.args.window": 1,
        "+model.args.mlp_ratio": 1,
        "train.seq_len": SEQ_LEN,
        "train.microbatch_size": 1,
        "train.global_batch": microbatches,
        "train.steps": steps,
        "train.validate_every": 0,
        "runtime.device": "emulated",
        "emulated.forward_ms": 1e3 * layer.forward_s,
        "emulated.backward_ms": 1e3 * layer.backward_s,
        "emulated.weight_share": WEIGHT_SHARE,
        "schedule.split_backward": "always",  # a trial of whole backwards would be measured as well
        "run.tensorboard": "false",
    }
    return found | {name.replace("__", "."): value for name, value in settings.items()}


def run(settings: Mapping[str, object], costs: CostModel, cache: Path, until: int) -> Run:
    """Runs `python train.py` once; its first placement is planned with `costs`.

    Args:
        cache: directory of prepared data, shared between runs.
        until: the last step in which the use of cores is measured.

    Raises:
        RuntimeError: the run failed; with the end of its output.
    """
    with new_directory("emulated-") as directory:
        profile, into = directory / "profile.json", directory / "run"
        profile.write_text(costs.to_json())
        words = {**settings, "schedule.profile": profile, "data.cache": cache, "run.dir": into}
        train = str(Path(__file__).parents[1] / "train.py")
        command = [sys.executable, train, *(f"{name}={value}" for name, value in words.items())]
        with program(command, directory) as running:
            used = []
            for step in (WARM_STEPS, until):
                running.wait(lambda step=step: _lines(into / "metrics.jsonl") >= step, _PATIENCE_S)
                used.append((os.times().elapsed, _cpu_seconds(running.mark)))
            running.finish(_PATIENCE_S)
        measured = into / "costs.json"
        return Run(
            json_lines(into / "metrics.jsonl"),
            json_lines(into / "events.jsonl"),
            CostModel.from_json(measured.read_text()) if measured.exists() else None,
            _busy(*used),
            json.loads((into / "summary.json").read_text())["weights_sha256"],
            json.loads(trace.read_text())["traceEvents"] if (trace := into / "trace.json").exists() else [],
        )


def blocks(seconds: Sequence[float], number: int) -> list[float]:
    """The means of `number` consecutive blocks of steps, all equally long."""
    size = len(seconds) // number
    return [statistics.fmean(seconds[i * size : (i + 1) * size]) for i in range(number)]


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


_Used = tuple[float, Mapping[int, float]]


def _busy(before: _Used, after: _Used) -> float:
    """The cores kept busy between two samples, by the processes that are in both."""
    (began, at_first), (ended, at_last) = before, after
    return sum(at_last[pid] - at_first[pid] for pid in at_first.keys() & at_last.keys()) / (ended - began)


def _cpu_seconds(mark: str) -> dict[int, float]:
    """Process id -> processor time, for all processes that carry the mark (Linux)."""
    found, tick = {}, os.sysconf("SC_CLK_TCK")
    for pid in processes_with(mark):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        found[pid] = (int(fields[11]) + int(fields[12])) / tick
    return found


def simulated_step(assignment: Assignment, costs: CostModel) -> float:
    """The simulated duration of a step in steady state, with sharding=zero1 and mirror.count=1, in seconds.

    Backwards are in two parts where the costs say so.
    """
    rule = MemoryRule(Shardings(optim=P("dp")))
    work = Work.from_assignment(executed(assignment, SplitBackward.of_costs(costs, rule)))
    return execute(work, costs, wires=Wires(), rule=rule, steps=3).step_s


def placed(stages: Sequence[Sequence[int]], layer_cuts: Sequence[int]) -> str:
    """The workers and layers of the stages, for a table."""
    sizes = "-".join(str(len(members)) for members in stages)
    return f"{sizes}; {'-'.join(str(b - a) for a, b in itertools.pairwise(layer_cuts))}"
