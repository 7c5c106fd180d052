"""Latency and throughput of the links between two processes, ipc against tcp.

    python -m benchmarks.links [--json PATH] [--rounds N]

One process sends, the other echoes: each message goes through `Links.send`, the event loop and the `Mailbox` on both
sides, as in training. The two transports alternate round by round, so that a busy machine disturbs both. Reported:
median and 90th percentile of half a round trip, and the rate when messages are streamed one way.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from elaswave_spmd.runtime.transport.links import Links, Transport, socket_directory
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox

SIZES = (64, 64 * 1024, 1024**2, 16 * 1024**2)  # bytes
TRANSPORTS: tuple[Transport, ...] = ("ipc", "tcp")
_WAIT_S = 60.0


@dataclass(frozen=True)
class Row:
    """One line of the table; times in milliseconds, one way; rates in GB/s."""

    transport: str
    num_bytes: int
    median_ms: float
    p90_ms: float
    ping_pong_gb_per_s: float
    stream_gb_per_s: float


def receive(mailbox: Mailbox) -> Envelope:
    """The next message; everything else is an error here."""
    item = mailbox.get(_WAIT_S)
    if not isinstance(item, Envelope):
        raise RuntimeError(f"expected a message, got {item}")
    return item


def echo(transport: Transport, directory: str) -> None:
    """The second process: echoes each message, or counts a stream and answers once. It ends when its input closes."""
    mailbox = Mailbox()
    links = Links(1, mailbox, transport=transport, directory=directory)
    print(links.address, flush=True)
    links.connect(0, sys.stdin.readline().strip())
    while (item := receive(mailbox)).header != b"end":
        if item.header == b"echo":
            links.send(0, b"back", item.payloads)
        elif item.header == b"last":
            links.send(0, b"back")
    links.close(1000)


class Pair:
    """Two connected processes: this one, and one that echoes."""

    def __init__(self, transport: Transport, directory: str) -> None:
        self.mailbox = Mailbox()
        self.links = Links(0, self.mailbox, transport=transport, directory=directory)
        command = [sys.executable, "-m", "benchmarks.links", "--echo", transport, directory]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin and self.process.stdout
        self.links.connect(1, self.process.stdout.readline().strip())
        self.process.stdin.write(self.links.address + "\n")
        self.process.stdin.flush()
        if self.links.wait_connected([1], _WAIT_S):
            raise RuntimeError("no connection to the echoing process")

    def ping(self, payload: np.ndarray) -> float:
        """The time of half a round trip, in seconds."""
        start = time.perf_counter()
        self.links.send(1, b"echo", [payload])
        receive(self.mailbox)
        return (time.perf_counter() - start) / 2

    def stream(self, payload: np.ndarray, count: int) -> float:
        """The rate of `count` messages that are sent back to back, until all have arrived, in bytes per second."""
        start = time.perf_counter()
        for number in range(count):
            self.links.send(1, b"last" if number == count - 1 else b"more", [payload])
        receive(self.mailbox)
        return payload.nbytes * count / (time.perf_counter() - start)

    def close(self) -> None:
        self.links.send(1, b"end")
        self.process.communicate(timeout=_WAIT_S)
        self.links.close(1000)


def measure(rounds: int) -> list[Row]:
    """The table: one row per transport and size."""
    directory = socket_directory()
    pairs = {transport: Pair(transport, directory) for transport in TRANSPORTS}
    rows = []
    try:
        for size in SIZES:
            payload = np.ones(size, np.uint8)
            per_round = max(2, min(100, 8 * 1024**2 // size))
            times: dict[str, list[float]] = {transport: [] for transport in TRANSPORTS}
            rates: dict[str, list[float]] = {transport: [] for transport in TRANSPORTS}
            for _ in range(rounds):
                for transport, pair in pairs.items():
                    times[transport] += [pair.ping(payload) for _ in range(per_round)]
                    rates[transport].append(pair.stream(payload, per_round))
            rows += [_row(transport, size, times[transport], rates[transport]) for transport in TRANSPORTS]
    finally:
        for pair in pairs.values():
            pair.close()
        Path(directory).rmdir()
    return rows


def _row(transport: str, size: int, seconds: list[float], rates: list[float]) -> Row:
    median = statistics.median(seconds)
    p90 = statistics.quantiles(seconds, n=10)[-1]
    stream = statistics.median(rates) / 1e9
    return Row(transport, size, median * 1e3, p90 * 1e3, size / median / 1e9, stream)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="PATH", help="also write the table as JSON")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--echo", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.echo:
        echo(*options.echo)
        return
    rows = measure(options.rounds)
    print(f"{'':4} {'bytes':>10} {'median ms':>10} {'p90 ms':>8} {'ping-pong GB/s':>15} {'stream GB/s':>12}")
    for row in rows:
        print(
            f"{row.transport:4} {row.num_bytes:>10} {row.median_ms:>10.3f} {row.p90_ms:>8.3f} "
            f"{row.ping_pong_gb_per_s:>15.2f} {row.stream_gb_per_s:>12.2f}"
        )
    if options.json:
        result = {"cpus": os.cpu_count(), "rounds": options.rounds, "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
