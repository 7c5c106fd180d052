"""The processes of a run on an agent's machine, and the time that they have to end when nobody is left to order it."""

from __future__ import annotations

import time
from collections.abc import Callable

from elaswave_spmd.controller.agent_workers import AgentWorkers
from elaswave_spmd.controller.launching import start_fork_server
from elaswave_spmd.runtime.devices.selection import WorkerStart
from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient, ForkServerSpec
from elaswave_spmd.runtime.processes.scratch import Scratch
from elaswave_spmd.runtime.processes.stop_signals import Signalled, StopSignals

ORPHAN_GRACE_S = 10.0  # until the run's own is known
_RELEASE_S = 0.2


class Machine:
    """The processes of a run on this machine: a fork server, and the workers that it makes. A context that ends both.

    A signal may come at any time while workers wait for a controller, and ends this process wherever it is: then they
    have time to write their state, since nobody adopts them any more.

    Args:
        drain_s: that workers have after a signal.
        terms: SIGTERM; one more ends this at once.

    Attributes:
        scratch: the directory of the fork server's sockets.
        workers: of the run here. Its own keys of their specifications are `host`, later `data`; and `death_watch`,
            None, as a robust mutex is shared memory of one machine.
    """

    def __init__(self, drain_s: float, terms: StopSignals) -> None:
        self._drain_s = drain_s
        self._terms = terms
        self.scratch = Scratch()
        try:
            spec = ForkServerSpec(scratch=(self.scratch.path,), orphan_grace_s=ORPHAN_GRACE_S, here=True)
            self.fork_server = start_fork_server(WorkerStart(), spec)
        except BaseException:
            self.scratch.remove()
            raise
        self.workers = AgentWorkers({"death_watch": None})

    def begin_again(self) -> None:
        """Another life of the run, or another run, has nothing of the one before."""
        self._restart(WorkerStart(), ORPHAN_GRACE_S)
        self.workers = AgentWorkers({"death_watch": None})

    def prepare(self, start: WorkerStart, orphan_grace_s: float) -> None:
        """Start the fork server again with the variables and modules of the run's device, if that has any.

        The first one was started before the run's settings were known.
        """
        if start != WorkerStart():
            self._restart(start, orphan_grace_s)

    def _restart(self, start: WorkerStart, orphan_grace_s: float) -> None:
        self.fork_server.stop(0.0)
        self.scratch.make_again()
        spec = ForkServerSpec(scratch=(self.scratch.path,), orphan_grace_s=orphan_grace_s)
        self.fork_server = start_fork_server(start, spec)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if isinstance(error, Signalled) and self.workers.are_waiting:
                before = self._terms.num_came  # which raise nothing any more
                release(self.fork_server, time.monotonic() + self._drain_s, lambda: self._terms.num_came > before)
        finally:
            self.fork_server.stop(0.0)
            self.fork_server.end_release()  # which another signal has interrupted
            self.scratch.remove()


def release(fork_server: ForkServerClient, until: float, is_late: Callable[[], bool] = lambda: False) -> bool:
    """Let the workers end that have lost the controller, too, and their fork server.

    Args:
        until: a time at which what is left is killed.
        is_late: True once no more time is to be given.

    Returns:
        True if all have ended by themselves.
    """
    while (is_left := fork_server.releasing(_RELEASE_S)) and time.monotonic() < until and not is_late():
        pass
    fork_server.end_release()
    return not is_left
