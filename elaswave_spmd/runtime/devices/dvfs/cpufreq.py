"""Frequencies of CPUs, through the files of Linux's cpufreq (kernel.org, admin-guide/pm/cpufreq).

A device is a policy, which is a set of CPUs with one clock. The backend sets the policy's upper limit,
`scaling_max_freq`, in kHz, and lowers the lower limit where it would be above. The normal frequency is the upper limit
at the start.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices.dvfs.base import SETTING, DeviceRange, at_least, no_device

ROOT = Path("/sys/devices/system/cpu/cpufreq")
_WHERE = f"{SETTING}=cpufreq"
_MIN, _MAX = "scaling_min_freq", "scaling_max_freq"


@dataclass(frozen=True)
class _Policy:
    """A policy and its limits at the start, in kHz.

    Args:
        folder: the policy's files.
        lowest, highest: the limits of the hardware.
        was: (scaling_min_freq, scaling_max_freq) at the start.
        steps: the frequencies that the driver has, in any order; () if it has no steps.
        cpus: the CPUs of the policy.
    """

    folder: Path
    lowest: int
    highest: int
    was: tuple[int, int]
    steps: tuple[int, ...]
    cpus: tuple[int, ...]


class CpuFrequencies:
    """The cpufreq backend: sets the limits of policies, and remembers the limits of the start.

    Args:
        root: folder of the policies.

    Raises:
        ConfigError: there are no policies, or their files cannot be read or written.
    """

    def __init__(self, root: str | Path = ROOT) -> None:
        root = Path(root)
        folders = sorted(root.glob("policy*"), key=lambda path: (len(path.name), path.name))
        if not folders:
            raise ConfigError(
                f"{root} has no cpufreq policy",
                rule="frequencies of CPUs are set through the cpufreq files of Linux",
                where=_WHERE,
                fix=f"a kernel with a cpufreq driver (virtual machines mostly have none), or {SETTING}=none",
            )
        self._policies = {folder.name: _read_policy(folder) for folder in folders}
        for policy in self._policies.values():
            for name in (_MIN, _MAX):
                if not os.access(policy.folder / name, os.W_OK):
                    raise _refused(policy.folder / name, "Permission denied")

    def devices(self) -> tuple[str, ...]:
        """The names of the policies: policy0, policy1, ..."""
        return tuple(self._policies)

    def range_of(self, device: str) -> DeviceRange:
        p = self._policy(device)
        return DeviceRange(p.lowest / 1e3, p.was[1] / 1e3, p.highest / 1e3, p.cpus)

    def set(self, device: str, frequency: float) -> float:
        p = self._policy(device)
        wanted = frequency * p.was[1]
        steps = [step for step in p.steps if p.lowest <= step <= p.highest]
        khz = round(at_least(steps, wanted)) if steps else round(min(max(wanted, p.lowest), p.highest))
        # At no moment may the lower limit be above the upper one, since a kernel may refuse that.
        if khz < _read(p.folder, _MIN):
            _write(p.folder, _MIN, khz)
        _write(p.folder, _MAX, khz)
        if _read(p.folder, _MIN) != (least := min(khz, p.was[0])):
            _write(p.folder, _MIN, least)
        return _read(p.folder, _MAX) / p.was[1]

    def reset(self) -> None:
        errors = []
        for p in self._policies.values():
            try:  # the upper limit first: the lower one is at most what it was, so it never exceeds the upper one
                for name, khz in ((_MAX, p.was[1]), (_MIN, p.was[0])):
                    if _read(p.folder, name) != khz:
                        _write(p.folder, name, khz)
            except ConfigError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _policy(self, device: str) -> _Policy:
        if device not in self._policies:
            raise no_device(device, self.devices(), "cpufreq")
        return self._policies[device]


def _read_policy(folder: Path) -> _Policy:
    cpus = folder / "affected_cpus"
    steps = folder / "scaling_available_frequencies"
    return _Policy(
        folder,
        _read(folder, "cpuinfo_min_freq"),
        _read(folder, "cpuinfo_max_freq"),
        (_read(folder, _MIN), _read(folder, _MAX)),
        tuple(map(int, steps.read_text().split())) if steps.exists() else (),
        tuple(map(int, cpus.read_text().split())) if cpus.exists() else (),
    )


def _read(folder: Path, name: str) -> int:
    try:
        return int((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {folder / name} as a frequency ({error})",
            rule="the files of a cpufreq policy hold frequencies in kHz",
            where=_WHERE,
            fix=f"{SETTING}=none",
        ) from None


def _write(folder: Path, name: str, khz: int) -> None:
    try:
        (folder / name).write_text(str(khz))
    except OSError as error:
        raise _refused(folder / name, error.strerror or str(error)) from None


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"cannot write {path} ({why})",
        rule="frequencies of CPUs are set by writing to the files of cpufreq",
        where=_WHERE,
        fix=f"run as root, or let the run's user write to scaling_min_freq and scaling_max_freq, or {SETTING}=none",
    )
