"""What becomes of workers that have computed wrongly, or may have (`verify.action`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller.events import Action, End, EvictWorker, Record, RunStopped
from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery.actions import Send
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


class Verdicts:
    """Turns cases that are judged into actions.

    Args:
        settings: of the run.
    """

    def __init__(self, settings: Settings, protocol: ControllerProtocol) -> None:
        self._action = settings.verify.action
        self._device = settings.runtime.device
        self._protocol = protocol

    def found(self, case: Case, wrong: Collection[int]) -> list[Action]:
        """These workers have computed wrongly."""
        wrong = [rank for rank in wrong if rank in self._protocol.members]  # others are lost by now, perhaps for it
        if not wrong:
            return []
        records: list[Action] = [self._record(case, rank) for rank in wrong]
        if self._action == "report":
            self._protocol.trust()
            return [*records, case.accept]
        if self._action == "stop":
            what = f"worker{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))} computed wrongly: {case}"
            return [*records, End(RunStopped(RunError(f"the run stops (verify.action=stop): {what}")))]
        return [*records, *(EvictWorker(rank, f"it computed wrongly in step {case.step}") for rank in wrong)]

    def not_found(self, case: Case, disputed: Collection[int]) -> list[Action]:
        """The end of the run: one of these workers is wrong, or more, and nothing shows which."""
        if not set(disputed) <= {*self._protocol.members}:
            return []  # a mesh epoch without one of them is about to begin, and with it another attempt
        what = f"workers {sorted(disputed)} computed different results in step {case.step}: {case}"
        error = f"{what}; each gives the same results again, and nothing shows which of them is wrong"
        return [End(RunStopped(RunError(error)))]

    def _record(self, case: Case, wrong: int) -> Record:
        checked = case.checked.get(wrong, 0)
        unsure = [checked + 1, case.step - 1] if checked + 1 < case.step else []
        host = "/".join(dict(self._protocol.placement.mesh.topology.domains).get(wrong, ())) or "localhost"
        exposed = f"; steps {unsure[0]} to {unsure[1]}, in which it was not checked, may be wrong" if unsure else ""
        fields = {
            "ranks": [wrong],
            "host": host,
            "device": self._device,
            "layer": case.layer,
            "step": case.step,
            "tensor": case.tensor,
            "elements": case.elements,
            "checked": checked or None,
            "unsure_steps": unsure,
            "message": f"worker {wrong} ({host}, {self._device}) computed wrongly: {case}{exposed}",
        }
        return Record("corrupt", fields)
