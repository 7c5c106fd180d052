"""An agent: `python -m elaswave_spmd agent HOST:PORT --token-file FILE`, once on each further machine of a run.

It offers places for workers to the controller that it finds at HOST:PORT, prepares the data here as the controller did
there, makes workers when told to, and reports how they end. It ends with the run, and when the controller is gone.
"""

from __future__ import annotations

import argparse
import os
import resource
import select
import shutil
import socket
import time
import traceback
from collections.abc import Sequence
from typing import Any

from elaswave_spmd.conf.format_version import FORMAT_VERSION
from elaswave_spmd.conf.schema import Settings, endpoint
from elaswave_spmd.controller.startup import data_spec, start_fork_server
from elaswave_spmd.data import PreparedData, prepare_data
from elaswave_spmd.errors import ConfigError, DataError, RunError, UserError
from elaswave_spmd.runtime.devices.selection import WorkerStart, worker_start
from elaswave_spmd.runtime.processes import agent_messages as am
from elaswave_spmd.runtime.processes.fd_limit import raise_fd_limit
from elaswave_spmd.runtime.processes.fork_server_client import Exited, ForkServerClient
from elaswave_spmd.runtime.processes.rendezvous import find_controller, read_secret, resolve_address
from elaswave_spmd.runtime.transport.agent_links import AgentLinks
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links, socket_directory
from elaswave_spmd.runtime.transport.mailbox import Envelope, Item, PeerClosed, SelectableMailbox

_CONNECT_TIMEOUT_S = 10.0
_ORPHAN_GRACE_S = 10.0  # until the run's own is known
_FAREWELL_MS = 2000
# What says which data it is; the rest are paths and names of this machine.
_SAME_DATA = ("corpus", "sha256", "num_tokens", "vocab_size", "seq_len", "num_train_samples", "num_validation_samples")


def main(arguments: Sequence[str], program: str) -> int:
    """Serves one run. Returns the exit code, 0: the controller said that it is over.

    Raises:
        UserError: bad input of this machine, or an agent that the controller does not take.
        RunError: no controller, or it is gone. Nothing is left behind.
    """
    options = _parse(arguments, program)
    host, port = endpoint("HOST:PORT", options.rendezvous)
    secret = read_secret(options.token_file, where=f"--token-file {options.token_file}")
    address = None if options.host is None else resolve_address(options.host, where=f"--host {options.host}")
    scratch = socket_directory()
    # Started first: it imports what workers need while this process looks for the controller.
    fork_server = start_fork_server(WorkerStart(), scratch, _ORPHAN_GRACE_S, here=True)
    try:
        found = find_controller(host, port, secret, options.timeout)
        address = address or found.local_host
        mailbox = SelectableMailbox()
        links = AgentLinks(found.peer, mailbox, token=found.token, host=address)
        try:
            links.connect(CONTROLLER, found.address)
            if links.wait_connected([CONTROLLER], _CONNECT_TIMEOUT_S):
                raise RunError(f"the controller cannot be reached at {found.address} (its runtime.host)")
            agent = Agent(links, mailbox, fork_server, {"directory": scratch, "host": address, "death_watch": None})
            agent.serve(options.name or socket.gethostname(), options.workers, options.rendezvous)
        finally:
            links.close(_FAREWELL_MS)
            mailbox.close()
    finally:
        fork_server.stop(0.0)
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


