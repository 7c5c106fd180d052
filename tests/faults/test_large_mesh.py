"""More than 32 workers, of which not all have links to all (C16): they come and go, and every bit is as on one."""

from __future__ import annotations

from pathlib import Path

from elaswave_spmd.recovery.vote_exchange import WIDEST
from elaswave_spmd.run_dir import read_metrics
from tests.faults.fault_runs import (
    PATIENT,
    Bits,
    all_events,
    chaos,
    num_joined,
    patient_until,
    run_undisturbed,
    run_with,
)

STAGES = 12, 11, 10


def test_workers_come_and_go_where_not_all_have_links_to_all(tmp_path: Path) -> None:
    """The mesh is above the limit, at it, above it again, and below it."""
    model = "model.layers=3", "train.global_batch=52", "train.steps=40"
    events = (
        "step: 2, kind: kill, rank: 1, point: backward",
        "step: 2, kind: join, rank: 2, point: backward",
        "step: 2, kind: join, rank: 3, point: backward",
        "step: 34, kind: kill, rank: 13, point: reduce",
        "step: 37, kind: kill, rank: 32, point: forward",
        "step: 40, kind: kill, rank: 24, point: backward",
    )
    assert sum(STAGES) == WIDEST + 1
    mesh = f"mesh.stages=[{','.join(map(str, STAGES))}]"
    settings = [*model, *PATIENT, mesh, "sharding=zero2", "mirror.count=3"]
    with patient_until(lambda: num_joined(tmp_path) >= 2, tmp_path) as waits:  # the last three are lost after that
        changes = run_with(tmp_path, *settings, *waits, chaos(*events))
    found = all_events(tmp_path)
    assert changes.ranks("fail") == [[1], [13], [32], [24]], found
    assert sorted(rank for ranks in changes.ranks("join") for rank in ranks) == [33, 34], found
    sizes = [line.workers for line in read_metrics(tmp_path / "run")]
    assert WIDEST in sizes and max(sizes[2:]) == WIDEST + 2 and sizes[-1] == WIDEST - 1, sizes
    assert "no link" not in found, "nobody missed one"
    assert Bits.of(tmp_path / "run") == run_undisturbed(tmp_path / "one", *model)
