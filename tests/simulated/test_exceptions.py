"""Exceptions of a user's code in the simulated cluster: the run ends, and no step that was committed is lost."""

from __future__ import annotations

import random
import traceback
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from elaswave_spmd.controller.outcomes import RestartFrom, RunFinished, RunStopped
from elaswave_spmd.controller.summary import collect_pages
from elaswave_spmd.errors import WorkerError
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import Unrecoverable
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.worker.context import WorkerHooks
from elaswave_spmd.worker.fault_points import FaultPoint
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.processes import Worker
from tests.cluster.schedules import MESHES, Schedule, cluster_of
from tests.cluster.tiny import TinyRun

OF_USERS = (FaultPoint.FORWARD, FaultPoint.BACKWARD, FaultPoint.WEIGHTS, FaultPoint.REDUCE, FaultPoint.SUM)
"""The points in whose actions a user's code runs, or shortly after it."""


class MistakeError(Exception):
    """The exception of the user's code."""


@dataclass(frozen=True)
class Mistake:
    """The user's code raises an exception, each time that a worker passes the point in the step or a later one.

    Args:
        point: None: in the validation after the step (`MistakenValidations`).
        ranks: the workers that it happens to; None: all.
    """

    step: int
    point: FaultPoint | None
    ranks: frozenset[int] | None = None


class MistakenCluster(SimulatedCluster):
    """A cluster whose workers run code with a mistake. They report exceptions as real workers do."""

    mistake: Mistake
    num_raised = 0

    def _hooks_of(self, worker: Worker) -> WorkerHooks:
        hooks, mistake = super()._hooks_of(worker), self.mistake

        def on_point(point: FaultPoint, step: int) -> None:
            hooks.on_point(point, step)
            is_here = mistake.ranks is None or worker.rank in mistake.ranks
            if point is mistake.point and step >= mistake.step and is_here:
                self.num_raised += 1
                raise MistakeError(f"in step {step} at {point.value}")

        return replace(hooks, on_point=on_point, failed=lambda error: report_of(worker.rank, error))

    def _advance(self, worker: Worker) -> None:
        try:
            super()._advance(worker)
        except MistakeError as error:  # it could not keep its state: the process ends
            worker.port.send(CONTROLLER, report_of(worker.rank, error))
            self._absent.append(worker.rank)
            self._lost.append(worker.rank)
            self._kill(worker.rank)
            self._exits_later(worker.rank)


class MistakenValidations(MistakenCluster):
    """The mistake is in code that only validations run."""

    def _advance(self, worker: Worker) -> None:
        programs = worker.programs
        if programs is not None and "set_training" not in vars(programs):
            set_training = programs.set_training

            def with_mistake(training: bool) -> None:
                assert worker.executor is not None
                version, ranks = worker.executor.version, self.mistake.ranks
                if not training and version >= self.mistake.step and (ranks is None or worker.rank in ranks):
                    self.num_raised += 1
                    raise MistakeError(f"in step {version} at its validation")
                set_training(training)

            vars(programs)["set_training"] = with_mistake
        super()._advance(worker)


def report_of(rank: int, error: Exception) -> m.Failed:
    """The report of a mistake; that of a mistake of ours is raised, so that the test fails."""
    if not isinstance(error, MistakeError):
        raise error
    return m.Failed(rank, "".join(traceback.format_exception(error)), int(str(error).split()[2]))


def ended(
    schedule: Schedule, mistake: Mistake, kind: type[MistakenCluster] = MistakenCluster
) -> tuple[MistakenCluster, RunFinished | RunStopped]:
    """The cluster in which the mistake was made, and how its run has ended."""
    cluster = cluster_of(schedule, kind=kind)
    assert isinstance(cluster, MistakenCluster)
    cluster.mistake = mistake
    while isinstance(outcome := cluster.controller.run(), RestartFrom):
        cluster._restart(outcome)
    assert isinstance(outcome, RunFinished | RunStopped)
    return cluster, outcome


def state_of(cluster: SimulatedCluster, step: int) -> dict[tuple[int, str], Tensor]:
    """The state in the checkpoint of a step: (layer, kind) -> fp32 [elements]."""
    checkpoint = cluster.checkpoints.newest_up_to(step)
    assert checkpoint is not None and checkpoint.step == step
    read = cluster.checkpoints.reader(checkpoint)
    layers = cluster._description.layout.layers
    return {
        (layer.index, kind): read((layer.index, 0, layer.num_state_pages), kind)
        for layer in layers
        for kind in checkpoint.manifest.kinds
    }


@cache
def undisturbed(run: TinyRun) -> tuple[dict[int, dict[tuple[int, str], Tensor]], dict[str, np.ndarray]]:
    """The state after each step but the last one, and the weights after that, of a run that nothing disturbs."""
    cluster = cluster_of(Schedule(0, run, mesh="dp2", zero=0, checkpoint_every=1))
    weights = cluster.run().weights
    return {step: state_of(cluster, step) for step in range(1, run.steps)}, weights


