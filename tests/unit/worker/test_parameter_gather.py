"""The all-gather of a layer's new parameters: who sends what, and that all get it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from elaswave_spmd.models import GPT
from elaswave_spmd.sharding.replicas import ReplicaSet
from elaswave_spmd.worker.model_layout import describe
from elaswave_spmd.worker.parameter_gather import ParameterGather

LAYER = 1
with torch.device("meta"):
    MODEL = GPT(vocab_size=29, seq_len=6, layers=1, d_model=8, heads=2)
LAYOUT = describe(MODEL, page_size=64).layout.layers[LAYER]
LAST = LAYOUT.num_value_pages
MEMBERS = (4, 2, 7, 0)
"""Of the stage, not in the order of their numbers; the last has no state of the layer, and sends padding alone."""


def pages(first: int, stop: int, primary: int, *mirrors: int, learners: tuple[int, ...] = ()) -> ReplicaSet:
    return ReplicaSet(LAYER, first, stop, primary, frozenset({primary, *mirrors}), frozenset(learners))


FOUND = (
    pages(0, 1, 2),
    pages(1, 3, 4, 2),
    pages(3, 4, 9),  # of another stage: over links
    pages(4, 5, 2, 0, 4, 7),  # all have it
    pages(5, 6, 2, 0, 4, learners=(7,)),  # a learner has no state yet
    pages(6, LAST, 7),
)
GATHERED = (FOUND[1], FOUND[0], FOUND[4], FOUND[5])
"""By member, in page order."""


def values(of: ReplicaSet) -> Tensor:
    return torch.arange(LAYOUT.num_elements(of.first, of.stop), dtype=torch.bfloat16) + 1000 * of.first


@pytest.mark.parametrize("rank", MEMBERS)
def test_every_member_gets_what_the_others_are_the_primaries_of(rank: int) -> None:
    gather = ParameterGather.of(LAYOUT, FOUND, MEMBERS, with_frozen=False)
    assert gather is not None and gather.keys == {of.key for of in GATHERED}
    assert gather.share == max(len(values(FOUND[5])), len(values(FOUND[1])))
    # Each member has memory of its own, as in a real all-gather.
    memory = {member: torch.full((len(MEMBERS) * gather.share,), -1.0, dtype=torch.bfloat16) for member in MEMBERS}
    of_member = {m: {of.key: values(of) for of in FOUND if of.primary == m} for m in MEMBERS}
    shares = [gather.pack(member, of_member[member], memory[member]) for member in MEMBERS]
    assert not shares[-1].any(), "what is sent is never memory of something else"
    memory[rank].copy_(torch.cat(shares))
    found = gather.unpack(rank, memory[rank])
    assert [key for key, _ in found] == [of.key for of in GATHERED if of.primary != rank]
    for key, value in found:
        assert torch.equal(value, next(values(of) for of in GATHERED if of.key == key))


def test_a_layer_whose_pages_all_members_hold_has_none() -> None:
    assert ParameterGather.of(LAYOUT, (pages(0, LAST, 4, 2, 7, 0), pages(0, 1, 9)), MEMBERS, with_frozen=True) is None


@pytest.mark.parametrize("with_frozen", [False, True])
def test_frozen_pages_are_gathered_where_workers_drop_their_parameters(with_frozen: bool) -> None:
    with torch.device("meta"):
        model = GPT(vocab_size=29, seq_len=6, layers=1, d_model=8, heads=2)
        for parameter in list(model.layers)[LAYER].parameters():
            parameter.requires_grad_(False)
    layout = describe(model, page_size=64).layout.layers[LAYER]
    gather = ParameterGather.of(layout, (pages(0, 1, 4), pages(1, 2, 2)), MEMBERS, with_frozen=with_frozen)
    assert (gather is not None) == with_frozen
