"""The variables that workers get, and those that are refused."""

from __future__ import annotations

import pytest

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices import Island, device_names, device_of


def test_xla_sets_the_size_of_the_island() -> None:
    found = device_of("xla").environment({}, Island(devices=4))
    assert (found["PJRT_DEVICE"], found["CPU_NUM_DEVICES"]) == ("CPU", "4")
    assert found["XLA_NO_SPECIAL_SCALARS"] == "1"


def test_xla_leaves_cpu_variables_out_for_a_plugin() -> None:
    found = device_of("xla").environment({"PJRT_DEVICE": "NPU"}, Island())
    assert found["PJRT_DEVICE"] == "NPU" and "CPU_NUM_DEVICES" not in found


def test_a_plugin_is_refused_if_torch_xla_would_not_load_plugins() -> None:
    with pytest.raises(ConfigError, match="XLA_REGISTER_INSTALLED_PLUGINS"):
        device_of("xla").environment({"PJRT_DEVICE": "NPU", "XLA_REGISTER_INSTALLED_PLUGINS": "0"}, Island())
    assert device_of("xla").environment({"XLA_REGISTER_INSTALLED_PLUGINS": "0"}, Island())["PJRT_DEVICE"] == "CPU"


def test_flags_of_the_user_stay() -> None:
    found = device_of("xla").environment({"XLA_FLAGS": "--xla_dump_to=hlo"}, Island())
    assert found["XLA_FLAGS"].split()[0] == "--xla_dump_to=hlo"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CPU_NUM_DEVICES", "8"),
        ("XLA_NO_SPECIAL_SCALARS", "0"),
        ("WORLD_SIZE", "4"),
        ("PJRT_LOCAL_PROCESS_COUNT", "2"),
        ("XLA_USE_BF16", "1"),
        ("XLA_USE_32BIT_LONG", "1"),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=8"),
        ("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true"),
    ],
)
def test_xla_refuses_variables_that_contradict_it(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        device_of("xla").environment({name: value}, Island(devices=2))
    assert caught.value.fix == f"unset {name}"


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "1"), ("XLA_USE_BF16", "0"), ("CPU_NUM_DEVICES", "2")])
def test_xla_accepts_variables_that_agree_with_it(name: str, value: str) -> None:
    assert device_of("xla").environment({name: value}, Island(devices=2))["CPU_NUM_DEVICES"] == "2"


@pytest.mark.parametrize("name", device_names())
def test_only_islands_have_several_devices(name: str) -> None:
    kind = device_of(name)
    if kind.capabilities.islands:
        kind.environment({}, Island(devices=2))
    else:
        with pytest.raises(ConfigError, match=r"mesh\.tp"):
            kind.environment({}, Island(devices=2))


def test_deterministic_kernels_are_asked_for() -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    assert device_of("cuda").environment({}, Island())[name] == ":4096:8"
    assert name not in device_of("cuda").environment({name: ":16:8"}, Island())
    with pytest.raises(ConfigError, match="same bits"):
        device_of("cuda").environment({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, Island())
    assert device_of("npu").environment({}, Island())["HCCL_DETERMINISTIC"] == "true"


@pytest.mark.parametrize(
    ("kind", "name", "wanted"),
    [("cuda", "TORCH_NCCL_BLOCKING_WAIT", "1"), ("npu", "HCCL_ASYNC_ERROR_HANDLING", "0")],
)
def test_an_error_in_a_group_ends_no_process(kind: str, name: str, wanted: str) -> None:
    assert device_of(kind).group_environment({})[name] == wanted
    assert name not in device_of(kind).environment({}, Island()), "without groups it is the user's"
    with pytest.raises(ConfigError, match=r"ends (processes|the process)"):
        device_of(kind).group_environment({name: "2"})


def test_all_algorithms_of_nccl_are_connected_when_a_group_is_made() -> None:
    """And not at the first collective that is large enough for another one, in the training thread."""
    assert device_of("cuda").group_environment({})["NCCL_RUNTIME_CONNECT"] == "0"
    with pytest.raises(ConfigError, match="waits for peers in a call"):
        device_of("cuda").group_environment({"NCCL_RUNTIME_CONNECT": "1"})
