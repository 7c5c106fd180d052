"""Workers that are lost at the same moment, as those of a machine are: the mesh changes once for all of them."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

from elaswave_spmd.controller.actions import Action
from elaswave_spmd.controller.events import Event, WorkerEnded
from elaswave_spmd.controller.loop import Controller
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.recovery.actions import Broadcast
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.recovery.messages import AT_ONCE, OfGeneration, Prepare, decode
from elaswave_spmd.recovery.packed_reconfigure import Packer
from tests.unit.recovery.controller_cases import started


class World:
    """A controller of workers 0 to 5, whose losses are the protocol's alone; what it journals, sends and logs."""

    def __init__(self, *ended: WorkerEnded) -> None:
        self.protocol = started(4, 2)
        self.waiting = deque(ended)
        self.journaled: list[Prepare] = []
        self.sent: list[tuple[int, Prepare]] = []
        self.logged: list[Action] = []
        self.heard: list[Event] = []
        self.controller = Controller.__new__(Controller)
        io = SimpleNamespace(now=lambda: 1.0, journal=self._journal, send=self._send, next_ends=self._next_ends)
        log = SimpleNamespace(
            action=lambda action, now: self.logged.append(action), event=lambda event, now: self.heard.append(event)
        )
        failures = SimpleNamespace(is_ending=False, worker_ended=self._lost)
        plan = SimpleNamespace(settings=SimpleNamespace(runtime=SimpleNamespace(local_workers=None)))
        self.controller.__dict__ |= {"_io": io, "_log": log, "_failures": failures, "_adopter": None, "_generation": 1}
        self.controller.__dict__ |= {"_plan": plan, "_roster": Roster(range(6)), "_unheard": frozenset()}
        self.controller.__dict__ |= {"_supervision": SimpleNamespace(moved=lambda: None), "_packer": Packer()}
        self.controller.__dict__ |= {"_released": SimpleNamespace(ended=lambda rank: None), "outcome": None}
        self.controller.protocol = cast(ControllerProtocol, self.protocol)

    def _journal(self, prepare: Prepare, next_rank: int) -> None:
        assert next_rank == 6
        self.journaled.append(prepare)

    def _send(self, rank: int, header: bytes) -> None:
        message = decode(header)
        assert not isinstance(message, OfGeneration)
        self.sent.append((rank, cast(Prepare, message)))

    def _next_ends(self) -> list[WorkerEnded]:
        found = [*self.waiting]
        self.waiting.clear()
        return found

    def _lost(self, event: WorkerEnded) -> list[Action]:
        """The change of the mesh alone."""
        actions: list[Any] = self.protocol.lost(event.rank, event.reason)
        return [action for action in actions if isinstance(action, Broadcast)]

    def happens(self, event: Event) -> None:
        self.controller._take(event)


def ends(*ranks: int) -> list[WorkerEnded]:
    return [WorkerEnded(rank, "its machine is gone", 1.0) for rank in ranks]


def test_one_line_of_the_journal_and_one_prepare_for_all_of_them() -> None:
    first, *others = ends(1, 2, 5)
    world = World(*others)
    world.happens(first)
    (prepare,) = world.journaled
    assert prepare == Prepare(3, AT_ONCE) and prepare.epoch == world.protocol.last_epoch
    assert world.sent == [(rank, prepare) for rank in (0, 3, 4)], "and none to the lost"
    assert world.heard == [first, *others] and len(world.logged) == 1


def test_a_loss_that_comes_later_is_a_change_of_its_own() -> None:
    world = World()
    for event in ends(1, 2):
        world.happens(event)
    assert [prepare.epoch for prepare in world.journaled] == [1, 2]


def test_so_it_is_with_losses_that_one_event_brings() -> None:
    """Workers that fall silent are found by one tick."""
    world = World()
    world.controller.execute([action for event in ends(1, 2, 5) for action in world._lost(event)])
    assert [prepare.epoch for prepare in world.journaled] == [3]


def test_while_workers_are_adopted_each_end_is_taken_by_itself() -> None:
    """What has come before one that follows may have to be decided first."""
    world = World(*ends(2))
    world.controller.__dict__["_adopter"] = SimpleNamespace(
        decide=lambda event, now: world.logged.append(event) or [], is_over=False
    )
    world.happens(ends(1)[0])
    assert [event.rank for event in cast(list[Any], world.logged)] == [1] and len(world.waiting) == 1
