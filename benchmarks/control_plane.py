"""Time of the controller's thread per message, by the number of workers: heartbeats, reports of steps, and a broadcast.

    python -m benchmarks.control_plane [--workers 100 1000 10000]

Nothing is sent: the controller is the product's own, over a `ControllerIO` that hands it encoded messages and takes its
answers. The table shows what decides how many workers one controller can have: a worker sends ten heartbeats a second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence

from elaswave_spmd.conf.schema import Timeouts
from elaswave_spmd.controller.supervision import Supervision
from elaswave_spmd.recovery import messages as m

REPEATS = 5


class Heartbeats:
    """A detector with so many workers, and a clock that runs one heartbeat period for each round of heartbeats."""

    def __init__(self, num_workers: int) -> None:
        self._timeouts = Timeouts()
        self._supervision = Supervision(self._timeouts, 0.0)
        self._now = 0.0
        self._ranks = range(num_workers)
        for rank in self._ranks:
            self._supervision.watch(rank, 0.0)

    def seconds_per_message(self) -> float:
        """A message is decoded and counted; ticks come when they are due, as in the controller's loop."""
        headers = [m.encode(m.Heartbeat(rank, 0, True, "forward")) for rank in self._ranks]
        period = self._timeouts.heartbeat / len(headers)
        rounds = max(1, 20_000 // len(headers))
        began = time.perf_counter()
        for _ in range(rounds):
            for header in headers:
                self._now += period
                if self._now >= self._supervision.next_tick:
                    assert not self._supervision.tick(self._now, (-1, ()), ())
                message = m.decode(header)
                assert isinstance(message, m.Heartbeat)
                self._supervision.heartbeat(message, self._now)
        return (time.perf_counter() - began) / (rounds * len(headers))


def encode_once(num_workers: int) -> Callable[[], float]:
    """Seconds to encode a Reconfigure message for all workers, once."""
    addresses = {rank: f"tcp://10.0.{rank // 256}.{rank % 256}:40000" for rank in range(num_workers)}
    counts = ((1,) * num_workers,)
    message = m.Reconfigure(1, (tuple(range(num_workers)),), (0, 8), counts, addresses)

    def seconds() -> float:
        began = time.perf_counter()
        m.encode(message)
        return time.perf_counter() - began

    return seconds


def best(measure: Callable[[], float]) -> float:
    """The least of several repeats: other processes only add to it."""
    return min(measure() for _ in range(REPEATS))


def rows(workers: Iterable[int]) -> list[tuple[int, float, float]]:
    """(workers, microseconds per heartbeat, milliseconds to encode a broadcast of Reconfigure)."""
    return [
        (number, 1e6 * best(Heartbeats(number).seconds_per_message), 1e3 * best(encode_once(number)))
        for number in workers
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 1000, 10_000], metavar="N")
    options = parser.parse_args(arguments)
    print("| workers | heartbeat, us | workers that fill a thread | Reconfigure encoded, ms |")
    print("|--:|--:|--:|--:|")
    for number, beat_us, encode_ms in rows(options.workers):
        print(f"| {number} | {beat_us:.1f} | {1e5 / beat_us:,.0f} | {encode_ms:.2f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
