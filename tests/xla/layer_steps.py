"""A few training steps of gpt_tiny's layers in one process, on XLA and on the CPU; prints what differs, as JSON.

    python -m tests.xla.layer_steps [TP [FSDP [DROPOUT [DTYPE]]]]

In the environment of `make test-xla`. The variables of an island are set before torch_xla is imported.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from elaswave_spmd.determinism import Keys, materialize
from elaswave_spmd.determinism.dropout import keep_mask_numpy, keep_mask_torch
from elaswave_spmd.models import Batch, LayeredModel, build_model
from elaswave_spmd.runtime.devices import Island, device_of
from elaswave_spmd.sharding import specs_of
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.inputs import Example
from elaswave_spmd.worker.model_layout import describe
from elaswave_spmd.worker.optimizers import AdamW, Update
from elaswave_spmd.worker.programs.eager import StagePrograms
from elaswave_spmd.worker.spec import DTYPES

HOST = torch.device("cpu")
SEED, MICROBATCH, TOKENS, MICROBATCHES, STEPS = 3, 4, 128, 2, 3


def make_model(dropout: float) -> LayeredModel:
    """gpt_tiny."""
    sizes = {"vocab_size": 256, "seq_len": TOKENS, "layers": 4, "d_model": 128, "heads": 4, "dropout": dropout}
    with torch.device("meta"):
        return build_model("gpt", sizes, {})


class Training:
    """All layers of a model in one process: micro-batches one after another, and an update after the last one."""

    def __init__(self, model: LayeredModel, make: Callable[[LayeredModel], StagePrograms], dtype: torch.dtype) -> None:
        found = describe(model)
        layers = found.layout.layers
        self.masters = [torch.zeros(layer.num_value_elements) for layer in layers]
        for layer, master in zip(layers, self.masters, strict=True):
            for slot in layer.slots:
                name = slot.parameter.name
                drawn = materialize(found.inits[name], SEED, name, 0, slot.parameter.num_elements)
                master[slot.start : slot.stop] = torch.from_numpy(drawn)
        self.programs = make(model)
        self.values = {i: ValueBuffer(layer, model.layers[i], dtype, HOST) for i, layer in enumerate(layers)}
        self._install(0)
        self.programs.bind({i: v.module for i, v in self.values.items()}, self.values)
        self._gradients = [GradientBuffer(layer, HOST) for layer in layers]
        self._moments = {name: [torch.zeros_like(m) for m in self.masters] for name in AdamW().state_names}

    def _install(self, version: int) -> None:
        for value, master in zip(self.values.values(), self.masters, strict=True):
            value.install(0, value.layout.num_value_pages, master, version)

    def step(self, number: int) -> float:
        """Returns the step's loss."""
        random = np.random.default_rng(number)
        layers, summed = range(len(self.values)), [torch.zeros_like(g.flat) for g in self._gradients]
        for microbatch in range(MICROBATCHES):
            batch = Batch(*(torch.from_numpy(random.integers(0, 256, (MICROBATCH, TOKENS))) for _ in range(2)))
            keys = Keys.make(SEED, number, np.arange(MICROBATCH) + 100 * number + 10 * microbatch, 0)
            x: Any = batch.tokens
            for layer in layers:
                x = self.programs.forward(layer, microbatch, x, keys.at(layer), batch)
            dy: Any = None
            for layer in reversed(layers):
                dy = self.programs.backward(layer, microbatch, dy, self._gradients[layer], add=False, batch=batch)
                summed[layer] += self._gradients[layer].flat
        for layer in layers:
            flat = summed[layer][: self.masters[layer].numel()]
            states = {name: [moments[layer]] for name, moments in self._moments.items()}
            AdamW().update([self.masters[layer]], [flat], states, Update(number, 1e-3))
        self._install(number)
        loss = self._gradients[-1].layout.loss_block
        assert loss is not None
        return float(summed[-1][loss.start])


def masks_agree(place: torch.device) -> bool:
    """True if keyed dropout's masks on the island are those of the CPU, bit for bit."""
    keys = Keys.make(SEED, 2**33 + 7, np.array([0, 1, 2**40 + 3, 2**63 - 1]), 2)
    shape, p, word = (4, 33, 7), 0.1, 5
    there = keep_mask_torch(shape, p, keys, word, place).cpu().numpy()
    return np.array_equal(there, keep_mask_numpy(shape, p, keys, word))


def main(tp: int = 1, fsdp: int = 1, dropout: float = 0.0, dtype: str = "fp32") -> None:
    """Prints losses of both, the largest difference of parameters, programs compiled, and bytes on each device."""
    threads = int(os.environ.get("ISLAND_THREADS", "1"))
    island_size = Island(devices=tp * fsdp, threads=threads)
    os.environ.update(device_of("xla").environment(os.environ, island_size))
    from elaswave_spmd.runtime.devices.xla_island import XlaIsland
    from elaswave_spmd.worker.programs.xla import XlaPrograms

    torch.set_num_threads(threads)
    island = XlaIsland({"tp": tp, "fsdp": fsdp})
    scale = 1.0 / (MICROBATCHES * MICROBATCH * TOKENS)

    def on_xla(model: LayeredModel) -> StagePrograms:
        args = {"loss": model.loss, "loss_scale": scale, "checkpointing": False}
        programs = XlaPrograms(len(model.layers), **args, island=island, specs=specs_of(model))
        programs.compile(
            model.layers,
            describe(model).layout,
            Example.of_tokens((MICROBATCH, TOKENS)),
            DTYPES[dtype],
        )
        return programs

    def on_cpu(model: LayeredModel) -> StagePrograms:
        return StagePrograms(len(model.layers), loss=model.loss, loss_scale=scale, checkpointing=False)

    here, there = (Training(make_model(dropout), make, DTYPES[dtype]) for make in (on_cpu, on_xla))
    compiled, losses = [island.num_compiled], []
    for number in range(1, STEPS + 1):
        losses.append((here.step(number), there.step(number)))
        compiled.append(island.num_compiled)
    apart = max(float((a - b).abs().max()) for a, b in zip(here.masters, there.masters, strict=True))
    assert isinstance(there.programs, XlaPrograms)
    shards = {
        name: island.shard_bytes(value) for name, value in there.programs.placed(1).items() if name.endswith("weight")
    }
    masks = masks_agree(island.place)
    bits = sum(int(m.view(torch.int32).to(torch.int64).sum()) for m in there.masters)
    found = {"losses": losses, "apart": apart, "compiled": compiled, "shards": shards, "masks": masks, "bits": bits}
    print(json.dumps(found))


if __name__ == "__main__":
    kinds = (int, int, float, str)
    main(*(kind(value) for kind, value in zip(kinds, sys.argv[1:], strict=False)))  # pyright: ignore[reportArgumentType]
