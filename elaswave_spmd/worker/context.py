"""The values that every part of a worker needs and none of them changes, as one frozen `WorkerContext`.

What is optional around a worker (measuring, fault injection, process groups, devices that recover) is in `WorkerHooks`,
so that the parts need not know which options are on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Init, materialize
from elaswave_spmd.models.objective import first_inputs
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.vote_exchange import WIDEST
from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.worker.channel import Channel
from elaswave_spmd.worker.fault_points import FaultPoint, OnFaultPoint, no_op
from elaswave_spmd.worker.initial_values import MadeValues
from elaswave_spmd.worker.inputs import Inputs
from elaswave_spmd.worker.loading import BackgroundLoader
from elaswave_spmd.worker.pacing import DeviceClock
from elaswave_spmd.worker.profiling import MemoryRow, Row, WeightsRow
from elaswave_spmd.worker.programs.eager import Batches, StagePrograms
from elaswave_spmd.worker.spec import Job

if TYPE_CHECKING:
    from elaswave_spmd.weights.given import GivenWeights
    from elaswave_spmd.worker.device_fault import DeviceRecovery
    from elaswave_spmd.worker.direct_channel import Pairs
    from elaswave_spmd.worker.stage_collectives import StageGroup
    from elaswave_spmd.worker.state_replica import StateReplica

MakeModules = Callable[[Iterable[int]], Mapping[int, nn.Module]]
"""Layer numbers -> new modules of these layers; their parameters are replaced by views of flat buffers."""


@dataclass(frozen=True)
class LocalModel:
    """The model as this worker runs it.

    Args:
        layout: where each parameter lies in the flat state of its layer.
        inits: name of an owned parameter -> its initial distribution; empty with `made`.
        make_modules: makes the layers that this worker is about to compute.
        prototype: layer number -> the layer without memory, only to be read.
        programs: run one layer at a time, on tensors of the worker's device.
        made: the initial values that constructors made, if the model's own count; None: they are drawn by `inits`.
        given: the weights that the run begins with in place of these (`model.init_from`); None: there are none. Checks
            of the model compute with initial values all the same, which are there when these files are not any more.
        inputs: makes the first layer's input of a micro-batch.
    """

    layout: ModelLayout
    inits: Mapping[str, Init]
    make_modules: MakeModules
    prototype: Callable[[int], nn.Module]
    programs: StagePrograms
    made: MadeValues | None = None
    given: GivenWeights | None = None
    inputs: Inputs = first_inputs

    def initial(self, seed: int, name: str, first: int, stop: int) -> Tensor:
        """Elements [first, stop) of the initial value of an owned parameter, flattened, fp32."""
        if self.made is not None:
            return self.made.part(name, first, stop)
        return torch.from_numpy(materialize(self.inits[name], seed, name, first, stop))


@dataclass(frozen=True)
class Datasets:
    """The two splits; `validation` is None if the run never validates.

    `loader` reads both, and ahead, if they are datasets of the user's; None: tokens in memory, which nobody waits for.
    """

    train: Batches
    validation: Batches | None
    loader: BackgroundLoader | None = None


def _ignore(*_: object) -> None:
    """The default of hooks that only observe."""


@dataclass(frozen=True)
class WorkerHooks:
    """Everything optional around a worker. Without arguments nothing is observed, injected or optional.

    All of them are called by the training thread.

    Args:
        on_point: (point, step): a step passes one of its points. Progress is counted here, and faults are injected.
        wrong_result: (point, step, result): what the device has computed at a point of a step; returns what the worker
            goes on with. Wrong results are injected here; None: none are.
        layer_ran: (step, micro-batch, layer, kind, began, ended): a layer program has run, of a kind of
            `scheduling.pipeline`; times by time.perf_counter(), or of the device. None: nobody wants to know.
        evaluated: a layer has run for a validation. Progress is counted here.
        step_measured: (step, times of layer programs, of weight gradients that were put off, memory of layers that are
            new): after every step.
        data_waited: (step, seconds): this worker's training thread has waited so long for the samples of a step; before
            it votes for the step.
        applied: (report, replica): a version is complete. The state may be copied now, and changes after the call.
        save: (replica): the run is about to stop; the state is to be written as it is.
        failed: (error): the worker cannot go on after an exception; returns its report, and the worker stays until its
            state is saved or others have taken its place. None is returned, or is the hook: the exception ends it.
        members_changed: (message): members of the new configuration; links are opened and closed to match.
        stage_group: process group of the worker's stage, for new parameters (`runtime.collectives=group`).
        pairs: for boundary tensors and state, with the workers that get them or send them (`runtime.pairs`).
        clock: sets the frequency of the device within steps (`schedule.frequency`).
        device_recovery: brings a failed device back in the middle of a step, where the kind of device can be.
        link_facts: (members): what the links have to say to a controller that has come back; None: none ever does, and
            a worker without a controller ends.
    """

    on_point: OnFaultPoint = no_op
    wrong_result: Callable[[FaultPoint, int, Tensor], Tensor] | None = None
    layer_ran: Callable[[int, int, int, str, float, float], None] | None = None
    evaluated: Callable[[], None] = _ignore
    step_measured: Callable[[int, tuple[Row, ...], tuple[WeightsRow, ...], tuple[MemoryRow, ...]], None] = _ignore
    data_waited: Callable[[int, float], None] = _ignore
    applied: Callable[[m.Applied, StateReplica], None] = _ignore
    save: Callable[[StateReplica], None] = _ignore
    failed: Callable[[Exception], m.Failed | None] | None = None
    members_changed: Callable[[m.Reconfigure], None] = _ignore
    stage_group: StageGroup | None = None
    pairs: Pairs | None = None
    clock: DeviceClock | None = None
    device_recovery: DeviceRecovery | None = None
    link_facts: Callable[[Iterable[int]], m.Adopted] | None = None

    def computed(self, point: FaultPoint, step: int, result: Tensor) -> Tensor:
        """What the worker goes on with, of what its device has computed at a point of a step."""
        return result if self.wrong_result is None else self.wrong_result(point, step, result)


@dataclass(frozen=True)
class WorkerContext:
    """One worker of a run.

    Args:
        rank: of this worker. A rank is not reused within one life of the run; a restart from a checkpoint numbers its
            workers from 0 again.
        job: the arithmetic of the run.
        placement: the first configuration of the mesh, without losses: what is the same in all configurations.
        model: its layers.
        data: the samples.
        device: where parameters, state and sums lie, and layer programs run.
        channel: the way to the other workers and the controller.
        hooks: what is optional.
        widest_votes: members up to which all vote to all (recovery/vote_exchange.py).
    """

    rank: int
    job: Job
    placement: Placement
    model: LocalModel
    data: Datasets
    device: Device
    channel: Channel
    hooks: WorkerHooks = field(default_factory=WorkerHooks)
    widest_votes: int = WIDEST
