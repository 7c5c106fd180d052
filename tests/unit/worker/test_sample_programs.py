"""Layer programs of models whose samples are no tokens: weights and metrics, in parts, again, compiled, emulated."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elaswave_spmd.data.samples import GenericDataset
from elaswave_spmd.determinism import Keys
from elaswave_spmd.errors import DataError, ModelError
from elaswave_spmd.models import LayeredModel, Objective
from elaswave_spmd.worker.activations import Activation, tensors_of
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.context import LocalModel
from elaswave_spmd.worker.inputs import Example, first_input, leaves_of, to_batch, with_leaves
from elaswave_spmd.worker.learning_rate import LearningRate
from elaswave_spmd.worker.model_check import check_model
from elaswave_spmd.worker.model_layout import describe
from elaswave_spmd.worker.optimizers import AdamW
from elaswave_spmd.worker.programs.eager import StagePrograms, program_args
from elaswave_spmd.worker.programs.emulated import EmulatedDevice, EmulatedPrograms
from elaswave_spmd.worker.programs.inductor import CompiledPrograms
from elaswave_spmd.worker.programs.scores import ScoreForm, checked_loss, scores_of
from elaswave_spmd.worker.spec import Job
from tests.sample_models import Classifier, Images, Padded, Restless, Sentences, Tagger

CPU = torch.device("cpu")
MODELS: dict[str, tuple[Callable[[], LayeredModel], Any]] = {
    "images": (lambda: Classifier(3), Images()),
    "sentences": (Tagger, Sentences()),
}
IDS = np.array([4, 5])


class Stack:
    """All layers of a model on one worker, with values, and the buffers of their gradients."""

    def __init__(self, name: str, programs: type[StagePrograms] = StagePrograms, **options: Any) -> None:
        make, dataset = MODELS[name]
        model = make()
        options = {"loss": Objective.of(model), "loss_scale": 0.1, "checkpointing": False} | options
        self.programs = programs(len(model.layers), **options)
        layout, self.inputs = describe(model, page_size=64).layout, model.inputs
        self.data = GenericDataset(dataset, 0, len(dataset), name)
        if isinstance(self.programs, CompiledPrograms):
            batch = self.batch(IDS)
            with torch.device("meta"):
                prototype = make()
            example = Example(first_input(self.inputs, batch, torch.float32), batch, len(IDS))
            self.programs.compile(prototype.layers, layout, example, torch.float32)
        values = {}
        for number, layer in enumerate(model.layers):
            values[number] = ValueBuffer(layout.layers[number], layer, torch.float32, CPU)
            draw = torch.Generator().manual_seed(number)
            values[number].flat.copy_(torch.randn(values[number].flat.shape, generator=draw) * 0.3)
            values[number].mark(0, values[number].layout.num_value_pages, 0)
        self.programs.bind({number: value.module for number, value in values.items()}, values)
        self.buffers = [GradientBuffer(layer, CPU) for layer in layout.layers]

    def batch(self, ids: np.ndarray) -> Any:
        return to_batch(self.data, ids, CPU, 0, 1)

    def run(
        self, ids: np.ndarray = IDS, microbatch: int = 0, *, parts: bool = False, add: bool = False
    ) -> list[Tensor]:
        """Returns the loss, all gradients, and what a validation makes of the micro-batch."""
        batch, keys, numbers = self.batch(ids), Keys.make(7, 3, ids, 0), range(len(self.buffers))
        x = first = first_input(self.inputs, batch, torch.float32)
        for number in numbers:
            x = self.programs.forward(number, microbatch, x, keys.at(number), batch)
        found = [*tensors_of(x)]
        dy: Activation | None = None
        for number in reversed(numbers):
            if parts:
                dy = self.programs.backward_input(number, microbatch, dy, batch=batch)
            else:
                dy = self.programs.backward(number, microbatch, dy, self.buffers[number], add=add, batch=batch)
        assert dy is None, "nobody waits for the gradient of what was read"
        for number in numbers if parts else ():
            self.programs.backward_weights(number, microbatch, self.buffers[number], add=add)
        self.programs.set_training(False)
        x = first
        for number in numbers:
            x = self.programs.evaluate(number, x, keys.at(number), batch)
        self.programs.set_training(True)
        return [*found, *(buffer.flat.clone() for buffer in self.buffers), *tensors_of(x)]


@pytest.mark.parametrize("name", MODELS)
def test_parts_and_checkpointing_have_the_bits_of_the_whole(name: str) -> None:
    whole = Stack(name)
    whole.run(IDS + 2)  # layers are measured
    wanted = whole.run()
    assert all(value.isfinite().all() for value in wanted) and any(value.any() for value in wanted[1:])
    parts, again = Stack(name), Stack(name, checkpointing=True)
    parts.run(IDS + 2)
    parts.programs.set_split_layers(range(len(parts.buffers)))
    in_parts = parts.run(parts=True)
    for found in (in_parts, again.run(), again.run()):
        assert all(map(torch.equal, found, wanted))


class Smoothed(Classifier):
    """Trained by twice the loss that it is validated by. One of its own modules stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(3, dropout=0.0)
        self.calm = nn.Identity().eval()

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert not self.calm.training
        return super().loss(output, batch) * (2.0 if self.training else 1.0)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "programs", [StagePrograms, pytest.param(CompiledPrograms, marks=pytest.mark.compiler)], ids=["eager", "compiled"]
)
def test_the_loss_of_a_model_knows_whether_it_is_a_validation(
    programs: type[StagePrograms], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "smoothed", (Smoothed, Images()))
    options = {} if programs is StagePrograms else {"threads": 1, "place": CPU, "backend": "aot_eager"}
    stack = Stack("smoothed", programs, **options)
    number = stack.programs.num_compiled
    for _ in range(2):
        found = stack.run()
        trained, validated = found[0], found[1 + len(stack.buffers)]
        assert float(trained) == pytest.approx(0.1 * 2 * float(validated), rel=1e-5)
    assert stack.programs.num_compiled == number, "nothing is compiled late"


