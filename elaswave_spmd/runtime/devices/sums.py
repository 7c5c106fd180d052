"""Sums whose order of additions is given: one addition after another, or up to eight terms in one kernel.

Floating-point addition is not associative. Whoever computes such a sum makes the very additions that are asked for, so
both ways give the same bits. One kernel reads each term once and writes once, where single additions read two tensors
and write one each: 9 passes over memory in place of 21 for eight terms.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Term:
    """A tensor that is added to others. `owned`: its memory may be overwritten with a sum."""

    values: Tensor
    owned: bool


Terms: TypeAlias = "Term | tuple[Terms, Terms]"
"""A sum in its order: a term, or left + right."""


def add_in_turn(terms: Terms) -> Tensor:
    """A sum by one addition after another, in memory that may be overwritten where there is any.

    Args:
        terms: of one shape, dtype and device.
    """
    return _added(terms).values


def _added(terms: Terms) -> Term:
    if isinstance(terms, Term):
        return terms
    left, right = map(_added, terms)
    if left.owned:
        return Term(left.values.add_(right.values), owned=True)
    # Addition commutes bit for bit.
    return Term(right.values.add_(left.values) if right.owned else left.values + right.values, owned=True)


class FusedSums:
    """Sums by kernels of up to eight terms, which are compiled when a form of sum is first asked for (about 0.1 s).

    Where none can be compiled, additions are made in turn, after a warning.

    Args:
        compiled: makes the kernel of a function's text, `torch.cuda.jiterator._create_jit_fn`.
    """

    MOST = 8
    """Terms that a kernel takes: a limit of torch's."""

    def __init__(self, compiled: Callable[[str], Callable[..., Tensor]]) -> None:
        self._compiled = compiled
        self._kernels: dict[str, Callable[..., Tensor]] = {}  # by name, which spells the form out
        self._works = True

    def add_up(self, terms: Terms) -> Tensor:
        """A sum, as by `add_in_turn`; of three terms and more it is in memory of its own.

        Args:
            terms: of one shape and dtype, contiguous, on the GPU that is current.
        """
        return self._at_once(self._within_limit(terms)).values

    def _within_limit(self, terms: Terms) -> Terms:
        """The same sum with so few terms that one kernel takes them: parts of it are added up already."""
        if isinstance(terms, Term):
            return terms
        left, right = map(self._within_limit, terms)
        sizes = _count(left), _count(right)
        if sum(sizes) > self.MOST and sizes[0] >= sizes[1]:
            left = self._at_once(left)
        elif sum(sizes) > self.MOST:
            right = self._at_once(right)
        return self._within_limit((left, right)) if _count(left) + _count(right) > self.MOST else (left, right)

    def _at_once(self, terms: Terms) -> Term:
        if isinstance(terms, Term) or _count(terms) == 2 or not self._works:
            return _added(terms)  # an addition of two in place needs no memory
        name, values = _name(terms), [term.values for term in _leaves(terms)]
        try:
            if name not in self._kernels:
                self._kernels[name] = self._compiled(_text(name, terms))
            return Term(self._kernels[name](*values), owned=True)
        except torch.OutOfMemoryError:  # of one moment; additions in place may need none
            return _added(terms)
        except RuntimeError as error:  # if the device is at fault, so it is in the additions that follow
            self._works = False
            warnings.warn(f"sums are added one by one, as no kernel can be made for them: {error}", stacklevel=2)
            return _added(terms)


def _leaves(terms: Terms) -> Iterator[Term]:
    """The terms, left to right."""
    if isinstance(terms, Term):
        yield terms
    else:
        for half in terms:
            yield from _leaves(half)


def _count(terms: Terms) -> int:
    return 1 if isinstance(terms, Term) else sum(map(_count, terms))


def _name(terms: Terms) -> str:
    """A name for the form of a sum, in Polish notation: sum_ppxxx for (x0 + x1) + x2."""

    def spelt(part: Terms) -> str:
        return "x" if isinstance(part, Term) else "p" + spelt(part[0]) + spelt(part[1])

    return "sum_" + spelt(terms)


def _text(name: str, terms: Terms) -> str:
    """The function of one element, in CUDA's C++. There are no products in it that a compiler could fuse with a sum."""
    names = iter(range(FusedSums.MOST))

    def written(part: Terms) -> str:
        return f"x{next(names)}" if isinstance(part, Term) else f"({written(part[0])} + {written(part[1])})"

    body = written(terms)
    parameters = ", ".join(f"T x{number}" for number in range(_count(terms)))
    return f"template <typename T> T {name}({parameters}) {{ return {body}; }}"
