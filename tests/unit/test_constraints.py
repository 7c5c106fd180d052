"""constraints.txt: one version of each package for each Python, or pip finds none that fits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LINES = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_a_package_has_one_version(python: str) -> None:
    pins = [Requirement(line) for line in LINES if line and not line.startswith("#")]
    valid = [pin for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": python})]
    count = Counter(canonicalize_name(pin.name) for pin in valid)
    assert [name for name, number in count.items() if number > 1] == []
