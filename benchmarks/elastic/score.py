"""The score of a run, from the lines that its system has written: pure functions, without a clock.

A system may go back to an earlier step. What its last history holds is what is in the weights; all else is undone.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.elastic.lines import Read, Start, Step


@dataclass(frozen=True)
class Score:
    """What a system has reached under a trace.

    Args:
        steps: the last step of the surviving history.
        seconds: from the first step to the last one that was asked for; None if that was not reached.
        launch_s: from the command to the first step.
        pause_s: the longest time without a step that was new, up to the end of the run.
        twice: how often samples were used once more than once.
        never: samples of the steps that were asked for, up to the one reached, which are in no step.
        again: steps that were computed once more, after the system had gone back.
        loss_difference: the largest difference of a step's loss from the undisturbed run; None without such a step.
        equal_bits: all losses of the undisturbed run's steps are there, with the same bits.
    """

    steps: int
    seconds: float | None
    launch_s: float
    pause_s: float
    twice: int
    never: int
    again: int
    loss_difference: float | None
    equal_bits: bool


def surviving(lines: Iterable[Step]) -> list[Step]:
    """The lines of steps that are in the weights at the end.

    A later history undoes what earlier ones did from its first step on.
    """
    steps = list(lines)
    begins: dict[int, int] = {}
    for line in steps:
        begins[line.history] = min(line.step, begins.get(line.history, line.step))
    kept, undone_from = set[tuple[int, int]](), math.inf
    for history in sorted(begins, reverse=True):
        own = {line.step for line in steps if line.history == history}
        kept |= {(history, step) for step in own if step < undone_from}
        undone_from = min(undone_from, begins[history])
    return [line for line in steps if (line.history, line.step) in kept]


def losses(lines: Iterable[Step]) -> dict[int, float]:
    """The loss of each step: the mean over all samples in it, exactly rounded, so no order of lines shows.

    Losses are fp32, and the mean has the 53 bits of a float: it hides no last bit of one of them.
    """
    parts: dict[int, list[tuple[float, int]]] = {}
    for line in surviving(lines):
        parts.setdefault(line.step, []).append((line.loss, len(line.samples)))
    return {
        step: math.fsum(loss * number for loss, number in some) / sum(number for _, number in some)
        for step, some in sorted(parts.items())
        if sum(number for _, number in some)
    }


def progress(lines: Iterable[Step]) -> list[tuple[float, int]]:
    """(time, step) of each step that was new: higher than all before."""
    found, highest = list[tuple[float, int]](), 0
    for line in sorted(lines, key=lambda line: (line.at, line.step)):
        if line.step > highest:
            found.append((line.at, line.step))
            highest = line.step
    return found


def usual_step_s(lines: Iterable[Step]) -> float:
    """The median time of a step. Raises ValueError if there are fewer than two."""
    spans = sorted((b - a) / (n - m) for (a, m), (b, n) in itertools.pairwise(progress(lines)))
    if not spans:
        raise ValueError("fewer than two steps: a usual step has no duration")
    return spans[len(spans) // 2]


def score(
    lines: Sequence[Start | Step | Read],
    order: Sequence[Sequence[int]],
    steps: int,
    launched: float,
    ended: float,
    undisturbed: Mapping[int, float],
) -> Score:
    """The score of a run.

    Args:
        order: the sample ids of step 1, 2, ...
        steps: as many were asked for.
        launched, ended: CLOCK_MONOTONIC at the command, and when the run had ended or its time was up.
        undisturbed: the losses of the same system's run without failures.
    """
    taken = [line for line in lines if isinstance(line, Step)]
    kept = [line for line in surviving(taken) if line.step <= steps]
    new = [(at, step) for at, step in progress(taken) if step <= steps]
    reached = max((line.step for line in kept), default=0)
    used = Counter(i for line in kept for i in line.samples)
    reads = [line for line in lines if isinstance(line, Read)]
    if reads:  # what no worker has read was not used, whatever the line of the step says
        seen = {i for line in reads for i in line.samples}
        used = Counter({i: number for i, number in used.items() if i in seen})
    found = losses(kept)
    common = found.keys() & undisturbed.keys()
    is_there = bool(new) and new[-1][1] >= steps and reached >= steps
    moments = [at for at, _ in new] + ([] if is_there else [ended])
    first = new[0][0] if new else ended
    return Score(
        steps=reached,
        seconds=new[-1][0] - first if is_there else None,
        launch_s=first - launched,
        pause_s=max((b - a for a, b in itertools.pairwise(moments)), default=ended - launched),
        twice=sum(number - 1 for number in used.values() if number > 1),
        never=len({i for ids in order[:reached] for i in ids} - used.keys()),
        again=_computed_again(taken),
        loss_difference=max((abs(found[s] - undisturbed[s]) for s in common), default=None),
        equal_bits=bool(undisturbed) and dict(undisturbed) == {s: x for s, x in found.items() if s in undisturbed},
    )


def _computed_again(lines: Iterable[Step]) -> int:
    """Pairs of a history and a step, less the steps."""
    pairs = {(line.history, line.step) for line in lines}
    return len(pairs) - len({step for _, step in pairs})
