"""Sums whose order of additions is given: one addition after another, or up to eight terms in one kernel.

Floating-point addition is not associative. Both ways make exactly the additions that are asked for, in the given order,
so they give the same bits. One kernel reads each term once and writes the result once, while each single addition reads
two tensors and writes one: for eight terms, 9 passes over memory in place of 21.
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
    """A tensor that is added to others.

    Args:
        values: the tensor.
        owned: True if its memory may be overwritten with a sum.
    """

    values: Tensor
    owned: bool


Terms: TypeAlias = "Term | tuple[Terms, Terms]"
"""A sum as a binary tree, which gives the order of additions: a term, or (left, right) for left + right."""


def add_in_turn(terms: Terms) -> Tensor:
    """Compute a sum by one addition after another, in the memory of an owned term if there is one.

    Args:
        terms: the terms, all of one shape, dtype and device.
    """
    return _added(terms).values


def _added(terms: Terms) -> Term:
    if isinstance(terms, Term):
        return terms
    left, right = map(_added, terms)
    if left.owned:
        return Term(left.values.add_(right.values), owned=True)
    # Addition is commutative bit for bit, so the sum may be stored on either side. Only which NaN the sum of two is may
    # depend on the side, so whoever compares sums takes all NaN for the same.
    return Term(right.values.add_(left.values) if right.owned else left.values + right.values, owned=True)


class FusedSums:
    """Sums by kernels of up to eight terms. The kernel for a form of sum is compiled at its first use (about 0.1 s).

    If no kernel can be compiled, there is a warning, and from then on additions are made in turn.

    Args:
        compiled: makes a kernel from the text of a function, such as `torch.cuda.jiterator._create_jit_fn`.
    """

    MOST = 8
    """The most terms of a kernel, which is a limit of torch."""

    def __init__(self, compiled: Callable[[str], Callable[..., Tensor]]) -> None:
        self._compiled = compiled
        self._kernels: dict[str, Callable[..., Tensor]] = {}  # by `_name`, which encodes the form of the sum
        self._works = True

    def add_up(self, terms: Terms) -> Tensor:
        """Compute a sum with the same bits as `add_in_turn`. With three terms or more it is in new memory.

        Args:
            terms: the terms, all of one shape and dtype, contiguous, on the current GPU.
        """
        return self._at_once(self._within_limit(terms)).values

    def _within_limit(self, terms: Terms) -> Terms:
        """The same sum with at most MOST terms, after adding up some parts of it."""
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
            return _added(terms)  # two terms are added in place if one is owned, which needs no memory
        name, values = _name(terms), [term.values for term in _leaves(terms)]
        try:
            if name not in self._kernels:
                self._kernels[name] = self._compiled(_text(name, terms))
            return Term(self._kernels[name](*values), owned=True)
        except torch.OutOfMemoryError:  # it may be over soon, and additions in place may need no memory
            return _added(terms)
        except RuntimeError as error:  # if the cause is a fault of the device, the additions below fail as well
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
    """The CUDA C++ function that adds up one element.

    It has no products, so the compiler cannot make fused multiply-adds, which would give other bits.
    """
    names = iter(range(FusedSums.MOST))

    def written(part: Terms) -> str:
        return f"x{next(names)}" if isinstance(part, Term) else f"({written(part[0])} + {written(part[1])})"

    body = written(terms)
    parameters = ", ".join(f"T x{number}" for number in range(_count(terms)))
    return f"template <typename T> T {name}({parameters}) {{ return {body}; }}"
