"""Finds damage of a worker's state in memory (H5), and sends hashes of the state to compare replicas by (H1)."""

from __future__ import annotations

from collections.abc import Mapping

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.worker_protocol import WorkerProtocol
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.sharding.replicas import ReplicaSet
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.context import WorkerContext
from elaswave_spmd.worker.state import HeldRange, HeldState


class StateSoundness:
    """Compares a worker's state with hashes of what the worker had written; gives damaged state up and reports it.

    Args:
        context: what all parts of the worker share.
        values: layer -> compute buffer, of the layers that this worker computes.
        state: the state that this worker holds.
        protocol: knows the version and the epoch; only read here.
    """

    def __init__(
        self,
        context: WorkerContext,
        values: Mapping[int, ValueBuffer],
        state: HeldState,
        protocol: WorkerProtocol,
    ) -> None:
        self.state = state
        self._rank = context.rank
        self._job = context.job
        self._values = values
        self._protocol = protocol
        self._send = context.channel.send
        self._is_in_doubt = False  # True: results since the version may have been computed from damaged parameters
        self._compared = -1, -1  # the mesh epoch and the version whose hashes were sent last

    def compare(self, *, saves: bool = False) -> None:
        """Send hashes of the state to the controller, which compares the replicas; if this version is compared.

        The hashes also serve here: until the next update, state that differs from them is damaged.

        Args:
            saves: the run stops with its state at this version, so it is compared even if others would not be.
        """
        version = self._protocol.version
        if self._compared == (self._protocol.epoch, version):
            return
        is_due = self._job.compares_at(version) or (saves and self._job.compares_at(0))
        written = self.state.fingerprints() if is_due else {}
        mine = {part.pages.key for part in self.state if part.version == version}
        if is_due and any(part.pages.key in mine or self._rank in part.pages.learners for part in self.state):
            rows = tuple((*key, digest) for key, digest in sorted(written.items()) if key in mine)
            self._compared = self._protocol.epoch, version
            self._send(CONTROLLER, m.Fingerprints(self._rank, self._protocol.epoch, version, rows), None)

    def check(self, *, leaves: bool = False) -> bool:
        """Check that this worker has computed everything since its version from undamaged parameters.

        If not, these results do not count: the damaged state is given up and reported, and the step begins anew in the
        mesh epoch that follows (H5).

        Args:
            leaves: the state itself is about to be sent or written, so all of it is checked and not only parameters.

        Returns:
            True if no damage was found.
        """
        damaged = self.state.damaged() if leaves else self.state.damaged_parameters(self._reads)
        self._doubt(damaged, waits=True)
        return not (damaged or self._is_in_doubt)

    def may_answer(self, need: m.Need) -> bool:
        """True unless parameters that a Need asks for are damaged here. Damaged ones are given up and reported."""

        def asked(pages: ReplicaSet) -> bool:
            return pages.layer == need.layer and pages.first < need.stop and need.first < pages.stop

        damaged = self.state.damaged_parameters(asked)
        self._doubt(damaged, waits=True)
        return not damaged

    def report_damage(self) -> None:
        """At a change of the mesh: give up what is damaged, and report it, so that nobody plans with it (H5)."""
        self._doubt(self.state.damaged(), waits=False)

    def give_up_damaged(self, step: int) -> None:
        """Before an update: give up and report what is damaged, so that this step is not applied to it."""
        self._give_up(self.state.damaged(), step)

    def begin_again(self) -> None:
        """All results since the version are dropped, so that none is in doubt any more."""
        self._is_in_doubt = False

    def _reads(self, pages: ReplicaSet) -> bool:
        """True if the master of these pages is itself computed with here, or sent to others (fp32).

        In bf16 it never is: workers compute with copies, which were made before the master was hashed.
        """
        return self._job.reads_masters and (pages.primary == self._rank or pages.layer in self._values)

    def _doubt(self, damaged: list[HeldRange], *, waits: bool) -> None:
        """Give up and report damage in the middle of a step. Results that were computed from it do not count any more.

        Args:
            waits: do nothing between a StepReport and the epoch that it is for. Entering that epoch checks again.
        """
        is_reported = self._protocol.promised > self._protocol.epoch
        if not (waits and is_reported):
            self._is_in_doubt |= self._give_up(damaged, min(self._protocol.version + 1, self._job.steps))

    def _give_up(self, damaged: list[HeldRange], step: int) -> bool:
        """Give up state that is not what this worker had written, and report it. Returns False if there is none."""
        if lost := self.state.disown(damaged):
            self._send(CONTROLLER, m.Damaged(self._rank, self._protocol.epoch, step, tuple(lost)), None)
        return bool(lost)
