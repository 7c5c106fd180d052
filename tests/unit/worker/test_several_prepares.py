"""Several changes of the mesh that reach a worker at once: it answers the last one alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.worker.channel import Incoming
from elaswave_spmd.worker.loop import Executor


def test_of_prepares_that_come_together_the_last_one_is_handled_in_its_place() -> None:
    others = Incoming(1, m.Need(1, 0, 0, 1)), Incoming(CONTROLLER, m.Written(3))
    prepares = [Incoming(CONTROLLER, m.Prepare(epoch, m.AT_ONCE)) for epoch in (4, 5, 6)]
    handled: list[Incoming] = []

    class Handles(Executor):
        """An executor that only notes what it is to handle."""

        def __init__(self, *found: Incoming) -> None:
            channel: Any = SimpleNamespace(receive_all=lambda: list(found))
            self.__dict__ |= {"_context": SimpleNamespace(channel=channel)}
            self.__dict__ |= {"replica": SimpleNamespace(collect=lambda: None)}

        def _handle(self, incoming: Incoming) -> None:
            handled.append(incoming)

    Handles(prepares[0], others[0], prepares[1], prepares[2], others[1]).handle_messages()
    assert handled == [others[0], prepares[2], others[1]]
    Handles(prepares[0]).handle_messages()
    assert handled[3:] == [prepares[0]]
