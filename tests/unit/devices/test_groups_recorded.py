"""Groups that are made in the background, on a recording double of torch.distributed: order, arguments, threads."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from elaswave_spmd.runtime.devices.groups import GroupInBackground
from tests.unit.devices.recording_doubles import RecordingDistributed

LIMIT = timedelta(seconds=30)


def make(
    distributed: RecordingDistributed, aborted: list[tuple[object, str]] | None = None, *, shrinks: bool = False
) -> GroupInBackground:
    told = aborted if aborted is not None else []
    return GroupInBackground(
        distributed,
        "hccl",
        lambda: "the store",
        timeout=LIMIT,
        abort=lambda group, reason: told.append((group, reason)),
        shrinks=shrinks,
    )


def test_links_serve_until_all_have_met() -> None:
    distributed = RecordingDistributed()
    distributed.gate.clear()
    group = make(distributed)
    group.change(0, [4, 7], rank=7)
    assert group.ready is None
    distributed.gate.set()
    group.wait()
    assert group.ready == 0
    assert [(name, args) for name, args, _ in distributed.calls] == [("init_process_group", ("hccl",)), ("barrier", ())]
    told = distributed.calls[0][2]
    assert (told["store"].prefix, told["rank"], told["world_size"], told["timeout"]) == ("epoch0/4", 1, 2, LIMIT)
    assert threading.current_thread().name not in distributed.threads


def test_each_stage_meets_in_a_place_of_its_own() -> None:
    stores = []
    for members in ([4, 7], [5, 6]):
        group = make(distributed := RecordingDistributed())
        group.change(3, members, rank=members[1])
        group.wait()
        stores.append(distributed.calls[0][2]["store"].prefix)
    assert stores == ["epoch3/4", "epoch3/5"]


def test_the_root_of_a_broadcast_is_a_worker() -> None:
    distributed = RecordingDistributed()
    distributed.gate.clear()
    group = make(distributed)
    group.change(0, [4, 7, 2], rank=7)
    with pytest.raises(AssertionError):
        group.broadcast("values", 2)
    distributed.gate.set()
    group.wait()
    assert group.broadcast("values", 2) == "work"
    assert distributed.calls[-1] == ("broadcast", ("values",), {"group_src": 2, "async_op": True})


def test_members_change_by_abort_destroy_and_a_new_group() -> None:
    distributed, aborted = RecordingDistributed(), []
    group = make(distributed, aborted)
    group.change(0, [4, 7], rank=4)
    group.wait()
    distributed.gate.clear()
    group.change(1, [4, 7, 9], rank=4)
    assert group.ready is None, "links serve from the change on"
    distributed.gate.set()
    group.wait()
    init = ["init_process_group", "barrier"]
    assert distributed.names == [*init, "destroy_process_group", *init]
    assert aborted == [("group of epoch0/4", "mesh epoch 1")]
    assert group.ready == 1


def test_a_change_while_one_is_being_made_overtakes_it() -> None:
    distributed = RecordingDistributed()
    distributed.gate.clear()
    group = make(distributed)
    for epoch, members in enumerate([[1, 2], [1, 2, 3], [1, 3]]):
        group.change(epoch, members, rank=1)
    distributed.gate.set()
    group.wait()
    assert group.ready == 2
    sizes = [kwargs["world_size"] for name, _, kwargs in distributed.calls if name == "init_process_group"]
    assert sizes[-1] == 2 and len(sizes) <= 3


def test_a_member_that_never_comes_keeps_nobody_in_a_library() -> None:
    """A library that waits for its peers cannot be told to stop: it is asked only when all are there."""
    distributed = RecordingDistributed(others={"epoch0/1": {}, "epoch1/1": {"here": 1}})
    group = make(distributed)
    group.change(0, [1, 2, 3], rank=1)
    group.wait(0.2)
    assert group.ready is None and distributed.calls == []
    group.change(1, [1, 3], rank=1)
    group.wait()
    assert group.ready == 1 and distributed.names == ["init_process_group", "barrier"]


def test_a_member_that_is_lost_while_they_connect_leaves_links_serving() -> None:
    distributed = RecordingDistributed()
    distributed.fails = RuntimeError("connection refused")
    group = make(distributed)
    group.change(0, [1, 2], rank=1)
    group.wait()
    assert (group.ready, group.failure) == (None, distributed.fails)
    distributed.fails = None
    group.change(1, [1, 3], rank=1)
    group.wait()
    assert group.ready == 1 and group.failure is None


def test_one_alone_has_no_group() -> None:
    distributed = RecordingDistributed()
    group = make(distributed)
    group.change(0, [5, 6], rank=5)
    group.wait()
    group.change(1, [5], rank=5)
    group.wait()
    assert group.ready is None and distributed.names[2:] == ["destroy_process_group"]


def test_at_the_end_it_is_destroyed_once() -> None:
    distributed = RecordingDistributed()
    group = make(distributed)
    group.change(0, [1, 2], rank=1)
    group.close()
    group.close()
    assert distributed.names.count("destroy_process_group") == 1 and group.ready is None


# ---- where a group can lose members


def shrinking(
    has: int, members: tuple[int, ...] = (1, 3), refuses: BaseException | None = None
) -> tuple[list[str], int]:
    """What is called, and how many groups are aborted, when [1, 2, 3] have become `members`.

    Args:
        has: how many of the others have the group of epoch 0.
    """
    others = {"epoch0/1": {"here": 2}, f"epoch1/{members[0]}": {"here": len(members) - 1, "has0": has}}
    distributed, aborted = RecordingDistributed(others), []
    distributed.refuses_to_shrink = refuses
    group = make(distributed, aborted, shrinks=True)
    group.change(0, [1, 2, 3], rank=1)
    group.wait()
    group.change(1, members, rank=1)
    group.wait()
    assert group.ready == 1, group.failure
    shrunk = [(args, kwargs) for name, args, kwargs in distributed.calls if name == "shrink_group"]
    gone = [index for index, member in enumerate((1, 2, 3)) if member not in members]
    assert all(call == ((gone,), {"shrink_flags": 1}) for call in shrunk)
    return distributed.names[2:], len(aborted)


def test_a_lost_member_is_taken_out_of_a_group_that_all_others_have() -> None:
    assert shrinking(has=1) == (["shrink_group", "barrier"], 0)


@pytest.mark.parametrize(
    ("has", "members", "refuses"),
    [
        pytest.param(0, (1, 3), None, id="another one had not come so far"),
        pytest.param(2, (1, 3, 4), None, id="a member is new"),
        pytest.param(1, (3, 1), None, id="their order is another"),
        pytest.param(2, (1, 2, 3), None, id="nobody is gone"),
    ],
)
def test_else_the_group_is_made_anew(has: int, members: tuple[int, ...], refuses: BaseException | None) -> None:
    assert shrinking(has, members, refuses) == (["destroy_process_group", "init_process_group", "barrier"], 1)


@pytest.mark.parametrize("error", [TypeError("does not support shrinking"), RuntimeError("NCCL 2.27 is needed")])
def test_a_library_that_cannot_shrink_makes_a_new_one(error: BaseException) -> None:
    names, aborted = shrinking(1, (1, 3), error)
    assert names == ["shrink_group", "destroy_process_group", "init_process_group", "barrier"] and aborted == 1
