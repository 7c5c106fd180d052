"""One undisturbed run for each number of steps, for all tests of a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.fault_runs import STEPS, Bits, run_undisturbed

Undisturbed = Callable[[int], Bits]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """steps -> the bits of that run on one worker."""
    found: dict[int, Bits] = {}

    def bits(steps: int = STEPS) -> Bits:
        if steps not in found:
            folder: Path = tmp_path_factory.mktemp(f"undisturbed{steps}")
            found[steps] = run_undisturbed(folder, f"train.steps={steps}")
        return found[steps]

    return bits