def test_weights_are_added_beside_the_loss() -> None:
    """The loss page has the scaled loss, its weight, and the number of micro-batches that have one."""
    stack, loss = Stack("sentences"), []
    for microbatch, ids in enumerate((IDS, IDS + 2, IDS + 4)):
        loss += [float(stack.run(ids, microbatch, add=microbatch > 0)[0])]
    page = stack.buffers[-1].layout.loss_block
    assert page is not None
    last = stack.buffers[-1].pages(page.first_page, page.first_page + 1)
    weights = [int(stack.batch(ids).labels["counts"].sum()) for ids in (IDS, IDS + 2, IDS + 4)]
    assert last[:3].tolist() == [pytest.approx(sum(loss), rel=1e-6), sum(weights), 3.0] and not last[3:].any()
    unweighted = Stack("images")
    unweighted.run()
    assert not unweighted.buffers[-1].flat[-63:].any()


@pytest.mark.compiler
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", MODELS)
def test_compiled_layers_are_right_and_take_one_form(name: str) -> None:
    stack = Stack(name, CompiledPrograms, threads=1, place=CPU, backend="aot_eager")
    number = stack.programs.num_compiled
    whole = stack.run()
    for one, other in zip(whole, Stack(name).run(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    stack.programs.set_split_layers(range(len(stack.buffers)))
    assert all(map(torch.equal, stack.run(parts=True), whole))
    stack.programs.check_form(stack.batch(IDS))
    assert stack.programs.num_compiled == number, "nothing is compiled late"
    longer, fewer = stack.batch(np.array([0, 1, 2])), with_leaves(stack.batch(IDS), [torch.ones(1)] * 3)
    with pytest.raises(DataError, match="the first one had"):
        stack.programs.check_form(fewer)
    with pytest.raises(DataError, match="the first one had"):
        stack.programs.check_form(longer)
    Stack(name).programs.check_form(longer)


@pytest.mark.parametrize("name", MODELS)
def test_an_emulated_device_hands_on_the_same_forms(name: str) -> None:
    stack = Stack(name, EmulatedPrograms, device=EmulatedDevice(0.0, 0.0))
    one, other = stack.run(), stack.run(parts=True)
    assert all(map(torch.equal, one, other)) and any(value.any() for value in one[1:])


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_a_weight_that_cannot_be_divided_by_is_refused_before_the_first_step(weight: float) -> None:
    class Odd(Classifier):
        def loss(self, output: Tensor, batch: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().loss(output, batch), weight

    with pytest.raises(ModelError, match=r"the weight of loss\(\) is (nan|inf|-1)"):
        checked(Odd(3), Images())


def test_a_weight_has_to_be_a_sum_over_samples() -> None:
    class Mean(Tagger):
        def loss(self, output: Tensor, batch: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            total, weight = super().loss(output, batch)
            return total, weight / len(batch.x)

    with pytest.raises(ModelError, match=r"the weight of loss\(\) of 2 samples is .*, and of their two halves"):
        checked(Mean(), Padded())


def test_a_dataset_that_changes_is_refused_and_its_samples_are_told() -> None:
    with pytest.raises(DataError, match="are not the same when they are read again: batch\\[0\\] differs"):
        checked(Classifier(3), Restless())
    samples = [checked(Classifier(3), images) for images in (Images(), Images(), Images(split="validation"))]
    assert samples[0] == samples[1] != samples[2]


class Measured(Images):
    """Images of which those with even numbers lack something: in a tensor of the batch all, or one value of each."""

    def __init__(self, lacking: int, value: float) -> None:
        super().__init__()
        self._lacking, self._value = lacking, value

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        given = [np.array(image, dtype=np.float32), np.float32(label)]
        if index % 2 == 0:
            given[self._lacking] = given[self._lacking] + np.float32(self._value)
        return given[0], given[1]


class Fitted(Classifier):
    """Fits a number; its inputs may be scaled by a deviation that is 0."""

    def __init__(self, divisor: float = 1.0) -> None:
        super().__init__(3)
        self._divisor = divisor

    def inputs(self, batch: Any) -> Any:
        return batch[0] / self._divisor

    def loss(self, output: Tensor, batch: Any) -> Any:
        return (output.float().sum(-1) - batch[1]).square().sum()

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("lacking", "value", "told"),
    [
        (0, np.nan, r"batch\[0\] has NaN, of samples? \d+(, \d+)*: (the output of )?layer "),
        (0, np.inf, r"batch\[0\] has infinities, of samples? \d+(, \d+)*: (the output of )?layer "),
        (1, np.nan, r"batch\[1\] has NaN, of samples? \d+(, \d+)*: the loss after layer "),
    ],
)
def test_data_that_are_not_finite_are_told_of_with_their_samples_and_not_of_a_layer(
    lacking: int, value: float, told: str
) -> None:
    checked(Fitted(), Measured(lacking, 0.0))
    with pytest.raises(DataError, match=told) as caught:
        checked(Fitted(), Measured(lacking, value))
    numbers = caught.value.what.partition(" of sample")[2].partition(":")[0].removeprefix("s").split(", ")
    assert all(int(number) % 2 == 0 for number in numbers) and caught.value.where == f"batch[{lacking}]"


def test_inputs_that_are_not_finite_are_told_of_where_the_data_are() -> None:
    with pytest.raises(ModelError, match=r"inputs\(batch\) returns numbers that are not finite") as caught:
        checked(Fitted(divisor=0.0), Measured(0, 0.0))
    assert caught.value.where == "inputs(batch)"


def checked(model: LayeredModel, dataset: Any) -> bytes:
    """The digest of the samples of a model and its data that have passed the check."""
    job = Job(
        seed=3,
        steps=2,
        global_batch=4,
        microbatch_size=2,
        seq_len=1,
        dtype="fp32",
        optimizer=AdamW(),
        learning_rate=LearningRate(1e-3, "constant", 0, 2, 0.1),
        is_tokens=False,
    )
    found = describe(model, page_size=64)
    programs = StagePrograms(**program_args(job, found.layout, Objective.of(model)))

    def make(layers: Iterable[int]) -> dict[int, nn.Module]:
        return {number: copy.deepcopy(model.layers[number]) for number in layers}

    one = LocalModel(found.layout, found.inits, make, model.layers.__getitem__, programs, inputs=model.inputs)
    return check_model(one, job, GenericDataset(dataset, 0, 12, "mine"), CPU).samples


def test_scores_have_one_form() -> None:
    stack = Stack("sentences")
    stack.run()
    form = stack.programs.scored
    assert form is not None and form == ScoreForm(("accuracy", "length"), (True, True, False))
    assert form.rows([1.0, 2.0, 3.0, 4.0, 5.0]) == [(1.0, 2.0), (3.0, 4.0), (5.0, None)]
    with pytest.raises(ModelError, match="the metrics of all micro-batches have the same names"):
        stack.programs._checked_scores(torch.ones(()), {"accuracy": 1.0})
    with pytest.raises(ModelError, match="with a weight for one micro-batch, and without for another"):
        stack.programs._check_weighted(False)


@pytest.mark.parametrize(
    "metrics",
    [
        [("accuracy", 1.0)],
        {"accuracy": torch.ones(2)},
        {"accuracy": (1.0, 2.0, 3.0)},
        {"accuracy": "high"},
        {"loss": 1.0},
        {3: 1.0},
        {"": 1.0},
        {str(number): 1.0 for number in range(101)},
    ],
)
def test_bad_metrics(metrics: Any) -> None:
    with pytest.raises(ModelError, match=r"metrics\(output, batch\) returned"):
        scores_of(torch.ones(()), metrics)


def test_losses_and_their_weights() -> None:
    loss, weight = checked_loss((torch.ones((), dtype=torch.float64), 3))
    assert loss.dtype == weight.dtype == torch.float32 and (float(loss), float(weight)) == (1.0, 3.0)
    graph = torch.ones((), requires_grad=True)
    _, weight = checked_loss((graph, graph * 2))
    assert not weight.requires_grad
    for bad in (
        (1.0, 2.0),
        (torch.ones(2), 1.0),
        (torch.ones(()), torch.ones(2)),
        (torch.ones(()),),
        torch.ones(1),
        1.0,
    ):
        with pytest.raises(ModelError, match="not one number"):
            checked_loss(bad)


def test_a_number_that_no_float_can_hold_is_refused() -> None:
    with pytest.raises(ModelError, match="larger than any float"):
        checked_loss((torch.ones(()), 2**2000))
    with pytest.raises(ModelError, match="larger than any float"):
        scores_of(torch.ones(()), {"count": 2**2000})


def test_inputs_are_in_the_compute_dtype_and_batches_as_they_are() -> None:
    batch = Stack("sentences").batch(IDS)
    assert [leaf.dtype for _, leaf in leaves_of(batch)] == [torch.float64, torch.int64, torch.bool]
    x = first_input(Tagger().inputs, batch, torch.bfloat16)
    assert [one.dtype for one in tensors_of(x)] == [torch.bfloat16, torch.bool]
    names = [name for name, _ in leaves_of(batch)]
    assert names == ["batch.x", 'batch.labels["of"]', 'batch.labels["counts"]']
    other = with_leaves(batch, [leaf + 1 for _, leaf in leaves_of(batch)])
    assert type(other) is type(batch) and torch.equal(other.labels["of"], batch.labels["of"] + 1)
    for bad in ({"x": {"deep": torch.ones(2)}}, (("a", torch.ones(1)),), (3.0, torch.ones(1))):
        with pytest.raises(ModelError, match="which the first layer cannot be given"):
            first_input(LayeredModel({"one": nn.Linear(1, 1)}).inputs, bad, torch.float32)


def test_inputs_that_call_exit_fail_as_others_that_raise() -> None:
    with pytest.raises(RuntimeError, match=r"sys\.exit\(3\) was called") as caught:
        first_input(lambda batch: sys.exit(3), {"image": torch.zeros(2, 4)}, torch.float32)
    assert any("in inputs(batch), of " in note for note in vars(caught.value)["__notes__"])
