"""The plan of a run, made from its settings: model, layout, placement, job. Controller and workers make the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from elaswave_spmd.conf.schema import EMULATED, Settings
from elaswave_spmd.data import PreparedData, TokenDataset, open_split
from elaswave_spmd.determinism import sample_ids
from elaswave_spmd.errors import ConfigError, DataError, ModelError, SpecError
from elaswave_spmd.mesh import ISLAND_AXES, Mesh, Topology
from elaswave_spmd.models import (
    LayeredModel,
    Objective,
    attributes_given,
    build_model,
    constructing,
    freeze_parameters,
    other_loss,
)
from elaswave_spmd.recovery.early_stop import EarlyStop
from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.runtime.devices.selection import kind_of
from elaswave_spmd.runtime.devices.xla_island import XlaIsland
from elaswave_spmd.scheduling.cost_model import CostModel, LayerCost
from elaswave_spmd.scheduling.placement import Placement, place
from elaswave_spmd.sharding import check_spec, specs_of
from elaswave_spmd.sharding.layout import LayerLayout, ModelLayout
from elaswave_spmd.sharding.replica_placement import least_pages, place_replicas
from elaswave_spmd.weights.given import GivenWeights, check_weights
from elaswave_spmd.worker.channel import Channel
from elaswave_spmd.worker.context import Datasets, LocalModel, WorkerContext, WorkerHooks
from elaswave_spmd.worker.initial_values import MadeValues, Row, digests
from elaswave_spmd.worker.inputs import Example, Inputs, first_input, refuse_other_form, to_batch
from elaswave_spmd.worker.learning_rate import LearningRate
from elaswave_spmd.worker.loading import BackgroundLoader
from elaswave_spmd.worker.model_layout import ModelDescription, describe, has_constants
from elaswave_spmd.worker.optimizers import make_optimizer
from elaswave_spmd.worker.programs.eager import Batches, StagePrograms, program_args
from elaswave_spmd.worker.programs.emulated import EmulatedDevice, EmulatedPrograms
from elaswave_spmd.worker.programs.inductor import CompiledPrograms
from elaswave_spmd.worker.programs.xla import XlaPrograms
from elaswave_spmd.worker.spec import Job

_COMPARED = 4
"""Micro-batches of which the form is known before layers are compiled for it."""


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
    with torch.device(device), constructing(settings.seed, layers):
        model = build_model(m.target, sizes, m.args, attributes)
    if not vocab_size and type(model).loss is LayeredModel.loss:
        raise other_loss(type(model).__name__)
    freeze_parameters(model, settings.optim.freeze_patterns)
    return model


def _model_of(plan: RunPlan, *, device: str = "meta", layers: Collection[str] | None = None) -> LayeredModel:
    """The model of a run, as `make_model` makes it."""
    data = plan.data
    return make_model(plan.settings, data.vocab_size, attributes=data.attributes, device=device, layers=layers)


def plan_run(
    settings: Settings, data: PreparedData, topology: Topology | None = None, costs: CostModel | None = None
) -> RunPlan:
    """Plan a run.

    Args:
        topology: the failure domains of the workers; None: all on one host.
        costs: of an earlier run, by which layers are balanced; None: by their numbers of elements.

    Raises:
        UserError: a model, mesh, spec or size that contradicts another.
    """
    job = _job(settings, data)
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
    if settings.elastic.enabled and settings.mirror.count:
        sharding = placement.state_sharding(settings.mirror.count, settings.mirror.scatter)
        replicas = place_replicas(layout, sharding, least_pages=least_pages(layout))
        placement = replace(placement, replicas=replicas)
    if settings.runtime.device == EMULATED:
        settings.emulated.check_layers(len(layout.layers))
    costs = (costs or estimates).with_links(settings.schedule.latency, settings.schedule.bandwidth)
    # What the model is not given, such as a dataset's counter, is no part of what a run is.
    m, sizes = settings.model, settings.model.sizes(settings.train.seq_len, data.vocab_size)
    data = replace(data, attributes=attributes_given(m.target, sizes, m.args, data.attributes))
    return RunPlan(settings, data, job, description, placement, costs)


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
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"cannot read {where} ({reason})", where=where, fix="name the costs.json of a run") from None
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


def _job(settings: Settings, data: PreparedData) -> Job:
    t, o = settings.train, settings.optim
    if data.num_train_samples < t.global_batch:
        raise DataError(
            f"the training split has {data.num_train_samples} samples"
            + (f" of {t.seq_len} tokens" if data.is_tokens else "")
            + f", fewer than train.global_batch={t.global_batch}",
            rule="the training split holds at least one global batch",
            where=f"data {data.corpus}",
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
    """How many micro-batches a validation has; 0 where the held-out split has less than one: the run does not validate.

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
                where=f"data {data.corpus}",
                fix=f"more data, a larger data.validation_fraction, or no {name}",
            )
    return number


