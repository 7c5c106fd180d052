"""The comparison of replicas on the controller, and what follows if they differ (`mirror.verify_every`).

A version that is compared is used by the step after it, but nobody votes for that step before all replicas are known to
be the same (docs/protocol.md, H1 to H5). So a wrong replica is found before anything that came of it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller.actions import Action, Record
from elaswave_spmd.controller.checkpoints import CheckpointCoordinator
from elaswave_spmd.controller.verdicts import Verdicts, host_of
from elaswave_spmd.mesh.mesh import named_workers
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import Broadcast
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.recovery.replica_check import Compared, ReplicaHashes
from elaswave_spmd.run_dir.journal import BALLOT
from elaswave_spmd.sharding.layout import STATE
from elaswave_spmd.sharding.replicas import PageRange, all_replica_sets


class ReplicaVerifier:
    """The comparisons of one run: hashes in, actions out.

    Args:
        compares_at: the versions that are compared; the same function as the workers' (Job.compares_at).
        checkpoints: wait for the comparison of what they are made of.
        verdicts: what becomes of workers that are wrong.
    """

    def __init__(
        self,
        settings: Settings,
        protocol: ControllerProtocol,
        compares_at: Callable[[int], bool],
        checkpoints: CheckpointCoordinator,
        verdicts: Verdicts,
    ) -> None:
        self._action = settings.verify.action
        self._verdicts = verdicts
        self._device = settings.runtime.device
        self._protocol = protocol
        self._compares_at = compares_at
        self._checkpoints = checkpoints
        self._layers = protocol.layout.layers
        self._hashes: ReplicaHashes | None = None  # of the present mesh epoch

    @property
    def epoch(self) -> int:
        """The mesh epoch whose replicas are compared."""
        return self._protocol.placement.mesh.epoch

    def fingerprints(self, message: m.Fingerprints) -> list[Action]:
        """A worker has sent the hashes of its replicas."""
        protocol = self._protocol
        is_due = self._compares_at(message.step) or (self._compares_at(0) and protocol.stops)
        if not is_due or message.epoch != self.epoch or not protocol.started:
            return []
        if self._hashes is None or self._hashes.epoch != self.epoch:
            layout = protocol.layout
            state = [
                pages
                for pages in all_replica_sets(protocol.placement.replica_map(layout))
                if layout.layers[pages.layer].block_of(pages.first).kind == STATE
            ]
            self._hashes = ReplicaHashes(self.epoch, state)
        outcome = self._hashes.add(message)
        if outcome is None:
            return []
        if outcome.agree:
            protocol.agreed = max(protocol.agreed, outcome.version)
            agree = m.ReplicasAgree(self.epoch, outcome.version)
            return [Broadcast(protocol.members, agree), *self._checkpoints.compared(outcome.version, self.epoch)]
        return [*self._checkpoints.distrust(outcome.version, self.epoch), *self._differ(outcome)]

    # ---- replicas that differ

    def _differ(self, found: Compared) -> list[Action]:
        """Decide about a run whose replicas differ."""
        records: list[Action] = [self._record_verdict(found, rank, pages) for rank, pages in found.wrong.items()]
        if found.undecided:
            return [*records, *self._undecided(found)]
        if self._action == "stop":
            who = f"{named_workers(found.wrong)} {'has' if len(found.wrong) == 1 else 'have'}"
            error = f"{who} wrong state after step {found.version}"
            return [*records, *self._verdicts.stopped(error, self._protocol.agreed, self._unsure(found.version))]
        if self._action == "report":
            return [*records, *self._protocol.repair(found.wrong)]
        self._protocol.repair({})
        why, unsure = f"its state after step {found.version} is wrong", self._unsure(found.version)
        return [*records, *self._verdicts.without(tuple(found.wrong), why, self._protocol.agreed, unsure)]

    def _undecided(self, found: Compared) -> list[Action]:
        """Replicas differ, and nothing shows which is wrong."""
        pages, ranks = next(iter(found.undecided.items()))
        what = f"{named_workers(ranks)} have different state after step {found.version}: {self._where(pages)}"
        fields = {
            "step": found.version,
            "ranks": list(ranks),
            "layer": self._layers[pages[0]].name,
            "pages": list(pages[1:]),
            BALLOT: self._checkpoints.ballot(self.epoch),
            "message": what,
        }
        error = f"{what}; each is what its worker wrote, and nothing shows which of them is wrong"
        return [Record("mismatch", fields), *self._verdicts.undecided(error, self._protocol.agreed, tuple(found.wrong))]

    def _where(self, pages: PageRange) -> str:
        layer, first, stop = pages
        return f"layer {self._layers[layer].name}, pages {first} to {stop - 1}"

    def _record_verdict(self, found: Compared, wrong: int, ranges: Sequence[PageRange]) -> Record:
        version, host = found.version, host_of(self._protocol.placement.mesh.topology, wrong)
        unsure = self._unsure(version)
        layer, first, stop = ranges[0]
        exposed = f"; steps {unsure[0]} to {unsure[1]}, since the last comparison, may be wrong" if unsure else ""
        more = f" and {len(ranges) - 1} more page ranges" if len(ranges) > 1 else ""
        fields = {
            "ranks": [wrong],
            "host": host,
            "device": self._device,
            "layer": self._layers[layer].name,
            "step": version,
            "tensor": "state",
            "pages": [first, stop],
            "page_ranges": len(ranges),
            BALLOT: self._checkpoints.ballot(self.epoch),
            "checked": self._protocol.agreed or None,
            "unsure_steps": unsure,
            "message": f"worker {wrong} ({host}, {self._device}) has wrong state after step {version}: "
            f"{self._where(ranges[0])}{more}{exposed}",
        }
        return Record("corrupt", fields)

    def _unsure(self, version: int) -> list[int]:
        """The first and the last step that may be wrong: computed from state that was not compared; empty: none.

        The update of the step after a comparison may be the wrong one; the step itself is computed from good state.
        """
        return [self._protocol.agreed + 2, version] if self._protocol.agreed + 2 <= version else []
