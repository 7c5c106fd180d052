"""Agents that come while a run goes on: who gets in, and how many workers are started on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_spmd.conf.schema import ElasticSettings
from elaswave_spmd.controller import machines as module
from elaswave_spmd.controller.actions import (
    Action,
    AdmitAgent,
    DoubtAgent,
    GiveUpAgent,
    LinkFailed,
    Record,
    RefuseAgent,
    Spawn,
)
from elaswave_spmd.controller.loop import Controller
from elaswave_spmd.controller.machines import Machines, Whereabouts
from elaswave_spmd.controller.replacements import ReplacementPolicy, Replacements
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.recovery.messages import Ready
from elaswave_spmd.runtime.processes.agents import AgentCame, AgentGone, AgentReady
from elaswave_spmd.runtime.processes.launcher import Machine


class World:
    """A run that was started with workers 0 to 3."""

    def __init__(self, **elastic: Any) -> None:
        settings = ElasticSettings(**elastic)
        self.protocol = SimpleNamespace(started=True, stops=False, version=3, steps=9, leaving=())
        self.roster = Roster(range(4))
        for rank in range(4):
            self.roster.add(rank, None)
        self.replacements = Replacements(ReplacementPolicy.from_settings(settings), self.roster)
        self.machines = Machines(settings, cast(Any, self.protocol), self.roster, self.replacements, 4)

    def lose(self, *ranks: int) -> None:
        for rank in ranks:
            self.roster.remove(rank)
            self.replacements.lost(rank)

    def come(self, places: int, *, used: int = 0, peer: int = -5) -> list[tuple[int, ...]]:
        """An agent on host b is ready. Returns the ranks that are started there, by the order."""
        (record,) = self.machines.agent_ready(AgentReady(peer, "b", places), 0.0)
        assert isinstance(record, Record) and record.fields["state"] == "joined"
        return self.use(Machine(peer, "b", places, frozenset(range(100, 100 + used))))

    def use(self, *machines: Machine) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for action in self.machines.use_places([Machine(None, "a", None), *machines], 0.0):
            if isinstance(action, Spawn):
                assert action.host == "b" and action.newcomers
                found.append(action.ranks)
                for rank in action.ranks:
                    self.roster.add(rank, None)
            else:
                assert isinstance(action, Record) and action.fields["ranks"] == list(found[-1])
        return found


def states(actions: list[Action]) -> list[object]:
    return [action.fields["state"] for action in actions if isinstance(action, Record)]


def test_who_asks_is_admitted() -> None:
    assert World().machines.agent_came(AgentCame(-4, "b", 2)) == [AdmitAgent(-4)]


@pytest.mark.parametrize(
    ("elastic", "facts", "why"),
    [
        ({"enabled": False}, {}, "elastic.enabled=false"),
        ({}, {"stops": True}, "about to stop"),
        ({}, {"version": 9}, "its last step, 9"),
    ],
    ids=str,
)
def test_a_run_that_ends_or_is_not_elastic_refuses_with_the_reason(
    elastic: dict[str, Any], facts: dict[str, Any], why: str
) -> None:
    world = World(**elastic)
    vars(world.protocol).update(facts)
    refuse, record = world.machines.agent_came(AgentCame(-4, "b", 2))
    assert isinstance(refuse, RefuseAgent) and refuse.peer == -4 and why in refuse.error.what
    assert isinstance(record, Record) and record.fields["state"] == "refused" and why in str(record.fields["reason"])


def test_a_machine_that_comes_back_brings_the_run_to_the_size_it_began_with() -> None:
    world = World()
    world.lose(1, 2)
    assert world.come(4) == [(4, 5)], "and not more"
    assert world.come(4, peer=-6) == []


def test_a_machine_gives_no_more_than_it_has() -> None:
    world = World()
    world.lose(0, 1, 2)
    assert world.come(2) == [(4, 5)]
    assert world.come(3, used=2, peer=-6) == [(6,)]


def test_who_leaves_and_who_waits_beside_the_mesh_does_not_count() -> None:
    world = World(spares=1)
    (spare,), _ = world.replacements.due(0.0, spares=True)
    world.roster.add(spare, None)
    assert world.replacements.ready(Ready(spare, "x")) and world.come(4) == []
    world.protocol.leaving = (3,)
    assert world.come(4, peer=-6) == [(5,)]


def test_a_place_that_a_replacement_is_due_for_is_left_to_it() -> None:
    world = World(replace=True, replacements_per_minute=1)
    world.lose(1, 2)
    ranks, _ = world.replacements.due(0.0, spares=True)
    assert ranks == (4,)
    world.roster.add(4, None)
    assert world.machines.num_workers == 4 and world.come(4) == [], "one starts, the other one is held back"


def test_a_run_grows_up_to_max_workers() -> None:
    world = World(max_workers=7)
    assert world.come(2) == [(4, 5)] and world.come(2, peer=-6) == [(6,)]


def test_places_that_cannot_be_used_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.lose(1)
    monkeypatch.setattr(module, "fits_fd_limit", lambda workers: workers < 4)
    world.machines.agent_ready(AgentReady(-5, "b", 2), 0.0)
    (record,) = world.machines.use_places([Machine(-5, "b", 2)], 0.0)
    assert isinstance(record, Record) and record.fields["state"] == "unused" and "ulimit -n" in str(record.fields)


def test_before_the_first_step_places_wait() -> None:
    world = World()
    world.protocol.started = False
    world.lose(1)
    assert world.come(2) == [] and world.machines.has_arrivals
    world.protocol.started = True
    assert world.use(Machine(-5, "b", 2)) == [(4,)] and not world.machines.has_arrivals


def test_the_places_of_an_agent_that_is_lost_again_are_not_used() -> None:
    world = World()
    world.protocol.started = False
    world.lose(1)
    world.come(2)
    assert states(world.machines.agent_gone(AgentGone(-5, "b", 2, True, "its connection closed"))) == ["lost"]
    world.protocol.started = True
    assert not world.machines.has_arrivals
    assert states(world.machines.agent_gone(AgentGone(-6, "b", 2, False, "its data differ"))) == ["refused"]


def test_an_agent_that_comes_back_for_ever_gets_no_more_workers_than_the_limit_allows() -> None:
    world = World(replacements_per_minute=2)
    found: list[Action] = []
    for turn in range(4):  # its one worker hangs each time, it is given up, and joins again
        world.lose(3 + turn)
        world.machines.agent_gone(AgentGone(-5 - turn, "b", 1, True, "given up"))
        world.machines.agent_ready(AgentReady(-6 - turn, "b", 1), 0.0)
        found = world.machines.use_places([Machine(-6 - turn, "b", 1)], 10.0 * turn)
        for action in found:
            if isinstance(action, Spawn):
                (rank,) = action.ranks
                world.roster.add(rank, None)
        if turn == 2:
            (record,) = found
            assert isinstance(record, Record) and record.kind == "replacements" and record.fields["missing"] == 1
            assert str(record.fields["message"]) == (
                "1 further worker is not started for now: 2 have been started within a minute "
                "(elastic.replacements_per_minute=2); the next one in 40 s"
            )
    last = [Machine(-9, "b", 1)]
    assert found == [] and world.machines.use_places(last, 59.9) == [], "once"
    assert world.machines.has_arrivals and world.replacements.due(59.9, spares=True) == ((), []), "which is another"
    (spawn, _) = world.machines.use_places(last, 60.0)
    assert spawn == Spawn((6,), host="b") and not world.machines.has_arrivals


def test_starts_on_machines_that_come_and_replacements_have_one_limit() -> None:
    world = World(replace=True, replacements_per_minute=3, max_workers=6)
    world.lose(1)
    assert len(world.replacements.due(0.0, spares=True)[0]) == 1
    world.roster.add(4, None)
    assert world.come(8) == [(5, 6)], "the two that max_workers allows, and the limit"
    world.lose(2)
    ranks, (record,) = world.replacements.due(0.0, spares=True)
    assert ranks == () and isinstance(record, Record) and "lost worker is not replaced" in str(record.fields["message"])


def test_places_beyond_the_limit_are_used_when_the_minute_has_passed() -> None:
    world = World(replacements_per_minute=2)
    world.lose(0, 1, 2)
    world.machines.agent_ready(AgentReady(-5, "b", 4), 0.0)
    spawn, used, held_back = world.machines.use_places([Machine(-5, "b", 4)], 0.0)
    assert spawn == Spawn((4, 5), host="b") and states([used]) == ["used"]
    assert isinstance(held_back, Record) and held_back.kind == "replacements" and held_back.fields["missing"] == 1
    world.roster.add(4, None)
    world.roster.add(5, None)
    here = [Machine(-5, "b", 4, frozenset({4, 5}))]
    assert world.machines.use_places(here, 59.0) == []
    assert world.machines.use_places(here, 60.0)[0] == Spawn((6,), host="b")


EVERYBODY = range(4)


def silent(world: World, machines: list[Machine], *ranks: int, ready: Any = EVERYBODY) -> list[Action]:
    """Workers are lost by their silence. Returns what becomes of their machines."""
    world.lose(*ranks)
    return world.machines.fallen_silent(ranks, machines, ready)


def given_up(actions: list[Action]) -> list[int]:
    return [action.peer for action in actions if isinstance(action, GiveUpAgent)]


def test_an_agent_all_of_whose_workers_fall_silent_is_given_up() -> None:
    world = World()
    b, c = Machine(-2, "b", 2, frozenset({1, 2})), Machine(-3, "c", 2, frozenset({3}))
    machines = [Machine(None, "a", None), b, c]
    assert silent(world, machines, 1) == [DoubtAgent(-2, frozenset({1}))], "worker 2 lives there"
    (action,) = silent(world, machines, 2)
    assert isinstance(action, GiveUpAgent) and action.peer == -2 and "timeouts.suspect" in action.reason
    assert silent(world, [machines[0], c], 0) == [], "it is here, and -2 is gone"


def test_an_agent_that_reports_the_end_of_a_silent_worker_stays_while_another_lives() -> None:
    world = World()
    assert not given_up(silent(world, [Machine(-2, "b", 2, frozenset({1, 2}))], 1))
    world.lose(2)  # killed, and not silent
    assert world.machines.fallen_silent([], [Machine(-2, "b", 2, frozenset({2}))], EVERYBODY) == []
    assert not given_up(silent(world, [Machine(-2, "b", 3, frozenset({0, 2, 3}))], 3)), "worker 0 lives there"


def test_a_worker_that_was_lost_otherwise_does_not_speak_for_its_machine() -> None:
    """It had been asked for its state, and was lost since it did not answer, before it counted as silent."""
    world = World()
    world.lose(2)
    assert given_up(silent(world, [Machine(-2, "b", 4, frozenset({2, 3}))], 3)) == [-2]


def test_workers_that_start_go_with_their_machine() -> None:
    """A replacement on the frozen machine itself, or workers that an administrator has added there."""
    world = World()
    world.roster.add(4, None)
    machines = [Machine(-2, "b", 4, frozenset({2, 3, 4}))]
    assert silent(world, machines, 2) == [DoubtAgent(-2, frozenset({2}))]
    assert given_up(silent(world, machines, 3)) == [-2]


def test_workers_that_are_not_ready_in_time_count_as_silent() -> None:
    """And while nobody there has ever been ready, one that is not late yet is waited for."""
    world = World()
    for rank in (4, 5):
        world.roster.add(rank, None)
    machines = [Machine(-2, "b", 4, frozenset({4, 5}))]
    assert silent(world, machines, 4) == [DoubtAgent(-2, frozenset({4}))]
    assert given_up(silent(world, machines, 5)) == [-2]
    world.roster.add(6, None)
    assert not given_up(silent(world, [Machine(-3, "c", 4, frozenset({3, 6}))], 6)), "worker 3 lives there"


HERE, B, C = (
    Machine(None, "a", None),
    Machine(-2, "b", 2, frozenset({1, 2})),
    Machine(-3, "c", 2, frozenset({3, 4})),
)


def severed(world: World, machines: list[Machine], *ends: int, now: float = 0.0) -> list[Action] | None:
    """Two workers cannot reach each other. Returns what becomes of their machines."""
    failed = LinkFailed(frozenset(ends), max(ends), "the link was lost again")
    return world.machines.link_failed(failed, Whereabouts.on(machines))


def test_where_workers_are_is_looked_up_once_for_all_links_that_an_event_tells_of() -> None:
    """A network that is cut in two fails 100,000 links of a large mesh, and finding out takes milliseconds."""
    world, looks, done = spread(), list[int](), list[object]()

    def machines() -> list[Machine]:
        looks.append(1)
        return [HERE, B, C]

    controller = Controller.__new__(Controller)
    controller.__dict__ |= {
        "outcome": None,
        "protocol": SimpleNamespace(last_epoch=0),
        "_io": SimpleNamespace(machines=machines, now=lambda: 0.0, order_agent=done.append),
        "_log": SimpleNamespace(action=lambda *_: None),
        "_roster": world.roster,
        "_machines": world.machines,
        "_failures": SimpleNamespace(cannot_reach=lambda rank, *_: done.append(rank) or world.lose(rank) or []),
    }
    pairs = (1, 3), (1, 4), (2, 3), (2, 4), (1, 2), (1, 2), (0, 9)
    controller.execute([LinkFailed(frozenset(ends), max(ends), "the link was lost again") for ends in pairs])
    assert len(looks) == 1
    given_up = [order.peer for order in done if isinstance(order, GiveUpAgent)]
    assert given_up == [-3] and [rank for rank in done if isinstance(rank, int)] == [2], "each of them once"


def spread() -> World:
    """Workers 0 here, 1 and 2 on host b, 3 and 4 on host c."""
    world = World()
    world.roster.remove(0)
    world.roster.add(0, 4711)
    world.roster.add(4, None)
    return world


def test_of_two_machines_that_cannot_reach_each_other_one_goes() -> None:
    world = spread()
    (action,) = severed(world, [HERE, B, C], 1, 4) or []
    assert isinstance(action, GiveUpAgent) and action.peer == -3
    assert action.reason == "its workers and those of b cannot reach each other (the link was lost again)"
    assert severed(world, [HERE, B, C], 2, 3) == [], "before the order is carried out"
    assert severed(world, [HERE, B], 2, 3) == [], "before the ends of its workers are known"


def test_the_machine_with_fewer_workers_goes_and_never_that_of_the_controller() -> None:
    world = spread()
    world.lose(1)
    assert given_up(severed(world, [HERE, B, C], 2, 4) or []) == [-2]
    world = spread()
    assert given_up(severed(world, [HERE, B, C], 0, 3) or []) == [-3]


def test_workers_of_one_machine_are_judged_by_themselves() -> None:
    world = spread()
    assert severed(world, [HERE, B, C], 3, 4) is None and severed(world, [], 1, 3) is None
    world.roster.add(5, 4712)
    assert severed(world, [HERE, B, C], 0, 5) is None


def test_a_machine_that_was_cut_off_is_used_after_a_pause_that_grows() -> None:
    world = spread()
    world.lose(0, 3)
    for turn, (now, seconds) in enumerate(((0.0, 60.0), (1000.0, 120.0), (2000.0, 240.0))):
        last = Machine(-3 - turn, "c", 2, C.ranks)
        assert given_up(severed(world, [HERE, B, last], 1, 4, now=now) or []) == [last.agent]
        now += 500.0  # it takes long to come back, and the pause begins then
        back = Machine(-4 - turn, "c", 2)
        joined, unused = world.machines.agent_ready(AgentReady(-4 - turn, "c", 2), now)
        assert states([joined, unused]) == ["joined", "unused"] and isinstance(unused, Record)
        assert str(unused.fields["message"]).startswith(f"c is not used for {seconds:.0f} s: its workers and those")
        assert world.machines.use_places([HERE, B, back], now + seconds - 0.1) == [] and world.machines.has_arrivals
        if turn == 2:
            spawn, _ = world.machines.use_places([HERE, B, back], now + seconds)
            assert isinstance(spawn, Spawn) and spawn.host == "c" and not world.machines.has_arrivals
        else:
            world.machines.agent_gone(AgentGone(-4 - turn, "c", 2, True, "given up"))


def test_an_agent_that_comes_back_twice_does_not_begin_its_pause_anew() -> None:
    world = spread()
    severed(world, [HERE, B, C], 1, 4)
    for peer, now, left in ((-4, 10.0, "60"), (-5, 50.0, "20")):
        _, unused = world.machines.agent_ready(AgentReady(peer, "c", 2), now)
        assert isinstance(unused, Record) and str(unused.fields["message"]).startswith(f"c is not used for {left} s: ")
        world.machines.agent_gone(AgentGone(peer, "c", 2, True, "its connection closed"))
    assert states(world.machines.agent_ready(AgentReady(-6, "c", 2), 70.0)) == ["joined"], "it is over"


def test_other_machines_are_used_meanwhile() -> None:
    world = spread()
    world.lose(0, 3)
    severed(world, [HERE, B, C], 1, 4)
    world.machines.agent_ready(AgentReady(-4, "c", 2), 1.0)
    world.machines.agent_ready(AgentReady(-5, "b", 1), 1.0)
    spawn, _ = world.machines.use_places([HERE, Machine(-4, "c", 2), Machine(-5, "b", 1)], 1.0)
    assert isinstance(spawn, Spawn) and spawn.host == "b" and world.machines.has_arrivals


def test_a_run_that_is_not_elastic_gives_no_machine_up() -> None:
    assert silent(World(enabled=False), [Machine(-2, "b", 2, frozenset({3}))], 3) == []


@pytest.mark.parametrize(
    ("local_workers", "is_known", "silent", "started"),
    [(0, True, (), 4), (0, True, (7,), 1), (0, False, (), 0), (2, False, (), 5), (None, True, (7,), 5)],
)
def test_as_many_lost_workers_are_replaced_at_once_as_agents_have_places_where_there_are_no_others(
    local_workers: int | None, is_known: bool, silent: tuple[int, ...], started: int
) -> None:
    world, controller = World(replace=True), Controller.__new__(Controller)
    machines = Machine(None, "a", 0), Machine(-2, "b", 4, frozenset({7})), Machine(-3, "c", 1)
    settings = SimpleNamespace(runtime=SimpleNamespace(local_workers=local_workers))
    controller.__dict__ |= {"_plan": SimpleNamespace(settings=settings), "_replacements": world.replacements}
    controller.__dict__ |= {"_io": SimpleNamespace(machines=lambda: machines)}
    world.lose(*range(4), 4)
    controller._note_room(is_known=is_known, silent=silent)
    ranks, _ = world.replacements.due(0.0, spares=True)
    assert len(ranks) == started
