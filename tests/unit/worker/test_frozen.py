"""Frozen parameters on one worker, and what is refused about them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elaswave_spmd.determinism import Keys
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import GPT, LayeredModel, freeze_parameters
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.admission import PLACE, SIZE, MessageBounds
from elaswave_spmd.recovery.worker_protocol import WorkerProtocol
from elaswave_spmd.sharding.layout import LayerLayout, LayerUse, ParameterInfo, lay_out
from elaswave_spmd.sharding.replicas import ReplicaSet
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.model_layout import describe
from elaswave_spmd.worker.optimizers import AdamW
from elaswave_spmd.worker.programs.eager import StagePrograms
from elaswave_spmd.worker.state import LEARNING, HeldState
from elaswave_spmd.worker.state_transfer import receive_state
from tests.unit.runtime.runtime_cases import HOST

LAYOUT = lay_out(
    [LayerUse("a", (ParameterInfo("a.still", (100,), frozen=True), ParameterInfo("a.moves", (150,))))], page_size=64
)
LAYER = LAYOUT.layers[0]
TRAINED, FROZEN = (0, 0, 3), (0, 3, 5)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.still, self.moves = nn.Parameter(torch.empty(100)), nn.Parameter(torch.empty(150))


def buffer(dtype: torch.dtype = torch.float32) -> ValueBuffer:
    return ValueBuffer(LAYER, Two(), dtype, HOST.place)


def held(values: ValueBuffer, *, separate: bool, learns: bool = False) -> HeldState:
    state = HeldState(LAYOUT, AdamW(), HOST, separate_master=separate)
    state.rebind([ReplicaSet(*pages, 0, frozenset((0,))) for pages in (TRAINED, FROZEN)], {0: values})
    if not learns:
        state.initialise(lambda name, first, stop: torch.arange(first, stop, dtype=torch.float32) + len(name))
    return state


def test_frozen_parameters_have_no_gradient_and_no_place_for_one() -> None:
    values, gradient = buffer(), GradientBuffer(LAYER, HOST.place)
    assert [p.requires_grad for p in values.parameters] == [True, False] and values.trained == values.parameters[:1]
    assert LAYER.num_gradient_elements == 192 + 64, "the trained parameter and the loss"
    gradient.set([torch.ones(150)])
    gradient.loss.fill_(7.0)
    assert gradient.pages(*TRAINED[1:]).sum() == 150 and gradient.flat.sum() == 157


@pytest.mark.parametrize("separate", [False, True])
def test_an_update_leaves_frozen_pages_alone_and_takes_their_version_along(separate: bool) -> None:
    values = buffer()
    state = held(values, separate=separate)
    before = values.pages(*FROZEN[1:]).clone()
    assert [len(part.optimizer_state) for part in state] == [2, 0]
    assert values.is_at(0) and bool(before.any())
    for step in (1, 2):
        values.keep_frozen(step)
        assert not values.is_at(step)
        state.apply(0, {TRAINED: torch.ones(192)}, step=step, lr=0.1, divisor=1.0)
        assert values.is_at(step) and [part.version for part in state] == [step, step]
    assert torch.equal(values.pages(*FROZEN[1:]), before) and torch.equal(list(state)[1].master, before)
    assert state.num_bytes(0) == {
        "master": 4 * (192 + 128), "optimizer": 8 * 192, "mirror_master": 0, "mirror_optimizer": 0
    }  # fmt: skip


def test_values_of_frozen_pages_are_copied_in_once() -> None:
    values = buffer()
    values.install(*FROZEN[1:], torch.full((128,), 3.0), 0)
    values.keep_frozen(4)
    assert values.missing(4) == [(0, 3)]
    values.install(*FROZEN[1:], torch.full((128,), 9.0), 5)
    assert values.pages(*FROZEN[1:]).unique().tolist() == [3.0] and values.missing(5) == [(0, 3)]
    values.install(*TRAINED[1:], torch.full((192,), 9.0), 5)
    assert values.is_at(5) and values.pages(*TRAINED[1:]).unique().tolist() == [9.0]
    values.drop()
    values.keep_frozen(6)
    assert values.missing(6) == [(0, 5)], "dropped memory has no values, frozen or not"
    values.install(*FROZEN[1:], torch.full((128,), 3.0), 6)
    assert values.missing(6) == [(0, 3)]


def test_a_newcomer_takes_the_state_of_a_frozen_page_however_old_it_is() -> None:
    source = held(buffer(), separate=True)
    part = list(source)[1]
    payload = torch.empty(source.state_size(part))
    for _ in source.copy_state(part, payload):
        pass
    assert payload.numel() == 128, "the master, without optimizer state"
    state = held(buffer(), separate=True, learns=True)
    protocol, done = WorkerProtocol(0, 0, (0,), (), version=9), []
    for _ in receive_state(state, m.PageState(2, *FROZEN, b""), payload, protocol, lambda: done.append(True)):
        pass
    assert [p.version for p in state] == [LEARNING, 9] and torch.equal(list(state)[1].master, part.master) and done
    assert protocol.norms_at(2, FROZEN) == protocol.norms_at(9, FROZEN) == ()


def test_a_frozen_page_that_a_worker_one_step_ahead_has_sent_is_at_the_version_of_its_receiver() -> None:
    """Else it could not be saved, compared or joined with others at that version."""
    state, values = held(buffer(), separate=True, learns=True), buffer()
    state.rebind([part.pages for part in state], {0: values})
    protocol = WorkerProtocol(0, 0, (0,), (), version=9)
    for _ in receive_state(state, m.PageState(10, *FROZEN, b""), torch.ones(128), protocol, lambda: None):
        pass
    assert [part.version for part in state] == [LEARNING, 9] and values.are_at(*FROZEN[1:], 9)
    state.keep(0, 10)
    assert [part.version for part in state] == [LEARNING, 10]


def test_messages_about_gradients_of_frozen_pages_cannot_be_right() -> None:
    bounds = MessageBounds(LAYOUT, 10, 4, 0, 3)
    assert bounds.refused_payload(m.PartialSum(1, *FROZEN, 0, 1), 128) == PLACE
    assert bounds.refused_payload(m.ReducedGradient(1, *FROZEN, np.zeros(2, "<f4").tobytes()), 128) == PLACE
    assert bounds.refused_payload(m.PageState(1, *FROZEN, b""), 128) == ""
    assert bounds.refused_payload(m.PageState(1, *FROZEN, b""), 3 * 128) == SIZE
    assert bounds.refused_payload(m.PageState(1, *FROZEN, b"12345678"), 128) == SIZE
    assert bounds.refused_payload(m.Publish(1, *FROZEN), 128) == bounds.refused_payload(m.Need(1, *FROZEN), None) == ""


def gpt(tied: bool = False) -> LayeredModel:
    return GPT(vocab_size=7, seq_len=4, layers=2, d_model=8, heads=2, tied=tied)


def test_layers_before_the_first_trained_parameter_keep_nothing_and_give_one_zero() -> None:
    model = gpt()
    freeze_parameters(model, ["embed.*", "block0.*", "block1.attn*"])
    layout = describe(model, page_size=64).layout
    programs = StagePrograms(
        4, loss=model.loss, loss_scale=1.0, checkpointing=False, first_trained=layout.first_trained
    )
    values: dict[int, ValueBuffer] = {}
    for layer, module in zip(layout.layers, model.layers, strict=True):
        values[layer.index] = ValueBuffer(layer, module, torch.float32, HOST.place)
        values[layer.index].flat.normal_(0.0, 0.1)
    programs.bind(dict(enumerate(model.layers)), values)
    tokens, keys = torch.tensor([[1, 2, 3, 4]]), Keys.make(0, 1, [0], 0)
    x: Any = tokens
    for layer in range(3):
        x = programs.forward(layer, 0, x, keys.at(layer), None)
    assert {row[0]: row[1] for row in programs.memory.pop_rows()}.keys() == {0, 1, 2}
    buffers = [GradientBuffer(layer, HOST.place) for layer in layout.layers]
    dy: Any = programs.backward(2, 0, torch.ones_like(x), buffers[2], add=False, batch=None)
    assert dy is not None and dy.tolist() == [0.0], "nothing before layer 2 waits for a gradient"
    trained = [slot.parameter.name for slot in layout.layers[2].gradient_slots]
    assert all(view.any() for view in buffers[2].views) and not any("attn" in name for name in trained)
    assert [programs.backward(layer, 0, dy, buffers[layer], add=False, batch=None) for layer in (1, 0)] == [0.0, 0.0]
    assert buffers[0].flat.numel() == buffers[1].flat.numel() == 0


def test_frozen_by_the_model_itself() -> None:
    """In the constructor of a layer, after that of the model, or by hand before training."""
    model = gpt()
    model.get_submodule("embed").requires_grad_(False)
    model.get_parameter("head.weight").requires_grad_(False)
    layout = describe(model).layout
    assert layout.frozen == ("embed.weight", "embed.positions", "head.weight") and layout.first_trained == 1


@pytest.mark.parametrize(
    ("tied", "patterns", "words"),
    [
        (
            False,
            ["embed.*", "block.*"],
            "optim.freeze=block.\\* matches no parameter(.|\n)*exists: (.|\n)*block0.attn.qkv",
        ),
        (False, ["*"], "all parameters of GPT are frozen"),
        (True, ["embed.*"], 'embed.weight is frozen, and head.weight.*(.|\n)*optim.freeze="embed.weight head.weight"'),
        (True, ["head.*"], "head.weight is frozen, and embed.weight"),
    ],
)
def test_what_is_refused(tied: bool, patterns: list[str], words: str) -> None:
    model = gpt(tied)
    with pytest.raises(ModelError, match=words):
        freeze_parameters(model, patterns)
        describe(model)


def test_tied_parameters_are_frozen_together_and_readers_are_frozen_pages() -> None:
    model = gpt(tied=True)
    freeze_parameters(model, ["embed.weight", "head.weight"])
    layout = describe(model, page_size=64).layout
    head: LayerLayout = layout.layers[-1]
    (reader,) = head.reader_blocks
    assert reader.frozen and layout.layers[0].block_of(reader.source[1] if reader.source else -1).frozen
    assert [b.frozen for b in head.blocks] == [False, True, False], "state, reader, loss"
    assert all(a.stop == b.start for a, b in pairwise(head.blocks))
    assert layout.frozen == ("embed.weight", "head.weight")
