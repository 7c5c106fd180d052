"""`WorkerContext`: the values that all parts of a worker need and no part changes, in one frozen object.

Everything optional (measuring, fault injection, process groups, devices that recover) is in `WorkerHooks`, so that the
parts of a worker need not know which options are on.
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
        prototype: called with a layer number; returns the layer without memory for its parameters, only to be read.
        programs: run one layer at a time, on tensors of the worker's device.
        made: the initial values that the model's constructors made; None: initial values are drawn by `inits`.
        given: the weights that the run begins with in place of initial values (`model.init_from`); None: there are
            none. Checks of the model compute with initial values all the same, since the files of given weights may be
            gone when a worker joins later.
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
        """The initial value of an owned parameter: elements [first, stop) of it flattened, fp32."""
        if self.made is not None:
            return self.made.part(name, first, stop)
        return torch.from_numpy(materialize(self.inits[name], seed, name, first, stop))


@dataclass(frozen=True)
class Datasets:
    """The two splits of the data.

    Args:
        train: the samples to train on.
        validation: the samples to validate on; None if the run never validates.
        loader: the thread that reads a user's datasets ahead, both splits; None for tokens in memory maps, which need
            no reading ahead.
    """

    train: Batches
    validation: Batches | None
    loader: BackgroundLoader | None = None


def _ignore(*_: object) -> None:
    """The default of hooks that only observe."""


@dataclass(frozen=True)
class WorkerHooks:
    """Everything optional around a worker. `WorkerHooks()` observes nothing, injects nothing, and has all options off.

    The training thread calls all of them.

    Args:
        on_point: called with (point, step) when a step passes one of its fault points. Progress is counted here, and
            faults are injected.
        wrong_result: called with (point, step, result) after the device has computed a result; returns the result that
            the worker goes on with. Wrong results are injected here. None: none are injected.
        layer_ran: called with (step, micro-batch, layer, kind, began, ended) after a layer program has run; `kind` is
            one of `scheduling.pipeline`, times are seconds of time.perf_counter() or of the device. None: not called.
        evaluated: called after a layer has run for a validation. Progress is counted here.
        step_measured: called after every step with (step, times of layer programs, times of weight gradients that were
            put off, memory of layers that are new).
        data_waited: called with (step, seconds) before the vote for a step: how long the training thread has waited for
            the samples of the step.
        applied: called with (report, replica) when a version is complete. The state may be copied only during the call,
            as it changes after it.
        save: called with (replica) when the run is about to stop, to write the state.
        failed: called with (error) when the worker cannot go on after an exception. Returns the report, and the worker
            stays until its state is saved or others have taken its place (C17). If it returns None, or if the hook is
            None, the exception ends the worker.
        members_changed: called with (message), a new configuration: links are opened and closed to match it.
        stage_group: the process group of the worker's stage (`runtime.collectives=group`), for parameters, sums and
            reduced gradients.
        pairs: the pairs with other workers that send or receive boundary tensors and state (`runtime.pairs`).
        clock: sets the frequency of the device within steps (`schedule.frequency`).
        device_recovery: resets a device that fails in the middle of a step, if its kind can be recovered.
        adopted: called with (members) when a controller has come back (`timeouts.adopt`); returns the answer as far as
            it is about links and the check of the model. None: no controller comes back, and a worker without a
            controller ends.
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
    adopted: Callable[[Iterable[int]], m.Adopted] | None = None

    def computed(self, point: FaultPoint, step: int, result: Tensor) -> Tensor:
        """The result that the worker goes on with: `result`, unless a wrong one is injected at this point."""
        return result if self.wrong_result is None else self.wrong_result(point, step, result)


@dataclass(frozen=True)
class WorkerContext:
    """One worker of a run.

    Args:
        rank: the rank of this worker. A rank is not reused within one life of the run; a restart from a checkpoint
            numbers its workers from 0 again.
        job: what the run computes.
        placement: the placement on the run's first mesh. Only what is the same in all configurations is read from it.
        model: the layers of the model and the programs that run them.
        data: the samples.
        device: the device on which parameters, state and sums lie, and on which layer programs run.
        channel: sends to, and receives from, the other workers and the controller.
        hooks: the optional parts.
        widest_votes: up to this number of members every member votes to every other (recovery/vote_exchange.py).
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
