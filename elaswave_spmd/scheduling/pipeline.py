"""The order of a step's actions: the rules by which workers choose, and the lists that they give in one simulated step.

The rule is that of 1F1B (Narayanan et al., 2019): a worker runs a backward as soon as one is ready, else a forward,
with a bounded number of micro-batches in flight (`in_flight_limits`), else weight gradients that it has put off, of
which there is a bounded number, too (`weight_limits`); of several ready ones it takes the one whose turn it is
(`turns`). Workers follow it while they run (`worker.ready_order`). `execute` simulates a step of them, by which plans
are judged, and `schedule` lists each worker's actions in such a step, in order, such as `1F4` (stage 1, forward, 4).
`check` proves that lists can be run.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elaswave_spmd.errors import PlanError
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
        occurring = [set(counts) for counts in microbatch_counts]
        longest = [_duration(min(some - {0})) for some in occurring]
        shortest = [_duration(max(some)) for some in occurring]
        # Parked workers are in nobody's way: the others are columns if they have equal micro-batches.
        columns = [
            [*filter(None, counts)] if 0 in some else [*counts]
            for counts, some in zip(microbatch_counts, occurring, strict=True)
        ]
        ragged = any(column != columns[0] for column in columns)
    if not ragged:
        return tuple(range(len(stage_sizes), 0, -1))
    return tuple(1 + -(-sum(longest[s + 1 :]) // own) + _MORE for s, own in enumerate(shortest))


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
    by_turn = sorted(turn, key=lambda u: (turn[u], u))
    owner = [[of_stage[u] for u in by_turn] for of_stage in owners]
    last, size = len(owners) - 1, len(forward_s)
    stage_of = [0] * size
    for s, of_stage in enumerate(owner):
        for row in set(of_stage):
            stage_of[row] = s
    forwards: list[list[int]] = [[] for _ in range(size)]  # ready, as places in `by_turn`
    backwards: list[list[int]] = [[] for _ in range(size)]
    weights: list[list[int]] = [[] for _ in range(size)]  # put off
    room = [limits[s] for s in stage_of]
    most = [put_off[s] for s in stage_of] if put_off else [0] * size
    if put_off:
        backward_s = [b - w if n else b for b, w, n in zip(backward_s, weights_s, most, strict=True)]
    idle = [True] * size
    free_at = [0.0] * size  # when the link of each worker will be free
    done: list[list[int]] = [[] for _ in range(size)]
    made = [[0.0] * len(by_turn) for _ in owner]
    # (time, has it arrived or ended, backward, stage, place). Of weight gradients, for which no action waits, ~worker
    # stands in place of the stage.
    events: list[tuple[float, bool, bool, int, int]] = []
    push, pop = heapq.heappush, heapq.heappop
    for place, row in enumerate(owner[0]):
        forwards[row].append(place)
    now, touched = 0, set(owner[0])
    while True:
        for row in touched:
            if not idle[row]:
                continue
            # Backward first, as in 1F1B: it frees the activations of a micro-batch.
            late = weights[row]
            if backwards[row] and (not late or len(late) < most[row]):
                place = pop(backwards[row])
                if most[row]:
                    push(late, place)
                room[row] += 1
                done[row].append(~by_turn[place])
                made[stage_of[row]][by_turn[place]] = end = now + backward_s[row]  # the first part, if there are two
                push(events, (end, False, True, stage_of[row], place))
            elif forwards[row] and room[row] and not backwards[row]:
                place = pop(forwards[row])
                room[row] -= 1
                done[row].append(by_turn[place])
                push(events, (now + forward_s[row], False, False, stage_of[row], place))
            elif late:
                place = pop(late)
                done[row].append(by_turn[place] + len(by_turn))
                made[stage_of[row]][by_turn[place]] = end = now + weights_s[row]
                push(events, (end, False, True, ~row, place))
            else:
                continue
            idle[row] = False
        if not events:
            return Executed(now, done, made)
        now = events[0][0]
        same, touched = now + SAME_S, set()
        # All that ends or arrives at one time counts before any action starts: the order of equal times is no matter.
        while events and events[0][0] <= same:
            _, arrived, is_backward, s, place = pop(events)
            if not arrived:
                if s < 0:
                    idle[~s] = True
                    touched.add(~s)
                    continue
                row = owner[s][place]
                idle[row] = True
                touched.add(row)
                to = s - is_backward if is_backward or s == last else s + 1
                if to < 0:
                    continue
                if to != s:
                    boundary = min(s, to)
                    if delay := delays[boundary]:
                        sent = now
                        if links_s:
                            sent = max(now, free_at[row])
                            free_at[row] = sent + links_s[boundary]
                        push(events, (sent + delay, True, is_backward, to, place))
                        continue
                else:
                    is_backward = True
                s = to
            row = owner[s][place]
            push((backwards if is_backward else forwards)[row], place)
            touched.add(row)


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
