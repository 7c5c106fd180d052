"""A trial of putting weight gradients off: made while a run trains, and given up where it does not pay.

A backward in two parts costs a few percent more processor time than a whole one, and fills time in which a worker would
wait (`scheduling.split_backward`). Whether a worker has such time no plan knows: where workers share processors another
one computes meanwhile. So steps are timed both ways, in blocks in turn, and the faster way is kept
(docs/design/backward_and_order.md). Workers are told by `Limits`, which hold from their next step on. No bit depends on
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from elaswave_spmd.controller.actions import Action, Record
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, MicrobatchAssigner
from elaswave_spmd.recovery.reconfiguration import Stages
from elaswave_spmd.scheduling.step_time import Assignment

SPLIT_BACKWARD = "split_backward"
"""The event of a trial that has ended."""

ORDER = (False, True, True, False, True, False, False, True)
"""Whether the steps of a block are run in the other way. Two neighbours are a pair, in which either way comes first as
often: what gets slower in the course of a trial gets slower for both."""

BLOCK = 8
"""Steps of a block that count."""

LEAST_GAIN = 0.01
"""The share of a step that is to be gained by putting off. Less is not told from noise by so many steps, and what is
put off takes memory."""

_WARM_UP = 4  # steps of a mesh that do not count: programs and memory are new
_UNDER_WAY = 3  # steps after an order that may have run without it, or with some of both


@dataclass
class BackwardTrial:
    """The times of steps of one mesh, run in two ways.

    Args:
        left_out: steps that do not count any more, before the next one that does.
        blocks: the seconds of those that count, by block.
    """

    left_out: int = _WARM_UP
    blocks: list[list[float]] = field(default_factory=lambda: [[]])

    @property
    def is_complete(self) -> bool:
        """True if all blocks have their steps."""
        return len(self.blocks) > len(ORDER)

    @property
    def is_other(self) -> bool:
        """True if steps are to be run in the other way now."""
        return not self.is_complete and ORDER[len(self.blocks) - 1]

    def add(self, seconds: float) -> bool:
        """A step took so long. Returns True if from now on steps are to be run in another way, or all are done."""
        if self.left_out:
            self.left_out -= 1
            return False
        self.blocks[-1].append(seconds)
        if len(self.blocks[-1]) < BLOCK:
            return False
        before = self.is_other
        self.blocks.append([])
        if self.is_complete:
            return True
        self.left_out = _UNDER_WAY if self.is_other != before else 0
        return self.is_other != before

    @property
    def times(self) -> float:
        """The time of steps in the other way, as a multiple of the time in this one, when all blocks are complete.

        The median of pairs of neighbouring blocks, so that neither a drift nor one odd block decides it.
        """
        found = [median(block) for block in self.blocks[: len(ORDER)]]
        pairs = zip(ORDER[::2], found[::2], found[1::2], strict=True)
        return median(one / two if is_other else two / one for is_other, one, two in pairs)

    def seconds(self, *, other: bool) -> float:
        """The median step of the complete blocks in one of the ways."""
        return median(median(block) for is_other, block in zip(ORDER, self.blocks, strict=False) if is_other == other)


class BackwardChoice:
    """Decides, for each mesh, whether weight gradients are put off.

    A mesh is known by its stages: where members come or go, or are grouped in another way, the trial is made again, and
    begins with what was found before. Where micro-batches, layers or limits move, what was found holds: plans are
    judged by it, and are not to undo it.

    Args:
        tries: schedule.split_backward=auto, on a device where whole backwards are faster than both parts.
        interrupted_every: after the multiples of any of these numbers of steps something else takes time; 0: never.
        assigner: knows the limits of workers.
    """

    def __init__(
        self,
        protocol: ControllerProtocol,
        assigner: MicrobatchAssigner,
        *,
        tries: bool,
        interrupted_every: Sequence[int] = (),
    ) -> None:
        self._protocol = protocol
        self._assigner = assigner
        self._interrupted_every = [number for number in interrupted_every if number]
        self._tries = tries and 1 not in self._interrupted_every  # else there is no step that counts
        self._trial = BackwardTrial()
        self._known: Stages | None = None  # the mesh that was decided about last
        self._others: Assignment | None = None  # the placement with the limits of the other way
        self._committed_s: float | None = None  # when the step before was, in this mesh epoch

    @property
    def is_trying(self) -> bool:
        """True as long as the present mesh is not decided about: steps may be run in another way."""
        here = self._protocol.placement
        has_two = self._protocol.split is not None and here.num_stages > 1
        return self._tries and has_two and self._known != here.mesh.stages

    def begun(self) -> None:
        """A mesh epoch begins: workers have the limits of its Reconfigure."""
        self._committed_s = None
        self._trial = BackwardTrial()
        self._others = None

    def committed(self, step: int, now: float) -> list[Action]:
        """A step is committed.

        Args:
            now: seconds of a clock that never runs back.
        """
        last_s, self._committed_s = self._committed_s, now
        if last_s is None or not self.is_trying or not self._protocol.settled or self._is_interrupted(step):
            return []
        return self._change(step) if self._trial.add(now - last_s) else []

    def _is_interrupted(self, step: int) -> bool:
        return any((step - 1) % number == 0 for number in self._interrupted_every)

    def _change(self, step: int) -> list[Action]:
        """A block is over: steps are run in another way, or it is decided in which."""
        own = self._protocol.running
        others = self._others = self._others or self._other_way(own)
        if bool(others.put_off) == bool(own.put_off):  # there is no room to put anything off, or no layer to split
            self._known = own.stages
            return []
        if self._trial.is_complete:
            return self._decide(own, others, step)
        return [self._protocol.try_limits(others if self._trial.is_other else own)]

    def _other_way(self, own: Assignment) -> Assignment:
        split = self._protocol.split
        assert split is not None
        if own.put_off:
            return replace(own, put_off=())
        return self._assigner.limited(self._protocol.placement, replace(split, keeps_whole=False))

    def _decide(self, own: Assignment, others: Assignment, step: int) -> list[Action]:
        trial, split = self._trial, self._protocol.split
        assert split is not None
        self._known = own.stages
        times = trial.times if others.put_off else 1 / trial.times
        pays = times <= 1 - LEAST_GAIN
        chosen = own if bool(own.put_off) == pays else others
        put_off_s, whole_s = (trial.seconds(other=bool(others.put_off) == late) for late in (True, False))
        what = "weight gradients are put off" if pays else "backwards are whole"
        text = f"steps take {times:.3f} times as long with weight gradients put off as with whole backwards"
        fields = {
            "ranks": [],
            "kept": "put off" if pays else "whole",
            "times": times,
            "seconds_put_off": put_off_s,
            "seconds_whole": whole_s,
            "step": step,
            "mesh_epoch": self._protocol.placement.mesh.epoch,
            "message": f"{what} from now on: {text}",
        }
        limits = self._protocol.limit(replace(split, keeps_whole=not pays), chosen)
        return [limits, Record(SPLIT_BACKWARD, fields)]
