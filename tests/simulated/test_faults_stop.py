"""Too few workers are left: they stop at the newest version, and save all of it, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from elaswave_spmd.controller.events import Received, RunStopped
from elaswave_spmd.controller.summary import collect_pages, is_complete
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import Save, Unrecoverable
from elaswave_spmd.recovery.controller_protocol import Policy
from elaswave_spmd.run_dir.checkpoint_writers import assign_writers
from tests.cluster.faults import AnyFault, Fault
from tests.cluster.processes import LostStateError, Worker
from tests.simulated.bits_cases import (
    MirroredCluster,
    Run,
    description_of,
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
        losses = outcome(simulate(RUN, placement_of(RUN, "single", 0))).losses
        assert tuple(cluster.result.losses) == losses[: len(cluster.result.losses)]


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
        cluster._notices += [(40, Received(m.Leaving(rank))) for rank in cluster.protocol.members]
        save = cluster.until_saved()
        assert 0 < save.version < RUN.steps and "0 stay" in save.reason and not cluster.result.epochs
        found = [(name, w.shape, w.tobytes()) for name, w in sorted(cluster.weights[save.epoch].items())]
        assert tuple(found) == weights_after(save.version)
