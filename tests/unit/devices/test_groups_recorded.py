"""Groups that are made in the background, on a recording double of torch.distributed: order, arguments, threads."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from elaswave_spmd.runtime.devices.groups import GroupInBackground
from tests.unit.devices.recording_doubles import RecordingDistributed

LIMIT = timedelta(seconds=30)


def make(distributed: RecordingDistributed, aborted: list[tuple[object, str]] | None = None) -> GroupInBackground:
    abort = (
        (lambda group, reason: aborted.append((group, reason))) if aborted is not None else lambda group, reason: None
    )
    return GroupInBackground(distributed, "hccl", "the store", timeout=LIMIT, abort=abort)


def test_links_serve_until_all_say_that_it_is_ready() -> None:
    distributed = RecordingDistributed()
    distributed.gate.clear()
    group = make(distributed)
    group.change(0, [4, 7], rank=7)
    assert group.group is None and group.ready is None
    distributed.gate.set()
    group.wait()
    assert group.group is None and group.ready == 0
    group.use(0)
    assert group.group == "group of epoch0" and group.ready is None
    wanted = {"store": ("epoch0", "the store"), "rank": 1, "world_size": 2, "timeout": LIMIT}
    assert distributed.calls == [("init_process_group", ("hccl",), wanted), ("barrier", (), {})]
    assert threading.current_thread().name not in distributed.threads


def test_members_change_by_abort_destroy_and_a_new_group() -> None:
    distributed, aborted = RecordingDistributed(), []
    group = make(distributed, aborted)
    group.change(0, [4, 7], rank=4)
    group.wait()
    group.use(0)
    distributed.gate.clear()
    group.change(1, [4, 7, 9], rank=4)
    assert group.group is None, "links serve from the change on"
    distributed.gate.set()
    group.wait()
    assert distributed.names == [
        "init_process_group",
        "barrier",
        "destroy_process_group",
        "init_process_group",
        "barrier",
    ]
    assert aborted == [("group of epoch0", "mesh epoch 1")]
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
    with pytest.raises(AssertionError):
        group.use(1)


def test_a_member_that_is_lost_before_all_have_met_leaves_links_serving() -> None:
    distributed = RecordingDistributed()
    distributed.fails = RuntimeError("connection refused")
    group = make(distributed)
    group.change(0, [1, 2], rank=1)
    group.wait()
    assert (group.ready, group.group, group.failure) == (None, None, distributed.fails)
    distributed.fails = None
    group.change(1, [1, 3], rank=1)
    group.wait()
    assert group.ready == 1 and group.failure is None


def test_one_alone_has_no_group() -> None:
    distributed = RecordingDistributed()
    group = make(distributed)
    group.change(0, [5], rank=5)
    group.wait()
    assert group.ready is None and distributed.calls == []


def test_at_the_end_it_is_destroyed_once() -> None:
    distributed = RecordingDistributed()
    group = make(distributed)
    group.change(0, [1, 2], rank=1)
    group.close()
    group.close()
    assert distributed.names.count("destroy_process_group") == 1 and group.group is None
