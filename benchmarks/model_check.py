"""The time of the check of a model before the first step, by model: twice each kind of layer, one thread.

    python -m benchmarks.model_check [--models gpt_tiny,llama_tiny,mlp_tiny] [--rounds 5] [--json PATH]

The first round is the one that a worker has, with the modules that its fork server has imported; later ones find memory
there already. Reported are the first round, the median of the others, and a micro-batch of the same model: forward and
backward through all of its layers.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from elaswave_spmd.conf.compose import settings_from
from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.determinism import Keys
from elaswave_spmd.runtime.processes import fork_server_client
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.context import LocalModel
from elaswave_spmd.worker.inputs import to_batch
from elaswave_spmd.worker.learning_rate import LearningRate
from elaswave_spmd.worker.model_check import check_model, fill_initial
from elaswave_spmd.worker.model_layout import describe
from elaswave_spmd.worker.optimizers import make_optimizer
from elaswave_spmd.worker.plan_run import make_model
from elaswave_spmd.worker.programs.eager import StagePrograms, program_args
from elaswave_spmd.worker.spec import Job

VOCABULARY = 256
CPU = torch.device("cpu")


class Drawn:
    """Samples of random tokens, by their ids."""

    def __init__(self, seq_len: int) -> None:
        self._seq_len = seq_len

    def __len__(self) -> int:
        return 10_000

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = np.stack([np.random.default_rng(int(i)).integers(0, VOCABULARY, self._seq_len + 1) for i in ids])
        return rows[:, :-1], rows[:, 1:]


def job_of(settings: Settings) -> Job:
    t, o = settings.train, settings.optim
    adamw = make_optimizer(o.name, weight_decay=o.weight_decay, betas=o.betas, eps=o.eps, momentum=o.momentum)
    rate = LearningRate(o.lr)
    return Job(0, t.steps, t.global_batch, t.microbatch_size, t.seq_len, settings.runtime.dtype, adamw, rate)


def local(settings: Settings, job: Job) -> LocalModel:
    """The model as a worker has it."""
    model = make_model(settings, VOCABULARY)
    description = describe(model, page_size=settings.page.size)

    def make(layers: Iterable[int]) -> Mapping[int, nn.Module]:
        return {number: copy.deepcopy(model.layers[number]) for number in layers}

    programs = StagePrograms(**program_args(job, description.layout, model.loss))
    return LocalModel(description.layout, description.inits, make, model.layers.__getitem__, programs)


def step_seconds(model: LocalModel, job: Job, data: Drawn) -> float:
    """One micro-batch through all layers, forward and backward, after one that warms up."""
    layouts = model.layout.layers
    modules = model.make_modules(range(len(layouts)))
    values = {i: ValueBuffer(layouts[i], module, job.torch_dtype, CPU) for i, module in modules.items()}
    for value in values.values():
        value.flat.zero_()
        fill_initial(value, model, job.seed)
    model.programs.bind({i: value.module for i, value in values.items()}, values)
    buffers = [GradientBuffer(layout, CPU) for layout in layouts]
    ids = np.arange(job.microbatch_size)
    batch, keys, seconds = to_batch(data, ids, CPU, job.seed, 1), Keys.make(job.seed, 1, ids, 0), 0.0
    for _ in range(2):
        began, x, dy = time.perf_counter(), batch.tokens, None
        for layer in range(len(layouts)):
            x = model.programs.forward(layer, 0, x, keys.at(layer), batch)
        for layer in reversed(range(len(layouts))):
            dy = model.programs.backward(layer, 0, dy, buffers[layer], add=False, batch=batch)
        seconds = time.perf_counter() - began
    model.programs.bind({}, {})
    return seconds


def measure(name: str, rounds: int) -> dict[str, Any]:
    settings = settings_from([f"model={name}"])
    job, data = job_of(settings), Drawn(settings.train.seq_len)
    model = local(settings, job)
    checks = [check_model(model, job, data, CPU) for _ in range(rounds)]
    seconds = [check.seconds for check in checks]
    return {
        "model": name,
        "layers": len(model.layout.layers),
        "kinds": len(checks[0].layers),
        "first_ms": round(1e3 * seconds[0], 1),
        "later_ms": round(1e3 * statistics.median(seconds[1:] or seconds), 1),
        "microbatch_ms": round(1e3 * step_seconds(model, job, data), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt_tiny,llama_tiny,mlp_tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in fork_server_client.PRELOAD:
        importlib.import_module(name)
    rows = [measure(name, options.rounds) for name in options.models.split(",")]
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if options.json:
        found = {"torch": torch.__version__, "rounds": options.rounds, "rows": rows}
        options.json.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
