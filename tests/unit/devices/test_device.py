"""The start of workers for a device: their environment, and the checks before any of them starts."""

from __future__ import annotations

import pytest

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices.selection import WorkerStart, kind_of, worker_start
from tests.unit.devices.made_up_machines import GPU, NPU, PLAIN, XLA, MadeUpMachine


def settings(device: str, threads: int = 1, compile: bool = False, collectives: str = "links", **mesh: int) -> Settings:
    runtime = {"device": device, "threads_per_worker": threads, "compile": compile, "collectives": collectives}
    return Settings.from_dict({"runtime": runtime, "mesh": mesh})


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_workers_of_the_cpu_get_nothing(device: str) -> None:
    assert worker_start(settings(device, dp=4), PLAIN) == WorkerStart()
    assert kind_of(settings(device)).name == "cpu"


def test_workers_of_an_island_get_its_devices_and_threads() -> None:
    start = worker_start(settings("xla", threads=4, dp=2, tp=2), XLA)
    assert {"CPU_NUM_DEVICES": "2", "NPROC": "4", "PJRT_DEVICE": "CPU"}.items() <= start.environment.items()
    assert start.method == "fork" and start.preload[0] == "torch_xla"
    assert "CPU_NUM_DEVICES=2 NPROC=4" in str(start)


@pytest.mark.parametrize(("axis", "size"), [("tp", 2), ("fsdp", 3)])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_only_islands_have_several_devices(device: str, axis: str, size: int) -> None:
    made = Settings.from_dict({"runtime": {"device": device}, "mesh": {axis: size}})
    with pytest.raises(ConfigError, match="has one device") as caught:
        worker_start(made, PLAIN)
    assert f"ask for {size} devices" in caught.value.what and "runtime.device=xla" in caught.value.fix


@pytest.mark.parametrize(("variable", "value"), [("CPU_NUM_DEVICES", "3"), ("WORLD_SIZE", "2"), ("XLA_USE_BF16", "1")])
def test_variables_that_contradict_the_settings_are_refused(variable: str, value: str) -> None:
    machine = XLA.without(environment={variable: value})
    with pytest.raises(ConfigError) as caught:
        worker_start(settings("xla", tp=2), machine)
    assert caught.value.what == f"{variable}={value} is set in the environment"
    assert caught.value.fix == f"unset {variable}"


def test_missing_libraries_are_reported_before_wrong_variables() -> None:
    with pytest.raises(ConfigError, match="CANN"):
        worker_start(settings("npu", tp=2), PLAIN)


def test_workers_of_a_gpu_are_forked_and_those_of_an_npu_are_not() -> None:
    gpu, npu = worker_start(settings("cuda"), GPU), worker_start(settings("npu"), NPU)
    assert (gpu.method, npu.method) == ("fork", "spawn")
    assert "CUBLAS_WORKSPACE_CONFIG" in gpu.environment


def test_workers_that_compile_are_forked_from_a_process_without_a_pool() -> None:
    start = worker_start(settings("cpu", compile=True, dp=2), PLAIN)
    assert start.environment == {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    assert start.preload == ("torch._inductor.compile_fx",) and start.method == "fork"


def test_no_driver_is_opened_in_the_process_that_workers_are_forked_from() -> None:
    """Importing torch's compiler asks the driver of GPUs for devices: each worker does that by itself."""
    assert worker_start(settings("cuda", compile=True), GPU).preload == ()


@pytest.mark.parametrize(("device", "machine"), [("xla", XLA), ("emulated", PLAIN)])
def test_other_devices_have_nothing_for_torch_compile(device: str, machine: MadeUpMachine) -> None:
    with pytest.raises(ConfigError, match=r"torch\.compile") as caught:
        worker_start(settings(device, compile=True), machine)
    assert caught.value.what == f"runtime.compile=true is not possible with runtime.device={device}"
    assert caught.value.exists.split(", ")[0] == "cpu"


def test_torch_compile_needs_a_compiler() -> None:
    bare = PLAIN.without(programs=())
    assert worker_start(settings("cpu"), bare) == WorkerStart()
    with pytest.raises(ConfigError, match=r"C\+\+ compiler") as caught:
        worker_start(settings("cpu", compile=True), bare)
    assert caught.value.what == "runtime.compile=true finds no C++ compiler g++" and "CXX" in caught.value.fix
    named = PLAIN.without(programs=("clang++-18",), environment={"CXX": "clang++-18"})
    assert worker_start(settings("cpu", compile=True), named).preload


def test_a_process_group_needs_a_library_that_knows_the_memory() -> None:
    for device in ("cpu", "emulated"):
        worker_start(settings(device, collectives="group", dp=2), PLAIN)
    with pytest.raises(ConfigError, match=r"runtime\.collectives=group") as caught:
        worker_start(settings("xla", collectives="group", dp=2), XLA)
    assert caught.value.what == "runtime.collectives=group is not possible with runtime.device=xla"
    assert caught.value.exists == "cpu, cuda, npu"
