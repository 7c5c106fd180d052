"""The plan of a run, made from its settings: model, layout, placement, job. Controller and workers make the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.given_files import text_of
from elaswave_spmd.conf.schema import EMULATED, GROUP, Settings, TrainSettings
from elaswave_spmd.data import PreparedData
from elaswave_spmd.errors import ConfigError, DataError, ModelError, SpecError
from elaswave_spmd.mesh import ISLAND_AXES, Mesh, Topology
from elaswave_spmd.mesh.mesh import named_workers
from elaswave_spmd.models import (
    LayeredModel,
    attributes_given,
    build_model,
    constructing,
    freeze_parameters,
    import_model,
    other_loss,
)
from elaswave_spmd.recovery.early_stop import EarlyStop
from elaswave_spmd.run_dir.manifest import layout_summary
from elaswave_spmd.runtime.devices.selection import kind_of
from elaswave_spmd.scheduling.cost_model import PROFILE_FIX, CostModel, LayerCost
from elaswave_spmd.scheduling.placement import Placement, place
from elaswave_spmd.sharding import check_spec, specs_of
from elaswave_spmd.sharding.layout import LayerLayout, ModelLayout
from elaswave_spmd.weights.given import GivenWeights, check_weights
from elaswave_spmd.worker.initial_values import Row
from elaswave_spmd.worker.learning_rate import LearningRate
from elaswave_spmd.worker.model_layout import ModelDescription, describe, has_constants
from elaswave_spmd.worker.optimizers import make_optimizer
from elaswave_spmd.worker.spec import Job


@dataclass(frozen=True)
class RunPlan:
    """Everything that is decided before the first worker starts.

    Args:
        settings: of the run.
        data: the prepared data.
        job: the arithmetic.
        description: layout and initial values of the model.
        placement: the first configuration of the mesh.
        costs: of layers and links: measured in an earlier run, or estimates.
    """

    settings: Settings
    data: PreparedData
    job: Job
    description: ModelDescription
    placement: Placement
    costs: CostModel

    def bytes_of(self, layer: int) -> tuple[int, int, int]:
        """Bytes of the state of a layer, of its compute buffer, and of one gradient."""
        return _layer_bytes(self.job, self.description.layout.layers[layer])

    def without_microbatches(self) -> str:
        """A line about the workers that have no micro-batch, since a stage has more workers than a step has; else "".

        Such a worker keeps its share of the state and takes part in sums and votes, as after a loss.
        """
        number, train = self.job.num_microbatches, self.settings.train
        stages, counts = self.placement.mesh.stages, self.placement.microbatch_counts
        most = max(map(len, stages))
        pairs = (zip(*of_stage, strict=True) for of_stage in zip(stages, counts, strict=True))
        ranks = sorted(rank for stage in pairs for rank, count in stage if not count)
        if most <= number or not ranks:
            return ""
        batch, size = train.global_batch, train.microbatch_size
        smaller = [n for n in range(1, batch // most + 1) if batch % n == 0]
        ways = [f"train.microbatch_size={smaller[-1]} (other bits), "] if smaller else []
        ways.append(f"train.global_batch={most * size} or at most {number} in a stage")
        return (
            f"{named_workers(ranks) if len(ranks) <= 8 else f'{len(ranks)} workers'} "
            f"{'has' if len(ranks) == 1 else 'have'} no micro-batch to compute: a step has {number} "
            f"(train.global_batch={batch}, train.microbatch_size={size}), one worker of a stage computes each, and a "
            f"stage has {most} workers; {''.join(ways)} leave none without"
        )

    def short_of_peak(self) -> str:
        """A line about a run that ends within the warm-up of its learning rate; else "".

        That is no mistake, as in a first look at whether a model runs at all, but seldom what somebody wants to train.
        """
        rate, steps = self.job.learning_rate, self.job.steps
        if steps >= rate.warmup_steps:
            return ""
        return (
            f"the learning rate does not come to optim.lr={rate.peak:g}: it rises for "
            f"optim.warmup_steps={rate.warmup_steps} steps, and the run has train.steps={steps}, the last with "
            f"{rate.at(steps):.3g}"
        )

    def without_validation(self) -> str:
        """A line about a run without a validation, though something in its settings is about them; else ""."""
        train, unnamed = self.settings.train, TrainSettings()
        if train.validate_every and not self.job.validates:
            held_out = self.data.num_validation_samples
            return (
                f"there is no validation: the held-out split has {held_out} samples, fewer than "
                f"train.microbatch_size={train.microbatch_size} (a larger data.validation_fraction, or "
                "train.validate_every=0)"
            )
        if train.validate_every or train.validate_microbatches == unnamed.validate_microbatches:
            return ""
        return (
            f"there is no validation: train.validate_microbatches={train.validate_microbatches} says how long one is, "
            f"and train.validate_every=0 that there is none (leave one of them out, or "
            f"train.validate_every={unnamed.validate_every})"
        )

    def without_early_stop(self) -> str:
        """A line about a run that no validation can end early, though it is to end so; else ""."""
        train, steps = self.settings.train, self.job.steps
        if not train.stop_patience or train.stop_patience * train.validate_every < steps:
            return ""
        return (
            f"train.stop_patience={train.stop_patience} ends nothing: so many validations, one in "
            f"train.validate_every={train.validate_every} steps, are not over before the last of train.steps={steps}"
        )

    def without_checkpoints(self) -> str:
        """A line about a run that ends before the first of the checkpoints that are asked for; else ""."""
        every, steps = self.settings.checkpoint.every, self.job.steps
        if not 0 < steps <= every or (self.job.saves_validated and self.job.validate_every < steps):
            return ""
        return (
            f"no checkpoint is made: checkpoint.every={every}, and the run has train.steps={steps}, whose last one has "
            "the weights as its result and no checkpoint, so the run could not be made longer from there"
        )


def make_model(
    settings: Settings,
    vocab_size: int,
    *,
    attributes: Mapping[str, object] | None = None,
    device: str = "meta",
    layers: Collection[str] | None = None,
) -> LayeredModel:
    """Build the model that the settings name. On the meta device it has shapes and no memory.

    Args:
        vocab_size: of the data; 0: its samples are no tokens.
        attributes: of the dataset (`PreparedData.attributes`), for parameters of the constructor that have no other
            value.
        layers: the layers that get memory on another device, of those that the model gives as factories; None: all.
    """
    m, sizes = settings.model, settings.model.sizes(settings.train.seq_len, vocab_size)
    import_model(m.target)
    with torch.device(device), constructing(settings.seed, layers):
        model = build_model(m.target, sizes, m.args, attributes, m.named)
    if not vocab_size and type(model).loss is LayeredModel.loss:
        raise other_loss(type(model).__name__)
    freeze_parameters(model, settings.optim.freeze_patterns)
    return model


def model_of(plan: RunPlan, *, device: str = "meta", layers: Collection[str] | None = None) -> LayeredModel:
    """The model of a run, as `make_model` makes it."""
    data = plan.data
    return make_model(plan.settings, data.vocab_size, attributes=data.attributes, device=device, layers=layers)


def plan_run(
    settings: Settings, data: PreparedData, topology: Topology | None = None, costs: CostModel | None = None
) -> RunPlan:
    """Plan a run.

    Args:
        topology: the failure domains of the workers; None: all on one host.
        costs: of an earlier run, by which layers are balanced; None: by their numbers of elements. The bytes of state,
            parameters and gradients are always those of this run.

    Raises:
        UserError: a model, mesh, spec or size that contradicts another.
    """
    job = _job(settings, data)
    _check_vocabulary(settings, data)
    # On the meta device: the layout needs shapes only. A model of any size is planned on any machine.
    model = make_model(settings, data.vocab_size, attributes=data.attributes)
    shardings = model.shardings.with_zero(settings.sharding.zero_level)
    description = describe(model, page_size=settings.page.size, groups=settings.optim.groups)
    layout = description.layout
    estimates = _unmeasured(job, layout)
    _check_islands(model, settings)
    layer_costs = None  # layers are balanced by their numbers of elements
    if costs is not None:
        costs.check(len(layout.layers), where=f"schedule.profile={settings.schedule.profile}")
        layer_costs = [layer.seconds for layer in costs.layers]
    placement = place(
        Mesh.initial(settings.mesh.shape, topology), layout, shardings, job.num_microbatches, layer_costs=layer_costs
    )
    placement = replace(placement, by_groups=settings.runtime.collectives == GROUP)
    if settings.elastic.enabled and settings.mirror.count:
        placement = placement.with_new_replicas(layout, settings.mirror.count, settings.mirror.scatter)
    if settings.runtime.device == EMULATED:
        settings.emulated.check_layers(len(layout.layers))
    costs = _with_sizes(costs or estimates, estimates)
    costs = costs.with_links(settings.schedule.latency, settings.schedule.bandwidth)
    # What the model is not given, such as a dataset's counter, is no part of what a run is.
    m, sizes = settings.model, settings.model.sizes(settings.train.seq_len, data.vocab_size)
    data = replace(data, attributes=attributes_given(m.target, sizes, m.args, data.attributes))
    return RunPlan(settings, data, job, description, placement, costs)


def _check_vocabulary(settings: Settings, data: PreparedData) -> None:
    """Refuse a vocabulary of the model that is smaller than that of its data: a later step would meet such a token.

    Raises:
        ModelError: it is.
    """
    rows = settings.model.args.get("vocab_size")
    if data.is_tokens and isinstance(rows, int) and rows < data.vocab_size:
        raise ModelError(
            f"model.args.vocab_size={rows} is less than the {data.vocab_size} tokens of {data.given}",
            rule="every token of the data has a row in the embedding",
            where="model.args.vocab_size",
            fix=f"leave it out, or model.args.vocab_size={data.vocab_size} or more",
        )


def _check_islands(model: LayeredModel, settings: Settings) -> None:
    """Check that the devices inside a worker can run the model.

    Raises:
        SpecError: an axis that does not divide what it splits, or that splits nothing.
        ModelError: constants in layers that are compiled.
    """
    shape, specs = settings.mesh.shape, specs_of(model)
    for name, spec in specs.items():
        check_spec(spec, tuple(model.get_parameter(name).shape), shape, name=name)
    used = {axis for spec in specs.values() for axis in spec.axes}
    for axis in ISLAND_AXES:
        if shape.axis_size(axis) > 1 and axis not in used:
            raise SpecError(
                f"mesh.{axis}={shape.axis_size(axis)} splits no parameter of this model",
                rule=f"mesh axis {axis!r} splits parameters over the devices of a worker",
                where=f"mesh.{axis}={shape.axis_size(axis)}",
                exists=f"axes in this model's specs: {', '.join(sorted(used)) or 'none'}",
                fix=f'leave mesh.{axis} out, or declare it in the model: shard(self.up, weight=P("{axis}", None))',
            )
    if has_constants(model) and kind_of(settings).capabilities.compiles:
        raise ModelError(
            f"layers of model.target={settings.model.target} keep tensors besides parameters",
            rule="a layer that is compiled has parameters only",
            where=f"runtime.device={settings.runtime.device}",
            fix="compute them in forward(), or use runtime.device=cpu",
        )


def read_profile(path: str) -> CostModel:
    """Read the costs in costs.json of an earlier run, without the speeds of its workers.

    Raises:
        UserError: the file cannot be read, or is no profile.
    """
    where = f"schedule.profile={path}"
    try:
        text = text_of(path)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"cannot read {where} ({reason})", where=where, fix=PROFILE_FIX) from None
    return replace(CostModel.from_json(text, where), speeds=())


def _unmeasured(job: Job, layout: ModelLayout) -> CostModel:
    """Costs before anything is measured: a nanosecond for each element of a layer, links of 1 GB/s and 0.1 ms."""
    layers = []
    for layer, work in zip(layout.layers, layout.work, strict=True):
        state, values, gradient = _layer_bytes(job, layer)
        seconds = work * 1e-9
        layers.append(
            LayerCost(layer.name, seconds, 0.0, state_bytes=state, value_bytes=values, gradient_bytes=gradient)
        )
    return CostModel(tuple(layers), 1e9, 1e-4)


def _with_sizes(costs: CostModel, own: CostModel) -> CostModel:
    """Costs with the sizes of this run's layers: a run that was measured may have had another optimizer or dtype."""
    layers = tuple(
        replace(cost, state_bytes=size.state_bytes, value_bytes=size.value_bytes, gradient_bytes=size.gradient_bytes)
        for cost, size in zip(costs.layers, own.layers, strict=True)
    )
    return replace(costs, layers=layers)