def weights_of(cluster: SimulatedCluster, state: dict[tuple[int, str], Tensor]) -> dict[str, np.ndarray]:
    """Parameter name -> its values in a state."""
    layout, weights = cluster._description.layout, dict[str, np.ndarray]()
    for layer in layout.layers:
        pages = m.FinalPages(layer.index, 0, layer.num_state_pages)
        collect_pages(layout, pages, state[layer.index, "master"], weights)
    return weights


def assert_saved(cluster: SimulatedCluster, outcome: RunFinished | RunStopped, run: TinyRun) -> int:
    """The run has stopped for the mistake, with the state of its last committed step. Returns that step."""
    assert isinstance(outcome, RunStopped) and isinstance(outcome.error, WorkerError), outcome
    assert "MistakeError" in outcome.error.report
    step = len(cluster.result.losses)
    newest = cluster.checkpoints.newest
    assert newest is not None and newest.step == step, (newest, step)
    assert f"Its state after step {step} is in {newest.path}" in str(outcome.error)
    states, weights = undisturbed(run.key)
    found = state_of(cluster, step)
    if step == run.steps:
        saved = weights_of(cluster, found)
        assert saved.keys() == weights.keys() and all(np.array_equal(saved[name], weights[name]) for name in weights)
    else:
        wanted = states[step]
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted), step
    return step


@pytest.mark.parametrize("mesh", ["dp1", *MESHES])
def test_a_mistake_that_all_workers_meet_costs_no_step(mesh: str) -> None:
    """Also on meshes where the first worker that meets it has some of the state alone."""
    for seed, point in enumerate(OF_USERS):
        draw = random.Random(f"{mesh} {point} {seed}")
        run = TinyRun(blocks=2, steps=4)
        mirrors, zero, uneven = draw.choice((0, 1)), draw.randrange(4), draw.random() < 0.5
        schedule = Schedule(seed, run, mesh=mesh, zero=zero, mirror_count=mirrors, uneven=uneven)
        cluster, outcome = ended(schedule, Mistake(draw.choice((2, 3)), point))
        if isinstance(outcome, RunFinished):
            assert point is FaultPoint.WEIGHTS  # those that are left have whole backwards
            continue
        assert_saved(cluster, outcome, run)


def test_a_mistake_of_one_worker_is_survived_where_others_have_its_state() -> None:
    for seed in range(3):
        schedule = Schedule(seed, TinyRun(steps=4), mesh="dp3", zero=2)
        cluster, outcome = ended(schedule, Mistake(3, FaultPoint.BACKWARD, frozenset({seed})))
        assert isinstance(outcome, RunFinished) and cluster.num_raised == 1
        assert cluster.protocol.placement.mesh.num_workers == 2


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mistake_in_the_validation_after_the_last_step_costs_none_either(mesh: str) -> None:
    run = TinyRun(blocks=2, steps=4)
    mirrors, zero = (1, 3) if MESHES.index(mesh) % 2 else (0, 0)
    schedule = Schedule(zero, run, mesh=mesh, zero=zero, mirror_count=mirrors)
    cluster, outcome = ended(schedule, Mistake(run.steps, None), MistakenValidations)
    assert assert_saved(cluster, outcome, run) == run.steps


def test_mistakes_in_the_last_validation_among_losses_and_newcomers_cost_no_step() -> None:
    num_saved = num_last = 0
    for seed in range(12):
        schedule = Schedule.draw(seed)
        steps = schedule.run.steps
        cluster, outcome = ended(schedule, Mistake(steps, None), MistakenValidations)
        assert isinstance(outcome, RunStopped), outcome
        if cluster.checkpoints.newest is not None and "MistakeError" in str(outcome.error):
            num_saved += 1
            num_last += assert_saved(cluster, outcome, schedule.run) == steps
    assert num_saved >= 8 and num_last >= 5, (num_saved, num_last)


def test_mistakes_among_losses_and_newcomers_cost_no_step() -> None:
    """A step that all workers fail in, after faults of other kinds: where all state is left, it is saved."""
    num_saved = 0
    for seed in range(16):
        drawn = Schedule.draw(seed)
        draw = random.Random(f"mistake {seed}")
        schedule = replace(drawn, run=replace(drawn.run, steps=drawn.run.steps + 1))
        point = draw.choice((FaultPoint.FORWARD, FaultPoint.BACKWARD))
        cluster, outcome = ended(schedule, Mistake(draw.randint(2, schedule.run.steps - 1), point))
        assert isinstance(outcome, RunStopped), outcome
        if cluster.checkpoints.newest is not None:
            num_saved += 1
            assert_saved(cluster, outcome, schedule.run)
        else:
            assert cluster._end is not None and isinstance(cluster._end.args[0], Unrecoverable), outcome
    assert num_saved >= 10
