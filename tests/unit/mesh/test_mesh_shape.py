"""Mesh shapes: one meaning is one value, and every wrong one says what exists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.errors import MeshError
from elaswave_spmd.mesh import Axis, MeshShape

shapes = st.one_of(
    st.builds(MeshShape.of, dp=st.integers(1, 9), pp=st.integers(1, 9), tp=st.integers(1, 4), fsdp=st.integers(1, 4)),
    st.builds(MeshShape.of_stages, st.lists(st.integers(1, 5), min_size=1, max_size=5), tp=st.integers(1, 3)),
)


@given(shapes)
def test_name_is_read_back(shape: MeshShape) -> None:
    assert MeshShape.parse(shape.name) == shape
    assert hash(MeshShape.parse(str(shape))) == hash(shape)
    assert eval(repr(shape)) == shape


@given(shapes)
def test_sizes_agree(shape: MeshShape) -> None:
    assert len(shape.stage_sizes) == shape.num_stages == shape.axis_size("pp")
    assert sum(shape.stage_sizes) == shape.num_workers
    assert (shape.stages is not None) == (len(set(shape.stage_sizes)) > 1)
    assert shape.island_size == shape.axis_size("tp") * shape.axis_size("fsdp")


def test_one_meaning_is_one_value() -> None:
    assert MeshShape.parse("dp1_pp2") == MeshShape.parse("pp2") == MeshShape.of_stages([1, 1])
    assert MeshShape.parse("pp2_dp3") == MeshShape.of(dp=3, pp=2) == MeshShape.of_stages((3, 3))
    assert MeshShape.parse("single") == MeshShape() == MeshShape.parse("dp1")
    assert MeshShape.of_stages((3, 2)).name == "stages3-2"
    assert MeshShape.of_stages((3, 3, 3, 2)).name == "stages3x3-2"
    assert MeshShape.of(pp=2, dp=2, tp=4).name == "dp2_pp2_tp4"


def test_absent_axis_has_size_one() -> None:
    assert MeshShape.parse("dp3").axis_size("tp") == 1
    with pytest.raises(MeshError, match="pp, dp, tp, fsdp"):
        MeshShape().axis_size("ep")
    with pytest.raises(MeshError, match="stage_sizes"):
        MeshShape.of_stages((3, 2)).axis_size("dp")


@pytest.mark.parametrize(
    "name", ["dpp2", "", "dp", "2dp", "dp2-pp2", "dp2_", "single_dp2", "ep2", "dp-1", "dp2 pp2", "stages3-", "DP2"]
)
def test_typo_shows_grammar_and_examples(name: str) -> None:
    with pytest.raises(MeshError, match=r"(?s)pp, dp, tp, fsdp.*dp2_pp2") as caught:
        MeshShape.parse(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dp0", "1 or more"),
        ("dp2_dp3", "at most once"),
        ("dp2_dp2", "at most once"),
        ("dp1_dp2", "at most once"),
        ("stages3-0", "1 or more"),
        ("stages3-2_dp2", "either stages, or dp and pp"),
        ("stages3-2_stages3-2", "at most once"),
    ],
)
def test_contradiction_is_refused(name: str, says: str) -> None:
    with pytest.raises(MeshError, match=says):
        MeshShape.parse(name)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "2", None])
def test_size_is_a_whole_number(size: object) -> None:
    with pytest.raises(MeshError, match="whole number"):
        Axis("dp", size)  # type: ignore[arg-type]


def test_no_stages_is_refused() -> None:
    with pytest.raises(MeshError, match="at least one stage"):
        MeshShape.of_stages(())
