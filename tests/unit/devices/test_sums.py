"""Sums in a given order: one addition after another, and by kernels, whose text Python runs here in place of a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elaswave_spmd.runtime.devices.sums import FusedSums, Term, Terms, add_in_turn

FORM = re.compile(r"template <typename T> T (\w+)\((T x\d+(?:, T x\d+)*)\) \{ return (.*); \}")


class Compiler:
    """Stands in for torch's jiterator: runs the one expression of a kernel's text, and notes what it was asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.runs: list[int] = []

    def __call__(self, text: str) -> Callable[..., Tensor]:
        found = FORM.fullmatch(text)
        assert found is not None, text
        name, parameters, expression = found.groups()
        assert name not in self.names, "a kernel is compiled once"
        self.names.append(name)
        variables = [one.removeprefix("T ") for one in parameters.split(", ")]

        def run(*values: Tensor) -> Tensor:
            assert 3 <= len(values) == len(variables) <= 8
            self.runs.append(len(values))
            return eval(expression, {}, dict(zip(variables, values, strict=True)))

        return run


def drawn_sums() -> st.SearchStrategy[Terms]:
    """Sums of any form, of terms that differ much in size, so that another order shows."""
    values = st.integers(0, 2**20).map(lambda seed: torch.randn(5, generator=torch.Generator().manual_seed(seed)))
    scaled = st.tuples(values, st.integers(-8, 8)).map(lambda drawn: drawn[0] * 10.0 ** drawn[1])
    term = st.builds(lambda value, owned: Term(value, owned=owned), scaled, st.booleans())
    return st.recursive(term, lambda halves: st.tuples(halves, halves), max_leaves=40)


def leaves(terms: Terms) -> list[Term]:
    return [terms] if isinstance(terms, Term) else [leaf for half in terms for leaf in leaves(half)]


def copied(terms: Terms) -> Terms:
    if isinstance(terms, Term):
        return Term(terms.values.clone(), owned=terms.owned)
    return copied(terms[0]), copied(terms[1])


def wanted(terms: Terms) -> Tensor:
    return terms.values if isinstance(terms, Term) else wanted(terms[0]) + wanted(terms[1])


@given(drawn_sums())
def test_both_ways_make_the_additions_that_are_asked_for(terms: Terms) -> None:
    compiler = Compiler()
    for add_up in (add_in_turn, FusedSums(compiler).add_up):
        given_terms = copied(terms)
        others = [leaf for leaf in leaves(given_terms) if not leaf.owned]
        before = [leaf.values.clone() for leaf in others]
        assert torch.equal(add_up(given_terms), wanted(terms))
        assert all(torch.equal(leaf.values, value) for leaf, value in zip(others, before, strict=True))


def in_halves(count: int) -> Terms:
    terms: list[Terms] = [Term(torch.full((3,), float(number)), owned=False) for number in range(count)]
    while len(terms) > 1:
        terms = [(left, right) for left, right in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def test_kernels_take_as_many_terms_as_torch_allows() -> None:
    compiler = Compiler()
    sums = FusedSums(compiler)
    assert sums.add_up(in_halves(64)).tolist() == [2016.0] * 3
    assert compiler.runs == [8] * 9
    assert compiler.names == ["sum_pppxxpxxppxxpxx"]  # one form, compiled once
    sums.add_up(in_halves(2))
    assert len(compiler.runs) == 9, "two terms are added as ever"


def test_without_memory_for_a_kernel_one_sum_is_made_in_turn() -> None:
    class Full(Compiler):
        def __call__(self, text: str) -> Callable[..., Tensor]:
            kernel = super().__call__(text)

            def run(*values: Tensor) -> Tensor:
                if not self.runs:
                    self.runs.append(0)
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return kernel(*values)

            return run

    compiler = Full()
    sums = FusedSums(compiler)
    assert [sums.add_up(in_halves(4)).tolist() for _ in range(2)] == [[6.0] * 3] * 2
    assert compiler.runs == [0, 4]


def test_where_no_kernel_can_be_made_additions_are_made_in_turn_after_one_warning() -> None:
    def fails(text: str) -> Callable[..., Tensor]:
        raise RuntimeError("nvrtc: no such library")

    sums = FusedSums(fails)
    with pytest.warns(UserWarning, match=r"one by one.*nvrtc: no such library") as seen:
        assert sums.add_up(in_halves(16)).tolist() == [120.0] * 3
        assert sums.add_up(in_halves(4)).tolist() == [6.0] * 3
    assert len(seen) == 1
