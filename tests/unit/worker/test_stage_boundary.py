"""Boundary tensors: kept by their senders until the step is decided, named by what they are, not by who sent them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.worker.activations import checked_output, forms_of
from elaswave_spmd.worker.stage_boundary import (
    ACTIVATION,
    GRADIENT,
    VALIDATION,
    Boundaries,
    BoundaryKey,
    message_of,
)
from tests.unit.runtime.runtime_cases import HOST, placed

ME, OTHER = 1, 2
STEP = 7


class Pair(NamedTuple):
    hidden: Tensor
    mask: Tensor


class Sent(list[tuple[int, m.Message, Tensor]]):
    def __call__(self, peer: int, message: m.Message, payload: Tensor | None = None, /) -> None:
        assert payload is not None
        self.append((peer, message, payload))


def make() -> tuple[Boundaries, Sent]:
    sent = Sent()
    return Boundaries(ME, sent, HOST), sent


def tensor(number: float) -> Tensor:
    return torch.full((2, 3), number)


def activation(microbatch: int, layer: int = 1, step: int = STEP, *, validation: bool = False) -> m.Activation:
    return m.Activation(step, microbatch, layer, (2, 3), validation)


def gradient(microbatch: int, layer: int = 0, step: int = STEP) -> m.ActivationGradient:
    return m.ActivationGradient(step, microbatch, layer, (2, 3))


def key(kind: str, microbatch: int, layer: int, step: int = STEP) -> BoundaryKey:
    return BoundaryKey(kind, step, microbatch, layer)


def two_stages() -> Placement:
    """Layer 0 on worker 0, layers 1 and 2 on workers 1 and 2."""
    return placed((1, 2), (0, 1, 3), ((4,), (2, 2)), 0)


def test_what_is_sent_arrives_with_its_shape_and_is_taken_once() -> None:
    (sender, sent), (receiver, _) = make(), make()
    sender.send(OTHER, activation(3), tensor(1.5))
    ((peer, message, payload),) = sent
    assert peer == OTHER and isinstance(message, m.Activation)
    receiver.receive(message, payload.reshape(-1))
    assert key(ACTIVATION, 3, 1) in receiver and key(GRADIENT, 3, 1) not in receiver
    found = receiver.pop(key(ACTIVATION, 3, 1))
    assert isinstance(found, Tensor) and torch.equal(found, tensor(1.5)) and key(ACTIVATION, 3, 1) not in receiver


def test_a_tuple_arrives_with_its_forms_and_names() -> None:
    (sender, sent), (receiver, _) = make(), make()
    value = checked_output(Pair(tensor(1.5).requires_grad_(), torch.tensor([[True], [False]])), torch.float32, "l")
    place = key(ACTIVATION, 3, 1)
    sender.send(OTHER, message_of(place, value), value)
    ((_, message, payload),) = sent
    assert isinstance(message, m.Activation)
    receiver.receive(message, payload)
    found = receiver.pop(place)
    assert forms_of(found) == forms_of(value)
    assert all(torch.equal(one, other) for one, other in zip(found, value, strict=True))


def test_gradients_of_a_tuple_are_those_of_its_tensors_that_have_one() -> None:
    boundaries, _ = make()
    value = (tensor(1.5).requires_grad_(), torch.ones(2, 1), torch.zeros(4).requires_grad_())
    boundaries.send(OTHER, message_of(key(ACTIVATION, 3, 1), value), value)
    right, wrong = (tensor(0.0), torch.zeros(4)), (tensor(0.0), torch.ones(2, 1))
    assert not boundaries.has_other_shape(message_of(key(GRADIENT, 3, 0), right))
    assert boundaries.has_other_shape(message_of(key(GRADIENT, 3, 0), wrong))
    assert boundaries.has_other_shape(message_of(key(GRADIENT, 3, 0), tensor(0.0)))


def test_a_tuple_without_gradient_gets_a_stand_in_back() -> None:
    boundaries, _ = make()
    value = (torch.arange(3), torch.ones(2, 1))
    boundaries.send(OTHER, message_of(key(ACTIVATION, 3, 1), value), value)
    assert not boundaries.has_other_shape(message_of(key(GRADIENT, 3, 0), torch.zeros(1)))
    assert boundaries.has_other_shape(message_of(key(GRADIENT, 3, 0), tensor(0.0)))


def test_what_arrives_is_copied_to_aligned_memory() -> None:
    """Kernels' bits may depend on alignment, and a link's memory may start anywhere."""
    boundaries, _ = make()
    memory = torch.arange(7, dtype=torch.float32)
    boundaries.receive(activation(0), memory[1:])
    found = boundaries.pop(key(ACTIVATION, 0, 1))
    assert isinstance(found, Tensor) and found.data_ptr() % 64 == 0 and found.flatten().tolist() == [1, 2, 3, 4, 5, 6]


def test_to_itself_nothing_is_sent() -> None:
    boundaries, sent = make()
    boundaries.send(ME, gradient(2), tensor(1))
    assert not sent and key(GRADIENT, 2, 0) in boundaries


def test_what_nobody_needs_now_is_kept_for_later() -> None:
    boundaries, sent = make()
    boundaries.send(None, activation(2), tensor(1))
    assert not sent and boundaries.kept(ACTIVATION, STEP) == ((1, 2),)


def test_what_is_kept_is_said_by_layer_and_microbatch_of_one_step() -> None:
    boundaries, _ = make()
    for microbatch in (3, 1):
        boundaries.send(OTHER, activation(microbatch), tensor(microbatch))
        boundaries.send(OTHER, gradient(microbatch), tensor(microbatch))
    boundaries.send(OTHER, activation(0, step=STEP + 1), tensor(0))
    assert boundaries.kept(ACTIVATION, STEP) == ((1, 1), (1, 3)) and boundaries.kept(GRADIENT, STEP) == ((0, 1), (0, 3))
    assert boundaries.kept(ACTIVATION, STEP + 1) == ((1, 0),) and boundaries.kept(GRADIENT, STEP + 1) == ()


def test_validation_tensors_are_not_kept() -> None:
    boundaries, sent = make()
    boundaries.send(OTHER, activation(0, validation=True), tensor(0))
    assert len(sent) == 1 and not boundaries.kept(ACTIVATION, STEP) and not boundaries.kept(VALIDATION, STEP)


def test_validation_and_training_do_not_mix() -> None:
    boundaries, _ = make()
    boundaries.receive(activation(0, validation=True), tensor(1).reshape(-1))
    assert key(VALIDATION, 0, 1) in boundaries and key(ACTIVATION, 0, 1) not in boundaries


def test_tensors_of_a_validation_are_not_used_in_another_mesh_epoch() -> None:
    """Nor those that were used since a StepReport: it is run again as a whole."""
    boundaries, _ = make()
    boundaries.keep_all()
    for microbatch in (0, 1):
        boundaries.receive(activation(microbatch, validation=True), tensor(1).reshape(-1))
        boundaries.receive(activation(microbatch), tensor(1).reshape(-1))
    boundaries.pop(key(VALIDATION, 0, 1))
    boundaries.pop(key(ACTIVATION, 0, 1))
    boundaries.restore_used()
    boundaries.forget_validations()
    assert not any(key(VALIDATION, microbatch, 1) in boundaries for microbatch in (0, 1))
    assert all(key(ACTIVATION, microbatch, 1) in boundaries for microbatch in (0, 1))


def test_kept_tensors_go_again_to_whoever_the_plan_names() -> None:
    boundaries, sent = make()
    boundaries.send(0, gradient(0), tensor(10))
    boundaries.send(OTHER, activation(1), tensor(21))
    boundaries.send(OTHER, activation(2), tensor(22))
    sent.clear()
    work = [
        m.Recompute(0, 0, 0, False, 2),
        m.Recompute(1, 1, OTHER, True, 2),
        m.Recompute(1, 2, ME, True, 0),
        m.Recompute(1, 3, OTHER, True, 2),
    ]
    boundaries.send_again(STEP, work, two_stages())
    assert [(peer, message) for peer, message, _ in sent] == [(0, gradient(0)), (OTHER, activation(1))]
    assert [float(payload[0, 0]) for _, _, payload in sent] == [10, 21]
    assert key(ACTIVATION, 2, 1) in boundaries, "its own is filed, not sent"


@pytest.mark.parametrize(("forward", "backward", "number"), [(False, 0, 0), (True, 0, 1), (False, 1, 1), (True, 2, 2)])
def test_only_the_inputs_of_what_is_run_go_again(forward: bool, backward: int, number: int) -> None:
    """A saved forward serves without its activation; a forward alone takes no gradient."""
    boundaries, sent = make()
    boundaries.send(None, activation(1), tensor(1))
    boundaries.send(None, gradient(1, layer=2), tensor(2))
    boundaries.send_again(STEP, [m.Recompute(1, 1, OTHER, forward, backward)], two_stages())
    assert len(sent) == number


def test_what_was_taken_between_status_and_place_is_there_again() -> None:
    """A peer with its Reconfigure sent it for the new plan, and does not send it twice."""
    boundaries, _ = make()
    boundaries.receive(activation(0), tensor(1).reshape(-1))
    boundaries.receive(activation(1), tensor(2).reshape(-1))
    boundaries.pop(key(ACTIVATION, 0, 1))
    boundaries.keep_all()
    boundaries.pop(key(ACTIVATION, 1, 1))
    boundaries.keep_all()  # a second Prepare, before the Reconfigure of the first
    boundaries.restore_used()
    assert key(ACTIVATION, 0, 1) not in boundaries and key(ACTIVATION, 1, 1) in boundaries
    boundaries.pop(key(ACTIVATION, 1, 1))
    boundaries.restore_used()
    assert key(ACTIVATION, 1, 1) not in boundaries, "only between StepReport and Reconfigure"


def test_what_could_not_be_used_is_put_back() -> None:
    boundaries, _ = make()
    boundaries.receive(activation(0), tensor(1).reshape(-1))
    taken = boundaries.pop(key(ACTIVATION, 0, 1))
    boundaries.put_back(key(ACTIVATION, 0, 1), taken)
    assert boundaries.pop(key(ACTIVATION, 0, 1)) is taken


def test_a_decided_step_is_forgotten_and_the_next_is_not() -> None:
    boundaries, _ = make()
    for step in (STEP - 1, STEP, STEP + 1):
        boundaries.send(OTHER, activation(0, step=step), tensor(0))
        boundaries.receive(gradient(1, step=step), tensor(0).reshape(-1))
        boundaries.receive(activation(2, step=step, validation=True), tensor(0).reshape(-1))
    boundaries.drop_decided(STEP)
    assert [boundaries.kept(ACTIVATION, step) for step in (STEP - 1, STEP, STEP + 1)] == [(), (), ((1, 0),)]
    assert [key(GRADIENT, 1, 0, step) in boundaries for step in (STEP - 1, STEP, STEP + 1)] == [False, False, True]
    left = [key(VALIDATION, 2, 1, step) in boundaries for step in (STEP - 1, STEP, STEP + 1)]
    assert left == [False, True, True], "version STEP is about to be validated"


@pytest.mark.parametrize("shape", [(3, 2), (6,), (1, 2, 3), (2, 4)])
def test_a_gradient_has_the_shape_of_the_activation_that_was_sent(shape: tuple[int, ...]) -> None:
    boundaries, _ = make()
    wrong = m.ActivationGradient(STEP, 3, 0, shape)
    assert not boundaries.has_other_shape(wrong), "nothing is known yet"
    boundaries.send(OTHER, activation(3), tensor(1.0))
    assert boundaries.has_other_shape(wrong) and not boundaries.has_other_shape(gradient(3))
    elsewhere = m.Activation(STEP, 3, 2, shape), m.ActivationGradient(STEP, 3, 1, shape)
    assert not any(map(boundaries.has_other_shape, elsewhere)), "another boundary has another shape"
    assert not boundaries.has_other_shape(m.Activation(STEP, 3, 1, shape, True)), "a validation is not compared"


def test_other_micro_batches_may_have_other_shapes() -> None:
    """As where a layer packs what is no padding."""
    boundaries, _ = make()
    boundaries.send(OTHER, activation(3), tensor(1.0))
    longer = torch.zeros(4, 3)
    boundaries.send(OTHER, message_of(key(ACTIVATION, 4, 1), longer), longer)
    assert not boundaries.has_other_shape(gradient(3)) and boundaries.has_other_shape(gradient(4))
    others = m.ActivationGradient(STEP, 4, 0, (4, 3)), m.Activation(STEP, 5, 1, (9, 3))
    assert not any(map(boundaries.has_other_shape, others))


def test_what_crosses_a_boundary_is_known_by_the_gradient_that_is_sent_back() -> None:
    boundaries, _ = make()
    boundaries.send(OTHER, gradient(3), tensor(1.0))
    assert boundaries.has_other_shape(m.Activation(STEP, 3, 1, (3, 2)))
    assert not boundaries.has_other_shape(activation(3))


def test_shapes_of_decided_steps_are_forgotten() -> None:
    boundaries, _ = make()
    wrong = [m.ActivationGradient(step, 3, 0, (3, 2)) for step in (STEP, STEP + 1)]
    for step in (STEP, STEP + 1):
        boundaries.send(OTHER, activation(3, step=step), tensor(1.0))
    boundaries.drop_decided(STEP)
    assert [boundaries.has_other_shape(one) for one in wrong] == [False, True]
    boundaries.forget_beyond(STEP)
    assert not any(map(boundaries.has_other_shape, wrong))
