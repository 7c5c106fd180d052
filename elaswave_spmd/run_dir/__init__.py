"""The files of a run, its progress display and its TensorBoard files. See README.md and docs/run_files.md."""

from __future__ import annotations

from elaswave_spmd.run_dir.directory import RunDir, read_events, read_metrics, read_summary
from elaswave_spmd.run_dir.display import Display, LiveDisplay, PlainDisplay, RunInfo, make_display
from elaswave_spmd.run_dir.metrics import MetricsLine
from elaswave_spmd.run_dir.observer import RunObserver
from elaswave_spmd.run_dir.weights import save_weights, weights_sha256

__all__ = [
    "Display",
    "LiveDisplay",
    "MetricsLine",
    "PlainDisplay",
    "RunDir",
    "RunInfo",
    "RunObserver",
    "make_display",
    "read_events",
    "read_metrics",
    "read_summary",
    "save_weights",
    "weights_sha256",
]
