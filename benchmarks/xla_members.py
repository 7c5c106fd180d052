"""The sides of `benchmarks.xla`: each is a process of its own that runs blocks of steps on order.

    python -m benchmarks.xla_members JSON

It reads one line of JSON for each block from stdin and answers with one on stdout. A step is forward and backward of
all micro-batches through all layers of gpt_tiny, without an update.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.processes import take_stdout
from elaswave_spmd.determinism import Keys, materialize
from elaswave_spmd.models import Batch, LayeredModel, build_model
from elaswave_spmd.runtime.devices import Island, device_of
from elaswave_spmd.sharding import P, specs_of
from elaswave_spmd.worker.activations import Activation
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.inputs import Example
from elaswave_spmd.worker.model_layout import describe
from elaswave_spmd.worker.programs.eager import ProgramArgs, StagePrograms
from elaswave_spmd.worker.programs.inductor import CompiledPrograms

EAGER, INDUCTOR, XLA, HAND, FUSED = "eager", "inductor", "xla", "hand", "fused"
STAY, FETCH, SEND = "stay", "fetch", "send"
"""What a step does besides: nothing; it brings the gradients to the host; it sends the parameters anew."""
MICROBATCH, TOKENS, SEED, THREADS = 4, 128, 3, 1
_HOST, _WHOLE = torch.device("cpu"), P()


@dataclass(frozen=True)
class Spec:
    """The specification of a side.

    Args:
        kind: EAGER, INDUCTOR, XLA (the project's programs), HAND or FUSED (a loop in plain torch_xla).
        tp: local devices.
        microbatches: of a step.
    """

    kind: str
    tp: int
    microbatches: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def loss_scale(self) -> float:
        return 1.0 / (self.microbatches * MICROBATCH * TOKENS)


class Side(Protocol):
    """A model in training."""

    def step(self, number: int, mode: str) -> float:
        """Runs all micro-batches forward and backward. Returns the step's loss when everything is done."""
        ...

    @property
    def num_compiled(self) -> int: ...

    def gradient_norm(self) -> float:
        """The gradient norm of the last step, if its gradients were copied to the host."""
        ...


def make_model(device: str = "meta") -> LayeredModel:
    """gpt_tiny, without dropout as in its configuration."""
    sizes = {"vocab_size": 256, "seq_len": TOKENS, "layers": 4, "d_model": 128, "heads": 4, "dropout": 0.0}
    with torch.device(device):
        return build_model("gpt", sizes, {})


def batch_of(number: int, microbatch: int) -> Batch:
    random = np.random.default_rng([SEED, number, microbatch])
    return Batch(*(torch.from_numpy(random.integers(0, 256, (MICROBATCH, TOKENS))) for _ in range(2)))


def initial(model: LayeredModel) -> dict[str, Tensor]:
    """The initial values of all parameters by name."""
    found = describe(model)
    infos = [slot.parameter for layer in found.layout.layers for slot in layer.slots]
    drawn = {p.name: materialize(found.inits[p.name], SEED, p.name, 0, p.num_elements) for p in infos}
    return {p.name: torch.from_numpy(drawn[p.name]).reshape(p.shape) for p in infos}


class Ours:
    """This project's layer programs, of any kind, run as by a worker that has all layers."""

    def __init__(self, model: LayeredModel, microbatches: int, programs: StagePrograms) -> None:
        layers = describe(model).layout.layers
        self._microbatches, self.programs = microbatches, programs
        self.values = {i: ValueBuffer(layer, model.layers[i], torch.float32, _HOST) for i, layer in enumerate(layers)}
        self._gradients = [GradientBuffer(layer, _HOST) for layer in layers]
        values = initial(model)
        for buffer in self.values.values():
            with torch.no_grad():
                for slot, parameter in zip(buffer.layout.slots, buffer.parameters, strict=True):
                    parameter.copy_(values[slot.parameter.name])
            buffer.mark(0, buffer.layout.num_value_pages, 0)
        self.programs.bind({i: v.module for i, v in self.values.items()}, self.values)
        self._version = 0

    @property
    def num_compiled(self) -> int:
        return self.programs.num_compiled

    def step(self, number: int, mode: str) -> float:
        if mode == SEND:  # as after an update of the parameters
            self._version += 1
            for buffer in self.values.values():
                buffer.mark(0, buffer.layout.num_value_pages, self._version)
        run, layers = self.programs, range(len(self.values))
        for microbatch in range(self._microbatches):
            batch = batch_of(number, microbatch)
            keys = Keys.make(SEED, number, np.arange(MICROBATCH) + microbatch * MICROBATCH, 0)
            x: Activation = batch.tokens
            for layer in layers:
                x = run.forward(layer, microbatch, x, keys.at(layer), batch)
            dy: Activation | None = None
            for layer in reversed(layers):
                dy = run.backward(layer, microbatch, dy, self._gradients[layer], add=microbatch > 0, batch=batch)
        return float(self._gradients[-1].loss)

    def gradient_norm(self) -> float:
        views = [view for buffer in self._gradients for view in buffer.views]
        return float(torch.stack([view.double().square().sum() for view in views]).sum().sqrt())


class HandWritten:
    """The same model in a loop of plain torch_xla: autograd, and `torch_xla.sync` wherever our programs end.

    Parameters, what leaves a layer and gradients are marked as our programs' are; its parameters stay on the devices.

    Args:
        fused: no cuts: one graph for the whole step.
    """

    def __init__(self, spec: Spec, fused: bool) -> None:
        import torch_xla  # pyright: ignore[reportMissingImports]

        from elaswave_spmd.runtime.devices.xla_island import XlaIsland

        self._sync: Callable[..., None] = torch_xla.sync
        self._spec, self._fused = spec, fused
        self._island = XlaIsland({"tp": spec.tp})  # used to send, mark and fetch only
        self._model = make_model()
        self._specs = specs_of(self._model)
        self._parameters: dict[str, Tensor] = {}
        for name, value in initial(self._model).items():
            (there,) = self._island.put([value], [self._specs.get(name, _WHOLE)])
            self._parameters[name] = there.requires_grad_()
            path, _, leaf = name.rpartition(".")
            self._model.get_submodule(path)._parameters[leaf] = there  # pyright: ignore[reportArgumentType]
        self._keys = Keys.make(0, 0, [0] * MICROBATCH, 0)  # without dropout nothing reads the keys
        self._fetched: list[Tensor] = []

    @property
    def num_compiled(self) -> int:
        return self._island.num_compiled

    def step(self, number: int, mode: str) -> float:
        for parameter in self._parameters.values():
            parameter.grad = None
        run = self._run_whole if self._fused else self._run_cut
        losses = [run(batch_of(number, microbatch)) for microbatch in range(self._spec.microbatches)]
        if self._fused:
            self._mark_gradients(self._parameters)
            self._sync()
        gradients = [parameter.grad for parameter in self._parameters.values()]
        found = self._island.fetch([*losses, *([g for g in gradients if g is not None] if mode == FETCH else [])])
        self._fetched = found[len(losses) :]
        self._island.wait()
        return float(sum(found[: len(losses)]))

    def _run_whole(self, batch: Batch) -> Tensor:
        x, there = self._given(batch)
        for module in self._model.layers[:-1]:
            x = self._island.mark(module(x, self._keys), _WHOLE)
        loss = self._loss(self._model.layers[-1], x, there)
        loss.backward()
        return loss.detach()

    def _run_cut(self, batch: Batch) -> Tensor:
        x, there = self._given(batch)
        ends: list[tuple[nn.Module, Tensor, Tensor]] = []
        for module in self._model.layers:
            x = x.detach()
            if x.is_floating_point():
                x.requires_grad_()
            last = module is self._model.layers[-1]
            y = self._loss(module, x, there) if last else self._island.mark(module(x, self._keys), _WHOLE)
            self._sync()
            ends.append((module, x, y))
            x = y
        loss, dy = x.detach(), None
        for name, (module, x, y) in reversed(list(zip(self._model.layer_names, ends, strict=True))):
            torch.autograd.backward(y, dy)
            self._mark_gradients(f"{name}.{path}" for path, _ in module.named_parameters())
            dy = x.grad
            if dy is not None:
                self._island.mark(dy, _WHOLE)
            self._sync()
        return loss

    def _given(self, batch: Batch) -> tuple[Tensor, Batch]:
        tokens, targets = self._island.put([batch.tokens, batch.targets], [_WHOLE, _WHOLE])
        return tokens, Batch(tokens, targets)

    def _loss(self, head: nn.Module, x: Tensor, batch: Batch) -> Tensor:
        logits = self._island.mark(head(x, self._keys), _WHOLE)
        return self._model.loss(logits, batch).float() * self._spec.loss_scale

    def _mark_gradients(self, names: Any) -> None:
        for name in names:
            gradient = self._parameters[name].grad
            if gradient is not None:
                self._island.mark(gradient, self._specs.get(name, _WHOLE))

    def gradient_norm(self) -> float:
        return float(torch.stack([g.double().square().sum() for g in self._fetched]).sum().sqrt())


def make_side(spec: Spec) -> Side:
    """Makes a side, and compiles everything that can be compiled before the first step."""
    if spec.kind in (HAND, FUSED):
        return HandWritten(spec, fused=spec.kind == FUSED)
    model = make_model()
    args: ProgramArgs = {
        "num_layers": len(model.layers),
        "loss": model.loss,
        "loss_scale": spec.loss_scale,
        "checkpointing": False,
        "first_trained": 0,
    }
    if spec.kind == EAGER:
        return Ours(model, spec.microbatches, StagePrograms(**args))
    layout = describe(model).layout
    if spec.kind == INDUCTOR:
        compiled = CompiledPrograms(**args, threads=THREADS, place=_HOST)
        compiled.compile(make_model().layers, layout, Example.of_tokens((MICROBATCH, TOKENS)), torch.float32)
        return Ours(model, spec.microbatches, compiled)
    from elaswave_spmd.runtime.devices.xla_island import XlaIsland
    from elaswave_spmd.worker.programs.xla import XlaPrograms

    programs = XlaPrograms(**args, island=XlaIsland({"tp": spec.tp}), specs=specs_of(model))
    programs.compile(model.layers, layout, Example.of_tokens((MICROBATCH, TOKENS)), torch.float32)
    return Ours(model, spec.microbatches, programs)


def set_environment(kind: str, tp: int) -> None:
    """Sets the environment variables of a worker. Call it before torch_xla is imported."""
    torch.set_num_threads(THREADS)
    if kind in (XLA, HAND, FUSED):
        os.environ.update(device_of("xla").environment(os.environ, Island(devices=tp, threads=THREADS)))
        import torch_xla  # pyright: ignore[reportMissingImports]
        import torch_xla.distributed.spmd  # noqa: F401  # pyright: ignore[reportMissingImports]


def block(side: Side, order: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the steps from `order["first"]` on. Returns the time of each, and the CPU time of all."""
    seconds, loss, cpu = [], 0.0, time.process_time()
    for number in range(order["first"], order["first"] + order["steps"]):
        began = time.perf_counter()
        loss = side.step(number, order["mode"])
        seconds.append(time.perf_counter() - began)
    cpu = time.process_time() - cpu
    return {"seconds": seconds, "cpu_s": cpu, "loss": loss, "compiled": side.num_compiled}


def main() -> None:
    """Command line: makes the side, runs its first step, then blocks until stdin ends."""
    spec = Spec(**json.loads(sys.argv[1]))
    answers = take_stdout()

    def answer(found: Mapping[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    set_environment(spec.kind, spec.tp)
    began = time.perf_counter()
    side = make_side(spec)
    made = time.perf_counter()
    loss = side.step(1, FETCH)
    answer({
        "make_s": made - began,
        "first_s": time.perf_counter() - began,
        "loss": loss,
        "norm": side.gradient_norm(),
        "compiled": side.num_compiled,
    })  # fmt: skip
    for line in sys.stdin:
        answer(block(side, json.loads(line)))


if __name__ == "__main__":
    main()
