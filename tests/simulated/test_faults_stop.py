"""A run stops, since too few workers are left or somebody asks: at the newest version, all of it saved, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from elaswave_spmd.controller.events import Received, StopRequested
from elaswave_spmd.controller.outcomes import RunFinished, RunStopped
from elaswave_spmd.controller.summary import collect_pages, is_complete
from elaswave_spmd.errors import StoppedBySignal
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import Save, Unrecoverable
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, Policy
from elaswave_spmd.run_dir.checkpoint_writers import assign_writers
from tests.cluster.faults import AnyFault, Fault
from tests.cluster.processes import LostStateError, Worker
from tests.simulated.bits_cases import (
    MirroredCluster,
    Run,
    description_of,
    expected,
    one_thread,
    outcome,
    placement_of,
    simulate,
)

RUN = Run(microbatches=5, steps=12)


class Saved(MirroredCluster):
    """A cluster of which all but one have to live on. Keeps what each worker saves, by mesh epoch."""

    def __init__(self, mesh: str, zero: int, least: int, faults: Sequence[AnyFault], seed: int) -> None:
        self.saves: list[Save] = []
        self.saved: dict[int, list[m.FinalPages]] = {}  # mesh epoch -> pages
        self.weights: dict[int, dict[str, np.ndarray]] = {}
        self.layout = description_of(RUN).layout
        policy = Policy(mirror_count=2, min_workers=least)
        super().__init__(RUN, mesh, zero, seed=seed, faults=faults, policy=policy)

    def _save(self, worker: Worker) -> None:
        """Keeps the page ranges that this worker writes into a checkpoint."""
        assert worker.executor is not None
        replica = worker.executor.replica
        epoch, version = replica.protocol.epoch, replica.protocol.version
        writers = assign_writers(replica.placement.replica_map(self.layout), self.layout)
        for part in replica.state:
            if writers[part.pages.key] == worker.rank:
                assert part.version == version == self.saves[-1].version
                pages = m.FinalPages(*part.pages.key)
                self.saved.setdefault(epoch, []).append(pages)
                collect_pages(self.layout, pages, part.master.clone(), self.weights.setdefault(epoch, {}))
        super()._save(worker)

    def cannot_go_on(self, action: Save | Unrecoverable) -> None:
        assert isinstance(action, Save)
        self.saves.append(action)
        super().cannot_go_on(action)

    def until_saved(self) -> Save:
        """Runs until the controller ends the run, since the checkpoint is complete."""
        with pytest.raises(LostStateError):
            self.run()
        save = self.saves[-1]
        assert isinstance(self.controller.outcome, RunStopped)
        assert f"Its state after step {save.version} is in " in str(self.controller.outcome.error)
        keys = {(p.layer, p.first, p.stop) for p in self.saved[save.epoch]}
        assert is_complete(self.layout, keys), "every page has been written"
        return save


@cache
def weights_after(steps: int) -> tuple:
    """The weights of an undisturbed run of so many steps."""
    return outcome(simulate(replace(RUN, steps=steps), placement_of(RUN, "single", 0))).weights


@pytest.mark.parametrize("point", ["forward", "backward", "reduce", "norm", "apply", "publish"])
@pytest.mark.parametrize(("mesh", "zero"), [("dp3", 0), ("dp4", 1), ("dp2_pp2", 2), ("dp4", 3), ("dp3_pp2", 3)])
@one_thread()
def test_a_loss_that_leaves_too_few_saves_the_newest_version(mesh: str, zero: int, point: str) -> None:
    for seed in range(2):
        workers = placement_of(RUN, mesh, zero).mesh.num_workers
        cluster = Saved(mesh, zero, workers, [Fault(4, "kill", seed, point)], seed)
        save = cluster.until_saved()
        assert save.version in (3, 4) and f"elastic.min_workers is {workers}" in save.reason
        found = [(name, w.shape, w.tobytes()) for name, w in sorted(cluster.weights[save.epoch].items())]
        assert tuple(found) == weights_after(save.version)
        assert tuple(cluster.result.losses) == expected(RUN).losses[: len(cluster.result.losses)]


@pytest.mark.parametrize(("mesh", "zero"), [("dp4", 1), ("dp3_pp2", 2)])
@one_thread()
def test_one_more_is_lost_while_the_others_save(mesh: str, zero: int) -> None:
    workers = placement_of(RUN, mesh, zero).mesh.num_workers
    for seed in range(3):
        faults = [Fault(4, "kill", 0, "backward"), Fault(4, "kill", 2, "backward")]
        cluster = Saved(mesh, zero, workers, faults, seed)
        save = cluster.until_saved()
        found = [(name, w.shape, w.tobytes()) for name, w in sorted(cluster.weights[save.epoch].items())]
        assert tuple(found) == weights_after(save.version)


@pytest.mark.parametrize(("mesh", "zero"), [("dp2", 1), ("dp2_pp2", 2), ("pp3", 3), ("dp3", 0)])
@one_thread()
def test_all_are_asked_to_leave(mesh: str, zero: int) -> None:
    for seed in range(3):
        cluster = Saved(mesh, zero, 1, (), seed)
        cluster._notices += [(40, Received(m.Leaving(rank), (), rank)) for rank in cluster.protocol.members]
        save = cluster.until_saved()
        assert 0 < save.version < RUN.steps and "0 stay" in save.reason and not cluster.result.epochs
        found = [(name, w.shape, w.tobytes()) for name, w in sorted(cluster.weights[save.epoch].items())]
        assert tuple(found) == weights_after(save.version)


# ---- somebody asks: Ctrl-C, or a batch system's SIGTERM

TERM = StopRequested("SIGTERM")


def of_step(kind: type, step: int) -> Callable[[m.AnyMessage], bool]:
    """The messages of this kind that are about this step."""
    return lambda message: isinstance(message, kind) and getattr(message, "step", step) == step


class Asked(Saved):
    """A cluster that is asked to stop when the controller takes the first message that `when` is true of."""

    def __init__(
        self,
        mesh: str,
        zero: int,
        seed: int,
        when: Callable[[m.AnyMessage], bool],
        *,
        times: int = 1,
        least: int = 1,
        faults: Sequence[AnyFault] = (),
    ) -> None:
        self._when: Callable[[m.AnyMessage], bool] | None = when
        self._times = times
        self.asked_at = -1  # the version then
        super().__init__(mesh, zero, least, faults, seed)

    def check(self, message: m.AnyMessage) -> None:
        super().check(message)
        if self._when is not None and self._when(message):
            self._when, self.asked_at = None, self.protocol.version
            self._io.events.extendleft([TERM] * self._times)  # before all that has come already

    def assert_saved(self) -> Save:
        """The run has ended as it was asked to: with all of its state, that of an undisturbed run at that step."""
        save = self.until_saved()
        outcome_ = self.controller.outcome
        assert isinstance(outcome_, RunStopped) and isinstance(outcome_.error, StoppedBySignal)
        assert "it was asked to by SIGTERM" in str(outcome_.error)
        found = [(name, w.shape, w.tobytes()) for name, w in sorted(self.weights[save.epoch].items())]
        assert tuple(found) == weights_after(save.version)
        assert len(self.result.losses) == save.version, "what is saved is committed: no step is computed again"
        return save

    @property
    def unfinished(self) -> list[m.StepReport]:
        """Answers of members that had begun a step which they have not finished."""
        return [message for message in self.heard if isinstance(message, m.StepReport) and message.partial_steps]


MESHES = [("single", 0), ("dp3", 0), ("dp4", 1), ("dp2_pp2", 2), ("dp3_pp2", 3)]


@pytest.mark.parametrize(("mesh", "zero"), MESHES)
@one_thread()
def test_a_run_that_is_asked_to_stop_finishes_its_step(mesh: str, zero: int) -> None:
    for seed in range(3):
        cluster = Asked(mesh, zero, seed, of_step(m.Applied, 3))
        save = cluster.assert_saved()
        assert save.version > cluster.asked_at and not cluster.unfinished and not cluster.result.epochs


def test_a_stop_at_once_would_leave_a_step_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of C13: the change comes as urgently as that of a loss."""
    monkeypatch.setattr(ControllerProtocol, "_next_boundary", lambda self: m.AT_ONCE)
    clusters = [Asked("dp2_pp2", 2, seed, of_step(m.Applied, 3)) for seed in range(3)]
    for cluster in clusters:
        cluster.until_saved()
    assert any(cluster.unfinished for cluster in clusters)


