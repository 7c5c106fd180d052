"""The command `agent HOST:PORT --token-file FILE`, given once on each further machine of a run.

It offers places for workers to the controller that it finds at HOST:PORT, and serves it (agent.py). It ends with the
run. If its link to the controller is lost, its workers end, and it looks for the controller again, for --timeout
seconds. It then joins as a new agent: of the former one only the peer ids still count, which it sends along. Where
another controller may adopt workers (`timeouts.adopt`), they wait for it first, and the agent offers them to the one
that it finds, at the same place or where a note says (address_note.py). At SIGTERM its workers leave the run first, and
by a deadline it ends in any case.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from elaswave_spmd.conf.schema import endpoint
from elaswave_spmd.controller.agent import Agent, LostControllerError
from elaswave_spmd.controller.agent_machine import Machine
from elaswave_spmd.controller.agent_search import (
    LOOK_AGAIN_S,
    ControllerSearch,
    Offer,
    check_host,
    is_beside_controller,
)
from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.output import say
from elaswave_spmd.runtime.processes import agent_messages as am
from elaswave_spmd.runtime.processes.rendezvous import Found, read_secret, resolve_address
from elaswave_spmd.runtime.processes.stop_signals import StopSignals, signal_name
from elaswave_spmd.runtime.transport.agent_links import AgentLinks
from elaswave_spmd.runtime.transport.credentials import Credentials
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.runtime.transport.mailbox import SelectableMailbox

_CONNECT_TIMEOUT_S = 10.0
_MOST_WORKERS = 2**16
_OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)  # SIGTERM is meant for this process alone: a machine that is to leave


def main(arguments: Sequence[str], program: str) -> int:
    """Serve one run. Returns the exit code, 0: the controller has ended it.

    Raises:
        UserError: bad input of this machine, or an agent that the controller does not take.
        RunError: no controller, or it is gone. Nothing is left behind.
    """
    options = _parse(arguments, program)
    host, port = endpoint(None, options.rendezvous)
    secret = read_secret(options.token_file, where=f"--token-file {options.token_file}")
    address = None if options.host is None else resolve_address(options.host, where=f"--host {options.host}")
    name = options.name or socket.gethostname()
    offer = Offer(name, options.workers, options.rendezvous, address, options.drain)
    moved = None if options.moved_file is None else Path(options.moved_file).absolute()
    search = ControllerSearch(offer, (host, port), secret, options.timeout, moved)
    # First of all: its fork server imports what workers need while this process looks for the controller.
    terms = StopSignals((signal.SIGTERM,))
    machine = Machine(options.drain, terms)
    with StopSignals(_OF_TERMINALS) as signals, terms, machine:
        found = search.first()
        if address is not None:
            check_host(address, found)
        if not options.name and is_beside_controller(found):
            why = f"the controller is on this machine too, by the same name, {name}: one failure domain"
            say(f"{why}. --name gives this agent another")
        _Service(search, machine, signals, terms, options.timeout).serve(found)
    return 0


class _Service:
    """The service of this machine to a run, from controller to controller.

    Args:
        signals: of a terminal, which are answered by a line.
        terms: SIGTERM.
        timeout_s: for which a controller that was lost is looked for, where no worker waits.
    """

    def __init__(
        self, search: ControllerSearch, machine: Machine, signals: StopSignals, terms: StopSignals, timeout_s: float
    ) -> None:
        self._search = search
        self._machine = machine
        self._signals = signals
        self._terms = terms
        self._timeout_s = timeout_s
        self._keeps_workers = False  # they wait for a controller
        self._gives_up_at: float | None = None  # None: no controller was lost yet

    def serve(self, found: Found) -> None:
        """Serve this controller, and those that come after it, until one of them ends the run.

        Raises:
            UserError, RunError: as for `main`.
        """
        before: tuple[int, ...] = ()
        while not self._serve_one(found, before):
            again = self._find_next(found.credentials)
            # Ids are those of one run; another one, at the same place, has given them to others.
            before = (*before, found.peer) if again.credentials == found.credentials else ()
            found = again

    def _serve_one(self, found: Found, before: tuple[int, ...]) -> bool:
        """Serve one controller. Returns True if it has ended the run, False if it is lost and is looked for again.

        Args:
            before: the peer ids that this process has had in the run.
        """
        try:
            # Ctrl-C in a terminal reaches the command beside it too, whose run then saves its state.
            with (
                _Joined(self._search.offer, found, self._machine, self._terms, self._signals) as agent,
                self._signals.as_events(_tell, count=1),
                self._terms.as_events(agent.terminate, count=1),
            ):
                agent.serve(self._search.offer, before)
        except _UnreachableError as unreachable:
            if self._gives_up_at is None or (not self._keeps_workers and time.monotonic() >= self._gives_up_at):
                raise
            say(f"{unreachable}: looking for it again")
            time.sleep(LOOK_AGAIN_S)
        except LostControllerError as lost:
            self._gives_up_at, self._keeps_workers = time.monotonic() + self._timeout_s, lost.keeps_workers
            kept = self._machine.workers if lost.keeps_workers else None
            say(f"{lost}: {self._search.announced(kept)}")
            self._terms.check()  # one may have come when nobody listened any more
            if not lost.keeps_workers:
                self._machine.begin_again()
        else:
            return True
        return False

    def _find_next(self, credentials: Credentials) -> Found:
        """The next controller, which workers may wait for.

        Args:
            credentials: of the controller that was lost.
        """
        assert self._gives_up_at is not None, "a controller was lost"
        again = None
        if self._keeps_workers:
            again = self._search.with_workers(self._machine.workers, self._machine.fork_server, credentials)
            if again is None or again.credentials != credentials:  # they have saved their state
                self._keeps_workers = False
                self._machine.begin_again()
        return again or self._search.until(self._gives_up_at)


class _Joined:
    """The links to a controller that was found, and the agent that serves by them. A context manager.

    Raises:
        _UnreachableError: on entry: the controller cannot be reached.
    """

    def __init__(self, offer: Offer, found: Found, machine: Machine, terms: StopSignals, signals: StopSignals) -> None:
        address = offer.address or found.local_host
        self._found = found
        self._mailbox = SelectableMailbox()
        self._links = AgentLinks(found.peer, self._mailbox, credentials=found.credentials, host=address)
        machine.workers.own["host"] = address
        self._agent = Agent(self._links, self._mailbox, machine, terms, signals, offer.drain_s)

    def __enter__(self) -> Agent:
        try:
            self._links.connect(CONTROLLER, self._found.address)
            if self._links.wait_connected([CONTROLLER], _CONNECT_TIMEOUT_S):
                raise _UnreachableError(f"the controller cannot be reached at {self._found.address} (its runtime.host)")
        except BaseException:
            self.__exit__()
            raise
        return self._agent

    def __exit__(self, *_: object) -> None:
        self._links.close(int(1e3 * self._agent.farewell_s))
        self._mailbox.close()


class _UnreachableError(RunError):
    """The controller has answered at the rendezvous, and its links cannot be reached."""


def _tell(number: int) -> None:
    """Answer the first signal of a terminal by a line. Called by the handler."""
    text = f"{signal_name(number)}: the agent serves until the run ends; a second signal ends it at once\n"
    with contextlib.suppress(OSError):  # the terminal is closed
        os.write(2, text.encode())


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        f"{program} agent", description="Offers this machine to the run that meets at HOST:PORT."
    )
    parser.add_argument("rendezvous", metavar="HOST:PORT", help="the controller's runtime.rendezvous")
    parser.add_argument("--token-file", required=True, metavar="FILE", help="the secret; mode 0600")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="places for workers here (default 1)")
    parser.add_argument("--host", metavar="ADDRESS", help="of this machine; default: the one that reaches HOST")
    parser.add_argument(
        "--name", help="failure domain: agents that fail together have the same; default: the host name"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="to look for the controller, at first and when the connection to it is lost (default 300)",
    )
    parser.add_argument(
        "--drain",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="after SIGTERM: its workers leave the run, and it ends within so long (default 30)",
    )
    parser.add_argument(
        "--moved-file",
        metavar="FILE",
        help="looked for while it looks for the controller: names the HOST:PORT where the run is now, and is removed",
    )
    options = parser.parse_args(arguments)
    if not options.drain > 0 or not math.isfinite(options.drain):
        raise ConfigError(f"--drain {options.drain:g} is no deadline", rule="a number of seconds above 0")
    if options.name and (refused := am.refused_name(options.name, "--name")) is not None:
        raise refused
    if not options.timeout > 0 or not math.isfinite(options.timeout):
        raise ConfigError(
            f"--timeout {options.timeout:g} is no time to look for the controller",
            rule="a number of seconds above 0",
            fix="--timeout 300",
        )
    if options.workers < 1:
        raise ConfigError(
            f"--workers {options.workers} leaves no place for a worker",
            rule="an agent has a place for at least 1 worker",
            fix="--workers 1",
        )
    if options.workers > _MOST_WORKERS:
        raise ConfigError(
            f"--workers {options.workers} is more than a machine has",
            rule=f"an agent has places for at most {_MOST_WORKERS:,} workers",
            fix="--workers N, as many as the machine has devices or processors for",
        )
    moved = options.moved_file
    if moved is not None and os.path.lexists(moved) and (os.path.islink(moved) or not os.path.isfile(moved)):
        raise ConfigError(
            f"--moved-file {moved} is no regular file",
            rule="it is a file that is taken away when it is read; there need not be one yet",
            fix="--moved-file FILE, in a directory of yours",
        )
    return options