def _job(settings: Settings, data: PreparedData) -> Job:
    t, o = settings.train, settings.optim
    if data.num_train_samples < t.global_batch:
        raise DataError(
            f"the training split has {data.num_train_samples} samples"
            + (f" of {t.seq_len} tokens" if data.is_tokens else "")
            + f", fewer than train.global_batch={t.global_batch}",
            rule="the training split holds at least one global batch",
            where=data.given,
            fix="more data, or a smaller train.global_batch" + (" or train.seq_len" if data.is_tokens else ""),
        )
    return Job(
        seed=settings.seed,
        steps=t.steps,
        global_batch=t.global_batch,
        microbatch_size=settings.train.microbatch_size,
        seq_len=t.seq_len if data.is_tokens else 1,
        is_tokens=data.is_tokens,
        dtype=settings.runtime.dtype,
        optimizer=make_optimizer(
            o.name, weight_decay=o.weight_decay, betas=o.betas, eps=o.eps, momentum=o.momentum, ema=o.ema
        ),
        learning_rate=LearningRate.of(o, t.steps),
        clip=o.clip,
        activation_checkpointing=settings.runtime.activation_checkpointing,
        validate_every=t.validate_every,
        num_validation_microbatches=_num_validation_microbatches(settings, data),
        verify_every=settings.mirror.verify_every,
        checkpoint_every=settings.checkpoint.every,
        early_stop=EarlyStop(t.stop_patience, t.stop_min_delta) if t.stop_patience else None,
        saves_validated=settings.checkpoint.keep_best > 0,
        verify_rate=settings.verify.rate,
    )


