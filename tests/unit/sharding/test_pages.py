"""Layouts: every parameter element in one slot, pages that cut blocks exactly, tied pages one to one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.errors import LayoutError
from elaswave_spmd.sharding.layout import ALIGNMENT, LayerUse, ParameterInfo, lay_out

SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5)
PAGE_SIZES = st.sampled_from([64, 128, 320, 4096])


@given(SHAPES, SHAPES, PAGE_SIZES, st.booleans())
def test_blocks_tile_the_buffer(embed, head, page_size, tied):
    first = tuple(ParameterInfo(f"a.p{i}", s, decay=i % 2 == 0) for i, s in enumerate(embed))
    last = tuple(ParameterInfo(f"b.p{i}", s) for i, s in enumerate(head))
    reads = (("b.tied", "a.p0"),) if tied else ()
    layout = lay_out([LayerUse("a", first), LayerUse("b", last, reads)], page_size=page_size)
    for layer in layout.layers:
        at = page = 0
        for block in layer.blocks:
            assert (block.start, block.first_page) == (at, page)
            assert block.stop % ALIGNMENT == 0 and block.num_pages == -(-(block.stop - block.start) // page_size)
            spans = [layer.span(p, p + 1) for p in block.pages]
            assert spans[0][0] == block.start and spans[-1][1] == block.stop
            assert all(a[1] == b[0] for a, b in pairwise(spans))
            taken = block.start
            for slot in block.slots:
                assert slot.start % ALIGNMENT == 0 and slot.start >= taken
                taken = slot.stop
            assert taken <= block.stop
            at, page = block.stop, page + block.num_pages
        owned = [i for s in layer.segments for i in range(s.start, s.stop)]
        assert owned == list(range(layer.num_state_elements))
    assert layout.num_parameters == sum(a * b for a, b in [*embed, *head])
    if tied:
        (block,) = layout.layers[1].reader_blocks
        assert block.source is not None
        owner, page = block.source
        source = layout.layers[owner].block_of(page)
        assert [s.parameter.name for s in source.slots] == ["a.p0"]
        assert (source.num_pages, source.stop - source.start) == (block.num_pages, block.stop - block.start)
        assert layout.readers == {(0, source.first_page): ((1, block),)}


def test_refusals():
    use = LayerUse("a", (ParameterInfo("a.p", (3,)),))
    with pytest.raises(LayoutError, match="multiple of 64") as error:
        lay_out([use], page_size=100)
    assert "page.size=128" in str(error.value)
    with pytest.raises(LayoutError, match="owned by a layer"):
        lay_out([use, LayerUse("b", (), (("b.q", "a.nothing"),))])
    with pytest.raises(LayoutError, match=r"(?s)at least one element.*fix: *leave it out"):
        lay_out([LayerUse("a", (ParameterInfo("a.p", (0, 3)),))])