def make_context(
    plan: RunPlan,
    rank: int,
    device: Device,
    channel: Channel,
    model: LocalModel,
    data: Datasets,
    hooks: WorkerHooks,
) -> WorkerContext:
    """Make the value that the parts of one worker share. Only the layers of its own stage will get memory.

    Args:
        device: that it computes with.
        channel: to the other workers and the controller.
        model: as `make_local_model` makes it.
        data: as `open_datasets` opens them.
        hooks: what is optional around the worker.
    """
    return WorkerContext(rank, plan.job, plan.placement, model, data, device, channel, hooks)


def open_datasets(plan: RunPlan) -> Datasets:
    """Open the splits that a worker reads."""
    train = open_split(plan.data, "train")
    validation = open_split(plan.data, "validation") if plan.job.validates else None
    if isinstance(train, TokenDataset):
        return Datasets(train, validation)
    loader = BackgroundLoader(train, validation, plan.settings.data.ahead)
    return Datasets(loader.train, loader.validation, loader)


def make_local_model(plan: RunPlan, programs: StagePrograms) -> LocalModel:
    """Make the model as a worker runs it, with programs as `make_programs` makes them. No layer has memory yet."""
    made = MadeValues(partial(_make_for_real, plan)) if plan.description.has_own_values else None
    layers, given = _Layers(plan), None
    if begins_with_given_weights(plan.settings):
        given = GivenWeights(plan.settings.model, _model_of(plan))
    layout, inits = plan.description.layout, plan.description.inits
    return LocalModel(layout, inits, layers, layers.prototype, programs, made, given, layers.inputs)


def check_given_weights(plan: RunPlan) -> None:
    """Check that the weights that the run begins with, if there are any, fit its model.

    Raises:
        ConfigError, CheckpointError: they do not; as for `check_weights`.
    """
    if begins_with_given_weights(plan.settings):
        check_weights(plan.settings.model, _model_of(plan))


def given_digests(plan: RunPlan) -> tuple[Row, ...]:
    """Digests of all weights that the run begins with, where workers on other machines read files of their own."""
    if not (begins_with_given_weights(plan.settings) and plan.settings.runtime.has_agents):
        return ()
    given = GivenWeights(plan.settings.model, _model_of(plan))
    found = tuple(given.digests(layer.name for layer in plan.description.layout.layers))
    given.close()
    return found


def begins_with_given_weights(settings: Settings) -> bool:
    """True if a run begins with the weights of `model.init_from`. One that is resumed goes on from its checkpoint."""
    return settings.model.init_from is not None and settings.train.resume is None


def _make_for_real(plan: RunPlan, layers: Collection[str]) -> LayeredModel:
    """The model with memory: all of it, but of the layers that it gives as factories these alone."""
    return _model_of(plan, device="cpu", layers=layers)


def digests_of(plan: RunPlan, rank: int, model: LocalModel, *, begins: bool) -> tuple[Row, ...]:
    """Digests of what constructors made for a worker, to be compared with those of the other workers.

    A worker of the first mesh takes the layers that it is to compute or to hold. One that comes later takes those that
    every worker makes, which are not given as factories.

    Args:
        begins: the run begins with initial values, and not with a checkpoint.
    """
    layers, placement = plan.description.layout.layers, plan.placement
    if rank in placement.mesh:
        replicas = placement.replica_map(plan.description.layout)
        computed = set(placement.layers_of_stage(placement.mesh.stage_of(rank)))
        held = {layer for layer, ranges in replicas.items() if any(rank in pages.replicas for pages in ranges)}
    else:
        factories = _model_of(plan).factories
        computed, held = {layer.index for layer in layers if layer.name not in factories}, set()
    modules = ((layers[number].name, module) for number, module in model.make_modules(sorted(computed)).items())
    of_values = [layers[number].name for number in sorted(held)] if begins else ()
    if model.given is None:
        return digests(modules, model.made, of_values)
    # On one machine all workers read the same files.
    given = model.given.digests(of_values) if plan.settings.runtime.has_agents else ()
    return (*digests(modules), *given)


def _layer_bytes(job: Job, layer: LayerLayout) -> tuple[int, int, int]:
    """Bytes of a layer's state (fp32 parameters and the optimizer's), of its compute buffer, and of one gradient."""
    copies = 1 + len(job.optimizer.state_names)
    return (
        4 * layer.state_elements(copies),
        job.torch_dtype.itemsize * layer.num_value_elements,
        4 * layer.num_gradient_elements,
    )