def _num_validation_microbatches(settings: Settings, data: PreparedData) -> int:
    """The number of micro-batches of a validation; 0 where the held-out split has less than one: there is none.

    Raises:
        DataError: there is none, and a setting goes by validation losses.
    """
    t = settings.train
    number = min(t.validate_microbatches, data.num_validation_samples // t.microbatch_size)
    needs = {"train.stop_patience": t.stop_patience, "checkpoint.keep_best": settings.checkpoint.keep_best}
    for name, value in needs.items():
        if value and not number:
            raise DataError(
                f"the held-out split has {data.num_validation_samples} samples, fewer than "
                f"train.microbatch_size={t.microbatch_size}",
                rule=f"{name}={value} goes by validation losses",
                where=data.given,
                fix=f"more data, a larger data.validation_fraction, or no {name}",
            )
    return number


def refuse_other_layout(plan: RunPlan, planned: str, rank: int) -> None:
    """Refuse the model that this worker has imported if it has another layout than the controller has planned with.

    The two import it by its name, each in a process of its own, so its file may have changed in between. Workers alone
    would agree with each other, and train what the controller cannot read.

    Args:
        planned: the controller's `layout_summary`.
        rank: of this worker.

    Raises:
        ModelError: it has.
    """
    if (found := layout_summary(plan.description.layout)) == planned:
        return
    target = plan.settings.model.target
    raise ModelError(
        f"worker {rank} has another model than the controller: {found}; the controller has {planned}",
        rule="the process that starts a run and all workers have the same model: each imports it by its name, or calls "
        "the function that makes it",
        where=checks.override("model.target", target) if target is not None else "model",
        fix="where a notebook or script had imported the file before it was changed: importlib.reload(module) and the "
        "class of it, or restart the kernel; on several machines: the same files on all; and no size in a model that "
        "depends on the process or the machine",
    )


def check_given_weights(plan: RunPlan) -> None:
    """Check that the weights that the run begins with, if there are any, fit its model.

    Raises:
        ConfigError, CheckpointError: they do not; as for `check_weights`.
    """
    if begins_with_given_weights(plan.settings):
        check_weights(plan.settings.model, model_of(plan), tokenizer=plan.settings.data.tokenizer)


def given_digests(plan: RunPlan) -> tuple[Row, ...]:
    """Digests of all weights that the run begins with, where workers on other machines read files of their own."""
    if not (begins_with_given_weights(plan.settings) and plan.settings.runtime.has_agents):
        return ()
    given = GivenWeights(plan.settings.model, model_of(plan))
    found = tuple(given.digests(layer.name for layer in plan.description.layout.layers))
    given.close()
    return found


def begins_with_given_weights(settings: Settings) -> bool:
    """True if a run begins with the weights of `model.init_from`. One that is resumed goes on from its checkpoint."""
    return settings.model.init_from is not None and settings.train.resume is None


def _layer_bytes(job: Job, layer: LayerLayout) -> tuple[int, int, int]:
    """Bytes of a layer's state (fp32 parameters and the optimizer's), of its compute buffer, and of one gradient."""
    copies = 1 + len(job.optimizer.state_names)
    return (
        4 * layer.state_elements(copies),
        job.torch_dtype.itemsize * layer.num_value_elements,
        4 * layer.num_gradient_elements,
    )
