"""Backends of frequencies: setting, restoring and refusing. Vendors' libraries are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices.dvfs import BACKENDS, DeviceRange, SimulatedClock, open_backend
from elaswave_spmd.runtime.devices.dvfs.base import at_least
from elaswave_spmd.runtime.devices.dvfs.cpufreq import CpuFrequencies
from elaswave_spmd.runtime.devices.dvfs.nvml import NvmlFrequencies
from tests.frequency_trees import limits, make_policies


def refused(caught: pytest.ExceptionInfo[ConfigError], *words: str) -> None:
    """The error names the setting, a fix, and these words."""
    text = str(caught.value)
    assert "schedule.frequency=" in caught.value.where and caught.value.fix
    assert all(word in text for word in words), text


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6), st.floats(0.05, 12))
def test_the_least_step_that_is_enough(steps: list[float], wanted: float) -> None:
    found = at_least(steps, wanted)
    assert found in steps
    enough = [step for step in steps if step >= wanted]
    assert found == min(enough) if enough else found == max(steps) or found >= wanted * (1 - 1e-9)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        open_backend("acpi")
    refused(caught, "acpi", ", ".join(BACKENDS))
    assert caught.value.what == "schedule.frequency=acpi names no backend"


# ---- cpufreq


def test_policies_are_limited_and_put_back(tmp_path: Path) -> None:
    make_policies(tmp_path, 2)
    backend = CpuFrequencies(tmp_path)
    assert backend.devices() == ("policy0", "policy1")
    assert backend.range_of("policy1") == DeviceRange(800.0, 3000.0, 3600.0, (2, 3))
    assert backend.set("policy0", 0.5) == 0.5
    assert limits(tmp_path, 0) == (1_000_000, 1_500_000) and limits(tmp_path, 1) == (1_000_000, 3_000_000)
    assert backend.set("policy0", 0.3) == pytest.approx(0.3)  # below the lower limit, which goes down with it
    assert limits(tmp_path, 0) == (900_000, 900_000)
    assert backend.set("policy0", 0.4) == 0.4
    assert limits(tmp_path, 0) == (1_000_000, 1_200_000)  # the lower one comes back as far as it was
    backend.reset()
    backend.reset()
    assert limits(tmp_path, 0) == limits(tmp_path, 1) == (1_000_000, 3_000_000)


@given(st.floats(0.01, 3), st.floats(0.01, 3))
def test_limits_stay_in_the_range_and_in_order(one: float, other: float) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_policies(root, 1)
        backend = CpuFrequencies(root)
        for wanted in (one, other):
            found = backend.set("policy0", wanted)
            low, high = limits(root, 0)
            assert 800_000 <= low <= high <= 3_600_000 and low <= 1_000_000
            assert found == high / 3_000_000 == pytest.approx(min(max(wanted, 0.8 / 3), 1.2), abs=1e-6)
        backend.reset()
        assert limits(root, 0) == (1_000_000, 3_000_000)


def test_steps_of_a_policy_are_kept(tmp_path: Path) -> None:
    make_policies(tmp_path, 1)
    steps = tmp_path / "policy0" / "scaling_available_frequencies"
    steps.write_text("3600000 3000000 2000000 800000\n")
    backend = CpuFrequencies(tmp_path)
    assert backend.set("policy0", 0.5) == pytest.approx(2 / 3)
    assert limits(tmp_path, 0)[1] == 2_000_000
    assert backend.set("policy0", 9.0) == pytest.approx(1.2)


def test_no_policies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_backend("cpufreq", str(tmp_path))
    refused(caught, f"{tmp_path} has no cpufreq policy", "cpufreq driver")


def test_a_policy_that_cannot_be_read_or_is_not_there_is_refused(tmp_path: Path) -> None:
    make_policies(tmp_path, 1)
    with pytest.raises(ConfigError) as caught:
        CpuFrequencies(tmp_path).set("policy7", 1.0)
    refused(caught, "policy7", "policy0")
    (tmp_path / "policy0" / "cpuinfo_max_freq").write_text("<unknown>")
    with pytest.raises(ConfigError) as caught:
        CpuFrequencies(tmp_path)
    refused(caught, "unknown")


def test_files_that_may_not_be_written_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_policies(tmp_path, 1)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError) as caught:
        CpuFrequencies(tmp_path)
    refused(caught, "root", "scaling_min_freq", "cannot write", "(Permission denied)")


def test_a_reset_that_fails_for_one_policy_restores_the_others(tmp_path: Path) -> None:
    make_policies(tmp_path, 2)
    backend = CpuFrequencies(tmp_path)
    for device in backend.devices():
        backend.set(device, 0.5)
    (tmp_path / "policy0" / "scaling_max_freq").unlink()
    (tmp_path / "policy0" / "scaling_max_freq").mkdir()
    with pytest.raises(ConfigError):
        backend.reset()
    assert limits(tmp_path, 1) == (1_000_000, 3_000_000)


# ---- NVML


class NVMLError(Exception):
    pass


class MadeUpNvml:
    """Two GPUs with clocks of 300 to 1,500 MHz; `fails` names calls that NVML refuses."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1

    def __init__(self, *fails: str) -> None:
        self.fails = set(fails)
        self.locked: dict[str, tuple[int, int]] = {}

    def _may(self, name: str) -> None:
        if name in self.fails:
            raise NVMLError("Insufficient Permissions")

    def nvmlInit(self) -> None:  # noqa: N802
        self._may("init")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> str:  # noqa: N802
        if number > 1:
            raise NVMLError("Invalid Argument")
        return f"gpu{number}"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
        return {"GPU-b": "gpu1"}[name]

    def nvmlDeviceGetSupportedMemoryClocks(self, handle: str) -> list[int]:  # noqa: N802
        self._may("steps")
        return [2600, 1500]

    def nvmlDeviceGetSupportedGraphicsClocks(self, handle: str, memory: int) -> list[int]:  # noqa: N802
        return [1500, 1200, 900, 600] if memory == 2600 else [600, 300]

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        return 1400

    def nvmlDeviceSetGpuLockedClocks(self, handle: str, low: int, high: int) -> None:  # noqa: N802
        self._may("set")
        self.locked[handle] = low, high

    def nvmlDeviceResetGpuLockedClocks(self, handle: str) -> None:  # noqa: N802
        self._may(f"reset {handle}")
        del self.locked[handle]


