"""Sums in pieces are exact, wherever each piece lies."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.determinism.exact_sum import exact_sum, expansion

VALUES = st.lists(st.floats(0, 2.0**126, width=32), max_size=60)


@given(VALUES, st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_partition_gives_fsum(values, parts, rng):
    shares = [[] for _ in range(parts)]
    for value in values:
        rng.choice(shares).append(value)
    assert exact_sum(map(expansion, shares)) == math.fsum(values)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=60))
def test_expansion_is_exact_and_short(values):
    parts = expansion(values)
    assert math.fsum([*values, *(-p for p in parts)]) == 0.0
    assert len(parts) <= 8  # 277 bits of fp32 range over 53 of a double, and carries


def test_non_finite_values_are_seen():
    assert math.isnan(exact_sum([expansion([1.0]), expansion([math.inf])]))
    assert math.isnan(exact_sum([expansion([math.inf, -math.inf])]))
    assert math.isnan(exact_sum([expansion([math.nan])]))
    assert exact_sum([expansion([]), ()]) == 0.0
