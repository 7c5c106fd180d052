"""The skeleton of a PJRT plugin in examples/: installed, asked for its library, refused without one.

torch_xla is a stand-in here: its base class, with the defaults that count.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from elaswave_spmd.runtime.devices import Island, device_of
from tests.waiting import PATIENCE_S

FOLDER = Path(__file__).parents[3] / "examples" / "pjrt_npu_plugin"
VARIABLES = ("NPU_PJRT_LIBRARY", "NPU_PJRT_OPTIONS", "ASCEND_RT_VISIBLE_DEVICES")


class StandInDevicePlugin:
    def library_path(self) -> str:
        raise NotImplementedError

    def configure_single_process(self) -> None:
        raise NotImplementedError


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin's module, with a stand-in for torch_xla."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    plugins: Any = ModuleType("torch_xla.experimental.plugins")
    plugins.DevicePlugin = StandInDevicePlugin
    experimental: Any = ModuleType("torch_xla.experimental")
    experimental.plugins = plugins
    for name, made in (
        ("torch_xla", ModuleType("torch_xla")),
        ("torch_xla.experimental", experimental),
        ("torch_xla.experimental.plugins", plugins),
    ):
        monkeypatch.setitem(sys.modules, name, made)
    spec = importlib.util.spec_from_file_location("pjrt_npu_plugin", FOLDER / "pjrt_npu_plugin" / "__init__.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def library(folder: Path, source: str) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: cc makes the libraries of this test")
    path = folder / "libmade_up.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=source, text=True, check=True, timeout=PATIENCE_S
    )
    return path


def test_without_a_library_the_error_names_the_variable_to_set(module: Any) -> None:
    with pytest.raises(RuntimeError, match=r"NPU_PJRT_LIBRARY is not set.*libpjrt_npu\.so"):
        module.NpuPlugin().library_path()


def test_a_setting_that_names_no_file_is_refused(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_PJRT_LIBRARY", str(tmp_path / "no.so"))
    with pytest.raises(RuntimeError, match=r"NPU_PJRT_LIBRARY=.*no\.so is no file"):
        module.NpuPlugin().library_path()


def test_a_file_that_the_loader_refuses_is_refused(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.so").write_text("no library")
    monkeypatch.setenv("NPU_PJRT_LIBRARY", str(tmp_path / "text.so"))
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        module.NpuPlugin().library_path()


def test_a_library_of_something_else_is_refused(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_PJRT_LIBRARY", str(library(tmp_path, "int other(void) { return 0; }")))
    with pytest.raises(RuntimeError, match="does not export GetPjrtApi"):
        module.NpuPlugin().library_path()


def test_a_pjrt_library_is_found_by_the_setting(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library(tmp_path, "void *GetPjrtApi(void) { return 0; }")
    monkeypatch.setenv("NPU_PJRT_LIBRARY", str(path))
    assert module.NpuPlugin().library_path() == str(path)


def test_a_library_in_the_package_is_found(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library(tmp_path, "void *GetPjrtApi(void) { return 0; }")
    monkeypatch.setattr(module, "IN_PACKAGE", path)
    assert module.NpuPlugin().library_path() == str(path)


@pytest.mark.parametrize(("text", "wanted"), [(None, {}), ('{"device": 1}', {"device": 1})])
def test_options_come_from_a_setting(
    module: Any, monkeypatch: pytest.MonkeyPatch, text: str | None, wanted: dict[str, Any]
) -> None:
    if text is not None:
        monkeypatch.setenv("NPU_PJRT_OPTIONS", text)
    assert module.NpuPlugin().client_create_options() == wanted


@pytest.mark.parametrize("text", ["", "[1]", "{device: 1}"])
def test_unknown_options_are_refused(module: Any, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("NPU_PJRT_OPTIONS", text)
    with pytest.raises(RuntimeError, match=r"NPU_PJRT_OPTIONS=.* is not a JSON object"):
        module.NpuPlugin().client_create_options()


@pytest.mark.parametrize(("visible", "number"), [("0,1,5", 3), ("2", 1), ("", 0)])
def test_devices_are_those_that_are_visible(
    module: Any, monkeypatch: pytest.MonkeyPatch, visible: str, number: int
) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    assert module.NpuPlugin().physical_chip_count() == number


def test_a_process_is_a_world_of_its_own(module: Any) -> None:
    assert module.NpuPlugin().configure_single_process() is None
    assert module.NpuPlugin().requires_xla_coordinator() is False


@pytest.mark.compiler
def test_it_installs_and_registers_under_the_name_of_the_device(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(FOLDER, source)  # a build writes into its folder
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", target, source], capture_output=True, text=True, timeout=PATIENCE_S)
    if "BackendUnavailable" in done.stderr or "setuptools" in done.stderr:
        pytest.skip(f"setuptools of this environment cannot build it: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    (found,) = importlib.metadata.distributions(path=[str(target)])
    (entry,) = found.entry_points
    assert (entry.group, entry.name, entry.value) == ("torch_xla.plugins", "NPU", "pjrt_npu_plugin:NpuPlugin")
    assert (target / "pjrt_npu_plugin" / "__init__.py").exists()


def test_the_framework_lets_the_device_through() -> None:
    found = device_of("xla").environment({"PJRT_DEVICE": "NPU"}, Island())
    assert found["PJRT_DEVICE"] == "NPU" and not {"CPU_NUM_DEVICES", "NPROC"} & found.keys()


def test_the_loader_has_a_library_to_refuse() -> None:
    assert ctypes.util.find_library("c"), "the tests above rest on a loader that works"
