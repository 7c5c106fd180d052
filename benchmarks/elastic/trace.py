"""The failures of a run, drawn from a seed by the causes of Llama 3's log: the same list for every system.

    python -m benchmarks.elastic.trace [--rate 5] [--steps 100] [--seed 1]

The log: 419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd of Models, 2024, table 5). Its shares
of causes are kept; its rate, one in three hours, is scaled so that there are `rate` failures per hundred steps.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

KILL, HANG, HOST = "kill", "hang", "host"
KINDS = {
    KILL: "a worker's process is killed (SIGKILL)",
    HANG: "a worker's process stands still (SIGSTOP), until its system or the health check of the machine ends it",
    HOST: "all workers of a host are killed at one moment (SIGKILL)",
}


@dataclass(frozen=True)
class Cause:
    """A row of the log. `kind`: how such a failure appears to a training system."""

    name: str
    count: int
    kind: str


LOG = (
    Cause("faulty GPU", 148, KILL),
    Cause("GPU HBM3 memory", 72, KILL),
    Cause("software bug", 54, KILL),
    Cause("network switch or cable", 35, HANG),
    Cause("unplanned host maintenance", 32, HOST),
    Cause("GPU SRAM memory", 19, KILL),
    Cause("GPU system processor", 17, HANG),
    Cause("NIC", 7, HANG),
    Cause("NCCL watchdog timeout", 7, HANG),
    Cause("silent data corruption", 6, KILL),
    Cause("GPU thermal interface and sensor", 6, HOST),
    Cause("SSD", 3, HOST),
    Cause("power supply", 3, HOST),
    Cause("server chassis", 2, HOST),
    Cause("IO expansion board", 2, HOST),
    Cause("dependency", 2, KILL),
    Cause("CPU", 2, HOST),
    Cause("system memory", 2, HOST),
)


@dataclass(frozen=True)
class Failure:
    """One failure.

    Args:
        at: when it strikes, in steps: 17.4 is 0.4 of a usual step after step 17 was reached for the first time.
        kind: KILL, HANG or HOST.
        slot: the worker that it strikes; of a host, one of its workers.
        cause: the row of the log.
    """

    at: float
    kind: str
    slot: int
    cause: str


@dataclass(frozen=True)
class Machines:
    """Slots for workers on hosts that have the same number of them: slots 0, 1 are on host 0, and so on."""

    workers: int = 4
    per_host: int = 2

    def struck(self, failure: Failure) -> tuple[int, ...]:
        """The slots that a failure strikes."""
        if failure.kind != HOST:
            return (failure.slot,)
        first = failure.slot // self.per_host * self.per_host
        return tuple(range(first, min(first + self.per_host, self.workers)))


def draw(seed: int, rate: float, steps: int, machines: Machines) -> tuple[Failure, ...]:
    """The failures of a run, in the order of their time: `rate` per hundred steps, and at least one unless `rate` is 0.

    Moments are those of a Poisson process with that number of events, from the first step on until the last one begins.

    Raises:
        ValueError: a negative rate, or fewer than 2 steps.
    """
    if not 0 <= rate < math.inf or steps < 2:
        raise ValueError(f"a trace has a rate of 0 or more and 2 steps or more, not rate {rate} and {steps} steps")
    number = max(1, round(rate * steps / 100)) if rate else 0
    source = random.Random(f"{seed} {rate:g} {steps}")
    moments = sorted(source.uniform(1, steps - 1) for _ in range(number))
    causes = source.choices(LOG, weights=[cause.count for cause in LOG], k=number)
    slots = [source.randrange(machines.workers) for _ in range(number)]
    rows = zip(moments, causes, slots, strict=True)
    return tuple(Failure(round(at, 3), cause.kind, slot, cause.name) for at, cause, slot in rows)


def printed(failures: Sequence[Failure], machines: Machines) -> str:
    """One line for each failure: its step, its kind, the slots that it strikes, its cause."""
    return "\n".join(
        f"step {f.at:8.3f}  {f.kind:4}  slots {','.join(map(str, machines.struck(f))):4}  {f.cause}" for f in failures
    )


def main(words: Sequence[str] | None = None) -> int:
    """Command line: prints a trace. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=5.0, help="failures per hundred steps (5)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(words)
    machines = Machines()
    print(printed(draw(args.seed, args.rate, args.steps, machines), machines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
