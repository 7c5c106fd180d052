"""Programs one after another, whose arguments are given up under the interpreter's lock; prints how many have run.

    python -m tests.xla.programs_in_turn

In the environment of `make test-xla`. A copy that is made in a TorchDispatchMode has a Python object, so the thread of
XLA that gives it up has to take the interpreter's lock.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elaswave_spmd.runtime.devices import Island, device_of

ROUNDS, ARGUMENTS, ELEMENTS = 30, 8, 1 << 18


class Passes(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def main() -> None:
    os.environ.update(device_of("xla").environment(os.environ, Island(devices=2, threads=1)))
    from elaswave_spmd.runtime.devices.xla_island import WHOLE, XlaIsland

    island = XlaIsland({"tp": 2})
    host = [torch.zeros(ELEMENTS) for _ in range(ARGUMENTS)]
    given = island.put(host, [WHOLE] * ARGUMENTS)
    total = island.mark(sum(given[1:], start=given[0] + 1.0), WHOLE)
    program = island.capture([total], given, [WHOLE])
    island.forget_traces()
    made = given[0]
    for _ in range(ROUNDS):
        with Passes():
            given = island.put(host, [WHOLE] * ARGUMENTS)
        (made,) = island.run(program, given)
        (made,) = island.run(program, [made, *given[1:]])
    print(ROUNDS, float(island.fetch([made])[0][0]))


if __name__ == "__main__":
    main()
