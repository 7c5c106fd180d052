"""The lines that a run writes of its mesh epochs: which, with what, and what an event cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.controller.run_log import EpochEvents
from elaswave_spmd.controller.supervision import Sign
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.recovery.actions import EpochBegun
from elaswave_spmd.run_dir import MetricsLine, RunDir, RunObserver, read_events
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.sharding.layout import LayerUse, ParameterInfo, lay_out
from elaswave_spmd.sharding.replicas import ReplicaSet
from elaswave_spmd.sharding.reshard import ReshardPlan, plan_reshard

NOW = 1000.0
MICROBATCHES = 8
# Two layers; 4 full pages of 64 elements, and 1 full one. The last has the page of the loss as well.
USES = [LayerUse(name, (ParameterInfo(f"{name}.w", (size,)),)) for name, size in (("a", 256), ("b", 64))]
LAYOUT = lay_out(USES, page_size=64)
ALONE, BOTH = frozenset((0,)), frozenset((0, 2))
TWO_COPIES = plan_reshard(
    LAYOUT,
    {0: (ReplicaSet(0, 0, 4, 0, ALONE),), 1: (ReplicaSet(1, 0, 1, 0, ALONE), ReplicaSet(1, 1, 2, 0, ALONE))},
    to={0: (ReplicaSet(0, 0, 4, 0, BOTH),), 1: (ReplicaSet(1, 0, 1, 0, BOTH), ReplicaSet(1, 1, 2, 0, ALONE))},
)


class Lines:
    """Events in a clock that stands at NOW, and what was written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.observer = RunObserver(RunDir.create(folder, "", model="m", mesh="dp2"), board=False)
        self.events = EpochEvents(self.observer, element_bytes=12)

    @property
    def all(self) -> list[dict[str, Any]]:
        return read_events(self._folder)

    def of(self, kind: str) -> dict[str, Any]:
        (found,) = [line for line in self.all if line["event"] == kind]
        return found

    def commit(self, step: int, seconds: float, *ranks: int) -> None:
        """A step is committed, and then applied by these."""
        line = MetricsLine.of(
            step=step, mesh_epoch=0, loss=1.0, grad_norm=1.0, lr=0.1, tokens=8, seconds=seconds, workers=3
        )
        self.events.committed(line, NOW)
        for rank in ranks:
            self.events.applied(rank, step, NOW)


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Lines]:
    found = Lines(tmp_path / "run")
    yield found
    found.observer.close()


def begun(
    kinds: dict[int, str],
    stages: tuple[tuple[int, ...], ...] = ((0, 2),),
    *,
    reasons: dict[int, str] | None = None,
    redone: int = 0,
    plan: ReshardPlan | None = None,
    version: int = 3,
) -> EpochBegun:
    mesh = Mesh(MeshShape.of_stages(map(len, stages)), stages, 5)
    counts = tuple(even_counts(MICROBATCHES, len(members)) for members in stages)
    placement = Placement(mesh, MICROBATCHES, tuple(range(len(stages) + 1)), counts, Shardings())
    return EpochBegun(placement, kinds, reasons or {}, version, redone, plan=plan)


def test_a_loss_is_one_line_with_its_cause_and_how_long_the_answer_took(lines: Lines) -> None:
    lines.events.lost(1, NOW - 0.25, None)
    lines.events.lost(1, NOW - 0.1, None)  # seen again by another detector: the first counts
    lines.events.begun(begun({1: "fail"}, reasons={1: "killed"}, redone=4, plan=TWO_COPIES), NOW)
    fail = lines.of("fail")
    wanted = {"ranks": [1], "mesh_epoch": 5, "mesh": "dp2", "reason": "killed", "after_step": 3, "edit_ms": 250.0}
    assert {name: fail[name] for name in wanted} == wanted and (fail["microbatches_redone"], fail["copies"]) == (4, 2)
    assert fail["message"] == "worker 1 lost (killed): dp2, mesh epoch 5, after step 3, 4 micro-batches again"


def test_several_losses_of_one_epoch_are_one_line(lines: Lines) -> None:
    lines.events.lost(3, NOW - 0.1, None)
    lines.events.lost(1, NOW - 0.5, None)
    lines.events.begun(begun({1: "fail", 3: "fail"}, reasons={1: "killed", 3: "killed"}), NOW)
    assert lines.of("fail")["ranks"] == [1, 3] and lines.of("fail")["edit_ms"] == 500.0
    assert lines.of("fail")["message"] == "workers 1, 3 lost (killed): dp2, mesh epoch 5, after step 3"


def test_each_kind_has_a_line_of_its_own(lines: Lines) -> None:
    lines.events.lost(1, NOW - 0.5, None)
    lines.events.begun(begun({1: "fail", 4: "leave", 2: "join"}, reasons={1: "killed", 4: "asked to leave"}), NOW)
    assert sorted(line["event"] for line in lines.all) == ["fail", "join", "leave"]
    assert lines.of("join")["ranks"] == [2] and lines.of("join")["reason"] == ""
    assert lines.of("leave")["reason"] == "asked to leave" and lines.of("leave")["edit_ms"] is None
    assert lines.of("fail")["reason"] == "killed" and lines.of("fail")["edit_ms"] == 500.0


