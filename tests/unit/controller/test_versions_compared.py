"""How many versions the summary says were compared (mirror.verify_every)."""

from __future__ import annotations

from elaswave_spmd.run_dir.faults import FaultCount


def test_a_version_that_two_meshes_or_lives_have_compared_counts_once() -> None:
    counts = FaultCount()
    for version in (0, 1, 2, 2, 3, 1, 2, 3, 4):
        counts.add_comparison(version)
    assert counts.versions_compared == 5


def test_what_is_kept_does_not_grow_with_the_run() -> None:
    counts = FaultCount()
    for version in range(1, 1001):
        counts.add_comparison(version)
    assert counts.versions_compared == 1000
    sizes = {name: len(kept) for name, kept in vars(counts).items() if hasattr(kept, "__len__")}
    assert max(sizes.values()) < 10, sizes
