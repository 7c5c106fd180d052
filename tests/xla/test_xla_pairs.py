"""Backwards of islands are pairs of programs, with the same bits whatever runs between them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paired_layers import LAYERS, NOT_CUT
from tests.waiting import PATIENCE_S
from tests.xla.xla_runs import NEEDS_XLA

pytestmark = NEEDS_XLA
ROOT = Path(__file__).parents[2]
WHOLE = "without parameters"
"""The only kind that is never cut: XLA's norms, unlike those of other devices, are made of several operators."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.xla.layer_pairs"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("checkpointing", [False, True], ids=str)
@pytest.mark.parametrize("name", [*LAYERS, *NOT_CUT])
def test_both_programs_have_the_same_bits_at_any_time(found: dict[str, Any], name: str, checkpointing: bool) -> None:
    """Put off until another micro-batch has gone forward and backward; by then the parameters' values are lost."""
    row = found[f"{name}, checkpointing={checkpointing}"]
    assert row["equal"] and row["begun"] == [[0], []] and not row["late"]
    assert (min(row["kept"]) > 0) == (name != WHOLE)
    # Both layers: B with a forward that is repeated once for both parts, and W.
    assert row["runs"] == [4 if checkpointing else 2, 0 if name == WHOLE else 2]


@pytest.mark.parametrize("name", [*LAYERS, *NOT_CUT])
def test_gradients_are_those_of_the_layer_as_it_is_written(found: dict[str, Any], name: str) -> None:
    assert found[f"{name}, checkpointing=False"]["apart"] < 1e-4


def test_what_is_kept_are_the_operands_of_the_weight_gradients(found: dict[str, Any]) -> None:
    """Of a linear its input and the gradient of its output; of a shift the gradient of its output, which W sums up."""
    one = 4 * 2 * 6 * 8
    kept = {name: found[f"{name}, checkpointing=False"]["kept"] for name in ("linear", "shifted", "added", "averaged")}
    assert kept == {"linear": [2 * one] * 2, "shifted": [one] * 2, "added": [one] * 2, "averaged": [4] * 2}
