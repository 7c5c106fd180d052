"""Backwards of many kinds of layers on XLA, in two parts and at once; prints what was found of each, as JSON.

    python -m tests.xla.layer_pairs

In the environment of `make test-xla`. The variables of an island are set before torch_xla is imported.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elaswave_spmd.determinism import Keys
from elaswave_spmd.runtime.devices import Island, device_of
from elaswave_spmd.runtime.devices.xla_island import Program, XlaIsland
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.inputs import Example
from elaswave_spmd.worker.model_layout import describe
from elaswave_spmd.worker.programs.eager import StagePrograms
from tests.paired_layers import LAYERS, NOT_CUT, model_of

SIZES = (2, 6)
HOST = torch.device("cpu")
KEYS = Keys.make(7, 3, [4, 5], 1)
INNER = (1, 2)
"""The layers of a kind in a model: between an embedding and a head."""


class Stage:
    """Layers 1 and 2 of a model, with values and the buffers of their gradients."""

    def __init__(self, name: str, programs: StagePrograms, dtype: torch.dtype) -> None:
        model = model_of((LAYERS | NOT_CUT)[name])
        layout = describe(model, page_size=64).layout
        self.programs, self._dtype = programs, dtype
        self.values = {n: ValueBuffer(layout.layers[n], model.layers[n], dtype, HOST) for n in INNER}
        for number, values in self.values.items():
            draw = torch.Generator().manual_seed(number)
            values.flat.copy_(torch.randn(values.flat.shape, generator=draw) * 0.3)
            values.mark(0, values.layout.num_value_pages, 0)
        programs.bind({number: values.module for number, values in self.values.items()}, self.values)
        self._buffers = {number: GradientBuffer(layout.layers[number], HOST) for number in INNER}

    def _tensor(self, seed: int) -> Tensor:
        return torch.randn(*SIZES, 8, generator=torch.Generator().manual_seed(seed)).to(self._dtype)

    def forward(self, microbatch: int) -> Any:
        x: Any = self._tensor(microbatch)
        for number in INNER:
            x = self.programs.forward(number, microbatch, x, KEYS.at(number), None)
        return x

    def backward(self, microbatch: int, *, add: bool = False) -> Any:
        dy: Any = self._tensor(100 + microbatch)
        for number in reversed(INNER):
            dy = self.programs.backward(number, microbatch, dy, self._buffers[number], add=add, batch=None)
        return dy

    def input(self, microbatch: int) -> Any:
        dy: Any = self._tensor(100 + microbatch)
        for number in reversed(INNER):
            dy = self.programs.backward_input(number, microbatch, dy, batch=None)
        return dy

    def weights(self, microbatch: int) -> None:
        for number in reversed(INNER):
            self.programs.backward_weights(number, microbatch, self._buffers[number], add=False)

    def gradients(self) -> list[Tensor]:
        return [buffer.flat.clone() for buffer in self._buffers.values()]


def same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(one is not None and other is not None and torch.equal(one, other) for one, other in pairs)


class CountingIsland(XlaIsland):
    """Counts how often programs are run."""

    num_run = 0

    def run(self, program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
        self.num_run += 1
        return super().run(program, inputs)


def of_a_kind(stage: Stage, island: CountingIsland) -> dict[str, Any]:
    """What is kept and run in both parts, and whether they have the bits of both at once: W when all else is over."""
    programs = stage.programs
    at_once = [stage.forward(0), stage.backward(0), *stage.gradients()]
    found: list[Tensor | None] = [stage.forward(0)]
    stage.forward(1)
    runs = [island.num_run]
    found.append(stage.input(0))
    runs.append(island.num_run)
    kept = [programs.bytes_put_off(number, 0) for number in INNER]
    begun = sorted(programs.begun)
    stage.backward(1)
    for number, values in stage.values.items():  # ZeRO-3
        values.drop()
        programs.dropped(number)
    runs.append(island.num_run)
    stage.weights(0)
    runs.append(island.num_run)
    equal = same([*found, *stage.gradients()], at_once)
    in_parts = [runs[1] - runs[0], runs[3] - runs[2]]
    return {"equal": equal, "kept": kept, "begun": [begun, sorted(programs.begun)], "runs": in_parts}


def sums(stage: Stage) -> list[Tensor | None]:
    """Outputs and gradients of two micro-batches, whose weight gradients are added."""
    found: list[Tensor | None] = []
    for microbatch in (0, 1):
        found += [stage.forward(microbatch), stage.backward(microbatch, add=microbatch == 1)]
    return [*found, *stage.gradients()]


def apart(ours: Tensor | None, theirs: Tensor | None) -> float:
    """The largest difference of two tensors; 0 if they are empty."""
    assert ours is not None and theirs is not None
    return float((ours - theirs).abs().amax()) if ours.numel() else 0.0


def main() -> None:
    os.environ.update(device_of("xla").environment(os.environ, Island(devices=1, threads=1)))
    from elaswave_spmd.worker.programs.xla import XlaPrograms

    torch.set_num_threads(1)
    island, rows = CountingIsland({}), dict[str, dict[str, Any]]()
    forms = ((False, torch.float32), (True, torch.bfloat16))
    for name, (checkpointing, dtype) in itertools.product([*LAYERS, *NOT_CUT], forms):
        model = model_of((LAYERS | NOT_CUT)[name])
        args = {"loss": model.loss, "loss_scale": 0.1, "checkpointing": checkpointing}
        programs = XlaPrograms(4, **args, island=island, specs={})
        programs.compile(model.layers, describe(model, page_size=64).layout, Example.of_tokens(SIZES), dtype)
        compiled = island.num_compiled
        row = of_a_kind(Stage(name, programs, dtype), island)
        if dtype == torch.float32:
            eager = sums(Stage(name, StagePrograms(4, **args), dtype))
            pairs = zip(sums(Stage(name, programs, dtype)), eager, strict=True)
            row["apart"] = max(apart(one, other) for one, other in pairs)
        rows[f"{name}, checkpointing={checkpointing}"] = row | {"late": island.num_compiled - compiled}
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
