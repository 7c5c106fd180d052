"""Verdicts on workers that have computed wrongly, or may have (`verify.action`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller.actions import Action, End, EvictWorker, GoBack, Record
from elaswave_spmd.controller.outcomes import RunStopped
from elaswave_spmd.errors import RunError
from elaswave_spmd.mesh.mesh import named_workers
from elaswave_spmd.mesh.topology import Topology
from elaswave_spmd.recovery.actions import EpochBegun, Send
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol


@dataclass(frozen=True)
class Case:
    """Results of one thing that differ.

    Args:
        step: in which it was computed.
        layer: by name.
        tensor: its kind, in words.
        elements: that differ; of many, at least so many.
        where: it belongs to, in words.
        checked: rank -> the last committed step in which such results of that worker were checked.
        accept: tells the checker that the step goes on all the same.
    """

    step: int
    layer: str
    tensor: str
    elements: int
    where: str
    checked: Mapping[int, int]
    accept: Send

    def __str__(self) -> str:
        what = f"{self.elements} element{'s' * (self.elements != 1)} of the {self.tensor} of layer {self.layer}"
        return f"{what}, {self.where}"


def mismatch(case: Case, one: int, other: int, **place: object) -> Record:
    """The event of two workers with different results; it may be one worker that has computed both.

    Args:
        place: further fields that say what was computed.
    """
    who = f"workers {one} and {other}" if one != other else f"worker {one}, twice,"
    text = f"{who} computed different results in step {case.step}: {case}"
    return Record("mismatch", {"step": case.step, "ranks": sorted({one, other}), **place, "message": text})


def host_of(topology: Topology, rank: int) -> str:
    """The failure domain of a worker, from the outermost one in."""
    return "/".join(dict(topology.domains).get(rank, ())) or "localhost"


class Verdicts:
    """Turns cases that are judged into actions.

    Args:
        settings: of the run.
        has_gone_back: the run has gone back to a checkpoint before, since nobody could tell which worker was wrong.
    """

    def __init__(self, settings: Settings, protocol: ControllerProtocol, *, has_gone_back: bool = False) -> None:
        self._action = settings.verify.action
        self._has_gone_back = has_gone_back
        self._first = protocol.began_at  # the workers of this life have computed nothing before
        self._device = settings.runtime.device
        self._protocol = protocol
        self._joined: dict[int, int] = {}  # rank -> the version at which it came later

    def begun(self, begun: EpochBegun) -> None:
        """A mesh epoch begins: what newcomers compute counts from its version on."""
        self._joined |= {rank: begun.version for rank, kind in begun.kinds.items() if kind == "join"}

    def found(self, case: Case, wrong: Collection[int]) -> list[Action]:
        """These workers have computed wrongly."""
        wrong = [rank for rank in wrong if rank in self._protocol.members]  # others are lost by now, perhaps for it
        if not wrong:
            return []
        records: list[Action] = [self._record(case, rank) for rank in wrong]
        if self._action == "report":
            self._protocol.accept_results()
            return [*records, case.accept]
        newest = min(self._right_until(case, rank) for rank in wrong)
        unsure = [newest + 1, case.step - 1] if newest + 1 < case.step else []
        if self._action == "stop":
            return [*records, *self.stopped(f"{named_workers(wrong)} computed wrongly: {case}", newest, unsure)]
        return [*records, *self.without(wrong, f"it computed wrongly in step {case.step}", newest, unsure)]

    def not_found(self, case: Case, disputed: Collection[int]) -> list[Action]:
        """One of these workers is wrong, or more, and nothing shows which."""
        if not set(disputed) <= {*self._protocol.members}:
            return []  # a mesh epoch without one of them is about to begin, and with it another attempt
        what = f"{named_workers(sorted({*disputed}))} computed different results in step {case.step}: {case}"
        error = f"{what}; each gives the same results again, and nothing shows which of them is wrong"
        return self.undecided(error, self._protocol.version)

    def without(self, wrong: Collection[int], reason: str, newest: int, unsure: Sequence[int]) -> list[Action]:
        """The run goes on without these workers; with `rollback` from before the steps that may be wrong, if any may.

        Args:
            newest: the last version that they cannot have spoiled.
            unsure: the first and the last step that may be wrong; empty: none.
        """
        if self._action == "rollback" and unsure:
            who = f"{named_workers(wrong)}: {reason}"
            may = f"steps {unsure[0]} to {unsure[1]} may be wrong"
            return [GoBack(f"{who}; {may} (verify.action=rollback)", newest, tuple(wrong))]
        return [EvictWorker(rank, reason) for rank in wrong]

    def stopped(self, error: str, newest: int, unsure: Sequence[int]) -> list[Action]:
        """The run ends with `verify.action=stop`; args as for `without`."""
        text = f"the run stops (verify.action=stop): {error}"
        if not unsure:
            return [End(RunStopped(RunError(text)))]
        return [GoBack(f"{text}; steps {unsure[0]} to {unsure[1]} may be wrong", newest, ends=True)]

    def undecided(self, error: str, newest: int, wrong: Sequence[int] = ()) -> list[Action]:
        """Nothing shows who is wrong: the run goes back to its checkpoint, once; the next time it ends.

        Args:
            error: in words, with the workers.
            newest: the last version that is not in doubt.
            wrong: other workers, which are known to be wrong: the run goes on without them.
        """
        if self._action == "stop" or self._has_gone_back:
            again = ", for the second time" if self._has_gone_back else ""
            if newest >= self._protocol.version:
                return [End(RunStopped(RunError(f"{error}{again}")))]
            return [GoBack(f"{error}{again}", newest, tuple(wrong), is_undecided=True, ends=True)]
        return [GoBack(error, newest, tuple(wrong), is_undecided=True)]

    def _right_until(self, case: Case, rank: int) -> int:
        """The last step up to which a worker's results count as right: it was checked, or was not there before."""
        return max(case.checked.get(rank, 0), self._joined.get(rank, self._first))

    def _record(self, case: Case, wrong: int) -> Record:
        first = self._right_until(case, wrong) + 1
        unsure = [first, case.step - 1] if first < case.step else []
        host = host_of(self._protocol.placement.mesh.topology, wrong)
        exposed = f"; steps {unsure[0]} to {unsure[1]}, in which it was not checked, may be wrong" if unsure else ""
        fields = {
            "ranks": [wrong],
            "host": host,
            "device": self._device,
            "layer": case.layer,
            "step": case.step,
            "tensor": case.tensor,
            "elements": case.elements,
            "checked": case.checked.get(wrong),
            "unsure_steps": unsure,
            "message": f"worker {wrong} ({host}, {self._device}) computed wrongly: {case}{exposed}",
        }
        return Record("corrupt", fields)
