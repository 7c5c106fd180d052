"""The order of a step's actions: the rules by which workers choose, and the lists that they give in one simulated step.

The rule is that of 1F1B (Narayanan et al., 2019): a worker runs a backward as soon as one is ready, else a forward,
with a bounded number of micro-batches in flight (`in_flight_limits`), else weight gradients that it has put off, of
which there is a bounded number, too (`weight_limits`); of several ready ones it takes the one whose turn it is
(`turns`). Workers follow it while they run (`worker.ready_order`). `execute` simulates a step of them, by which plans
are judged, and `schedule` lists each worker's actions in such a step, in order, such as `1F4` (stage 1, forward, 4).
`check` proves that lists can be run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.equal_stages import once_each
from elaswave_spmd.scheduling.placement import Placement

FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"
"""Kinds of actions. A backward is whole, or makes the gradient of the input only, and WEIGHTS those of the weights."""
_STEP = 1 << 24  # duration of a worker's step; whole numbers, so that two ends are equal or not without rounding
_BACKWARD = 2  # times as long as a forward
_MORE = 2  # micro-batches in flight beyond the estimate, where they come from several workers in turn


@dataclass(frozen=True)
class PipelineAction:
    """Forward, backward, or weight gradients that were put off, of one micro-batch through one stage."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def needs(self, num_stages: int) -> tuple[PipelineAction, ...]:
        """The actions whose results this one needs."""
        if self.kind == FORWARD:
            return (PipelineAction(self.stage - 1, FORWARD, self.microbatch),) if self.stage else ()
        if self.kind == WEIGHTS:
            return (PipelineAction(self.stage, BACKWARD, self.microbatch),)
        own = PipelineAction(self.stage, FORWARD, self.microbatch)
        if self.stage == num_stages - 1:
            return (own,)
        return own, PipelineAction(self.stage + 1, BACKWARD, self.microbatch)


Schedule = Mapping[int, tuple[PipelineAction, ...]]


