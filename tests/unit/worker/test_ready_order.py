"""The order of a worker's actions: whatever is ready, by priority, within its limit; nobody waits for ever."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery.partial_step import FULL, INPUT_GRADIENT
from elaswave_spmd.scheduling import Placement, pipeline
from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, PipelineAction
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.worker.ready_order import MicrobatchWork, next_ready


def has(*microbatches: int):
    return lambda microbatch: microbatch in microbatches


def ready(work: dict[int, MicrobatchWork], activation, gradient, limit: int = 99) -> int | None:
    return next_ready(work, lambda u: u, activation, gradient, limit)


FORWARDS = {u: MicrobatchWork(True, FULL, False) for u in (5, 3, 4)}


def test_a_backward_goes_before_any_forward() -> None:
    work = {1: MicrobatchWork(True, FULL, False), 2: MicrobatchWork(False, FULL, False)}
    assert ready(work, has(1, 2), has(2)) == 2


def test_the_lowest_turn_goes_first() -> None:
    assert ready(FORWARDS, has(3, 4, 5), has()) == 3
    assert ready({u: MicrobatchWork(False, FULL, False) for u in (5, 3, 4)}, has(), has(4, 5)) == 4
    assert next_ready(FORWARDS, lambda u: -u, has(3, 4, 5), has(), 99) == 5


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


# ---- many workers


class Line:
    """The workers of a pipeline in virtual time: each runs what `next_ready` says, with random delays.

    Args:
        owners: per stage, the worker of each micro-batch.
        limits: per worker.
    """

    def __init__(self, owners: list[list[int]], limits: dict[int, int], turns, rng: random.Random) -> None:
        self.owners, self.limits, self.turns, self.rng = owners, limits, turns, rng
        self.last = len(owners) - 1
        self.work: dict[int, dict[int, MicrobatchWork]] = {rank: {} for of_stage in owners for rank in of_stage}
        self.stage = {rank: s for s, of_stage in enumerate(owners) for rank in of_stage}
        self.here: set[tuple[int, str, int]] = {(0, FORWARD, u) for u in range(len(owners[0]))}
        self.busy: set[int] = set()
        self.events: list[tuple[float, int, object]] = []
        self.ran: list[PipelineAction] = []
        self.most = dict.fromkeys(self.work, 0)

    def later(self, now: float, event: object) -> None:
        heapq.heappush(self.events, (now + self.rng.expovariate(1.0), self.rng.getrandbits(62), event))

    def run(self) -> None:
        self.start(0.0)
        while self.events:
            now, _, event = heapq.heappop(self.events)
            if isinstance(event, tuple):
                self.here.add(event)
            else:
                assert isinstance(event, PipelineAction)
                self.finish(now, event)
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
                kind = FORWARD if work[microbatch].forward else BACKWARD
                self.later(now, PipelineAction(stage, kind, microbatch))

    def finish(self, now: float, action: PipelineAction) -> None:
        stage, microbatch = action.stage, action.microbatch
        rank = self.owners[stage][microbatch]
        self.busy.remove(rank)
        self.ran.append(action)
        work = self.work[rank]
        work[microbatch].forward = False
        if action.kind == FORWARD:
            self.later(now, (stage + 1, FORWARD, microbatch))
        else:
            self.later(now, (stage - 1, BACKWARD, microbatch))
        if action.kind == BACKWARD or not work[microbatch].backward:
            del work[microbatch]
        self.most[rank] = max(self.most[rank], sum(left.is_in_flight for left in work.values()))


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
    limits = {rank: rng.randint(1, 3) for of_stage in owners for rank in of_stage}
    line = Line(owners, limits, lambda u: rng.random(), rng)
    # Of some micro-batches the forwards up to some stage are done already: an interrupted step.
    wanted = 0
    for microbatch in range(num_microbatches):
        done = rng.choice([0, 0, rng.randint(0, len(sizes))])
        for stage in range(len(sizes)):
            line.work[owners[stage][microbatch]][microbatch] = MicrobatchWork(stage >= done, FULL, False)
            wanted += 1 + (stage >= done)
        if done < len(sizes):
            line.here.add((done, FORWARD, microbatch))
    begun = {rank: sum(left.is_in_flight for left in work.values()) for rank, work in line.work.items()}
    line.run()
    assert not any(line.work.values()) and len(line.ran) == wanted
    for rank, most in line.most.items():
        assert most <= max(limits[rank], begun[rank])


@pytest.mark.parametrize("shape", ["pp3", "dp2_pp2", "pp4"])
def test_on_an_even_mesh_the_order_is_1f1b(shape: str) -> None:
    """With equal times for all, what runs when it is ready is what the schedule lists."""
    mesh = Mesh.initial(MeshShape.parse(shape))
    num_microbatches = 4 * len(mesh.stages[0])
    counts = tuple((num_microbatches // len(members),) * len(members) for members in mesh.stages)
    placement = Placement(mesh, num_microbatches, tuple(range(len(mesh.stages) + 1)), counts, Shardings())
    owners = [
        [placement.worker_of_microbatch(stage, u) for u in range(num_microbatches)] for stage in range(len(mesh.stages))
    ]
    limits = pipeline.in_flight_limits([len(members) for members in mesh.stages], counts)
    by_rank = {rank: limits[mesh.stage_of(rank)] for rank in mesh.members}
    turns = pipeline.turns(placement, range(num_microbatches))
    line = Line(owners, by_rank, lambda u: turns[u], random.Random(0))
    line.work = {
        rank: {u: MicrobatchWork(True, FULL, False) for u in placement.microbatches_of(rank)} for rank in mesh.members
    }
    seconds = {FORWARD: 1.0, BACKWARD: 2.0}
    count = iter(range(1 << 30))

    def exactly(now: float, event: object) -> None:
        takes = seconds[event.kind] if isinstance(event, PipelineAction) else 0.0
        heapq.heappush(line.events, (now + takes, next(count), event))

    line.later = exactly
    line.run()
    for rank, listed in pipeline.schedule(placement).items():
        assert [a for a in line.ran if owners[a.stage][a.microbatch] == rank] == list(listed)
