"""The order of a worker's actions: whatever is ready, by priority, within its limit; nobody waits for ever."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery.partial_step import FULL, INPUT_GRADIENT, WEIGHTS_ONLY
from elaswave_spmd.scheduling import Placement, pipeline
from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, WEIGHTS, PipelineAction
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.worker.ready_order import KeptLimits, MicrobatchWork, next_ready


def has(*microbatches: int):
    return lambda microbatch: microbatch in microbatches


def ready(work: dict[int, MicrobatchWork], activation, gradient, limit: int = 99, put_off: int = 0) -> int | None:
    return next_ready(work, lambda u: u, activation, gradient, KeptLimits(limit, put_off))


FORWARDS = {u: MicrobatchWork(True, FULL, False) for u in (5, 3, 4)}


def test_a_backward_goes_before_any_forward() -> None:
    work = {1: MicrobatchWork(True, FULL, False), 2: MicrobatchWork(False, FULL, False)}
    assert ready(work, has(1, 2), has(2)) == 2


def test_the_lowest_turn_goes_first() -> None:
    assert ready(FORWARDS, has(3, 4, 5), has()) == 3
    assert ready({u: MicrobatchWork(False, FULL, False) for u in (5, 3, 4)}, has(), has(4, 5)) == 4
    assert next_ready(FORWARDS, lambda u: -u, has(3, 4, 5), has(), KeptLimits(99)) == 5


def test_nothing_goes_without_its_input() -> None:
    work = {1: MicrobatchWork(True, FULL, False), 2: MicrobatchWork(False, FULL, False)}
    assert ready(work, has(2), has(1)) is None, "a forward takes an activation, a backward a gradient"
    assert ready({}, has(1), has(1)) is None


def test_what_waits_does_not_keep_others_from_going() -> None:
    work = {
        1: MicrobatchWork(False, FULL, False),
        2: MicrobatchWork(True, 0, False),
        3: MicrobatchWork(False, INPUT_GRADIENT, True),
    }
    assert ready(work, has(2), has()) == 2 and ready(work, has(), has(3)) == 3


@pytest.mark.parametrize("level", [FULL, INPUT_GRADIENT])
def test_no_forward_begins_while_enough_microbatches_are_in_flight(level: int) -> None:
    work = {1: MicrobatchWork(False, level, False), 2: MicrobatchWork(True, FULL, False)}
    assert ready(work, has(2), has(), limit=1) is None and ready(work, has(2), has(), limit=2) == 2


def test_a_forward_that_keeps_nothing_is_not_counted() -> None:
    work = {1: MicrobatchWork(False, FULL, False), 2: MicrobatchWork(True, 0, False)}
    assert ready(work, has(2), has(), limit=1) == 2


PUT_OFF = MicrobatchWork(False, WEIGHTS_ONLY, False)


def test_weight_gradients_come_when_nothing_else_is_ready() -> None:
    work = {1: PUT_OFF, 2: MicrobatchWork(False, FULL, False), 3: MicrobatchWork(True, FULL, False)}
    assert ready(work, has(3), has(2), put_off=2) == 2 and ready(work, has(3), has(), put_off=2) == 3
    assert ready(work, has(), has(), put_off=2) == 1, "they wait for nothing"
    assert ready({4: PUT_OFF, 1: PUT_OFF}, has(), has(), put_off=2) == 1


@pytest.mark.parametrize("put_off", [0, 1])
def test_weight_gradients_come_before_a_backward_that_would_put_off_too_many(put_off: int) -> None:
    """The limit may have become less than what is put off already."""
    work = {1: PUT_OFF, 2: MicrobatchWork(False, FULL, False), 3: MicrobatchWork(True, FULL, False)}
    assert ready(work, has(3), has(2), put_off=put_off) == 1
    assert ready(work, has(3), has(), put_off=put_off) == 3, "a forward puts nothing off"


def test_what_is_put_off_is_not_in_flight() -> None:
    work = {1: PUT_OFF, 2: MicrobatchWork(True, FULL, False)}
    assert ready(work, has(2), has(), limit=1, put_off=1) == 2


# ---- many workers


class Line:
    """The workers of a pipeline in virtual time: each runs what `next_ready` says, with random delays.

    Args:
        owners: per stage, the worker of each micro-batch.
        limits: per worker. One that may put nothing off runs whole backwards.
    """

    def __init__(self, owners: list[list[int]], limits: dict[int, KeptLimits], turns, rng: random.Random) -> None:
        self.owners, self.limits, self.turns, self.rng = owners, limits, turns, rng
        self.last = len(owners) - 1
        self.work: dict[int, dict[int, MicrobatchWork]] = {rank: {} for of_stage in owners for rank in of_stage}
        self.stage = {rank: s for s, of_stage in enumerate(owners) for rank in of_stage}
        self.here: set[tuple[int, str, int]] = {(0, FORWARD, u) for u in range(len(owners[0]))}
        self.busy: set[int] = set()
        self.events: list[tuple[float, int, object]] = []
        self.begun: list[tuple[float, PipelineAction]] = []
        self.ran: list[PipelineAction] = []
        self.most: dict[int, tuple[int, int]] = dict.fromkeys(self.work, (0, 0))
        self.now = 0.0

    def later(self, now: float, event: object) -> None:
        heapq.heappush(self.events, (now + self.rng.expovariate(1.0), self.rng.getrandbits(62), event))

    def run(self) -> None:
        self.start(0.0)
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            now = self.now
            if isinstance(event, tuple):
                self.here.add(event)
            else:
                assert isinstance(event, PipelineAction)
                self.finish(now, event)
            if not self.events or self.events[0][0] > now:  # all that comes at one time is here
                self.start(now)

    def start(self, now: float) -> None:
        for rank, work in self.work.items():
            stage = self.stage[rank]
            if rank in self.busy:
                continue
            has_activation = lambda u, stage=stage: (stage, FORWARD, u) in self.here  # noqa: E731
            has_gradient = lambda u, stage=stage: stage == self.last or (stage, BACKWARD, u) in self.here  # noqa: E731
            microbatch = next_ready(work, self.turns, has_activation, has_gradient, self.limits[rank])
            if microbatch is not None:
                self.busy.add(rank)
                left = work[microbatch]
                kind = FORWARD if left.forward else WEIGHTS if left.backward == WEIGHTS_ONLY else BACKWARD
                self.begun.append((now, PipelineAction(stage, kind, microbatch)))
                self.later(now, PipelineAction(stage, kind, microbatch))

    def finish(self, now: float, action: PipelineAction) -> None:
        stage, microbatch = action.stage, action.microbatch
        rank = self.owners[stage][microbatch]
        self.busy.remove(rank)
        self.ran.append(action)
        work = self.work[rank]
        left = work[microbatch]
        left.forward = False
        if action.kind == FORWARD:
            self.later(now, (stage + 1, FORWARD, microbatch))
        elif action.kind == BACKWARD:
            self.later(now, (stage - 1, BACKWARD, microbatch))
        if action.kind == BACKWARD and left.backward == FULL and self.limits[rank].put_off:
            left.backward = WEIGHTS_ONLY
        elif action.kind != FORWARD or not left.backward:
            del work[microbatch]
        in_flight, put_off = self.most[rank]
        in_flight = max(in_flight, sum(left.is_in_flight for left in work.values()))
        put_off = max(put_off, sum(not left.forward and left.backward == WEIGHTS_ONLY for left in work.values()))
        self.most[rank] = in_flight, put_off


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    num_microbatches=st.integers(1, 12),
    seed=st.integers(0, 1 << 30),
)
def test_every_step_comes_to_its_end_with_any_owners_limits_and_delays(sizes, num_microbatches, seed) -> None:
    """Owners need not be those of a placement, nor limits what pipelining needs; what is left may begin anywhere."""
    rng = random.Random(seed)
    first = [sum(sizes[:s]) for s in range(len(sizes))]
    owners = [[first[s] + rng.randrange(size) for _ in range(num_microbatches)] for s, size in enumerate(sizes)]
    limits = {rank: KeptLimits(rng.randint(1, 3), rng.randint(0, 2)) for of_stage in owners for rank in of_stage}
    line = Line(owners, limits, lambda u: rng.random(), rng)
    # Of some micro-batches the forwards up to some stage are done already: an interrupted step.
    wanted = {FORWARD: 0, BACKWARD: 0, WEIGHTS: 0}
    for microbatch in range(num_microbatches):
        done = rng.choice([0, 0, rng.randint(0, len(sizes))])
        # Of these the last stages may have put the weight gradients off.
        backward_done = rng.choice([0, rng.randint(0, len(sizes))]) if done == len(sizes) else 0
        for stage in range(len(sizes)):
            rank, level = owners[stage][microbatch], rng.choice([FULL, FULL, INPUT_GRADIENT])
            if stage >= len(sizes) - backward_done:
                level = WEIGHTS_ONLY
            line.work[rank][microbatch] = MicrobatchWork(stage >= done, level, False)
            wanted[FORWARD] += stage >= done
            wanted[BACKWARD] += level != WEIGHTS_ONLY
            wanted[WEIGHTS] += level == WEIGHTS_ONLY or (level == FULL and limits[rank].put_off > 0)
        if 0 < backward_done < len(sizes):
            line.here.add((len(sizes) - backward_done - 1, BACKWARD, microbatch))
        if done < len(sizes):
            line.here.add((done, FORWARD, microbatch))
    begun = {rank: sum(left.is_in_flight for left in work.values()) for rank, work in line.work.items()}
    late = {rank: sum(left.backward == WEIGHTS_ONLY for left in work.values()) for rank, work in line.work.items()}
    line.run()
    assert not any(line.work.values()) and Counter(action.kind for action in line.ran) == Counter(wanted)
    for rank, (in_flight, put_off) in line.most.items():
        assert in_flight <= max(limits[rank].in_flight, begun[rank])
        assert put_off <= max(limits[rank].put_off, late[rank])


def even_line(shape: str, num_microbatches: int, *, splits: bool) -> tuple[Placement, Line]:
    """A step on an even mesh that has been run, with a second for each part of an action, and none for messages."""
    mesh = Mesh.initial(MeshShape.parse(shape))
    counts = tuple((num_microbatches // len(members),) * len(members) for members in mesh.stages)
    placement = Placement(mesh, num_microbatches, tuple(range(len(mesh.stages) + 1)), counts, Shardings())
    owners = [
        [placement.worker_of_microbatch(stage, u) for u in range(num_microbatches)] for stage in range(len(mesh.stages))
    ]
    limits = pipeline.in_flight_limits([len(members) for members in mesh.stages], counts)
    put_off = pipeline.weight_limits(limits) if splits else (0,) * len(limits)
    by_rank = {rank: KeptLimits(limits[s], put_off[s]) for s, members in enumerate(mesh.stages) for rank in members}
    turns = pipeline.turns(placement, range(num_microbatches))
    line = Line(owners, by_rank, lambda u: turns[u], random.Random(0))
    line.work = {
        rank: {u: MicrobatchWork(True, FULL, False) for u in placement.microbatches_of(rank)} for rank in mesh.members
    }
    count = iter(range(1 << 30))

    def exactly(now: float, event: object) -> None:
        takes = 0.0
        if isinstance(event, PipelineAction):
            is_whole = event.kind == BACKWARD and not put_off[event.stage]
            takes = 2.0 if is_whole else 1.0
        heapq.heappush(line.events, (now + takes, next(count), event))

    line.later = exactly
    line.run()
    return placement, line


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    num_microbatches=st.integers(1, 14),
    seed=st.integers(0, 1 << 30),
)
def test_the_simulated_step_of_plans_is_what_workers_do(sizes, num_microbatches, seed) -> None:
    """`pipeline.execute` judges plans, `next_ready` runs them: with all seconds alike their actions are the same."""
    rng = random.Random(seed)
    first = [sum(sizes[:s]) for s in range(len(sizes))]
    owners = [[first[s] + rng.randrange(size) for _ in range(num_microbatches)] for s, size in enumerate(sizes)]
    stage_of = {rank: s for s, of_stage in enumerate(owners) for rank in of_stage}
    in_flight, put_off = ([rng.randint(least, 3) for _ in sizes] for least in (1, 0))
    # Short whole numbers: often several things happen at one time.
    forward_s, input_s, weights_s = ([rng.randint(least, 4) for _ in range(sum(sizes))] for least in (1, 1, 0))
    delays = [rng.randint(0, 2) for _ in sizes[1:]]
    turns = {u: rng.randint(0, 4) / 4 for u in range(num_microbatches)}
    limits = {rank: KeptLimits(in_flight[s], put_off[s]) for rank, s in stage_of.items()}
    line = Line(owners, limits, lambda u: (turns[u], u), rng)
    for of_stage in owners:
        for u, rank in enumerate(of_stage):
            line.work[rank][u] = MicrobatchWork(True, FULL, False)
    numbers = iter(range(1 << 30))

    def exactly(now: float, event: object) -> None:
        if isinstance(event, PipelineAction):
            rank = owners[event.stage][event.microbatch]
            whole = put_off[event.stage] == 0
            backward_s = input_s[rank] + (weights_s[rank] if whole else 0)
            takes = {FORWARD: forward_s[rank], BACKWARD: backward_s, WEIGHTS: weights_s[rank]}[event.kind]
        else:
            assert isinstance(event, tuple)
            stage, kind, _ = event
            takes = delays[stage - 1 if kind == FORWARD else stage] if 0 <= stage < len(sizes) and len(sizes) > 1 else 0
            if (kind == FORWARD and stage == len(sizes)) or stage < 0:
                return
        heapq.heappush(line.events, (now + takes, next(numbers), event))

    line.later = exactly
    line.run()
    backward_s = [i + w for i, w in zip(input_s, weights_s, strict=True)]
    late = (weights_s, put_off) if any(put_off) else ((), ())
    run = pipeline.execute(owners, turns, in_flight, forward_s, backward_s, delays, *late)
    found = [[pipeline._kind_of(u, num_microbatches) for u in todo] for todo in run.done]  # pyright: ignore[reportPrivateUsage]
    by_rank: dict[int, list[tuple[str, int]]] = {}
    for _, action in line.begun:
        by_rank.setdefault(owners[action.stage][action.microbatch], []).append((action.kind, action.microbatch))
    assert {rank: todo for rank, todo in enumerate(found) if todo} == by_rank and run.seconds == line.now


@pytest.mark.parametrize("shape", ["pp3", "dp2_pp2", "pp4"])
def test_on_an_even_mesh_the_order_is_1f1b(shape: str) -> None:
    """With equal times for all, what runs when it is ready is what the schedule lists."""
    placement, line = even_line(shape, 4 * len(Mesh.initial(MeshShape.parse(shape)).stages[0]), splits=False)
    for rank, listed in pipeline.schedule(placement).items():
        assert [a for a in line.ran if line.owners[a.stage][a.microbatch] == rank] == list(listed)


ZB_H1 = {
    0: "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
    1: "F0 F1 F2 B0 F3 W0 B1 F4 W1 B2 F5 W2 B3 F6 W3 B4 F7 W4 B5 W5 B6 W6 B7 W7",
    2: "F0 F1 B0 F2 B1 F3 W0 B2 F4 W1 B3 F5 W2 B4 F6 W3 B5 F7 W4 B6 W5 B7 W6 W7",
    3: "F0 B0 F1 B1 F2 B2 F3 W0 B3 F4 W1 B4 F5 W2 B5 F6 W3 B6 F7 W4 B7 W5 W6 W7",
}
"""The order of ZB-H1 (Qi et al., 2024); the first stage's backwards are whole, as nobody waits for a part of them."""


def test_on_an_even_mesh_with_split_backwards_the_order_is_that_of_zb_h1() -> None:
    """Nobody keeps more than the first stage does with whole backwards: as many micro-batches as there are stages."""
    _, line = even_line("pp4", 8, splits=True)
    found = {stage: " ".join(f"{a.kind}{a.microbatch}" for a in line.ran if a.stage == stage) for stage in range(4)}
    assert found == ZB_H1
    assert line.most == {0: (4, 0), 1: (3, 1), 2: (2, 2), 3: (1, 3)}
    _, whole = even_line("pp4", 8, splits=False)
    assert line.now == 28.0 and whole.now == 33.0  # of which each worker computes 24
