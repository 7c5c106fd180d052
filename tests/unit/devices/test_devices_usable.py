"""The devices that can be used on a machine, and the error for those that cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elaswave_spmd.conf.schema import DEVICES
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices import ThisMachine, check_usable, device_names, device_of
from tests.unit.devices.made_up_machines import GPU, NPU, PLAIN, XLA, MadeUpMachine
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]


def refusal(name: str, machine: MadeUpMachine) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_usable(name, machine, also=("emulated",))
    return caught.value


def test_every_device_in_the_settings_exists() -> None:
    assert set(DEVICES) - {"emulated"} <= set(device_names())


@pytest.mark.parametrize("name", device_names())
def test_a_kind_has_the_name_of_its_module(name: str) -> None:
    assert device_of(name).name == name


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="tpu") as caught:
        device_of("tpu")
    assert caught.value.exists == ", ".join(device_names())


@pytest.mark.parametrize(("name", "machine"), [("cpu", PLAIN), ("cpu", GPU), ("cuda", GPU), ("npu", NPU), ("xla", XLA)])
def test_a_machine_that_has_everything_is_accepted(name: str, machine: MadeUpMachine) -> None:
    assert check_usable(name, machine).name == name


LACKS = [
    ("cuda", GPU.without(files=()), "a CUDA build of torch (this is 2.13.0)"),
    ("cuda", GPU.without(libraries=()), "the NVIDIA driver"),
    ("cuda", GPU.without(paths=()), "a GPU (/dev/nvidia0)"),
    ("npu", NPU.without(versions={"torch": "2.13.0"}), "torch_npu"),
    ("npu", NPU.without(versions={"torch": "2.13.0", "torch_npu": "2.9.0"}), "torch_npu for torch 2.13.0"),
    ("npu", NPU.without(libraries=()), "CANN (libhccl.so)"),
    ("npu", NPU.without(libraries=()), "TORCH_DEVICE_BACKEND_AUTOLOAD=0"),
    ("npu", NPU.without(paths=()), "the Ascend driver and a device"),
    ("xla", PLAIN, "torch_xla"),
    ("xla", XLA.without(versions={"torch": "2.13.0", "torch_xla": "2.9.0"}), "torch_xla for torch 2.13.0"),
    ("xla", XLA.without(environment={"PJRT_DEVICE": "NPU"}), "a PJRT plugin for PJRT_DEVICE=NPU"),
    ("cpu", MadeUpMachine(), "torch"),
]


@pytest.mark.parametrize(("name", "machine", "what"), LACKS)
def test_missing_requirements_are_named(name: str, machine: MadeUpMachine, what: str) -> None:
    error = refusal(name, machine)
    assert error.what.startswith(f"runtime.device={name} needs ") and error.what.endswith("not found on this machine")
    assert what in error.what and f"runtime.device={name}" in error.where
    assert error.fix and name not in error.exists.removeprefix("what works here: ").split(", ")


def test_everything_that_is_missing_is_named_at_once() -> None:
    rule = refusal("npu", PLAIN).what
    assert all(what in rule for what in ("torch_npu", "CANN", "driver"))


def test_usable_devices_are_named_instead() -> None:
    assert refusal("npu", GPU).exists == "what works here: cpu, cuda, emulated"
    assert "or runtime.device=cpu" in refusal("npu", PLAIN).fix


def test_without_cann_no_device_works_before_autoload_is_off() -> None:
    broken = NPU.without(libraries=())
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in refusal("cpu", broken).what
    off = broken.without(environment={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert check_usable("cpu", off).name == "cpu"
    assert "AUTOLOAD" not in refusal("npu", off).what


@pytest.mark.parametrize("name", ["NPU", "npu"])  # torch_xla makes capitals of them
def test_a_plugin_that_is_installed_is_accepted(name: str) -> None:
    machine = XLA.without(environment={"PJRT_DEVICE": "NPU"}, plugins=(name,))
    assert check_usable("xla", machine).name == "xla"


def test_facts_about_this_machine() -> None:
    machine = ThisMachine()
    assert machine.version("torch") and machine.version("no-such-distribution") is None
    assert machine.has_package_file("torch", "__init__.py") and not machine.has_package_file("torch", "no.such")
    assert not machine.has_package_file("no_such_package", "__init__.py")
    assert machine.has_library("c") and not machine.has_library("no_such_library")
    assert machine.has_path(__file__) and not machine.has_path("/no/such/path*")
    assert check_usable("cpu", machine).name == "cpu"


def test_a_library_is_found_on_the_loaders_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libmade_up.so.3").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert ThisMachine().has_library("made_up")


def test_checking_loads_no_torch_and_no_vendor_module() -> None:
    code = (
        "import sys\n"
        "from elaswave_spmd.errors import ConfigError\n"
        "from elaswave_spmd.runtime.devices import check_usable, device_names\n"
        "for name in device_names():\n"
        "    try:\n"
        "        check_usable(name)\n"
        "    except ConfigError:\n"
        "        pass\n"
        "print(sorted(m for m in sys.modules if m.startswith('torch')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
