"""How many versions the summary says were compared (mirror.verify_every)."""

from __future__ import annotations

from typing import cast

from elaswave_spmd.controller.summary import RunRecord
from elaswave_spmd.sharding.layout import ModelLayout


def test_a_version_that_two_meshes_have_compared_counts_once() -> None:
    record = RunRecord(cast(ModelLayout, None))  # of state, which is not looked at here
    for version in (0, 1, 2, 2, 3):
        record.add_comparison(version)
    assert record.versions_compared == 4


def test_what_is_kept_does_not_grow_with_the_run() -> None:
    record = RunRecord(cast(ModelLayout, None))
    for version in range(1, 1001):
        record.add_comparison(version)
    assert record.versions_compared == 1000
    sizes = {name: len(kept) for name, kept in vars(record).items() if hasattr(kept, "__len__") and name != "_layout"}
    assert max(sizes.values()) < 10, sizes