def in_flight_limits(
    stage_sizes: Sequence[int], microbatch_counts: Sequence[Sequence[int]] | None = None
) -> tuple[int, ...]:
    """The most micro-batches that a worker of each stage may have between forward and backward.

    They are enough to keep all later stages busy. If the workers at one position of all stages share their
    micro-batches with nobody, that is the bound of 1F1B: the number of stages from this one to the last. Else it is 1,
    plus the time that a micro-batch takes through the slowest workers of all later stages, measured in micro-batches of
    this stage's fastest worker, plus 2, because later workers get micro-batches from several workers in turn.

    Args:
        microbatch_counts: per stage, the number of micro-batches of each worker; None: evenly assigned.
    """
    if microbatch_counts is None:
        longest = shortest = list(stage_sizes)
        ragged = len(set(stage_sizes)) > 1
    else:
        # Parked workers are in nobody's way: the others are columns if they have equal micro-batches.
        active = once_each(_without_parked, microbatch_counts)
        longest = [_duration(fewest) for fewest in once_each(min, active)]
        shortest = [_duration(most) for most in once_each(max, active)]
        ragged = any(of_stage != active[0] for of_stage in active)
    if not ragged:
        return tuple(range(len(stage_sizes), 0, -1))
    return tuple(1 + -(-sum(longest[s + 1 :]) // own) + _MORE for s, own in enumerate(shortest))


def _without_parked(counts: Sequence[int]) -> tuple[int, ...]:
    """The micro-batches of the workers of a stage that have any."""
    return tuple(filter(None, counts)) if 0 in counts else tuple(counts)


def weight_limits(limits: Sequence[int]) -> tuple[int, ...]:
    """The most micro-batches whose weight gradients a worker of each stage may put off; 0: its backwards are whole.

    What is kept until then is about what is kept in flight. So all stages may keep as much as the one with the most in
    flight does anyway: on an even mesh as many micro-batches as there are stages (ZB-H1: Qi et al., 2024). Nobody waits
    for an input gradient of the first stage.

    Args:
        limits: `in_flight_limits`.
    """
    return tuple(max(limits) - own if stage else 0 for stage, own in enumerate(limits))


def _duration(microbatches: int) -> int:
    """The modelled duration of one micro-batch on a worker that has this many of them.

    Micro-batches are assigned by speed, so all workers are assumed to be busy equally long. Turns and limits then
    follow from the counts of the placement alone, without measured times, and all workers compute the same ones.
    """
    return max(1, _STEP // max(1, microbatches))


def schedule(
    placement: Placement,
    *,
    limits: Sequence[int] | None = None,
    put_off: Sequence[int] = (),
    seconds: tuple[Mapping[int, float], Mapping[int, float], Mapping[int, float]] | None = None,
    delays: Sequence[float] | None = None,
) -> Schedule:
    """The actions of every worker in a step, in the order in which it executes them: rank -> list.

    Args:
        limits: per stage, the most micro-batches in flight; None: `in_flight_limits` of this mesh.
        put_off: per stage, the most micro-batches whose weight gradients a worker puts off; (): backwards are whole.
        seconds: by rank, those of one forward, of one whole backward, and of its weight gradients; None: as the counts
            have it (`_duration`).
        delays: per boundary between stages, seconds from the end of an action to the arrival of its result; None: 0.
    """
    mesh, counts = placement.mesh, placement.microbatch_counts
    if not limits:
        limits = in_flight_limits([len(members) for members in mesh.stages], counts)
    if seconds is None:
        takes = {
            rank: _duration(count)
            for members, of_stage in zip(mesh.stages, counts, strict=True)
            for rank, count in zip(members, of_stage, strict=True)
        }
        seconds = takes, {rank: _BACKWARD * each for rank, each in takes.items()}, takes
    row = {rank: i for i, rank in enumerate(mesh.members)}
    order = turns(placement, range(placement.num_microbatches))
    owners = [
        [row[placement.worker_of_microbatch(s, u)] for u in range(placement.num_microbatches)]
        for s in range(placement.num_stages)
    ]
    forward_s, backward_s, weights_s = ([of_kind[rank] for rank in mesh.members] for of_kind in seconds)
    gaps, number = delays or [0] * (placement.num_stages - 1), placement.num_microbatches
    done = execute(owners, order, limits, forward_s, backward_s, gaps, weights_s, put_off).done
    stage_of = [mesh.stage_of(rank) for rank in mesh.members]
    return {
        rank: tuple(PipelineAction(stage, *_kind_of(u, number)) for u in todo)
        for rank, stage, todo in zip(mesh.members, stage_of, done, strict=True)
    }


def _kind_of(action: int, num_microbatches: int) -> tuple[str, int]:
    """Kind and micro-batch of an action as `execute` numbers it."""
    if action < 0:
        return BACKWARD, ~action
    return (FORWARD, action) if action < num_microbatches else (WEIGHTS, action - num_microbatches)


def turns(placement: Placement, microbatches: Iterable[int]) -> dict[int, float]:
    """The turn of each micro-batch: micro-batch -> part of the step, from 0 to 1.

    Micro-batches that take the same path, over the same workers of all stages, are spread evenly over the step. A
    worker that gets micro-batches from several workers then takes from each in turn, and one that sends to several
    serves each in turn, in proportion to their shares. So no worker waits until another one has been served completely.

    Args:
        microbatches: all of a step, or all that one worker has: no others take the same path as these.
    """
    return turns_of_ways(
        {u: tuple(placement.worker_of_microbatch(s, u) for s in range(placement.num_stages)) for u in microbatches}
    )


def turns_of_ways(ways: Mapping[int, tuple[int, ...]]) -> dict[int, float]:
    """`turns`, of micro-batches whose ways are known: micro-batch -> its worker of each stage."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for microbatch in sorted(ways):
        alike.setdefault(ways[microbatch], []).append(microbatch)
    return {microbatch: (2 * i + 1) / (2 * len(same)) for same in alike.values() for i, microbatch in enumerate(same)}


SAME_S = 1e-9
"""Seconds between which times are the same. By the rounding of their sums alone, a worker began a forward before the
backward that came at that time, or did not: a plan was judged by a step that was 14 % shorter than the next one."""


class Executed(NamedTuple):
    """A simulated step.

    Args:
        seconds: the time at which the last action ends.
        done: what each worker did: u for the forward of micro-batch u, ~u for its backward, and u + (number of
            micro-batches) for its weight gradients, where these were put off.
        made_s: per stage, the time at which the gradients of each micro-batch are there.
    """

    seconds: float
    done: list[list[int]]
    made_s: list[list[float]]


def execute(
    owners: Sequence[Sequence[int]],
    turn: Mapping[int, float],
    limits: Sequence[int],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    delays: Sequence[float],
    weights_s: Sequence[float] = (),
    put_off: Sequence[int] = (),
    links_s: Sequence[float] = (),
) -> Executed:
    """Simulates a step as workers execute it (`worker.ready_order`).

    Plans are judged by this, thousands of times, so workers and actions are numbers here. A worker sends one result
    after the other.

    Args:
        owners: per stage, the worker of each micro-batch. A worker, a number from 0 on, is in one stage.
        turn: of each micro-batch; these are numbers from 0 on.
        limits: per stage, the most micro-batches that a worker has in flight.
        forward_s, backward_s: by worker, of one micro-batch.
        delays: per boundary between stages, from the end of an action to the arrival of its result.
        weights_s: by worker, the part of `backward_s` that makes weight gradients, where these may be put off.
        put_off: per stage, the most micro-batches whose weight gradients a worker puts off; 0: backwards are whole. ()
            if they are on all stages.
        links_s: per boundary, the part of the delay for which the sender's link is in use; (): no result waits for a
            link.
    """
    order = sorted(turn, key=lambda u: (turn[u], u))
    made_s = [[0.0] * len(order) for _ in owners]
    workers = _idle_workers(owners, limits, forward_s, backward_s, weights_s, put_off, made_s)
    owner_of = [[workers[of_stage[u]] for u in order] for of_stage in owners]
    for place, worker in enumerate(owner_of[0]):
        worker.forwards.append(place)
    now, touched = 0, owner_of[0]
    events: list[_Event] = []
    while True:
        for worker in touched:
            if worker.is_idle and (end := worker.start(now, order)):
                heappush(events, end)
        if not events:
            return Executed(now, [worker.done for worker in workers], made_s)
        now = events[0][0]
        touched = _take_due(now, events, owner_of, delays, links_s)


_FORWARD_ENDED, _BACKWARD_ENDED, _WEIGHTS_ENDED, _INPUT_CAME, _GRADIENT_CAME = range(5)
_Event = tuple[float, int, int, int]
"""Its time, what happens, in which stage, and to which micro-batch, by its place in the order of turns."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker of a simulated step. Micro-batches are places in the order of turns, in heaps.

    Args:
        backward_s: seconds of the backward of one micro-batch, as far as the stage before waits for it.
        weights_s: seconds of its weight gradients, where these are put off.
        most_late: the most micro-batches whose weight gradients are put off; 0: backwards are whole.
        room: for micro-batches in flight.
        made_s, done: of its stage and its own, as in `Executed`.
        link_free_s: the time when its link can take the next result.
        forwards, backwards: ready.
        late: with weight gradients that are put off.
    """

    stage: int
    forward_s: float
    backward_s: float
    weights_s: float
    most_late: int
    room: int
    made_s: list[float]
    is_idle: bool = True
    link_free_s: float = 0.0
    forwards: list[int] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)

    def start(self, now: float, order: Sequence[int]) -> _Event | None:
        """Begins the action whose turn it is, if any is ready. Returns its end.

        Args:
            order: the micro-batches by their turns.
        """
        late = self.late
        # Backward first, as in 1F1B: it frees the activations of a micro-batch.
        if self.backwards and (not late or len(late) < self.most_late):
            place = heappop(self.backwards)
            if self.most_late:
                heappush(late, place)
            self.room += 1
            self.done.append(~order[place])
            self.made_s[order[place]] = end = now + self.backward_s  # the first part, if there are two
            what = _BACKWARD_ENDED
        elif self.forwards and self.room and not self.backwards:
            place = heappop(self.forwards)
            self.room -= 1
            self.done.append(order[place])
            what, end = _FORWARD_ENDED, now + self.forward_s
        elif late:
            place = heappop(late)
            self.done.append(order[place] + len(order))
            self.made_s[order[place]] = end = now + self.weights_s
            what = _WEIGHTS_ENDED
        else:
            return None
        self.is_idle = False
        return end, what, self.stage, place


def _idle_workers(
    owners: Sequence[Sequence[int]],
    limits: Sequence[int],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weights_s: Sequence[float],
    put_off: Sequence[int],
    made_s: list[list[float]],
) -> list[_Worker]:
    """The workers before the step, with the arguments of `execute`."""
    stage_of = [0] * len(forward_s)
    for s, of_stage in enumerate(owners):
        for row in set(of_stage):
            stage_of[row] = s
    found: list[_Worker] = []
    for row, s in enumerate(stage_of):
        most_late = put_off[s] if put_off else 0
        late_s = weights_s[row] if most_late else 0.0
        input_s = backward_s[row] - late_s
        found.append(_Worker(s, forward_s[row], input_s, late_s, most_late, limits[s], made_s[s]))
    return found


def _take_due(
    now: float,
    events: list[_Event],
    owner_of: list[list[_Worker]],
    delays: Sequence[float],
    links_s: Sequence[float],
) -> list[_Worker]:
    """Takes all events of one time. Returns the workers that may have work now, some of them twice.

    All that ends or comes at one time counts before any action starts, so the order of equal times does not matter.

    Args:
        now: the time of the first event.
        owner_of: per stage, the worker of each micro-batch.
        delays, links_s: as for `execute`.
    """
    same, last = now + SAME_S, len(owner_of) - 1
    touched: list[_Worker] = []
    while events and events[0][0] <= same:
        _, what, stage, place = heappop(events)
        if what <= _WEIGHTS_ENDED:
            worker = owner_of[stage][place]
            worker.is_idle = True
            touched.append(worker)
            if what == _FORWARD_ENDED:
                if stage == last:
                    heappush(worker.backwards, place)
                    continue
                what, boundary = _INPUT_CAME, stage
                stage += 1
            elif what == _BACKWARD_ENDED and stage:
                stage -= 1
                what, boundary = _GRADIENT_CAME, stage
            else:
                continue  # no action waits for its result
            if delay := delays[boundary]:
                sent = now
                if links_s:
                    sent = max(now, worker.link_free_s)
                    worker.link_free_s = sent + links_s[boundary]
                heappush(events, (sent + delay, what, stage, place))
                continue
        worker = owner_of[stage][place]
        heappush(worker.forwards if what == _INPUT_CAME else worker.backwards, place)
        touched.append(worker)
    return touched


def check(actions: Schedule, num_stages: int) -> None:
    """Proves that the lists can be run to the end with any timing: no action waits for itself in a circle.

    Raises:
        PlanError: an action comes twice, waits for an action that nobody does, or is part of a circle of waits.
    """
    lists = {rank: list(todo) for rank, todo in actions.items()}
    everything = [a for todo in lists.values() for a in todo]
    if len(set(everything)) != len(everything):
        twice = next(a for a in everything if everything.count(a) > 1)
        raise PlanError(f"action {twice} comes twice", rule="each action of a step is done once")
    done: set[PipelineAction] = set()
    at = dict.fromkeys(lists, 0)
    waiting: dict[PipelineAction, list[int]] = {}
    runnable = list(lists)
    while runnable:
        rank = runnable.pop()
        while at[rank] < len(lists[rank]):
            action = lists[rank][at[rank]]
            # The first missing result is enough: the worker is looked at again when it is there.
            missing = next((n for n in action.needs(num_stages) if n not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done.add(action)
            at[rank] += 1
            runnable += waiting.pop(action, [])
    stuck = {rank: str(lists[rank][at[rank]]) for rank in lists if at[rank] < len(lists[rank])}
    if stuck:
        raise PlanError(f"workers wait for ever at {stuck}", rule="the actions of a step can all be run")