@pytest.mark.parametrize(("mesh", "zero"), MESHES[1:])
@one_thread()
def test_asked_during_a_validation_the_step_is_the_validated_one(mesh: str, zero: int) -> None:
    for seed in range(3):
        cluster = Asked(mesh, zero, seed, of_step(m.ValidationLoss, 6))
        assert cluster.assert_saved().version == 6
        assert 6 in cluster.result.validation and not cluster.unfinished


@pytest.mark.parametrize(("mesh", "zero"), MESHES)
@one_thread()
def test_after_the_last_step_nothing_is_stopped(mesh: str, zero: int) -> None:
    for seed in range(2):
        cluster = Asked(mesh, zero, seed, of_step(m.Applied, RUN.steps))
        assert outcome(cluster.run()) == outcome(simulate(RUN, placement_of(RUN, "single", 0)))
        assert isinstance(cluster.controller.outcome, RunFinished) and not cluster.saves


@pytest.mark.parametrize("kind", [m.StepReport, m.Applied])
@pytest.mark.parametrize(("mesh", "zero"), MESHES[1:])
@one_thread()
def test_asked_while_the_run_recovers_from_a_loss(mesh: str, zero: int, kind: type) -> None:
    """The step that the loss has met is left to the run that goes on, or is finished: what is saved is whole."""
    for seed in range(3):
        faults = [Fault(4, "kill", seed, "backward")]
        Asked(mesh, zero, seed, of_step(kind, 3), faults=faults).assert_saved()


@one_thread()
def test_asked_twice_it_ends_at_once() -> None:
    cluster = Asked("dp2_pp2", 2, 0, of_step(m.Applied, 3), times=2)
    ended = cluster.controller.run()
    assert isinstance(ended, RunStopped) and isinstance(ended.error, StoppedBySignal)
    assert "at once, after a second signal" in str(ended.error) and not cluster.saves


@one_thread()
def test_asked_before_the_first_step_there_is_nothing_to_save() -> None:
    cluster = Asked("dp2_pp2", 2, 0, of_step(m.Ready, 0))
    ended = cluster.controller.run()
    assert (
        isinstance(ended, RunStopped) and str(ended.error) == "the run was stopped by SIGTERM while its workers started"
    )
    assert not cluster.protocol.started