def test_an_epoch_in_which_only_state_moves_is_a_rebalance(lines: Lines) -> None:
    lines.events.begun(begun({}), NOW)
    assert lines.of("rebalance")["ranks"] == []
    assert lines.of("rebalance")["message"] == "state lies where it belongs: dp2, mesh epoch 5, after step 3"


def test_a_loss_is_told_once(lines: Lines) -> None:
    lines.events.lost(1, NOW - 0.5, None)
    lines.events.begun(begun({1: "fail"}), NOW)
    lines.events.begun(begun({}), NOW)
    assert lines.of("rebalance")["edit_ms"] is None


def test_the_penalty_is_what_neither_a_usual_step_nor_the_microbatches_done_again_explain(lines: Lines) -> None:
    for step, seconds in enumerate((0.7, 0.8, 5.0), start=1):
        lines.commit(step, seconds)
    lines.events.begun(begun({1: "fail"}, redone=4), NOW)
    assert not any(line["event"] == "recovered" for line in lines.all)
    lines.commit(4, 2.0, 0, 2)
    # usual: 0.8 s, the median, on 3 workers: 0.3 s a micro-batch. 4 micro-batches over 2 workers: 0.6 s.
    recovered = lines.of("recovered")
    assert recovered["penalty_ms"] == pytest.approx(1e3 * (2.0 - 0.8 - 0.6))
    assert (recovered["step"], recovered["mesh_epoch"]) == (4, 5)
    assert recovered["message"] == "step 4 took 2.000 s, 600 ms more than work explains"


def test_microbatches_of_several_stages_are_smaller(lines: Lines) -> None:
    lines.commit(1, 0.8)
    lines.events.begun(begun({1: "fail"}, ((0, 2), (3,)), redone=4), NOW)
    lines.commit(2, 2.0, 0, 2, 3)
    # 4 workers before, 8 micro-batches through 2 stages: 0.2 s each. 4 micro-batches over 3 workers.
    assert lines.of("recovered")["penalty_ms"] == pytest.approx(1e3 * (2.0 - 0.8 - 4 * 0.2 / 3), abs=1e-2)


def test_a_disturbed_step_is_not_a_usual_one(lines: Lines) -> None:
    lines.commit(1, 1.0)
    lines.events.begun(begun({1: "fail"}), NOW)
    lines.commit(2, 100.0, 0, 2)
    lines.events.begun(begun({3: "join"}), NOW)
    lines.commit(3, 3.0, 0, 2)
    penalties = [line["penalty_ms"] for line in lines.all if line["event"] == "recovered"]
    assert penalties == [pytest.approx(99_000), pytest.approx(2_000)], "the usual one is 1 s"


def test_only_the_first_step_after_an_event_is_told(lines: Lines) -> None:
    lines.commit(1, 1.0)
    lines.events.begun(begun({1: "fail"}), NOW)
    for step in (2, 3):
        lines.commit(step, 1.0, 0, 2)
    assert lines.of("recovered")["step"] == 2


def test_state_that_moves_does_not_hide_the_cost_of_the_loss(lines: Lines) -> None:
    lines.commit(1, 1.0)
    lines.events.begun(begun({1: "fail"}, redone=2), NOW)
    lines.events.begun(begun({}), NOW)
    lines.commit(2, 2.0, 0, 2)
    assert lines.of("recovered")["penalty_ms"] < 1000


def test_state_that_moves_disturbs_no_step(lines: Lines) -> None:
    lines.commit(1, 1.0)
    lines.events.begun(begun({}), NOW)
    lines.commit(2, 2.0, 0, 2)
    assert [line["event"] for line in lines.all] == ["rebalance"]


def test_before_the_first_step_nothing_is_usual(lines: Lines) -> None:
    lines.events.begun(begun({1: "fail"}), NOW)
    lines.commit(1, 2.0, 0, 2)
    assert [line["event"] for line in lines.all] == ["fail"]


def test_the_cost_is_written_when_everybody_has_applied_or_another_event_comes(lines: Lines) -> None:
    lines.commit(1, 1.0)
    lines.events.begun(begun({1: "fail"}), NOW)
    lines.commit(2, 2.0, 0)
    assert [line["event"] for line in lines.all] == ["fail"]
    lines.events.begun(begun({2: "fail"}, ((0,),)), NOW)
    assert [line["event"] for line in lines.all] == ["fail", "recovered", "fail"]
    assert lines.all[1]["all_applied_at"] is None
    lines.commit(3, 2.0, 0)
    assert lines.all[-1]["event"] == "recovered" and lines.all[-1]["all_applied_at"] == NOW


# ---- how soon it was seen


