"""Latency and throughput of the links between two processes: ipc, tcp, and tcp with encryption.

    python -m benchmarks.links [--json PATH] [--rounds N]

One process sends, the other echoes: each message goes through `Links.send`, the event loop and the `Mailbox` on both
sides, as in training. The ways alternate round by round, so that a busy machine disturbs all. Reported:
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from elaswave_spmd.runtime.transport.credentials import Credentials, RunKeys, RunToken
from elaswave_spmd.runtime.transport.links import Links, Transport, socket_directory
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox

SIZES = (64, 200, 64 * 1024, 1024**2, 16 * 1024**2)  # bytes
WAYS: Mapping[str, tuple[Transport, Credentials | None]] = {
    "shm": ("shm", None),
    "ipc": ("ipc", None),
    "tcp": ("tcp", RunToken("00" * 32)),
    "encrypted": ("tcp", RunKeys.derive(b"of a benchmark", "links")),
}
_WAIT_S = 60.0


@dataclass(frozen=True)
class Row:
    """One line of the table; times in milliseconds, one way; rates in GB/s."""

    way: str
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


def open_links(me: int, mailbox: Mailbox, way: str, directory: str) -> Links:
    """Links of one of the two processes."""
    transport, credentials = WAYS[way]
    return Links(me, mailbox, transport=transport, directory=directory, credentials=credentials)


def echo(way: str, directory: str) -> None:
    """The second process: echoes each message, or counts a stream and answers once. It ends when its input closes."""
    mailbox = Mailbox()
    links = open_links(1, mailbox, way, directory)
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

    def __init__(self, way: str, directory: str) -> None:
        self.mailbox = Mailbox()
        self.links = open_links(0, self.mailbox, way, directory)
        command = [sys.executable, "-m", "benchmarks.links", "--echo", way, directory]
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
    """The table: one row per way and size."""
    directory = socket_directory()
    pairs = {way: Pair(way, directory) for way in WAYS}
    rows = []
    try:
        for size in SIZES:
            payload = np.ones(size, np.uint8)
            per_round = max(2, min(100, 8 * 1024**2 // size))
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            rates: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(rounds):
                for way, pair in pairs.items():
                    times[way] += [pair.ping(payload) for _ in range(per_round)]
                    rates[way].append(pair.stream(payload, per_round))
            rows += [_row(way, size, times[way], rates[way]) for way in WAYS]
    finally:
        for pair in pairs.values():
            pair.close()
        Path(directory).rmdir()
    return rows


def _row(way: str, size: int, seconds: list[float], rates: list[float]) -> Row:
    median = statistics.median(seconds)
    p90 = statistics.quantiles(seconds, n=10)[-1]
    stream = statistics.median(rates) / 1e9
    return Row(way, size, median * 1e3, p90 * 1e3, size / median / 1e9, stream)


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
    print(f"{'':9} {'bytes':>10} {'median ms':>10} {'p90 ms':>8} {'ping-pong GB/s':>15} {'stream GB/s':>12}")
    for row in rows:
        print(
            f"{row.way:9} {row.num_bytes:>10} {row.median_ms:>10.3f} {row.p90_ms:>8.3f} "
            f"{row.ping_pong_gb_per_s:>15.2f} {row.stream_gb_per_s:>12.2f}"
        )
    if options.json:
        result = {"cpus": os.cpu_count(), "rounds": options.rounds, "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
