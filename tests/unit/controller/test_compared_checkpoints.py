"""A checkpoint is complete when all of its pages are on the disk, and their replicas were found to be the same."""

from __future__ import annotations

from elaswave_spmd.controller.actions import Action, Record, RemoveShards, WriteManifest
from elaswave_spmd.controller.checkpoints import CheckpointCoordinator, CheckpointSpec
from elaswave_spmd.recovery.actions import Save
from elaswave_spmd.recovery.messages import ShardWritten
from elaswave_spmd.run_dir.checkpoint_shard import ShardInfo
from elaswave_spmd.run_dir.journal import Ballot
from elaswave_spmd.run_dir.manifest import layout_fingerprint
from elaswave_spmd.worker.checkpoint_orders import CheckpointOrders
from tests.unit.runtime.runtime_cases import small_layout

LAYOUT = small_layout(64)
RANGES = tuple(
    (number, 0, layer.num_state_pages) for number, layer in enumerate(LAYOUT.layers) if layer.num_state_pages
)
PAGES = sum(stop for _, _, stop in RANGES)


def coordinator(*, compares: bool = True) -> CheckpointCoordinator:
    orders = CheckpointOrders("run", "made up", 1, 5, 20)
    spec = CheckpointSpec("made up", 1, 0, 0, {}, layout_fingerprint(LAYOUT), ("master",), PAGES, orders)
    return CheckpointCoordinator(spec, compares=compares)


def write(found: CheckpointCoordinator, step: int, *, epoch: int = 0) -> list[Action]:
    """Two workers report their shards of a step."""
    actions: list[Action] = []
    for rank, ranges in enumerate((RANGES[:1], RANGES[1:])):
        name = f"shard_{rank}_1-{epoch}.safetensors"
        actions += found.wrote(ShardWritten(step, rank, epoch, name, 1, "0" * 64, ranges), 0.0)
    return actions


def manifests(actions: list[Action]) -> list[int]:
    return [action.manifest.step for action in actions if isinstance(action, WriteManifest)]


def test_it_waits_for_the_comparison_and_without_comparisons_for_nothing() -> None:
    assert manifests(write(coordinator(compares=False), 5)) == [5]
    found = coordinator()
    assert write(found, 5) == [] and found.compared(4, 0) == []
    assert manifests(found.compared(5, 0)) == [5]
    assert found.compared(5, 1) == found.compared(6, 1) == [], "once"
    found.compared(10, 1)
    assert manifests(write(found, 10, epoch=1)) == [10], "the comparison may be the first"


def lost(actions: list[Action]) -> list[tuple[object, object]]:
    """(step, ballot) of the checkpoints that are said to be lost."""
    return [
        (action.fields["step"], action.fields.get("ballot"))
        for action in actions
        if isinstance(action, Record) and action.kind == "checkpoint_lost"
    ]


def removed(actions: list[Action]) -> dict[int, tuple[str, ...]]:
    return {action.step: action.names for action in actions if isinstance(action, RemoveShards)}


def names(epoch: int = 0) -> tuple[str, ...]:
    """The shards that `write` reports."""
    return tuple(f"shard_{rank}_1-{epoch}.safetensors" for rank in (0, 1))


def test_shards_of_replicas_that_differed_make_none_whenever_they_come() -> None:
    found = coordinator()
    write(found, 5)
    assert lost(found.distrust(5, 0)) == [(5, [1, 0])]
    assert found.compared(5, 1) == [], "of the others, in the mesh epoch after it"
    late = coordinator()
    assert lost(late.distrust(5, 0)) == [(5, [1, 0])] and late.compared(5, 1) == write(late, 5) == []
    for each in (found, late):
        assert removed(each.committed(5)) == {}, "workers are at that version still"
        assert removed(each.committed(6)) == {5: names()}


def test_a_version_that_is_not_saved_has_no_checkpoint_to_lose() -> None:
    found = coordinator()
    assert found.distrust(4, 0) == found.committed(5) == [] and found.why_not(4) == ""


