"""The parts of one worker, made from the plan of its run: datasets, model, programs, and what they share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import numpy as np
import torch
from torch import nn

from elaswave_spmd.conf.schema import EMULATED
from elaswave_spmd.data import TokenDataset, open_split
from elaswave_spmd.determinism import sample_ids
from elaswave_spmd.errors import ModelError
from elaswave_spmd.mesh import ISLAND_AXES
from elaswave_spmd.models import LayeredModel, Objective
from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.runtime.devices.selection import kind_of
from elaswave_spmd.runtime.devices.xla_island import XlaIsland
from elaswave_spmd.sharding import specs_of
from elaswave_spmd.weights.given import GivenWeights
from elaswave_spmd.worker.channel import Channel
from elaswave_spmd.worker.context import Datasets, LocalModel, WorkerContext, WorkerHooks
from elaswave_spmd.worker.initial_values import MadeValues, Row, digests
from elaswave_spmd.worker.inputs import Example, Inputs, first_input, refuse_other_form, to_batch
from elaswave_spmd.worker.loading import BackgroundLoader
from elaswave_spmd.worker.model_check import refusing_mistakes
from elaswave_spmd.worker.model_layout import has_constants
from elaswave_spmd.worker.plan_run import RunPlan, begins_with_given_weights, model_of
from elaswave_spmd.worker.programs.eager import Batches, StagePrograms, program_args
from elaswave_spmd.worker.programs.emulated import EmulatedDevice, EmulatedPrograms
from elaswave_spmd.worker.programs.inductor import CompiledPrograms
from elaswave_spmd.worker.programs.xla import XlaPrograms

_COMPARED = 4
"""The most micro-batches whose form is compared before layers are compiled for that form."""


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
        device: the device that the worker computes with.
        channel: the connection to the other workers and the controller.
        model: the result of `make_local_model`.
        data: the result of `open_datasets`.
        hooks: the optional parts around the worker.
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
    """Make the model as a worker runs it, with the programs of `make_programs`. No layer has memory yet."""
    made = MadeValues(partial(_make_for_real, plan)) if plan.description.has_own_values else None
    layers, given = _Layers(plan), None
    if begins_with_given_weights(plan.settings):
        given = GivenWeights(plan.settings.model, model_of(plan))
    layout, inits = plan.description.layout, plan.description.inits
    return LocalModel(layout, inits, layers, layers.prototype, programs, made, given, layers.inputs)


def digests_of(plan: RunPlan, rank: int, model: LocalModel, *, begins: bool) -> tuple[Row, ...]:
    """Digests of what the constructors of layers made in this worker, to be compared with those of other workers.

    A worker of the first mesh returns them for the layers that it will compute, or whose state it will hold. A worker
    that joins later returns them for the layers that every worker makes, which are those not given as factories.

    Args:
        begins: True if the run begins with initial values, and not with a checkpoint.
    """
    layers, placement = plan.description.layout.layers, plan.placement
    if rank in placement.mesh:
        replicas = placement.replica_map(plan.description.layout)
        computed = set(placement.layers_of_stage(placement.mesh.stage_of(rank)))
        held = {layer for layer, ranges in replicas.items() if any(rank in pages.replicas for pages in ranges)}
    else:
        factories = model_of(plan).factories
        computed, held = {layer.index for layer in layers if layer.name not in factories}, set()
    modules = ((layers[number].name, module) for number, module in model.make_modules(sorted(computed)).items())
    of_values = [layers[number].name for number in sorted(held)] if begins else ()
    if model.given is None:
        return digests(modules, model.made, of_values)
    # On one machine all workers read the same files.
    given = model.given.digests(of_values) if plan.settings.runtime.has_agents else ()
    return (*digests(modules), *given)


def make_programs(
    plan: RunPlan,
    rank: int,
    place: torch.device,
    frequency: Callable[[], float],
    compiled: Callable[[str], None],
    train: Batches,
) -> StagePrograms:
    """Make the programs that run the layers of one worker.

    If layers are compiled, all layers of the model are compiled, so that the worker is ready for any stage.

    Args:
        place: the device of parameters, inputs and outputs.
        frequency: returns the frequency of an emulated device, as a fraction of its highest. It is called before every
            program.
        compiled: called with the name of each layer once its programs exist.
        train: the training split, whose first micro-batch shows the form of all.
    """
    settings, layout = plan.settings, plan.description.layout
    model = model_of(plan)  # for its loss and its specs; modules of layers come later
    args = program_args(plan.job, layout, Objective.of(model))
    if settings.runtime.device != EMULATED:
        dtype = plan.job.torch_dtype
        if settings.runtime.compile:
            programs = CompiledPrograms(**args, threads=settings.runtime.threads_per_worker, place=place)
            modules, example = _Layers(plan)(range(len(layout.layers))), _example(plan, model, train, place)
            with refusing_mistakes(place):
                programs.compile([*modules.values()], layout, example, dtype, compiled)
            return programs
        if not kind_of(settings).capabilities.compiles:
            return StagePrograms(**args)
        island = XlaIsland({axis: settings.mesh.shape.axis_size(axis) for axis in ISLAND_AXES})
        programs = XlaPrograms(**args, island=island, specs=specs_of(model))
        programs.compile(model.layers, layout, _example(plan, model, train, torch.device("cpu")), dtype, compiled)
        return programs
    e = settings.emulated
    device = EmulatedDevice(
        e.forward_ms / 1e3,
        e.backward_ms / 1e3,
        e.layer_costs,
        lambda step: e.speed(rank, step) * frequency(),
        e.weight_share,
    )
    return EmulatedPrograms(**args, device=device)


def _example(plan: RunPlan, model: LayeredModel, train: Batches, place: torch.device) -> Example:
    """A micro-batch of the form that all have: zeros for token data, else the first micro-batch of the first step.

    Raises:
        DataError: one of the next micro-batches has another form. So this is found before minutes of compiling.
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


class _Layers:
    """Makes modules of layers: copies of a model that is made once, without memory for its parameters.

    Making the model takes tens of milliseconds, and all workers would wait for it whenever layers move.
    """

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        model = model_of(plan)
        self._modules = model.layers
        self._names = model.layer_names
        self.inputs: Inputs = model.inputs
        # The numbers of layers whose constants have no values yet. Constants get values only when a layer is made with
        # memory, which happens when the first such layer is requested.
        self._lacking = {number for number, module in enumerate(self._modules) if has_constants(module)}

    def __call__(self, layers: Iterable[int]) -> Mapping[int, nn.Module]:
        wanted = sorted(set(layers))
        if lacking := self._lacking.intersection(wanted):
            self._make_constants(lacking)
        return {number: self._copy(number) for number in wanted}

    def prototype(self, layer: int) -> nn.Module:
        """The layer without memory for its parameters, only to be read. Its constants may or may not have values."""
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


def _make_for_real(plan: RunPlan, layers: Collection[str]) -> LayeredModel:
    """The model with memory. Of the layers that it gives as factories, only those in `layers` are made."""
    return model_of(plan, device="cpu", layers=layers)


def _without_memory(module: nn.Module) -> nn.Module:
    """The layer, with parameters without memory in place of its own. A parameter with several names stays shared."""
    empty: dict[int, nn.Parameter] = {}  # id of a parameter, which `named` keeps alive -> its replacement
    named = [(one, name, p) for one in module.modules() for name, p in one.named_parameters(recurse=False)]
    for one, name, parameter in named:
        if id(parameter) not in empty:
            empty[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        setattr(one, name, empty[id(parameter)])
    return module
