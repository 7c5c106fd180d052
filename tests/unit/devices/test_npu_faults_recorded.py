"""The fault calls of torch_npu on recording doubles: order and arguments. No Ascend device is behind any of this."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaswave_spmd.runtime.devices import Remedy
from elaswave_spmd.runtime.devices.npu_faults import LINK_EVENTS, MEMORY_EVENTS, NpuEvent, NpuFaults, abort, event_of
from tests.unit.devices.recording_doubles import RecordingTorchNpu, recorded_signatures
from tests.unit.devices.torch_npu_wheel import COMPILED, FUNCTIONS, RECORD, TEXTS, read

WHEEL = "TORCH_NPU_WHEEL"
STOP, CHECK, RESTART = ("stop_device", (3,), {}), ("check_uce_in_memory", (3,), {}), "restart_device"
RESTARTED = (RESTART, (3,), {"rebuild_all_resources": False})


def faults(groups: bool = False, **answers: Any) -> tuple[NpuFaults, RecordingTorchNpu]:
    npu = RecordingTorchNpu({"stop_device": 0, **answers})
    made: Any = npu
    return NpuFaults(made.npu, 3, made.distributed, made.npu._recovery, has_groups=lambda: groups), npu


def error(event: NpuEvent) -> RuntimeError:
    return RuntimeError(f"[ERROR] NPU function error: {event.value}, error code is 507053\n[Error]: look at the log")


@pytest.mark.parametrize("event", NpuEvent)
def test_a_text_is_an_event(event: NpuEvent) -> None:
    assert event_of(error(event)) is event


def test_the_fault_behind_a_stop_is_reported_first() -> None:
    assert event_of(RuntimeError("FORCE STOP. UCE ERROR")) is NpuEvent.MEMORY


@pytest.mark.parametrize("other", [RuntimeError("shape mismatch"), ValueError("UCE ERROR"), KeyError("FORCE STOP")])
def test_other_errors_are_not_faults_of_the_device(other: Exception) -> None:
    made, npu = faults()
    assert event_of(other) is None and made.recover(other) is None and npu.calls == []


@pytest.mark.parametrize("event", sorted(MEMORY_EVENTS, key=str))
@pytest.mark.parametrize(("answer", "remedy"), [(0, Remedy.REDO), (2, Remedy.REDO), (3, Remedy.RELOAD)])
def test_memory_is_checked_between_stop_and_restart(event: NpuEvent, answer: int, remedy: Remedy) -> None:
    made, npu = faults(check_uce_in_memory=answer)
    assert made.recover(error(event)) is remedy
    assert npu.calls == [STOP, CHECK, RESTARTED]


@pytest.mark.parametrize("answer", [1, 7, None])
def test_memory_that_cannot_be_given_up_ends_the_worker(answer: int | None) -> None:
    made, npu = faults(check_uce_in_memory=answer)
    assert made.recover(error(NpuEvent.MEMORY)) is None
    assert npu.calls == [STOP, CHECK]


def test_a_device_that_was_stopped_is_restarted_only() -> None:
    made, npu = faults()
    assert made.recover(error(NpuEvent.STOPPED)) is Remedy.REDO
    assert npu.calls == [RESTARTED]


@pytest.mark.parametrize(("answer", "stopped"), [(0, True), (None, True), (1, False)])
def test_answers_of_stop_device(answer: int | None, stopped: bool) -> None:
    made, npu = faults(stop_device=answer)
    assert made.stop() is stopped
    remedy = made.recover(error(NpuEvent.LINK))
    assert (remedy is Remedy.REDO) is stopped and (RESTART in npu.names) is stopped


@pytest.mark.parametrize("event", NpuEvent)
def test_groups_go_on_and_broken_links_are_made_again(event: NpuEvent) -> None:
    made, npu = faults(groups=True, check_uce_in_memory=2)
    assert made.recover(error(event)) is Remedy.REDO
    assert npu.calls[-2:] == [RESTARTED, ("reinit_process_group", (None,), {"rebuild_link": event in LINK_EVENTS})]


def test_a_fault_call_that_fails_is_reported() -> None:
    made, _ = faults(restart_device=RuntimeError("restart failed"))
    with pytest.raises(RuntimeError, match="restart failed"):
        made.recover(error(NpuEvent.STOPPED))


def test_only_bad_tensors_get_other_memory() -> None:
    made, npu = faults(check_npu_tensor_is_safe=lambda tensor: tensor != "bad")
    assert made.reuse(["good", "bad", "fine"]) == 1
    assert [call for call in npu.calls if call[0] == "update_npu_tensor_to_safe"] == [
        ("update_npu_tensor_to_safe", ("bad",), {})
    ]


def test_a_group_is_aborted_by_the_call_that_does_it() -> None:
    calls = []
    abort(SimpleNamespace(abort_hccl_comm=calls.append), "a member is lost")
    assert calls == ["a member is lost"]


# ---- against torch_npu itself, as files


def test_the_record_has_every_call_and_every_text() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert set(recorded_signatures()) == set(FUNCTIONS)
    assert {event.value for event in NpuEvent} == set(TEXTS)
    assert set(record["in_libraries"]) == {*COMPILED, *TEXTS}


def test_the_record_matches_a_wheel() -> None:
    path = os.environ.get(WHEEL)
    if path is None:
        pytest.skip(f"{WHEEL} is not set: a wheel from `pip download --no-deps torch_npu`")
    found, record = read(Path(path)), json.loads(RECORD.read_text(encoding="utf-8"))
    assert {**found, "torch_npu": ""} == {**record, "torch_npu": ""}
