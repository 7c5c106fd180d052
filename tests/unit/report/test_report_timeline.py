"""The window of a run's trace that its report shows."""

from __future__ import annotations

from pathlib import Path

from elaswave_spmd.report.timeline import read_timeline
from elaswave_spmd.run_dir.trace import TRACE, slice_of, write_trace


def test_a_trace_that_has_nothing_of_the_window_says_so(tmp_path: Path) -> None:
    """A run may have been traced only since it was resumed."""
    with open(tmp_path / TRACE, "w", encoding="utf-8") as file:
        write_trace(file, [slice_of((2, 1), "F micro-batch 0, layer 0", "forward", 100e6, 100.5e6)])
    late = read_timeline(tmp_path, 5.0, 0.5)
    assert (late.slices, late.note) == (
        (),
        "trace.json has nothing of the steps around the first incident. ui.perfetto.dev opens it.",
    )
    shown = read_timeline(tmp_path, 100.0, 0.5)
    assert len(shown.slices) == 1 and shown.note.startswith("Shown are the steps around the first incident.")
