"""The result of XLA's partitioner for the layer programs of gpt_tiny on an island of two devices, for `benchmarks.xla`.

    python -m benchmarks.xla_partitions DIR

Prints as JSON: bytes of each layer's parameters on each device, and the collectives in the compiled HLO of each
program, which XLA writes to DIR; both beside those that the specs imply.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.processes import take_stdout
from benchmarks.xla_members import MICROBATCH, TOKENS, XLA, Ours, make_model, set_environment
from elaswave_spmd.sharding import P, specs_of
from elaswave_spmd.sharding.layout import LayerLayout
from elaswave_spmd.worker.inputs import Example
from elaswave_spmd.worker.model_layout import describe

TP = 2
_OPTIMIZED = "*cpu_after_optimizations.txt"
_COLLECTIVE = re.compile(r" = (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_SHAPE = re.compile(r"\w+\[[\d,]*\]")
_PROGRAMS = ("evaluation", "forward", "backward", "weights")
"""In the order in which the programs of a layer are compiled. The first layer's backward is one program."""


def collectives(hlo: str) -> list[tuple[str, str]]:
    """(operator, shapes of its result) of each collective in a compiled module."""
    return [(operator, " ".join(_SHAPE.findall(result))) for result, operator in _COLLECTIVE.findall(hlo)]


def implied(layout: LayerLayout, specs: dict[str, P], first: bool, last: bool) -> dict[str, dict[str, int]]:
    """The collectives that the specs of a layer's weights imply, per program, for whole inputs and outputs.

    A weight [out, in] split by rows makes a split output of a whole input, so the gradient by that input is a sum over
    devices; one split by columns makes a sum over devices of a split input. An embedding split by rows is a sum, too:
    each device looks up the rows that it has. The head's output must be whole, so it is gathered; the gradient by it is
    computed in parts, which takes one more sum: a number for each token, over the vocabulary. Gradients of weights are
    split like these, and take no collective.
    """
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    for slot in layout.slots:
        spec = specs.get(slot.parameter.name, P())
        if len(slot.parameter.shape) < 2 or "tp" not in spec.axes:
            continue
        if first or "tp" in spec.axes_of(1):
            forward["all-reduce"] += 1
        else:
            backward["all-reduce"] += 1
            forward["all-gather"] += last
            backward["all-reduce"] += last
    return {"evaluation": dict(+forward), "forward": dict(+forward), "backward": dict(+backward), "weights": {}}


def implied_bytes(layout: LayerLayout, specs: dict[str, P]) -> int:
    """The bytes of a layer's parameters on each device that the specs imply."""
    split = ["tp" in specs.get(slot.parameter.name, P()).axes for slot in layout.slots]
    return sum(4 * s.parameter.num_elements // (TP if cut else 1) for s, cut in zip(layout.slots, split, strict=True))


def main(directory: Path) -> dict[str, Any]:
    """Compiles the programs and reads their HLO. `directory` must be empty."""
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={directory} --xla_dump_hlo_as_text"
    set_environment(XLA, TP)
    from elaswave_spmd.runtime.devices.xla_island import Program, XlaIsland
    from elaswave_spmd.worker.programs.xla import XlaPrograms

    captured: list[Program] = []
    modules: dict[Any, str] = {}  # hash of a graph -> its compiled module
    seen: set[Path] = set()

    class Watched(XlaIsland):
        """An island that remembers which HLO module was written for which program."""

        def capture(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], specs: Sequence[P]) -> Program:
            program = super().capture(outputs, inputs, specs)
            fresh = sorted(set(directory.glob(_OPTIMIZED)) - seen)
            seen.update(fresh)
            if program.graph not in modules:
                assert len(fresh) == 1, (len(captured), fresh)
                modules[program.graph] = fresh[0].read_text()
            captured.append(program)
            return program

    model, island = make_model(), Watched({"tp": TP})
    layout, specs = describe(model).layout, specs_of(model)
    programs = XlaPrograms(
        len(model.layers), loss=model.loss, loss_scale=1.0, checkpointing=False, island=island, specs=specs
    )
    programs.compile(model.layers, layout, Example.of_tokens((MICROBATCH, TOKENS)), torch.float32)
    Ours(model, 1, programs)
    numbers = {graph: number for number, graph in enumerate(modules)}
    found: dict[str, Any] = {"bytes": [], "collectives": []}
    of_programs = iter(captured)
    for index, layer in enumerate(layout.layers):
        placed = [island.shard_bytes(value) for value in programs.placed(index).values()]
        found["bytes"].append({
            "layer": layer.name,
            "whole": sum(4 * slot.parameter.num_elements for slot in layer.slots),
            "implied": implied_bytes(layer, specs),
            "found": [sum(column) for column in zip(*placed, strict=True)],
        })  # fmt: skip
        wanted = implied(layer, specs, index == 0, index == len(layout.layers) - 1)
        for name in _PROGRAMS if index else _PROGRAMS[:3]:
            program = next(of_programs)
            row = {"layer": layer.name, "program": name, "number": numbers[program.graph], "implied": wanted[name]}
            found["collectives"].append(row | {"found": collectives(modules[program.graph])})
    assert next(of_programs, None) is None, len(captured)
    return found


if __name__ == "__main__":
    answers = take_stdout()
    print(json.dumps(main(Path(sys.argv[1]))), file=answers)
