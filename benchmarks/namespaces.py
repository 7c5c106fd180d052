"""Hosts on one machine: processes in namespaces of their own, joined by a switch that can be told to fail.

    node0  10.77.0.1 ---+
    node1  10.77.0.2 ---+--- switch.py, which carries each frame, or loses it
    node2  10.77.0.3 ---+

Each host has its own host name, interface and loopback, and knows the others by name. They share the machine's files
and its clock. Root can have such hosts, and so can other users where the kernel lets them make user namespaces;
`why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import switch
from benchmarks.switch import Way, host_address, host_name

CUT = Way(lost=1.0)
"""All frames are lost, and nobody is told."""


class Hosts:
    """Hosts and the network between them; `hosts` makes them. All of it is gone when it is closed."""

    def __init__(self, process: subprocess.Popen[str], pids: Sequence[int], *, in_user_namespace: bool) -> None:
        self._process = process
        self._pids = pids
        self._in_user_namespace = in_user_namespace
        self._ways: dict[tuple[int, int], Way] = {}

    def __len__(self) -> int:
        return len(self._pids)

    def process(self, number: int) -> int:
        """The id of a process in the namespaces of a host, which lives as long as the host does."""
        return self._pids[number]

    def command(self, number: int, *words: str, folder: Path | None = None) -> list[str]:
        """The words that run a command on a host, in a folder. The process is the command's own."""
        user = ["--user", "--preserve-credentials"] if self._in_user_namespace else []
        enter = ["nsenter", "--target", str(self._pids[number]), *user, "--net", "--mount", "--uts"]
        return [*enter, "env", "-C", str(folder or Path.cwd()), *words]

    def set_way(self, sender: int, receiver: int, way: Way) -> None:
        """From now on frames from one host to another go this way. Those of the other direction as before."""
        self._ways[sender, receiver] = way
        self._tell()

    def cut(self, number: int, *others: int) -> None:
        """Lose all frames between a host and these others; or all others."""
        self._set_both(number, others, CUT)

    def mend(self, number: int, *others: int) -> None:
        """Carry all frames between a host and these others; or all others."""
        self._set_both(number, others, Way())

    def disturb(self, way: Way) -> None:
        """Have all frames go this way."""
        everybody = range(len(self))
        self._ways = {(one, other): way for one in everybody for other in everybody if one != other}
        self._tell()

    def pull_cable(self, number: int) -> None:
        """A host's interface is down, which its own programs are told: they have no way to the others any more."""
        self._ip(number, "link", "set", "eth0", "down")

    def plug_in(self, number: int) -> None:
        self._ip(number, "link", "set", "eth0", "up")

    def _ip(self, number: int, *words: str) -> None:
        subprocess.run(self.command(number, "ip", *words), check=True, capture_output=True)

    def _set_both(self, number: int, others: Sequence[int], way: Way) -> None:
        for other in others or [each for each in range(len(self)) if each != number]:
            self._ways[number, other] = self._ways[other, number] = way
        self._tell()

    def _tell(self) -> None:
        """Tell the switch, and wait until it does so."""
        ways = {f"{sender}>{to}": way._asdict() for (sender, to), way in self._ways.items() if way != Way()}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(ways) + "\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError(f"the switch has ended:\n{self._process.communicate()[1]}")


@contextlib.contextmanager
def hosts(number: int = 3) -> Iterator[Hosts]:
    """Make hosts, and end what is left of them: whatever runs in them is ended by its own owner.

    Raises:
        OSError: not on this machine, with the reason.
    """
    if missing := [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]:
        raise OSError(f"{' and '.join(missing)} not installed (iproute2, util-linux)")
    in_user_namespace = os.geteuid() != 0
    own = ["--user", "--map-root-user"] if in_user_namespace else []
    command = ["unshare", *own, "--net", "--mount", "--uts", sys.executable, switch.__file__, str(number)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            told = process.communicate()[1].strip().splitlines()
            raise OSError(told[-1] if told else f"the switch ended with {process.returncode}")
        yield Hosts(process, json.loads(line)["hosts"], in_user_namespace=in_user_namespace)
    finally:
        process.communicate()  # closes its input, with which it ends


def why_not() -> str:
    """The reason why there can be no such hosts on this machine; empty if there can."""
    try:
        with hosts(2):
            return ""
    except OSError as error:
        return f"no hosts in namespaces here: {error}"


__all__ = ["CUT", "Hosts", "Way", "host_address", "host_name", "hosts", "why_not"]
