"""Real arithmetic on two workers, and the same step in virtual time; a part of benchmarks/simulated.py."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.emulated_runs import BANDWIDTH, LATENCY_S, blocks, placed, run, simulated_step
from benchmarks.harness import say
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.cost_model import CostModel, LayerCost
from elaswave_spmd.scheduling.step_time import Assignment
from elaswave_spmd.simulator import healthy

LAYERS, MICROBATCHES, MICROBATCH_SIZE = 6, 8, 2
_WARM_STEPS, _BLOCKS = 4, 5
_SETTINGS: dict[str, object] = {
    "sharding": "zero1",
    "model.layers": LAYERS,
    "model.d_model": 256,
    "model.heads": 8,
    "train.microbatch_size": MICROBATCH_SIZE,
    "train.global_batch": MICROBATCHES * MICROBATCH_SIZE,
    "train.validate_every": 0,
    "schedule.every": 2,
    "schedule.lasting": 0,
    "schedule.window": 3,
    "schedule.min_gain": 0.9,
    "schedule.split_backward": "always",
    "run.tensorboard": "false",
}
REAL_COLUMNS = (
    "mesh",
    "micro-batches",
    "workers; layers of stages",
    "real step, ms",
    "min - max",
    "simulated, ms",
    "off by",
)


def real_rows(cache: Path, block: int) -> list[list[str]]:
    """The lines of the table. block: steps of each of the blocks that the median is over."""
    rough = (
        LayerCost("embedding", 1e-4, 1e-4),
        *[LayerCost("block", 1e-3, 2e-3)] * LAYERS,
        LayerCost("head", 1e-3, 1e-3),
    )
    found = []
    for name in ("pp2", "dp2"):
        mesh = Mesh.initial(MeshShape.parse(name))
        profile = CostModel(rough, BANDWIDTH, LATENCY_S)
        steps = _WARM_STEPS + _BLOCKS * block
        done = run({**_SETTINGS, "mesh": name, "train.steps": steps + 1}, profile, cache, _WARM_STEPS + 2)
        assert done.costs is not None and not done.last_change, (name, done.events)
        assignment = Assignment.of(healthy(mesh, profile, MICROBATCHES))
        means = blocks(done.seconds(_WARM_STEPS + 1, steps), _BLOCKS)
        took = statistics.median(means)
        simulated = simulated_step(assignment, done.costs)
        found.append(
            [
                name,
                str(MICROBATCHES),
                placed(assignment.stages, assignment.layer_cuts),
                f"{1e3 * took:.0f}",
                f"{1e3 * min(means):.0f} - {1e3 * max(means):.0f}",
                f"{1e3 * simulated:.0f}",
                f"{100 * (simulated / took - 1):+.1f} %",
            ]
        )
        say(", ".join(found[-1]))
    return found
