"""The comparison of two runs, bit for bit, by the files that they have left."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from elaswave_spmd.run_dir import read_events, read_metrics, read_summary


@dataclass(frozen=True)
class Comparison:
    """The result.

    Args:
        steps: of the first run.
        weights_sha256: of the first run.
        lost: (ranks, the last step before) of each loss of workers in the second run.
        workers: of the second run's last step.
        differences: in words; empty: the runs have the same bits.
    """

    steps: int
    weights_sha256: str
    lost: tuple[tuple[tuple[int, ...], int], ...]
    workers: int
    differences: tuple[str, ...]

    def lines(self) -> list[str]:
        """The result in plain words."""
        found = [
            f"worker {', '.join(map(str, ranks))} was killed after step {step} was done and before step {step + 1} was"
            for ranks, step in self.lost
        ]
        if self.differences:
            return [*found, *self.differences, "the two runs differ"]
        return [
            *found,
            f"{self.workers} workers finished the run",
            f"all {self.steps} losses are equal, bit for bit, and all {self.steps} gradient norms; "
            f"weights {self.weights_sha256[:12]}... in both runs",
        ]


def compare(quiet: Path, disturbed: Path) -> Comparison:
    """Compare a run with one that has lost workers.

    Raises:
        DataError: a run has not finished, or its files are malformed.
    """
    one, other = read_metrics(quiet), read_metrics(disturbed)
    summaries = read_summary(quiet), read_summary(disturbed)
    events = read_events(disturbed)
    lost = tuple((tuple(e["ranks"]), e["after_step"]) for e in events if e["event"] == "fail" and "after_step" in e)
    differences = [] if lost else ["no worker was lost in the second run"]
    for step, (a, b) in enumerate(zip_longest(one, other), 1):
        if a is None or b is None:
            differences.append(f"step {step} is in one of the runs only")
            break
        for name, left, right in (
            ("loss", a.loss_hex, b.loss_hex),
            ("gradient norm", a.grad_norm_hex, b.grad_norm_hex),
        ):
            if left != right:
                differences.append(f"the {name} of step {step} is {left} undisturbed, and {right} with the loss")
    left, right = (str(summary["weights_sha256"]) for summary in summaries)
    if left != right:
        differences.append(f"the weights are {left} undisturbed, and {right} with the loss")
    return Comparison(len(one), left, lost, other[-1].workers if other else 0, tuple(differences))
