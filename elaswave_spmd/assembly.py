"""From settings to the values of a run: model, layout, placement, job. Controller and workers call the same."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from elaswave_spmd.data import PreparedData, open_split
from elaswave_spmd.errors import DataError
from elaswave_spmd.mesh import Mesh
from elaswave_spmd.models import LayeredModel, build_model
from elaswave_spmd.recovery.messages import Place
from elaswave_spmd.runtime.describe import ModelDescription, describe, has_constants
from elaswave_spmd.runtime.executor import Executor
from elaswave_spmd.runtime.job import Job
from elaswave_spmd.runtime.optimizers import make_optimizer
from elaswave_spmd.runtime.port import Port
from elaswave_spmd.scheduling.actions import actions_of
from elaswave_spmd.scheduling.learning_rate import LearningRate
from elaswave_spmd.scheduling.placement import Placement, place
from elaswave_spmd.settings import Settings
from elaswave_spmd.sharding import check_spec, specs_of


@dataclass(frozen=True)
class RunPlan:
    """Everything that is decided before the first worker starts."""

    settings: Settings
    data: PreparedData
    job: Job
    description: ModelDescription
    placement: Placement

    def with_place(self, message: Place) -> RunPlan:
        """The same run in the mesh epoch that the controller announced."""
        mesh = Mesh.initial(self.settings.mesh.shape)
        assert mesh.stages == message.stages, (mesh.stages, message.stages)
        placement = replace(self.placement, mesh=mesh, layer_cuts=message.layer_cuts, unit_counts=message.unit_counts)
        return replace(self, placement=placement)


def make_model(settings: Settings, vocab_size: int, *, device: str = "meta") -> LayeredModel:
    """The model that the settings name; on the meta device it has shapes and no memory."""
    m = settings.model
    sizes = {
        "vocab_size": vocab_size,
        "seq_len": settings.train.seq_len,
        "layers": m.layers,
        "d_model": m.d_model,
        "heads": m.heads,
        "dropout": m.dropout,
    }
    with torch.device(device):
        return build_model(m.target, sizes, m.args)


def plan_run(settings: Settings, data: PreparedData) -> RunPlan:
    """Plans a run, and refuses what cannot be run.

    Raises:
        UserError: a model, mesh, spec or size that contradicts another.
    """
    model = make_model(settings, data.vocab_size)
    zero_level = settings.sharding.zero_level
    shardings = model.shardings if zero_level is None else model.shardings.with_zero(zero_level)
    shape = settings.mesh.shape
    for name, spec in specs_of(model).items():
        check_spec(spec, tuple(model.get_parameter(name).shape), shape, name=name)
    description = describe(model, page_size=settings.page.size)
    job = _job(settings, data)
    placement = place(Mesh.initial(shape), description.layout, shardings, job.num_units)
    return RunPlan(settings, data, job, description, placement)


def _job(settings: Settings, data: PreparedData) -> Job:
    t, o = settings.train, settings.optim
    if data.num_train_samples < t.global_batch:
        raise DataError(
            "the training split holds at least one global batch",
            got=f"{data.num_train_samples} samples of {t.seq_len} tokens, for train.global_batch={t.global_batch}",
            where=f"data {data.corpus}",
            fix="more data, or a smaller train.global_batch or train.seq_len",
        )
    rate = LearningRate(o.lr, o.schedule, o.warmup_steps, t.steps, o.final_lr_ratio)
    return Job(
        seed=settings.seed,
        steps=t.steps,
        global_batch=t.global_batch,
        unit_size=settings.unit.size,
        seq_len=t.seq_len,
        dtype=settings.runtime.dtype,
        optimizer=make_optimizer(o.name, weight_decay=o.weight_decay, betas=o.betas, eps=o.eps, momentum=o.momentum),
        learning_rate=rate,
        clip=o.clip,
        checkpointing=settings.runtime.activation_checkpointing,
        validate_every=t.validate_every,
        validation_units=min(t.validate_units, data.num_validation_samples // settings.unit.size),
    )


def make_executor(plan: RunPlan, rank: int, port: Port) -> Executor:
    """The executor of one worker: only its own layers get memory."""
    model = make_model(plan.settings, plan.data.vocab_size)
    placement = plan.placement
    layers = placement.layers_of_stage(placement.mesh.stage_of(rank))
    if has_constants(model):  # they exist only where the model is made for real; other layers are given up again
        model = make_model(plan.settings, plan.data.vocab_size, device="cpu")
        for number, module in enumerate(model.layers):
            if number not in layers:
                module.to("meta")
    modules = model.layers
    return Executor(
        rank,
        plan.job,
        placement,
        plan.description.layout,
        {layer: modules[layer] for layer in layers},
        model.loss,
        plan.description.inits,
        open_split(plan.data, "train"),
        open_split(plan.data, "validation") if plan.job.validates else None,
        port,
        actions_of(placement, rank),
    )
