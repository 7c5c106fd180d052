"""The search for the controller of a run, from another machine: what an agent offers, and where it asks."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from elaswave_spmd.conf.schema import endpoint
from elaswave_spmd.controller.address_note import take_note
from elaswave_spmd.controller.agent_machine import release
from elaswave_spmd.controller.agent_workers import AgentWorkers
from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.output import say
from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient
from elaswave_spmd.runtime.processes.rendezvous import Found, NoRunYetError, find_controller, is_loopback
from elaswave_spmd.runtime.transport.credentials import Credentials

LOOK_AGAIN_S = 0.5  # between two attempts to join again
_NOTE_S = 2.0  # between two looks whether the run has moved


@dataclasses.dataclass(frozen=True)
class Offer:
    """An offer says how many workers a machine has places for, and which run they are for.

    Args:
        name: of the machine.
        capacity: places for workers.
        rendezvous: HOST:PORT.
        address: of this machine for links; None: the one that reaches the rendezvous.
        drain_s: after SIGTERM, until it ends whatever has become of its workers.
    """

    name: str
    capacity: int
    rendezvous: str
    address: str | None
    drain_s: float


class ControllerSearch:
    """The search for the controller of a run, at first and when it was lost: at its rendezvous, or where a note says.

    Once it was found, a process there that does not answer, or ends each connection, may be a controller that ends, or
    the network has failed once more; and one that does not show the secret is a stranger, who could else end the agents
    of a run whose controller has died: that is looked at again. What a process with the secret refuses stays refused.

    Args:
        endpoint: (host, port) of the rendezvous.
        timeout_s: for which it is looked for, where no worker waits.
        moved: a file that may name another HOST:PORT meanwhile (address_note.py); None: the run stays where it is.

    Attributes:
        offer: for the run, which is at its rendezvous as far as is known.
    """

    def __init__(
        self, offer: Offer, endpoint: tuple[str, int], secret: bytes, timeout_s: float, moved: Path | None = None
    ) -> None:
        self.offer = offer
        self._endpoint = endpoint
        self._secret = secret
        self._timeout_s = timeout_s
        self._moved = moved

    def announced(self, kept: AgentWorkers | None) -> str:
        """The next thing that the agent does, in words."""
        if kept is None:
            return f"looking for it at {self.offer.rendezvous} for {self._timeout_s:g} s"
        left = max(0.0, kept.wait_until - time.monotonic())
        return f"it keeps {kept} for the next one at {self.offer.rendezvous}, for {left:.0f} s (timeouts.adopt)"

    def first(self) -> Found:
        """The controller of the run that is about to begin.

        Raises:
            ConfigError, RunError: as for `find_controller`.
        """
        until = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._ask(until - time.monotonic())
            except RunError as error:
                if self._moved is None:
                    raise
                if time.monotonic() >= until:
                    where = self.offer.rendezvous
                    what = f"no controller at {where} within {self._timeout_s:g} s: nothing listens there"
                    raise RunError(what) from error

    def _ask(self, left_s: float) -> Found:
        """Ask at the rendezvous, for so long, or until it is time to look whether the run is at another one now.

        Raises:
            ConfigError, RunError: as for `find_controller`.
        """
        left_s = max(0.0, left_s)
        if self._moved is None:
            return find_controller(*self._endpoint, self._secret, left_s)
        if (said := take_note(self._moved)) is not None:
            try:
                self._endpoint = endpoint(None, said)
            except ConfigError:
                say(f"{self._moved} names no place of a run: {said!r}")
            else:
                self.offer = dataclasses.replace(self.offer, rendezvous=said)
                say(f"the run has moved: it is looked for at {said} ({self._moved})")
        return find_controller(*self._endpoint, self._secret, min(left_s, _NOTE_S))

    def with_workers(self, kept: AgentWorkers, fork_server: ForkServerClient, credentials: Credentials) -> Found | None:
        """The controller, once it is there again, while workers wait for it; None: they have waited long enough.

        Then they have had time to write their state, and are gone. So it is where what has come is another life of the
        run, which has credentials of its own and begins with a checkpoint: it adopts nobody, and what they write is
        what it may begin with.

        Args:
            credentials: of the life that they are in.

        Raises:
            ConfigError: the controller refuses the format; they are gone as well.
        """
        found: Found | None = None
        try:
            while found is None and (left := kept.wait_until - time.monotonic()) > 0:
                try:
                    found = self._ask(left)
                except (RunError, NoRunYetError):
                    time.sleep(LOOK_AGAIN_S)
        except ConfigError:
            release(fork_server, time.monotonic() + kept.grace_s)
            raise
        if found is not None and found.credentials == credentials:
            return found
        why = f"no controller came within {kept.adopt_s:g} s (timeouts.adopt)"
        if found is not None:
            why = f"the run at {self.offer.rendezvous} has begun another life, which adopts nobody"
        say(f"{why}: {kept} may save state and end")
        release(fork_server, time.monotonic() + kept.grace_s)
        return found

    def until(self, when: float) -> Found:
        """The controller, once it is there again, or that of another run at the same place.

        Args:
            when: the time at which it is given up.

        Raises:
            RunError: nobody is there until then.
            ConfigError: the controller refuses the format.
        """
        while True:
            try:
                return self._ask(when - time.monotonic())
            except (RunError, NoRunYetError) as error:
                cause = error
            if time.monotonic() >= when:
                break
            time.sleep(LOOK_AGAIN_S)
        why = f" ({cause.what})" if isinstance(cause, NoRunYetError) else ""
        raise RunError(
            f"the connection to the controller of the run at {self.offer.rendezvous} was lost: the controller was "
            "killed, or its machine or the network in between has failed; nobody answered there again within "
            f"{self._timeout_s:g} s (--timeout){why}. No worker is left here; they had time to write their state\n"
            "  a run that goes on has counted them as lost; it takes this agent again, and so does one that is resumed "
            "there"
        ) from cause


def check_host(address: str, found: Found) -> None:
    """Refuse an address of this machine alone for links, where the controller is on another one.

    The agent would wait for orders for ever: there is no link on which the controller could refuse it.

    Args:
        address: that --host names.

    Raises:
        ConfigError: it is on the loopback interface.
    """
    if is_loopback(address) and not is_loopback(found.local_host) and not is_beside_controller(found):
        raise ConfigError(
            f"--host names {address}, an address that other machines cannot reach",
            rule="links between machines listen on an address that the others reach",
            where="--host",
            fix=f"--host {found.local_host}, or leave it out",
        )


def is_beside_controller(found: Found) -> bool:
    """True if the controller listens at the address of this machine that leads to it."""
    return found.address.rpartition(":")[0] == f"tcp://{found.local_host}"
