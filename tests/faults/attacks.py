"""The attacks of strangers on the ports of a run: `python attacks.py ATTACK PORT...`, as another user where it can.

It has no credentials of the run, and needs nothing of this package. Each attack ends by itself.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import zmq

NOBODY = 65534
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
NULL = GREETING + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"


def connected(port: int) -> socket.socket:
    made = socket.socket()
    made.connect(("127.0.0.1", port))  # create_connection would import a codec, which the other user may not read
    made.settimeout(20)
    return made


def garbage(port: int) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(100_000), b"\0" * 1000, NULL[:20]):
        with connected(port) as stranger, suppress(OSError):
            stranger.sendall(data)


def empty_frames(port: int) -> None:
    """300 kB: one message of 150,000 empty frames, from a client without credentials."""
    _push(port, lambda _: None, [b""] * 150_000)


def large_frame(port: int) -> None:
    """A frame that is declared as 6 GiB, of which 512 MiB are sent if nobody hangs up."""
    with connected(port) as stranger, suppress(OSError):
        stranger.sendall(NULL + READY)
        stranger.recv(4096)
        stranger.sendall(b"\x02" + struct.pack(">Q", 6 << 30))
        for _ in range(512):
            stranger.sendall(bytes(1 << 20))
        time.sleep(1)


def other_keys(port: int) -> None:
    def prepare(client: zmq.Socket[bytes]) -> None:
        client.curve_serverkey = zmq.curve_keypair()[0]
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()

    _push(port, prepare)


def wrong_password(port: int) -> None:
    def prepare(client: zmq.Socket[bytes]) -> None:
        client.plain_username, client.plain_password = b"elaswave", b"0" * 64

    _push(port, prepare)


def _push(port: int, prepare: Callable[[zmq.Socket[bytes]], None], frames: Sequence[bytes] = (b"x",) * 500) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = context.socket(zmq.PUSH)
    client.setsockopt(zmq.SNDHWM, 0)
    prepare(client)
    client.connect(f"tcp://127.0.0.1:{port}")
    time.sleep(0.5)  # for a handshake: until then there is nobody to send to
    with suppress(zmq.Again):
        client.send_multipart(frames, zmq.DONTWAIT)
    time.sleep(3)  # it sends in the background
    context.destroy(0)


def silence(port: int) -> None:
    """Hundreds of connections that send nothing, until they are closed."""
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(port)) for _ in range(200)]
        for each in silent:
            with suppress(OSError):
                while each.recv(1000):
                    pass


ATTACKS = {
    attack.__name__: attack for attack in (garbage, empty_frames, large_frame, other_keys, wrong_password, silence)
}


def main() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    print(f"user {os.geteuid()}", flush=True)
    attack = ATTACKS[sys.argv[1]]
    with ThreadPoolExecutor(len(sys.argv)) as pool:  # all ports at once
        for done in [pool.submit(attack, int(port)) for port in sys.argv[2:]]:
            done.result()


if __name__ == "__main__":
    main()
