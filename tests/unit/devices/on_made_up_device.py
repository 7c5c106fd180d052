"""Code that runs where the made-up device is registered: in a process of its own (test_devices_agnostic)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.determinism import Keys, materialize
from elaswave_spmd.models import Batch, LayeredModel, build_model
from elaswave_spmd.runtime.devices import Island
from elaswave_spmd.worker.activations import Activation
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.model_layout import describe
from elaswave_spmd.worker.programs.eager import StagePrograms
from tests.cluster.made_up_device import MadeUp, register

__all__ = ["copies", "differences", "mixed"]

DEVICE = MadeUp().open(0, Island()) if (LIBRARY := register()) else None
SIZES = {"vocab_size": 64, "seq_len": 16, "layers": 2, "d_model": 32, "heads": 4, "dropout": 0.1}
SAMPLES = 2


def programs(model: LayeredModel, place: torch.device) -> tuple[StagePrograms, list[GradientBuffer]]:
    """All layers at `place`, with initial values and gradient buffers."""
    found = describe(model, page_size=256)
    modules = dict(enumerate(model.layers))
    values = {i: ValueBuffer(found.layout.layers[i], modules[i], torch.float32, place) for i in modules}
    gradients = [GradientBuffer(found.layout.layers[i], place) for i in modules]
    for layer in values.values():
        for slot, parameter in zip(layer.layout.slots, layer.parameters, strict=True):
            name = slot.parameter.name
            initial = materialize(found.inits[name], 5, name, 0, slot.parameter.num_elements)
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(initial).view(slot.parameter.shape))
    stage = StagePrograms(len(modules), loss=model.loss, loss_scale=0.01, checkpointing=False)
    stage.bind(modules, values)
    return stage, gradients


def step(name: str, place: torch.device) -> list[Tensor]:
    """One micro-batch forward and backward: outputs, gradients, and the gradient by each layer's input, on the host."""
    with torch.device("meta"):
        model = build_model(name, SIZES, {})
    stage, gradients = programs(model, place)
    random = np.random.default_rng(1)
    rows = [torch.from_numpy(random.integers(0, 64, (SAMPLES, 16))).to(place) for _ in range(2)]
    batch, found = Batch(*rows), []
    keys = Keys.make(3, 7, np.arange(SAMPLES), 0, device=place)
    x: Activation = batch.tokens
    for layer in range(len(gradients)):
        x = stage.forward(layer, 0, x, keys.at(layer), batch)
        found.append(x)
    dy: Activation | None = None
    for layer in reversed(range(len(gradients))):
        dy = stage.backward(layer, 0, dy, gradients[layer], add=False, batch=batch)
        found += [gradients[layer].flat, *([] if dy is None else [dy])]
    assert all(t.device.type == place.type for t in found)
    return [t.detach().to("cpu") for t in found]


def differences(name: str, tolerance: float) -> list[str]:
    """The results of a micro-batch's step that differ between made-up device and CPU; tolerance 0: in any bit."""
    assert DEVICE is not None
    pairs = zip(step(name, DEVICE.place), step(name, torch.device("cpu")), strict=True)
    apart = [(i, float((a - b).abs().max())) for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    return [f"{i}: {far}" for i, far in apart if far >= tolerance]


def mixed() -> str:
    """The error when tensors of the device and of the CPU meet."""
    assert DEVICE is not None
    try:
        torch.add(torch.ones(2, device=DEVICE.place), torch.ones(2))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def copies() -> str:
    """Copies to and from the host."""
    assert DEVICE is not None
    there = DEVICE.from_host(torch.arange(6.0).view(2, 3))
    copy = DEVICE.copy_to_host(there)
    there.zero_()
    DEVICE.synchronize()
    assert there.device == DEVICE.place and copy.done()
    assert torch.equal(copy.wait(), torch.arange(6.0).view(2, 3)) and not DEVICE.to_host(there).any()
    return "ok"