def test_gpus_are_limited_and_put_back() -> None:
    nvml = MadeUpNvml()
    backend = NvmlFrequencies(nvml=nvml)
    assert backend.devices() == ("0", "1") and backend.range_of("0") == DeviceRange(300.0, 1500.0, 1500.0)
    assert backend.set("1", 0.7) == pytest.approx(0.8) and nvml.locked == {"gpu1": (300, 1200)}
    assert backend.set("1", 2.0) == 1.0 and nvml.locked == {"gpu1": (300, 1500)}
    backend.reset()
    assert nvml.locked == {}
    backend.reset()


def test_only_gpus_that_are_ours_are_touched() -> None:
    nvml = MadeUpNvml()
    backend = NvmlFrequencies("GPU-b", nvml)
    backend.set("0", 0.2)
    assert backend.devices() == ("0",) and nvml.locked == {"gpu1": (300, 300)}
    assert NvmlFrequencies("", nvml).devices() == ()
    with pytest.raises(ConfigError) as caught:
        NvmlFrequencies("5", nvml)
    refused(caught, "CUDA_VISIBLE_DEVICES=5", "Invalid Argument")
    with pytest.raises(ConfigError) as caught:
        backend.set("1", 0.2)
    assert caught.value.what == "schedule.frequency=nvml has no device 1" and caught.value.exists == "0"


def test_a_gpu_without_steps_has_its_highest_clock_alone() -> None:
    backend = NvmlFrequencies(nvml=MadeUpNvml("steps"))
    assert backend.range_of("0") == DeviceRange(1400.0, 1400.0, 1400.0) and backend.set("0", 0.3) == 1.0


def test_an_error_of_the_driver_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        NvmlFrequencies(nvml=MadeUpNvml("init"))
    refused(caught, "Insufficient Permissions")
    with pytest.raises(ConfigError) as caught:
        NvmlFrequencies(nvml=MadeUpNvml("set")).set("0", 0.5)
    refused(caught, "GPU 0", "root")


def test_a_gpu_that_cannot_be_put_back_does_not_keep_the_others() -> None:
    nvml = MadeUpNvml("reset gpu0")
    backend = NvmlFrequencies(nvml=nvml)
    for device in backend.devices():
        backend.set(device, 0.5)
    with pytest.raises(ConfigError):
        backend.reset()
    assert nvml.locked == {"gpu0": (300, 900)}
    nvml.fails.clear()
    backend.reset()
    assert nvml.locked == {}


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ConfigError) as caught:
        open_backend("nvml")
    refused(caught, "nvidia-ml-py", "elaswave-spmd[dvfs]")


# ---- emulated devices


def test_a_simulated_clock_takes_its_time_for_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    clock = SimulatedClock(0.25)
    assert clock.frequency == 1.0 and slept == []
    assert clock.set(0.5) == 0.5 == clock.frequency and slept == [0.25]
    assert clock.now() <= clock.now()
    clock.close()
