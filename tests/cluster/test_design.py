"""The example in docs/design.md, "A reshard plan, from the kill to the last message", is what the code does.

`python -m tests.cluster.test_design` prints the example's block, to be put into the document after a change.
"""

from __future__ import annotations

from pathlib import Path

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import EpochBegun
from elaswave_spmd.sharding.replicas import ReplicaMap, all_replica_sets
from tests.cluster.test_walkthrough import Ended, training

DOCUMENT = Path(__file__).parents[2] / "docs" / "design.md"
MARK = "<!-- reshard plan: python -m tests.cluster.test_design -->"
ELEMENT_BYTES = 12  # AdamW: fp32 master parameter and two moments


def example() -> str:
    """One kill on dp3_pp2 with ZeRO-2, as the simulated cluster carries it out."""
    run = training("dp3_pp2", zero=2).worker(1, "kill", step=2, at="backward").run(0)
    old, specs = run.before, run.before.shardings
    lines = [
        "old mesh and specs",
        f"  {old.state_sharding(mirror_count=1)}",
        f"  batch {specs.batch}, layers {specs.layers}",
        f"  params {specs.params}, grads {specs.grads}, optim {specs.optim}",
        "replicas before",
        *(f"  {pages}" for pages in all_replica_sets(old.replicas or {})),
    ]
    replicas = old.replicas or {}
    for epoch in run.changes:
        lines += _epoch(epoch, replicas)
        lines += _state_messages(run) if epoch.num_copies else []
        replicas = epoch.placement.replicas or {}
    return "\n".join(lines)


def _epoch(epoch: EpochBegun, before: ReplicaMap) -> list[str]:
    number = epoch.placement.mesh.epoch
    assert epoch.plan is not None and epoch.placement.replicas is not None
    known = set(all_replica_sets(before))
    changed = [pages for pages in all_replica_sets(epoch.placement.replicas) if pages not in known]
    plan = epoch.plan.text(ELEMENT_BYTES) if epoch.num_copies else "all copies are there: the target of the plan holds"
    return [
        f"controller -> each member: Prepare(epoch={number})",
        f"each member -> controller: StepReport(epoch={number})",
        *plan.splitlines(),
        f"controller -> each member: Reconfigure(epoch={number}), with all replicas; changed are",
        *(f"  {pages}" for pages in changed),
    ]


def _state_messages(run: Ended) -> list[str]:
    """The state that workers send, and the reports of those that have got all of theirs."""
    states = sorted(
        f"{sent.sender} -> {sent.receiver}: PageState(layer={it.layer}, first={it.first}, stop={it.stop})"
        for sent in run.sent
        if isinstance(it := sent.message, m.PageState)
    )
    caught_up = sorted(sent.sender for sent in run.sent if isinstance(sent.message, m.CaughtUp))
    return [*states, *(f"{rank} -> controller: CaughtUp" for rank in caught_up)]


def test_the_document_shows_what_the_code_does() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    shown = text[text.index(MARK) :].split("```")[1].removeprefix("text").strip("\n")
    assert shown == example(), "python -m tests.cluster.test_design prints the block as it is now"


if __name__ == "__main__":
    print(example())
