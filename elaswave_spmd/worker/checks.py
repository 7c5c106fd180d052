"""The checks of one worker: micro-batches of others that it computes as well, and its own that others compute.

`recovery.checks` says which these are. A check needs the inputs of the micro-batch, which their senders send to both
workers, and never keeps anybody waiting but the vote of its own worker, which comes when all its checks have agreed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.checks import CheckDraw, Pair
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.worker.digests import Digester, MicrobatchDigests
from elaswave_spmd.worker.stage_boundary import Send

Rows = tuple[m.DigestRow, ...]


@dataclass
class _Check:
    """A check that this worker makes.

    Args:
        is_pending: it has not been computed yet.
        checked: the results of this worker.
        owned: those of the micro-batch's worker.
        is_settled: both were the same, or the controller has accepted them.
        is_reported: they were not the same, and the controller knows.
    """

    owner: int
    is_pending: bool = True
    checked: Rows | None = None
    owned: Rows | None = None
    is_settled: bool = False
    is_reported: bool = False


@dataclass
class _Step:
    """The pairs of the step under way that concern this worker."""

    number: int = 0
    epoch: int = 0
    owned: dict[int, Pair] = field(default_factory=dict)
    is_compared: bool = True  # the state that it is computed from is right on all workers
    mine: dict[int, _Check] = field(default_factory=dict)
    receivers: dict[tuple[int, int], int] = field(default_factory=dict)  # (stage, micro-batch) of neighbours -> checker


class StepChecks:
    """The checks of one step after another.

    Args:
        rank: of this worker.
        draw: the pairs of each step.
        digester: on the worker's device.
        send: to other workers and the controller.
    """

    def __init__(self, rank: int, draw: CheckDraw, digester: Digester, send: Send) -> None:
        self._rank = rank
        self._draw = draw
        self._digester = digester
        self._send = send
        self._step = _Step()
        self._digests: dict[int, MicrobatchDigests] = {}  # micro-batch -> of those of its own that others check
        self._came: dict[tuple[int, int, int], Rows] = {}  # (step, micro-batch, sender) -> results of its worker
        self.num_made = 0
        """The checks that this worker has made."""
        self.num_idle = 0
        """Those among them that it made while its next action had no input."""
        self._wanted: dict[tuple[int, int], m.CheckAgain] = {}  # (step, micro-batch) -> what the controller asks for

    @property
    def is_on(self) -> bool:
        """True if anything is ever checked."""
        return self._draw.rate > 0

    def begin(self, step: int, stage: int, placement: Placement, *, is_compared: bool = True) -> None:
        """Begin a step, or another attempt of it.

        Args:
            is_compared: as in `compared`.
        """
        self._digests.clear()
        if not self.is_on:
            return
        pairs = self._draw.pairs(step, stage, placement)
        near = [s for s in (stage - 1, stage + 1) if 0 <= s < placement.num_stages]
        self._step = _Step(
            step,
            placement.mesh.epoch,
            {pair.microbatch: pair for pair in pairs if pair.owner == self._rank},
            is_compared,
            {pair.microbatch: _Check(pair.owner) for pair in pairs if pair.checker == self._rank},
            {(p.stage, p.microbatch): p.checker for s in near for p in self._draw.pairs(step, s, placement)},
        )
        self._came = {key: rows for key, rows in self._came.items() if key[0] >= step}
        for (number, microbatch, sender), rows in list(self._came.items()):
            if number == step:
                self._compare(microbatch, sender, rows)
        self._wanted = {key: request for key, request in self._wanted.items() if key[0] >= step}

    def forget(self) -> None:
        """Give up everything of the step under way, and of later ones: another attempt begins."""
        self._step = _Step()
        self._digests.clear()
        self._came.clear()
        self._wanted.clear()

    # ---- this worker's own micro-batches

    def digests_of(self, microbatch: int) -> MicrobatchDigests | None:
        """The digests in which the results of an own micro-batch are noted; None if nobody checks it."""
        if microbatch not in self._step.owned:
            return None
        twice = self._step.owned[microbatch].checker == self._rank
        return self._digests.setdefault(microbatch, MicrobatchDigests(self._digester, computed_twice=twice))

    def computed(self, microbatch: int) -> None:
        """An own micro-batch is computed: its checker is told the results."""
        if (digests := self._digests.pop(microbatch, None)) is None:
            return
        checker = self._step.owned[microbatch].checker
        if checker == self._rank:
            self._compare(microbatch, self._rank, digests.rows)
        else:
            self._send(checker, m.CheckDigests(self._step.number, microbatch, digests.rows))

    def receivers(self, stage: int, microbatch: int) -> tuple[int, ...]:
        """The worker of a neighbouring stage that checks a micro-batch and so needs its input as well."""
        checker = self._step.receivers.get((stage, microbatch))
        return () if checker is None else (checker,)

    # ---- checks of this worker

    @property
    def is_settled(self) -> bool:
        """True if all checks that this worker has to make have agreed: it may vote."""
        return all(check.is_settled for check in self._step.mine.values())

    def pending(self, step: int) -> list[int]:
        """The micro-batches that are still to be computed by this worker as checks."""
        drawn = [u for u, check in self._step.mine.items() if check.is_pending] if self._step.number == step else []
        return [*drawn, *(u for number, u in self._wanted if number == step and u not in drawn)]

    def ready(self, step: int, has_inputs: Callable[[int], bool]) -> int | None:
        """A check whose inputs are here. A worker's own micro-batch is checked after it: both use the same inputs."""
        mine = self._step.mine if self._step.number == step else {}
        first = {u for u, check in mine.items() if check.owner == self._rank and check.owned is None}
        return next((u for u in self.pending(step) if u not in first and has_inputs(u)), None)

    def new_digests(self) -> MicrobatchDigests:
        """The digests in which the results of a check are noted."""
        return MicrobatchDigests(self._digester)

    def checked(self, step: int, microbatch: int, rows: Rows) -> None:
        """A check is computed."""
        self.num_made += 1
        check = self._step.mine.get(microbatch)
        if check is not None and check.is_pending:
            check.is_pending, check.checked = False, rows
            self._judge(microbatch, check)
        elif (request := self._wanted.pop((step, microbatch), None)) is not None:
            self._send(CONTROLLER, m.CheckedAgain(self._rank, request.epoch, step, microbatch, rows))

    def received(self, sender: int, message: m.CheckDigests) -> None:
        """File the results of another worker's micro-batch."""
        if message.step < self._step.number:
            return  # decided
        self._came[message.step, message.microbatch, sender] = message.rows
        if message.step == self._step.number:
            self._compare(message.microbatch, sender, message.rows)

    def asked(self, message: m.CheckAgain) -> None:
        """The controller asks for the results of a micro-batch; its inputs come from whoever keeps them."""
        if self._rank in message.ranks:
            self._wanted[message.step, message.microbatch] = message

    def compared(self, version: int) -> None:
        """All replicas are the same at a version. Before that, results of the step after it may differ since the state
        of some worker is wrong, though two others have computed them: nothing is reported."""
        if self._step.number == version + 1 and not self._step.is_compared:
            self._step.is_compared = True
            for microbatch, check in self._step.mine.items():
                self._judge(microbatch, check)

    def accepted(self, message: m.CheckAccepted) -> None:
        """The step goes on with what was computed, right or not."""
        if message.step == self._step.number and (check := self._step.mine.get(message.microbatch)) is not None:
            check.is_settled = True

    def _compare(self, microbatch: int, sender: int, rows: Rows) -> None:
        check = self._step.mine.get(microbatch)
        if check is not None and check.owner == sender:
            check.owned = rows
            self._judge(microbatch, check)

    def _judge(self, microbatch: int, check: _Check) -> None:
        """Note whether both results are the same; tell the controller, once, if they are not."""
        if check.checked is None or check.owned is None or check.is_settled or check.is_reported:
            return
        if check.checked == check.owned:
            check.is_settled = True
            return
        if not self._step.is_compared:
            return
        check.is_reported = True
        epoch, step = self._step.epoch, self._step.number
        report = m.ChecksDiffer(self._rank, epoch, step, microbatch, check.owner, check.owned, check.checked)
        self._send(CONTROLLER, report)
