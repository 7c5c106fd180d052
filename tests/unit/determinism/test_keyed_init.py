from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.determinism import Constant, Init, Normal, Uniform, materialize
from elaswave_spmd.errors import ModelError

SIZE = 10_000
INITS = [Normal(0.02), Uniform(0.3), Constant(1.5)]


@pytest.mark.parametrize("init", INITS)
@given(st.data())
def test_a_tile_equals_the_slice_of_the_whole(init: Init, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, SIZE))
    stop = data.draw(st.integers(start, SIZE))
    whole = materialize(init, 3, "block0.up.weight", 0, SIZE)
    tile = materialize(init, 3, "block0.up.weight", start, stop)
    assert tile.dtype == np.float32
    assert tile.tobytes() == whole[start:stop].tobytes()


def test_values_follow_their_distribution() -> None:
    n = 400_000
    normal = materialize(Normal(0.5), 1, "a", 0, n).astype(np.float64)
    assert abs(normal.mean()) < 4 * 0.5 / math.sqrt(n) and abs(normal.std() - 0.5) < 0.002
    assert abs((np.abs(normal) < 0.5).mean() - 0.6827) < 0.004  # within one standard deviation
    assert abs((np.abs(normal) > 1.0).mean() - 0.0455) < 0.002  # beyond two
    uniform = materialize(Uniform(2.0), 1, "a", 0, n).astype(np.float64)
    assert np.abs(uniform).max() <= 2.0 and abs(uniform.mean()) < 0.01
    assert abs(uniform.std() - 4.0 / math.sqrt(12)) < 0.01
    assert (materialize(Constant(0.25), 1, "a", 0, 5) == 0.25).all()


def test_neighbours_are_not_correlated() -> None:
    values = materialize(Normal(1.0), 1, "a", 0, 200_000).astype(np.float64)
    for lag in (1, 2, 3, 4, 2048, 4096):
        assert abs((values[:-lag] * values[lag:]).mean()) < 0.01, lag


def test_seeds_and_names_give_other_values() -> None:
    seen = {materialize(Normal(1.0), seed, name, 0, 8).tobytes() for seed in (1, 2, 2**40) for name in ("a", "b")}
    assert len(seen) == 6


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="not a range"):
        materialize(Normal(1.0), 1, "a", 5, 4)
    for bad in (lambda: Normal(-1.0), lambda: Normal(math.nan), lambda: Uniform(math.inf)):
        with pytest.raises(ModelError, match="finite"):
            bad()
