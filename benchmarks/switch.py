"""The network between the hosts of `namespaces.py`: a switch in user space, which can lose, delay and reorder frames.

It makes one network namespace for each host, with an interface whose other end it holds itself (a tap device), and
carries every frame from one to the others. So it has a say in each: what a host sends another may be dropped in one
direction only, which a cable cannot do, and on every kernel alike (few have netem, the kernel's own way to do that).

    python switch.py HOSTS      in namespaces of its own: `unshare --net --mount --uts`, with --user who is not root

It prints a line of JSON when the hosts are there (`{"hosts": [pid, ...]}`, a process in each one's namespaces), then
reads lines `{"from>to": {"lost": ..., "delay_s": ..., "jitter_s": ...}}`, all pairs that are not perfect, and answers
each when it holds. It ends with its standard input, and its hosts with it: nothing of them has a name on the machine.

Imports nothing but the standard library, as it starts once for each test.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
_MOST_FRAME_BYTES = 1 << 16
_BURST = 64  # frames of one host before the others are looked at
_DESTINATION = slice(0, 6)  # of an Ethernet frame


class Way(NamedTuple):
    """What becomes of the frames from one host to another.

    Args:
        lost: the share of them that is dropped; 1: all.
        delay_s: until a frame is handed over.
        jitter_s: of the delay: up to so much more, drawn for each frame, so that a later one may overtake it.
    """

    lost: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0


def host_name(number: int) -> str:
    return f"node{number}"


def host_address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _hardware_address(number: int) -> bytes:
    return bytes((2, 0, 0, 0, 0, number + 1))


class Switch:
    """Carries frames between tap devices, one for each host.

    Args:
        taps: their descriptors, which do not block.
        seed: of what is drawn.
    """

    def __init__(self, taps: list[int], seed: int = 0) -> None:
        self._taps = taps
        self._ways: dict[tuple[int, int], Way] = {}
        self._random = random.Random(seed)
        self._late: list[tuple[float, int, int, bytes]] = []  # a heap of (when, number, to, frame)
        self._num_late = 0
        self._hosts = {_hardware_address(number): number for number in range(len(taps))}

    def set_ways(self, ways: dict[tuple[int, int], Way]) -> None:
        """From now on only these ways are not perfect. What is under way arrives, unless its way loses all."""
        self._ways = ways
        self._late = [entry for entry in self._late if ways.get((entry[2] >> 8, entry[2] & 255), Way()).lost < 1]
        heapq.heapify(self._late)

    def run(self, orders: int) -> None:
        """Carry frames until the orders end: lines at a descriptor, see the top of this file."""
        poller = select.poll()
        for waited in (*self._taps, orders):
            poller.register(waited, select.POLLIN)
        numbers = {tap: number for number, tap in enumerate(self._taps)}
        rest = b""
        while True:
            due_s = self._late[0][0] - time.monotonic() if self._late else None
            for descriptor, _ in poller.poll(None if due_s is None else max(0.0, 1e3 * due_s)):
                if descriptor != orders:
                    self._read(numbers[descriptor])
                    continue
                if not (read := os.read(orders, 1 << 16)):
                    return
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    self.set_ways(_decoded(line))
                    print("{}", flush=True)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, pair, frame = heapq.heappop(self._late)
                self._write(pair & 255, frame)

    def _read(self, sender: int) -> None:
        """Take what a host has sent."""
        for _ in range(_BURST):
            try:
                frame = os.read(self._taps[sender], _MOST_FRAME_BYTES)
            except BlockingIOError:
                return
            receiver = self._hosts.get(frame[_DESTINATION])
            for each in range(len(self._taps)) if receiver is None else (receiver,):  # None: a broadcast
                if each != sender:
                    self._carry(sender, each, frame)

    def _carry(self, sender: int, receiver: int, frame: bytes) -> None:
        way = self._ways.get((sender, receiver))
        if way is None:
            self._write(receiver, frame)
        elif way.lost < 1 and self._random.random() >= way.lost:
            if not way.delay_s and not way.jitter_s:
                self._write(receiver, frame)  # in order with the frames on ways that are perfect
                return
            when = time.monotonic() + way.delay_s + way.jitter_s * self._random.random()
            self._num_late += 1
            heapq.heappush(self._late, (when, self._num_late, sender << 8 | receiver, frame))

    def _write(self, receiver: int, frame: bytes) -> None:
        try:
            os.write(self._taps[receiver], frame)
        except OSError:  # its interface is down, or full: the frame is lost, as on a cable
            return


def _decoded(line: bytes) -> dict[tuple[int, int], Way]:
    found = {}
    for pair, way in json.loads(line).items():
        sender, receiver = map(int, pair.split(">"))
        found[sender, receiver] = Way(**way)
    return found


def _open_tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


def _make_host(number: int, names: str) -> subprocess.Popen[bytes]:
    """A host: a process in namespaces of its own, which ends with this one. It has the tap device of its number.

    Args:
        names: a file of the hosts' names and addresses.
    """
    setting_up = f"hostname {host_name(number)} && mount --bind {names} /etc/hosts && echo && exec cat"
    command = ["unshare", "--net", "--mount", "--uts", "sh", "-c", setting_up]
    host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert host.stdout is not None
    if not host.stdout.readline():
        raise OSError(f"no host in a namespace: {' '.join(command)} ended")
    mac = ":".join(f"{byte:02x}" for byte in _hardware_address(number))
    _run("ip", "link", "set", f"tap{number}", "netns", str(host.pid), "name", "eth0", "address", mac)
    inside = ["nsenter", "--target", str(host.pid), "--net", "ip"]
    _run(*inside, "addr", "add", f"{host_address(number)}/24", "dev", "eth0")
    _run(*inside, "link", "set", "lo", "up")
    _run(*inside, "link", "set", "eth0", "up")
    return host


def _run(*words: str) -> None:
    subprocess.run(words, check=True, stdout=sys.stderr)


def main() -> None:
    num_hosts = int(sys.argv[1])
    taps = [_open_tap(f"tap{number}") for number in range(num_hosts)]
    with tempfile.NamedTemporaryFile("w", prefix="hosts-") as names:
        lines = ["127.0.0.1 localhost", *(f"{host_address(n)} {host_name(n)}" for n in range(num_hosts))]
        names.write("\n".join(lines) + "\n")
        names.flush()
        os.chmod(names.name, 0o644)
        hosts = [_make_host(number, names.name) for number in range(num_hosts)]
    try:
        print(json.dumps({"hosts": [host.pid for host in hosts]}), flush=True)
        Switch(taps).run(sys.stdin.fileno())
    finally:
        for host in hosts:
            host.kill()
            host.wait()


if __name__ == "__main__":
    main()