def test_a_shard_counts_if_the_replicas_of_its_own_mesh_epoch_were_the_same() -> None:
    """A worker is lost before its replicas were compared: what others have does not show whether they were right."""
    for is_late in (False, True):
        found = coordinator()
        before = [] if is_late else write(found, 5)
        later = found.compared(5, 1)  # of the replicas that are left
        after = write(found, 5) if is_late else []
        assert manifests([*before, *later, *after]) == [] and lost([*later, *after]) == [(5, [1, 0])]
        assert found.why_not(5) and removed(found.committed(6)) == {5: names()}
        found.compared(10, 1)
        assert manifests(write(found, 10, epoch=1)) == [10]
    found = coordinator()
    found.compared(5, 0)
    assert found.compared(5, 1) == [] and manifests(write(found, 5)) == [5], "it is lost after the comparison"


def test_a_run_that_stops_with_that_state_writes_it_anew() -> None:
    """A loss meanwhile makes another mesh epoch, in which all of it is written, and compared."""
    for differs in (False, True):
        found = coordinator()
        found.stop_and_save(Save(5, 1, "too few workers"))
        write(found, 5, epoch=1)
        if differs:
            assert lost(found.distrust(5, 1)) == [] and not found.why_not(5)
        found.stop_and_save(Save(5, 2, "too few workers"))
        told = found.compared(5, 2)
        assert [(it.kind, it.fields["ballot"]) for it in told if isinstance(it, Record)] == (
            [] if differs else [("uncompared", [1, 1])]
        ), "if differs, the event `mismatch` has said so"
        assert len(told) == (not differs) and found.compared(5, 2) == [] and not found.why_not(5)
        (written,) = write(found, 5, epoch=2)
        assert isinstance(written, WriteManifest)
        assert tuple(shard.name for shard in written.manifest.shards) == names(2)


def test_the_run_may_stop_with_that_state_once_it_is_right() -> None:
    found = coordinator()
    found.distrust(5, 0)
    found.stop_and_save(Save(5, 1, "too few workers"))
    assert write(found, 5, epoch=1) == [] and manifests(found.compared(5, 1)) == [5]


def test_shards_that_are_found_complete_a_checkpoint_with_those_that_are_reported() -> None:
    """A controller that came back finds what its predecessor was told of (A10)."""
    shards = [
        ShardInfo(f"shard_{rank}", "made up", 5, Ballot(1, 0), rank, 1, "0" * 64, ranges)
        for rank, ranges in enumerate((RANGES[:1], RANGES[1:]))
    ]
    assert manifests(coordinator(compares=False).found(shards, 0.0)) == [5]
    found = coordinator(compares=False)
    assert found.found(shards[:1], 0.0) == [] and found.found(shards[:1], 0.0) == [], "the same one, counted once"
    report = ShardWritten(5, 1, 0, "shard_1", 1, "0" * 64, RANGES[1:])
    assert manifests(found.wrote(report, 0.0)) == [5]
    assert found.found(shards, 0.0) == [], "it is being written"
    compared = coordinator()
    assert compared.found(shards, 0.0) == [] and manifests(compared.compared(5, 0)) == [5]


def test_a_step_that_two_mesh_epochs_have_cut_differently_is_completed_by_one_of_them() -> None:
    """The run stops where its members are, and page ranges were joined while the disk was busy with that very step."""
    layer, first, stop = max(RANGES, key=lambda key: key[2])
    halves, others = ((layer, first, first + 1), (layer, first + 1, stop)), tuple(r for r in RANGES if r[0] != layer)
    for newest_last in (True, False):
        found = coordinator(compares=False)
        older = [(0, 0, halves[:1]), (1, 0, (*halves[1:], *others))]
        newer = [(0, 1, ((layer, first, stop),)), (1, 1, others)]
        made: list[int] = []
        for rank, epoch, ranges in (*older[:1], *newer[:1], *(newer[1:] if newest_last else older[1:])):
            assert not made
            name = f"shard_{rank}_1-{epoch}.safetensors"
            made += manifests(found.wrote(ShardWritten(5, rank, epoch, name, 1, "0" * 64, ranges), 0.0))
        assert made == [5]