def make_programs(
    plan: RunPlan,
    rank: int,
    place: torch.device,
    frequency: Callable[[], float],
    compiled: Callable[[str], None],
    train: Batches,
) -> StagePrograms:
    """Make the programs that run the layers of one worker.

    Where layers are compiled, all layers of the model are, so that a worker is ready for any stage.

    Args:
        place: where parameters, inputs and outputs lie.
        frequency: of an emulated device, as a fraction of its highest; asked before every program.
        compiled: called with the name of each layer when its programs are there.
        train: the training split, of which the first micro-batch shows the form of all.
    """
    settings, layout = plan.settings, plan.description.layout
    model = _model_of(plan)  # for its loss and its specs; modules of layers come later
    args = program_args(plan.job, layout, Objective.of(model))
    if settings.runtime.device != EMULATED:
        dtype = plan.job.torch_dtype
        if settings.runtime.compile:
            programs = CompiledPrograms(**args, threads=settings.runtime.threads_per_worker, place=place)
            modules = _Layers(plan)(range(len(layout.layers)))
            programs.compile([*modules.values()], layout, _example(plan, model, train, place), dtype, compiled)
            return programs
        if not kind_of(settings).capabilities.compiles:
            return StagePrograms(**args)
        island = XlaIsland({axis: settings.mesh.shape.axis_size(axis) for axis in ISLAND_AXES})
        programs = XlaPrograms(**args, island=island, specs=specs_of(model))
        programs.compile(model.layers, layout, _example(plan, model, train, torch.device("cpu")), dtype, compiled)
        return programs
    e = settings.emulated
    speed: Callable[[int], float] = lambda step: e.speed(rank, step) * frequency()  # noqa: E731
    return EmulatedPrograms(
        **args, device=EmulatedDevice(e.forward_ms / 1e3, e.backward_ms / 1e3, e.layer_costs, speed, e.weight_share)
    )


def _example(plan: RunPlan, model: LayeredModel, train: Batches, place: torch.device) -> Example:
    """A micro-batch of the form that all have: the first of the first step, or zeros in place of tokens.

    Raises:
        DataError: the next micro-batches have another form. That is seen before minutes of compiling.
    """
    job = plan.job
    if job.is_tokens:
        return Example.of_tokens((job.microbatch_size, job.seq_len), place)
    ids = sample_ids(job.seed, 1, job.global_batch, len(train), np.arange(job.global_batch))
    size = job.microbatch_size
    first, *others = (
        to_batch(train, ids[start : start + size], place, job.seed, 1)
        for start in range(0, min(job.global_batch, _COMPARED * size), size)
    )
    example = Example(first_input(model.inputs, first, job.torch_dtype), first, size)
    for other in others:
        refuse_other_form(example, other)
    return example


def _without_memory(module: nn.Module) -> nn.Module:
    """A layer whose parameters have lost their memory. One that has several names stays one."""
    empty: dict[int, nn.Parameter] = {}  # id of a parameter, which `named` keeps alive -> the one in its place
    named = [(one, name, p) for one in module.modules() for name, p in one.named_parameters(recurse=False)]
    for one, name, parameter in named:
        if id(parameter) not in empty:
            empty[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        setattr(one, name, empty[id(parameter)])
    return module


class _Layers:
    """Makes modules of layers: copies of a model that is made once, without memory for its parameters.

    Making the model takes tens of milliseconds, and all workers would wait for it whenever layers move.
    """

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        model = _model_of(plan)
        self._modules = model.layers
        self._names = model.layer_names
        self.inputs: Inputs = model.inputs
        # Constants exist only where a layer is made for real, which is done when the first such layer is asked for.
        self._lacking = {number for number, module in enumerate(self._modules) if has_constants(module)}

    def __call__(self, layers: Iterable[int]) -> Mapping[int, nn.Module]:
        wanted = sorted(set(layers))
        if lacking := self._lacking.intersection(wanted):
            self._make_constants(lacking)
        return {number: self._copy(number) for number in wanted}

    def prototype(self, layer: int) -> nn.Module:
        """The layer without memory for its parameters, only to be read; constants may have values or not."""
        return self._modules[layer]

    def _copy(self, number: int) -> nn.Module:
        try:
            return copy.deepcopy(self._modules[number])
        except Exception as error:
            raise ModelError(
                f"layer {self._names[number]} cannot be copied ({type(error).__name__}: {error})",
                rule="a worker makes copies of layers, when it starts and when layers move",
                where=f"layer {self._names[number]}",
                fix="keep no locks, files, generators or results of computations in a layer, but make them in forward; "
                "torch.nn.utils.parametrizations.weight_norm in place of torch.nn.utils.weight_norm",
            ) from error

    def _make_constants(self, wanted: Collection[int]) -> None:
        model = _make_for_real(self._plan, [self._names[number] for number in wanted])
        built = {n for n in self._lacking if n in wanted or self._names[n] not in model.factories}
        for number in built:
            self._modules[number] = _without_memory(model.layers[number])
        self._lacking -= built
