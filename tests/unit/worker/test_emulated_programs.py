"""Emulated layer programs: results are functions of all arguments, and programs take the configured time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elaswave_spmd.conf.schema import EmulatedSettings, SlowDevice
from elaswave_spmd.determinism import Keys
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.models import Batch
from elaswave_spmd.sharding.layout import LayerUse, ParameterInfo, lay_out
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.programs import emulated
from elaswave_spmd.worker.programs.emulated import EmulatedDevice, EmulatedPrograms

LAYOUT = lay_out([LayerUse(n, (ParameterInfo(f"{n}.weight", (8, 8)),)) for n in ("first", "last")], page_size=64)
KEYS = Keys.make(1, 1, [0, 1], 0)
HOST = torch.device("cpu")
TOKENS = torch.zeros(2, 3, dtype=torch.int64)
BATCH = Batch(TOKENS, TOKENS)
AT_ONCE = EmulatedDevice(0.0, 0.0)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return (x if x.is_floating_point() else torch.ones(*x.shape, 8)) @ self.weight


def programs(scale: float = 1.0, fill: float = 0.0, device: EmulatedDevice = AT_ONCE) -> EmulatedPrograms:
    made = EmulatedPrograms(2, loss=lambda y, _: y.sum(), loss_scale=scale, checkpointing=False, device=device)
    values = {i: ValueBuffer(layer, Rows(), torch.float32, HOST) for i, layer in enumerate(LAYOUT.layers)}
    for value in values.values():
        value.flat.fill_(fill)
    made.bind({i: v.module for i, v in values.items()}, values)
    return made


def through(made: EmulatedPrograms, microbatch: int, tokens: Tensor = TOKENS) -> tuple[Tensor, ...]:
    """A micro-batch forward and backward: output of layer 0, loss, and the gradients of both layers."""
    y: Any = made.forward(0, microbatch, tokens, KEYS, None)
    loss: Any = made.forward(1, microbatch, y, KEYS, BATCH)
    buffers = [GradientBuffer(layer, HOST) for layer in LAYOUT.layers]
    dy: Any = made.backward(1, microbatch, None, buffers[1], add=False, batch=BATCH)
    assert dy is not None and dy.shape == y.shape
    assert made.backward(0, microbatch, dy, buffers[0], add=False, batch=None) is None
    return (y, loss, *(buffer.flat for buffer in buffers))


def test_the_same_microbatch_gives_the_same_bits() -> None:
    assert all(map(torch.equal, through(programs(), 3), through(programs(), 3)))


@pytest.mark.parametrize("forget", [lambda v: v.keep_only(()), lambda v: v.forget_beyond(6), ValueBuffer.drop])
def test_other_parameters_of_the_same_version_are_computed_with(forget: Callable[[ValueBuffer], None]) -> None:
    """As after a repair: a damaged copy is given up, and other values come at its version."""
    layer = LAYOUT.layers[0]
    values = ValueBuffer(layer, Rows(), torch.float32, HOST)
    made = EmulatedPrograms(2, loss=lambda y, _: y.sum(), loss_scale=1.0, checkpointing=False, device=AT_ONCE)
    made.bind({0: values.module}, {0: values})

    def computed_with(value: float) -> Tensor:
        values.install(0, layer.num_value_pages, torch.full((layer.num_value_elements,), value), 7)
        assert values.is_at(7)
        y = made.forward(0, 0, TOKENS, KEYS, None)
        assert isinstance(y, Tensor)
        return y

    damaged = computed_with(2.0)
    forget(values)
    values.expect()
    right = computed_with(1.0)
    assert not torch.equal(right, damaged)
    assert torch.equal(right, computed_with(2.0)), "pages that are at the version stay as they are"


def test_a_backward_in_two_parts_gives_the_same_bits() -> None:
    """Whatever runs in between; and added to a buffer, too."""
    whole = through(programs(), 3)
    made = programs()
    made.set_split_layers([1])
    assert made.has_split_layers
    y: Any = made.forward(0, 3, TOKENS, KEYS, None)
    loss: Any = made.forward(1, 3, y, KEYS, BATCH)
    dy = made.backward_input(1, 3, None, batch=BATCH)
    assert made.backward_input(0, 3, dy, batch=None) is None and made.begun == {3} and not made.forwarded
    buffers = [GradientBuffer(layer, HOST) for layer in LAYOUT.layers]
    through(made, 4)
    for layer in (1, 0):
        made.backward_weights(layer, 3, buffers[layer], add=False)
    assert all(map(torch.equal, (y, loss, *(buffer.flat for buffer in buffers)), whole)) and not made.begun
    other = through(programs(), 5)[3]
    made.forward(1, 5, made.forward(0, 5, TOKENS, KEYS, None), KEYS, BATCH)
    made.backward_input(1, 5, None, batch=BATCH)
    made.backward_weights(1, 5, buffers[1], add=True)
    assert torch.equal(buffers[1].flat, whole[3] + other)


def test_each_part_of_a_backward_takes_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(emulated.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(emulated, "_sleep_until", slept.append)
    made = programs(device=EmulatedDevice(1.0, 8.0, weight_share=0.25, speed=lambda step: 2.0))
    buffers = [GradientBuffer(layer, HOST) for layer in LAYOUT.layers]
    made.set_split_layers([1])
    made.forward(1, 3, made.forward(0, 3, TOKENS, KEYS, None), KEYS, BATCH)
    dy = made.backward_input(1, 3, None, batch=BATCH)
    made.backward_input(0, 3, dy, batch=None)
    for layer in (1, 0):
        made.backward_weights(layer, 3, buffers[layer], add=False)
    assert slept == [0.5, 0.5, 3.0, 4.0, 1.0, 0.0], "a layer that is not split takes all of its time in the first part"
    through(made, 4)
    assert slept[-2:] == [4.0, 4.0]


def test_microbatches_inputs_and_parameters_change_every_result() -> None:
    others = [
        through(programs(), 0),
        through(programs(), 1),
        through(programs(), 0, TOKENS + 1),
        through(programs(fill=1.0), 0),
    ]
    for a, b in itertools.combinations(others, 2):
        assert not any(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_with_add_a_gradient_is_added_to_the_buffer() -> None:
    alone = through(programs(), 1)[3]
    made, buffer = programs(), GradientBuffer(LAYOUT.layers[1], HOST)
    for microbatch in (0, 1):
        made.forward(1, microbatch, made.forward(0, microbatch, TOKENS, KEYS, None), KEYS, BATCH)
        made.backward(1, microbatch, None, buffer, add=microbatch == 1, batch=BATCH)
    assert torch.equal(buffer.flat, through(programs(), 0)[3] + alone)


def test_forwarded_micro_batches_are_known_until_they_are_discarded() -> None:
    made = programs()
    made.forward(0, 4, TOKENS, KEYS, None)
    assert made.forwarded == frozenset()
    made.forward(1, 4, torch.zeros(2, 3, 8), KEYS, BATCH)
    assert made.forwarded == {4}
    made.discard(4)
    assert made.forwarded == frozenset()


def test_the_time_of_a_program_follows_cost_and_speed() -> None:
    device = EmulatedDevice(0.010, 0.020, (1.0, 3.0), lambda step: 0.5 if step >= 10 else 1.0)
    assert [device.seconds(0, 1, backward=b) for b in (False, True)] == [0.010, 0.020]
    assert device.seconds(1, 10, backward=True) == pytest.approx(0.120)


def test_of_several_slowdowns_the_last_one_in_force_counts() -> None:
    settings = EmulatedSettings(slow=(SlowDevice(1, 0.5, step=3, until=6), SlowDevice(1, 0.25, step=5)))
    assert [settings.speed(1, step) for step in (2, 3, 4, 5, 6)] == [1.0, 0.5, 0.5, 0.25, 0.25]
    assert settings.speed(0, 4) == 1.0


def test_there_is_one_cost_for_each_layer() -> None:
    EmulatedSettings(layer_costs=(1, 2)).check_layers(2)
    EmulatedSettings().check_layers(7)
    with pytest.raises(ConfigError, match="2 numbers, and the model has 3 layers"):
        EmulatedSettings(layer_costs=(1, 2)).check_layers(3)
