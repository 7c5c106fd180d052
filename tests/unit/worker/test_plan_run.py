"""The plan of a run: what is said of workers without a micro-batch and of the warm-up; its profile; other models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaswave_spmd.conf.compose import settings_from
from elaswave_spmd.data import PreparedData
from elaswave_spmd.errors import ConfigError, ModelError
from elaswave_spmd.run_dir.manifest import layout_summary
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.worker.plan_run import RunPlan, plan_run, read_profile, refuse_other_layout

SMALL = ("model=mlp_tiny", "train.seq_len=8", "model.layers=2", "model.d_model=8", "page.size=64")


def planned(*words: str, costs: CostModel | None = None) -> RunPlan:
    settings = settings_from([*SMALL, *words])
    data = PreparedData("text", "", 1, "bytes", 11, 8, 100, 10, token_file="tokens", dtype="uint8", num_tokens=900)
    return plan_run(settings, data, costs=costs)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("mesh=dp3", "train.global_batch=8", "train.microbatch_size=4"),
            "worker 2 has no micro-batch to compute: a step has 2 (train.global_batch=8, train.microbatch_size=4), one "
            "worker of a stage computes each, and a stage has 3 workers; train.microbatch_size=2 (other bits), "
            "train.global_batch=12 or at most 2 in a stage leave none without",
        ),
        (
            ("mesh=dp3", "train.global_batch=2", "train.microbatch_size=2"),
            "workers 1, 2 have no micro-batch to compute: a step has 1 (train.global_batch=2, "
            "train.microbatch_size=2), "
            "one worker of a stage computes each, and a stage has 3 workers; train.global_batch=6 or at most 1 in a "
            "stage leave none without",
        ),
        (("mesh=dp3", "train.global_batch=12", "train.microbatch_size=4"), ""),
        (("mesh=single", "train.global_batch=4", "train.microbatch_size=4"), ""),
    ],
)
def test_workers_that_have_no_micro_batch_are_told_with_what_gives_them_one(words: tuple[str, ...], told: str) -> None:
    assert planned(*words).without_microbatches() == told


def test_workers_without_a_micro_batch_are_those_of_the_stages_that_have_too_many() -> None:
    few = ("train.global_batch=8", "train.microbatch_size=4")
    told = planned("mesh.stages=[3,2]", *few).without_microbatches()
    assert told.startswith("worker 2 has no micro-batch to compute: a step has 2 ")
    assert planned("mesh=dp16", *few).without_microbatches().startswith("14 workers have no micro-batch")
    assert planned("mesh=dp3_pp2", *few).without_microbatches().startswith("workers 2, 5 have no micro-batch")


@pytest.mark.parametrize("way", ["train.microbatch_size=2", "train.global_batch=12", "mesh=dp2"])
def test_what_gives_each_worker_a_micro_batch_does(way: str) -> None:
    plan = planned("mesh=dp3", "train.global_batch=8", "train.microbatch_size=4", way)
    assert plan.without_microbatches() == "" and all(map(all, plan.placement.microbatch_counts))


def test_a_profile_is_a_file() -> None:
    with pytest.raises(ConfigError) as caught:
        read_profile("/dev/null")  # as /dev/zero, which has no end
    assert caught.value.what == "cannot read schedule.profile=/dev/null (it is no regular file)"
    assert "10 steps or more" in caught.value.fix and "elastic.enabled=false" in caught.value.fix


def test_a_profile_gives_times_and_what_micro_batches_keep_and_the_run_its_own_sizes() -> None:
    """The run that was measured had another optimizer, with less state."""
    other = planned("optim=sgd", "optim.momentum=0").costs
    measured = replace(other, layers=tuple(replace(layer, forward_s=0.5, activation_bytes=7) for layer in other.layers))
    plan = planned("optim=adamw", "optim.ema=0.9", costs=measured)
    assert [layer.forward_s for layer in plan.costs.layers] == [0.5] * len(measured.layers)
    assert [layer.activation_bytes for layer in plan.costs.layers] == [7] * len(measured.layers)
    for number, (layer, before) in enumerate(zip(plan.costs.layers, measured.layers, strict=True)):
        assert (layer.state_bytes, layer.value_bytes, layer.gradient_bytes) == plan.bytes_of(number)
        assert layer.state_bytes == 2 * before.state_bytes > 0, "parameters, two moments and an average; one moment"


def test_a_run_that_ends_within_its_warm_up_is_told_so() -> None:
    warm = ("optim.warmup_steps=20", "optim.lr=0.01")
    assert planned("train.steps=5", *warm).short_of_peak() == (
        "the learning rate does not come to optim.lr=0.01: it rises for optim.warmup_steps=20 steps, and the run has "
        "train.steps=5, the last with 0.0025"
    )
    assert planned("train.steps=20", *warm).short_of_peak() == ""
    assert planned("train.steps=1", "optim.warmup_steps=0").short_of_peak() == ""


@pytest.mark.parametrize(("steps", "is_told"), [(50, True), (200, True), (201, False)])
def test_a_run_that_no_validation_can_end_early_is_told_so(steps: int, is_told: bool) -> None:
    words = f"train.steps={steps}", "train.validate_every=100"
    told = planned(*words, "train.stop_patience=2").without_early_stop()
    assert bool(told) is is_told and planned(*words).without_early_stop() == ""
    assert not told or told.startswith("train.stop_patience=2 ends nothing: ")


def test_a_model_has_a_row_for_each_token_of_its_data() -> None:
    with pytest.raises(ModelError) as caught:
        planned("+model.args.vocab_size=10")
    assert caught.value.what == "model.args.vocab_size=10 is less than the 11 tokens of data=text"
    for rows in (11, 50):
        assert planned(f"+model.args.vocab_size={rows}").job.is_tokens


def test_a_worker_with_another_model_than_the_controller_has_planned_with_is_refused() -> None:
    """Its file was edited after the process of a notebook had imported it."""
    before, after = planned(), planned("model.d_model=12")
    refuse_other_layout(before, layout_summary(before.description.layout), 3)
    with pytest.raises(ModelError) as caught:
        refuse_other_layout(after, layout_summary(before.description.layout), 3)
    assert caught.value.what.startswith("worker 3 has another model than the controller: 4 layers, ")
    assert "; the controller has 4 layers, " in caught.value.what and "importlib.reload" in caught.value.fix
    numbers = [plan.description.layout.num_parameters for plan in (before, after)]
    assert numbers[0] != numbers[1] and all(f"{number:,} parameters" in caught.value.what for number in numbers)


def test_a_layout_of_as_many_parameters_with_other_names_is_another_one() -> None:
    layout = planned().description.layout
    renamed = replace(layout.layers[0], name="other")
    other = replace(layout, layers=(renamed, *layout.layers[1:]))
    assert other.num_parameters == layout.num_parameters and layout_summary(other) != layout_summary(layout)
