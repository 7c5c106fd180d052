"""A made-up tree of cpufreq policies, as Linux has them, that tests of the backend and of its guard share."""

from __future__ import annotations

from pathlib import Path

from tests.waiting import eventually

FILES = {
    "cpuinfo_min_freq": "800000\n",
    "cpuinfo_max_freq": "3600000\n",
    "scaling_min_freq": "1000000\n",
    "scaling_max_freq": "3000000\n",
}


def make_policies(root: Path, number: int) -> None:
    """Policies of two CPUs each: 0.8 to 3.6 GHz, limited to 1.0 to 3.0 GHz."""
    for i in range(number):
        folder = root / f"policy{i}"
        folder.mkdir(parents=True)
        for name, text in FILES.items():
            (folder / name).write_text(text)
        (folder / "affected_cpus").write_text(f"{2 * i} {2 * i + 1}\n")


def limits(root: Path, number: int) -> tuple[int, int]:
    """(scaling_min_freq, scaling_max_freq) of a policy, kHz."""
    folder = root / f"policy{number}"
    return _number_in(folder / "scaling_min_freq"), _number_in(folder / "scaling_max_freq")


def _number_in(path: Path) -> int:
    """The number in a file that another process may be writing: unlike in sysfs, such a file is empty for a moment."""
    text = ""

    def written() -> str:
        nonlocal text
        text = path.read_text()
        return text

    eventually(written)
    return int(text)