class Agent:
    """Between the beginning and the end of `serve` it does what the controller says.

    Args:
        own: what the spec of each worker here has of its own: directory, host, no death_watch (it is one host's).
    """

    def __init__(
        self, links: Links, mailbox: SelectableMailbox, fork_server: ForkServerClient, own: dict[str, Any]
    ) -> None:
        self._links, self._mailbox, self._fork_server, self._own = links, mailbox, fork_server, own

    def serve(self, name: str, capacity: int, rendezvous: str) -> None:
        """Offers `capacity` places on machine `name` and serves until the run is over. Leaves no worker.

        Raises:
            UserError: what the controller did not like, or this machine's data.
            RunError: the controller is gone, or workers cannot be made here.
        """
        import torch

        self._send(am.Hello(FORMAT_VERSION, self._links.address, name, capacity, str(torch.__version__)))
        print(f"agent on {name}: places for {capacity} workers of the run at {rendezvous}", flush=True)
        try:
            while not self._turn():
                pass
        except _ControllerLostError:
            self._fork_server.release()  # its workers are told in the same way, and may have something to save
            raise RunError("the controller is gone; no worker is left here") from None
        except BaseException as error:
            self._fork_server.stop(0.0)
            self._send(am.AgentFailed(am.Problem.from_error(error, _report(error))))
            self._until_told_to_stop()
            raise

    def _until_told_to_stop(self) -> None:
        """What is told must arrive before the end of the connection, which is seen elsewhere, and may be seen first."""
        deadline = time.monotonic() + _FAREWELL_MS / 1000
        while (left := deadline - time.monotonic()) > 0:
            item = self._mailbox.get(left)
            if isinstance(item, PeerClosed) or (
                isinstance(item, Envelope) and isinstance(am.decode(item.header), (am.Stop, am.Refused))
            ):
                return

    def _turn(self) -> bool:
        """Waits for something and answers it; True when the run is over."""
        select.select([self._mailbox, self._fork_server], [], [])
        if any([self._take(item) for item in self._mailbox.take_all()]):
            return True
        self._report_exits(self._fork_server.poll())
        return False

    def _take(self, item: Item) -> bool:
        if isinstance(item, PeerClosed):
            raise _ControllerLostError
        if not isinstance(item, Envelope):
            return False
        match am.decode(item.header):
            case am.Prepare(num_workers, settings, data):
                self._prepare(num_workers, Settings.from_dict(settings), PreparedData.from_dict(data))
            case am.Spawn(rank, spec):
                self._fork_server.spawn(rank, spec | self._own)
            case am.Signal(rank, number):
                self._fork_server.signal(rank, number)
            case am.ReportExits():
                self._fork_server.signal(-1, 0)  # nobody; its answer comes after the notices of all who have ended
                self._report_exits(self._fork_server.poll())
                self._send(am.ExitsReported())
            case am.Refused(problem):
                raise problem.to_error("the controller")
            case am.Stop(grace_s):
                self._report_exits(self._fork_server.stop(grace_s))
                return True
            case message:
                raise AssertionError(f"an agent got {message}")
        return False

    def _prepare(self, num_workers: int, settings: Settings, theirs: PreparedData) -> None:
        raise_fd_limit(num_workers)
        self._restart_fork_server(worker_start(settings), settings.timeouts.orphan_grace)
        if hasattr(resource, "prlimit"):  # Linux; the fork server runs already, and its children inherit its limits
            resource.prlimit(self._fork_server.pid, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
        ours = prepare_data(data_spec(settings))
        check_same_data(ours, theirs)
        self._own["data"] = ours.to_dict()
        self._fork_server.ready()
        self._fork_server.set_orphan_grace(settings.timeouts.orphan_grace)
        self._send(am.Prepared())

    def _restart_fork_server(self, start: WorkerStart, orphan_grace_s: float) -> None:
        """The fork server was started before the run's device was known: it lacks that device's variables and
        modules.
        """
        if start == WorkerStart():
            return
        self._fork_server.stop(0.0)
        os.makedirs(self._own["directory"], mode=0o700, exist_ok=True)  # it goes with a fork server
        self._fork_server = start_fork_server(start, self._own["directory"], orphan_grace_s)

    def _report_exits(self, exits: Sequence[Exited]) -> None:
        for exited in exits:
            self._send(am.WorkerExited(exited.rank, exited.pid, exited.code, exited.signal))

    def _send(self, message: am.AgentMessage) -> None:
        self._links.send(CONTROLLER, am.encode(message))


class _ControllerLostError(Exception):
    pass


def check_same_data(ours: PreparedData, theirs: PreparedData) -> None:
    """Refuses data other than the controller's.

    Raises:
        DataError: with what differs.
    """
    names = [name for name in _SAME_DATA if getattr(ours, name) != getattr(theirs, name)]
    if not names:
        return
    raise DataError(
        "this machine's data differ: " + ", ".join(f"{name} {getattr(ours, name)}" for name in names),
        rule="all machines have the same data",
        where=f"data {ours.corpus}",
        exists=", ".join(f"{name} {getattr(theirs, name)}" for name in names) + " on the controller's machine",
        fix="the same files on all machines; data=stdlib also needs the same version of Python",
    )


def _report(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, (RunError, UserError)) else traceback.format_exc()


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        f"{program} agent", description="Lends this machine to the run that meets at HOST:PORT."
    )
    parser.add_argument("rendezvous", metavar="HOST:PORT", help="the controller's runtime.rendezvous")
    parser.add_argument("--token-file", required=True, metavar="FILE", help="the secret; mode 0600")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="places for workers here (default 1)")
    parser.add_argument("--host", metavar="ADDRESS", help="of this machine; default: the one that reaches HOST")
    parser.add_argument("--name", help="what fails together has the same; default: the host name")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="to wait for the controller (default 300)"
    )
    options = parser.parse_args(arguments)
    if options.workers < 1:
        raise ConfigError(
            f"--workers {options.workers} leaves no place for a worker",
            rule="an agent has a place for at least 1 worker",
        )
    return options