def test_a_loss_whose_instant_is_known_counts_from_there(lines: Lines) -> None:
    lines.events.lost(1, NOW - 0.25, Sign(NOW - 0.2625, is_death=True))
    lines.events.begun(begun({1: "fail"}), NOW)
    assert (lines.of("fail")["detect_ms"], lines.of("fail")["detect_from"]) == (pytest.approx(12.5), "death")


def test_another_loss_counts_from_the_last_sign_of_life(lines: Lines) -> None:
    lines.events.lost(1, NOW - 0.25, Sign(NOW - 0.3, is_death=False))
    lines.events.begun(begun({1: "fail"}), NOW)
    assert (lines.of("fail")["detect_ms"], lines.of("fail")["detect_from"]) == (pytest.approx(50.0), "heartbeat")


def test_of_several_losses_the_one_that_was_seen_last_counts(lines: Lines) -> None:
    lines.events.lost(1, NOW - 0.25, Sign(NOW - 0.26, is_death=True))
    lines.events.lost(3, NOW - 0.2, Sign(NOW - 0.3, is_death=False))
    lines.events.lost(4, NOW - 0.2, None)
    lines.events.begun(begun({1: "fail", 3: "fail", 4: "fail"}), NOW)
    assert (lines.of("fail")["detect_ms"], lines.of("fail")["detect_from"]) == (pytest.approx(100.0), "heartbeat")


def test_where_nobody_was_lost_or_nothing_was_heard_nothing_was_detected(lines: Lines) -> None:
    lines.events.lost(1, NOW - 0.25, None)
    lines.events.begun(begun({1: "fail", 2: "join"}), NOW)
    for kind in ("fail", "join"):
        assert (lines.of(kind)["detect_ms"], lines.of(kind)["detect_from"]) == (None, None)


def test_a_sign_of_life_after_the_loss_was_seen_is_no_negative_time(lines: Lines) -> None:
    lines.events.lost(1, NOW - 0.25, Sign(NOW - 0.2, is_death=False))
    lines.events.begun(begun({1: "fail"}), NOW)
    assert lines.of("fail")["detect_ms"] == 0.0


# ---- what moves


def test_the_bytes_of_all_copies_and_the_least_are_told(lines: Lines) -> None:
    """Worker 2 learns pages 2 and 3 of layer 0, of 64 elements of 12 bytes, and the loss page, which is no state."""
    loss = LAYOUT.layers[1].loss_block
    assert loss is not None
    both, new = frozenset((0, 2)), frozenset((2,))
    one = frozenset((0,))
    replicas = {
        0: (ReplicaSet(0, 0, 2, 0, one), ReplicaSet(0, 2, 4, 0, one, new)),
        1: (ReplicaSet(1, 0, 1, 0, one), ReplicaSet(1, 1, 2, 0, one, new)),
    }
    target = {
        0: (ReplicaSet(0, 0, 2, 0, one), ReplicaSet(0, 2, 4, 2, new)),
        1: (ReplicaSet(1, 0, 1, 0, one), ReplicaSet(1, 1, 2, 2, both)),
    }
    mesh = Mesh(MeshShape.of_stages((2,)), ((0, 2),), 5)
    placement = Placement(mesh, MICROBATCHES, (0, 2), ((4, 4),), Shardings().with_zero(1), replicas=replicas)
    plan = ReshardPlan(LAYOUT, replicas, frozenset(), placement.state_sharding(), replicas, target)
    lines.events.begun(EpochBegun(placement, {2: "join"}, {}, 3, 0, plan=plan), NOW)
    join = lines.of("join")
    assert (join["copies"], join["bytes_moved"], join["bytes_bound"]) == (2, 2 * 64 * 12, 2 * 64 * 12)


def test_a_promotion_moves_nothing(lines: Lines) -> None:
    lines.events.lost(1, NOW - 0.25, None)
    lines.events.begun(begun({1: "fail"}), NOW)
    assert (lines.of("fail")["bytes_moved"], lines.of("fail")["bytes_bound"]) == (0, 0)


# ---- a link


def test_a_link_that_is_made_again_is_a_line_of_its_own_and_loses_nobody(lines: Lines) -> None:
    lines.commit(1, 1.0)
    why = "the link between workers 0 and 2 was lost"
    lines.events.begun(begun({0: "link", 2: "link"}, reasons={0: why, 2: why}, redone=4), NOW)
    link = lines.of("link")
    assert (link["ranks"], link["reason"], link["edit_ms"]) == ([0, 2], why, None)
    assert (
        link["message"] == f"workers 0, 2 linked again ({why}): dp2, mesh epoch 5, after step 3, 4 micro-batches again"
    )
    lines.commit(2, 2.0, 0, 2)
    # 2 workers before and after: 0.25 s a micro-batch.
    assert lines.of("recovered")["penalty_ms"] == pytest.approx(1e3 * (2.0 - 1.0 - 4 * 0.25 / 2), abs=1e-2)
