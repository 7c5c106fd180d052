"""The partitioner's result for a model's annotations, read from the compiled modules."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.waiting import PATIENCE_S
from tests.xla.xla_runs import NEEDS_XLA

pytestmark = NEEDS_XLA
ROOT = Path(__file__).parents[2]


def test_bytes_and_collectives_are_those_that_the_specs_imply(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.xla_partitions", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["bytes"]) == 6 and len(found["collectives"]) == 3 + 5 * 4
    for row in found["bytes"]:
        assert row["found"] == [row["implied"]] * 2 and row["implied"] < row["whole"], row
    for row in found["collectives"]:
        assert Counter(operator for operator, _ in row["found"]) == row["implied"], row
