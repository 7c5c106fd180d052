"""Held pages, whoever holds which, are updated as one whole layer would be, and come together again."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elaswave_spmd.controller.summary import collect_pages, is_complete
from elaswave_spmd.recovery.messages import FinalPages
from elaswave_spmd.sharding.layout import LOSS, LayerLayout
from elaswave_spmd.sharding.replicas import ReplicaSet
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.optimizers import SGD, AdamW
from elaswave_spmd.worker.state import HeldState
from tests.unit.runtime.runtime_cases import HOST, placed, small_layout
from tests.unit.sharding.sharding_strategies import owned_slots

LAYOUT = small_layout(64)


class Empty(nn.Module):
    """A module with the parameters of a layout's layer."""

    def __init__(self, layer: LayerLayout) -> None:
        super().__init__()
        for slot in layer.slots:
            name = slot.parameter.name.removeprefix(layer.name + ".")
            setattr(self, name, nn.Parameter(torch.empty(slot.parameter.shape)))


def draw(name: str, first: int, stop: int) -> Tensor:
    """Element i of a parameter is a function of its name and i."""
    shift = sum(map(ord, name))
    return torch.sin(torch.arange(first, stop, dtype=torch.float32) + shift)


def states(workers: int, zero: int, *, separate: bool, dtype: torch.dtype, sgd: bool = False) -> dict[int, HeldState]:
    """The states of a stage that has all three layers, freshly drawn."""
    runs = placed((workers,), (0, 3), ((workers, *[0] * (workers - 1)),), zero).replica_map(LAYOUT)
    found = {}
    for rank in range(workers):
        values = {layer.index: ValueBuffer(layer, Empty(layer), dtype, HOST.place) for layer in LAYOUT.layers}
        held = [run for of_layer in runs.values() for run in of_layer if rank in run.replicas and not is_loss(run)]
        optimizer = SGD(0.1) if sgd else AdamW()
        found[rank] = HeldState(LAYOUT, optimizer, HOST, separate_master=separate)
        found[rank].rebind(held, values)
        found[rank].initialise(draw)
    return found


def is_loss(run: ReplicaSet) -> bool:
    return LAYOUT.layers[run.layer].block_of(run.first).kind == LOSS


def update(state: HeldState, step: int, divisor: float) -> None:
    """One step with gradients that are functions of the element."""
    for layer in LAYOUT.layers:
        whole = torch.cos(torch.arange(layer.num_gradient_elements, dtype=torch.float32) * step)
        for block in layer.blocks:  # what lies between parameters is zero in every gradient
            used = torch.zeros(layer.num_gradient_elements, dtype=torch.bool)
            for slot in block.slots:
                used[slot.start : slot.stop] = True
            whole[block.start : block.stop] *= used[block.start : block.stop]
        entries = {
            (layer.index, part.pages.first, part.pages.stop): whole[part.start : part.stop].clone()
            for part in state.layers.get(layer.index, ())
        }
        state.apply(layer.index, entries, step=step, lr=0.05, divisor=divisor)


def collected(of_workers: dict[int, HeldState]) -> dict[str, np.ndarray]:
    weights: dict[str, np.ndarray] = {}
    received = set()
    for rank, state in of_workers.items():
        for held in state.layers.values():
            for part in held:
                if part.pages.primary == rank:
                    key = (part.pages.layer, part.pages.first, part.pages.stop)
                    collect_pages(LAYOUT, FinalPages(*key), part.master, weights)
                    received.add(key)
    assert is_complete(LAYOUT, received)
    assert not is_complete(LAYOUT, set(sorted(received)[1:]))
    return weights


def test_initial_pages_are_slices_of_the_parameters() -> None:
    for workers in (1, 2, 3):
        weights = collected(states(workers, 1, separate=True, dtype=torch.float32))
        assert set(weights) == {slot.parameter.name for slot in owned_slots(LAYOUT)}
        for slot in owned_slots(LAYOUT):
            name = slot.parameter.name
            wanted = draw(name, 0, slot.parameter.num_elements).numpy().reshape(slot.parameter.shape)
            np.testing.assert_array_equal(weights[name], wanted)


@pytest.mark.parametrize("sgd", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_an_update_over_any_cut_is_the_update_of_the_whole(workers: int, zero: int, sgd: bool) -> None:
    one = states(1, 1, separate=False, dtype=torch.float32, sgd=sgd)
    many = states(workers, zero, separate=zero == 3, dtype=torch.float32, sgd=sgd)
    for step, divisor in ((1, 1.0), (2, 1.7), (3, 1.0)):
        for state in (*one.values(), *many.values()):
            update(state, step, divisor)
    whole, parts = collected(one), collected(many)
    assert whole.keys() == parts.keys()
    for name in whole:
        assert whole[name].tobytes() == parts[name].tobytes(), name


def test_mirrors_have_the_bits_of_their_primary() -> None:
    many = states(3, 0, separate=True, dtype=torch.bfloat16)
    for state in many.values():
        update(state, 1, 1.3)
    for layer in LAYOUT.layers:
        for parts in zip(*(many[rank].layers[layer.index] for rank in range(3)), strict=True):
            assert len({part.pages for part in parts}) == 1
            for part in parts[1:]:
                assert torch.equal(part.master, parts[0].master)
                for name, values in part.optimizer_state.items():
                    assert torch.equal(values, parts[0].optimizer_state[name])


def test_the_compute_buffer_follows_at_the_same_version() -> None:
    (state,) = states(1, 1, separate=True, dtype=torch.bfloat16).values()
    for held in state.layers.values():
        for part in held:
            assert torch.equal(state.compute_values(part), part.master.bfloat16())
    update(state, 1, 1.0)
    for held in state.layers.values():
        for part in held:
            assert torch.equal(state.compute_values(part), part.master.bfloat16())


def test_without_a_separate_master_there_is_one_copy() -> None:
    (state,) = states(1, 1, separate=False, dtype=torch.float32).values()
    part = state.layers[1][0]
    assert part.master.data_ptr() == state.compute_values(part).data_ptr()


def test_keeping_advances_the_version_only() -> None:
    (state,) = states(1, 1, separate=True, dtype=torch.bfloat16).values()
    before = [part.master.clone() for held in state.layers.values() for part in held]
    for layer in LAYOUT.layers:
        state.keep(layer.index, 1)
    after = [part.master for held in state.layers.values() for part in held]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert state._values[1].is_at(1)


def test_bytes_of_state_are_those_of_the_pages() -> None:
    total = sum(layer.num_state_elements for layer in LAYOUT.layers)
    of_workers = states(3, 1, separate=True, dtype=torch.float32)
    counted = [state.num_bytes(rank) for rank, state in of_workers.items()]
    assert sum(c["master"] for c in counted) == 4 * total and sum(c["optimizer"] for c in counted) == 8 * total
    assert not any(c["mirror_master"] or c["mirror_optimizer"] for c in counted), "nothing is mirrored"
    page = LAYOUT.page_size * 4 * len(LAYOUT.layers)
    assert max(c["master"] for c in counted) - min(c["master"] for c in counted) <= page


def test_bytes_of_mirrors_are_counted_apart() -> None:
    total = sum(layer.num_state_elements for layer in LAYOUT.layers)
    counted = [state.num_bytes(rank) for rank, state in states(3, 0, separate=True, dtype=torch.float32).items()]
    assert sum(c["master"] for c in counted) == 4 * total and sum(c["mirror_master"] for c in counted) == 8 * total
    assert (
        sum(c["optimizer"] for c in counted) == 8 * total and sum(c["mirror_optimizer"] for c in counted) == 16 * total
    )


# ---- damage of memory


@pytest.mark.parametrize("separate", [False, True])
def test_state_is_held_to_what_was_written_until_the_next_update(separate: bool) -> None:
    state = states(2, 1, separate=separate, dtype=torch.float32)[0]
    assert not state.is_hashed and state.damaged() == []
    hashes = state.fingerprints()
    assert state.is_hashed and state.damaged() == [] and state.fingerprints() == hashes
    first, *others = list(state)
    next(iter(first.optimizer_state.values())).view(torch.int32)[3] ^= 1
    assert state.damaged() == [first] and state.damaged_parameters(lambda pages: True) == []
    others[0].master.view(torch.int32)[0] ^= 1 << 31
    assert state.damaged() == [first, others[0]] and state.damaged_parameters(lambda pages: True) == [others[0]]
    assert state.damaged_parameters(lambda pages: pages.key == first.pages.key) == []
    assert state.fingerprints() == hashes, "what was written, not what is there"
    assert state.disown(state.damaged()) == [first.pages.key, others[0].pages.key]
    assert state.damaged() == [] and set(state.fingerprints()) == set(hashes) - {first.pages.key, others[0].pages.key}
    update(state, 1, 1.0)
    assert not state.is_hashed


def test_a_range_that_is_cut_is_hashed_anew_and_one_that_is_not_is_held_to_its_hash() -> None:
    state = states(1, 0, separate=True, dtype=torch.float32)[0]
    hashes = state.fingerprints()
    whole = max(state, key=lambda part: part.pages.num_pages).pages
    middle = whole.first + 1
    cut = [ReplicaSet(whole.layer, a, b, 0, whole.replicas) for a, b in ((whole.first, middle), (middle, whole.stop))]
    state.rebind([*(part.pages for part in state if part.pages != whole), *cut], {})
    assert {part.pages.key for part in state if part.written is None} == {pages.key for pages in cut}
    found = state.fingerprints()
    assert {key: found[key] for key in hashes.keys() & found.keys()} == {
        key: hashes[key] for key in hashes if key != whole.key
    }
    assert all(pages.key in found for pages in cut)


def test_state_that_has_come_is_held_to_what_has_come() -> None:
    """Its master may be in the compute buffer already, as published: another bit there is damage."""
    first, second = (states(1, 0, separate=False, dtype=torch.float32)[0] for _ in range(2))
    part, learned = next(iter(first)), next(iter(second))
    payload = torch.empty(first.state_size(part))
    deque(first.copy_state(part, payload), maxlen=0)
    second.disown([learned])
    learned.master.data.view(torch.int32)[1] ^= 1 << 5
    deque(second.receive(*part.pages.key, 0, payload, lambda pages: None, hashed=True), maxlen=0)
    assert second.damaged() == [learned] and first.is_as_written(part, payload)
    assert first.fingerprints()[part.pages.key] == second.fingerprints()[part.pages.key]
    payload[0] += 1
    assert not first.is_as_written(part, payload)


def test_a_bit_flips_in_parameters_or_in_the_state_of_the_optimizer() -> None:
    damaged = set[str]()
    for seed in range(20):
        state = states(1, 0, separate=False, dtype=torch.float32)[0]
        state.fingerprints()
        state.flip_a_bit(draw=random.Random(seed))
        (part,) = state.damaged()
        damaged.add("master" if state.damaged_parameters(lambda pages: True) else "optimizer")
        assert not state.is_frozen(part.pages.layer, part.pages.first)
    assert damaged == {"master", "optimizer"}
    states(1, 0, separate=False, dtype=torch.float32)[0].flip_a_bit(("a kind that there is not",))


@pytest.mark.parametrize("separate", [False, True])
def test_what_is_given_up_of_a_range_frees_its_memory(separate: bool) -> None:
    """Half of each range goes to a newcomer: what stays has the same bits, and no memory of the other half."""
    state = states(1, 1, separate=separate, dtype=torch.float32)[0]
    update(state, 1, 1.0)
    kept, wanted = [], {}
    for part in state:
        middle = (part.pages.first + part.pages.stop + 1) // 2
        pages = ReplicaSet(part.pages.layer, part.pages.first, middle, 0, part.pages.replicas)
        kept.append(pages)
        wanted[pages.key] = [
            row.clone() for row in part.part(pages, *LAYOUT.layers[pages.layer].span(pages.first, middle)).rows
        ]
    state.rebind(kept, {} if separate else state._values)
    storages = {}
    for part in state:
        assert all(map(torch.equal, part.rows, wanted[part.pages.key]))
        own = part.rows if separate else part.rows[1:]  # else the master lies in the compute buffer
        storages |= {row.untyped_storage().data_ptr(): row.untyped_storage().nbytes() for row in own}
    needed = sum(row.nbytes for part in state for row in (part.rows if separate else part.rows[1:]))
    assert needed <= sum(storages.values()) <= 1.25 * needed


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("separate", [False, True])
def test_ranges_that_are_joined_have_the_state_of_their_parts(seed: int, separate: bool) -> None:
    """Also where a range that was cut is joined to a part of the next one, as after a mesh epoch that was missed."""
    draw = random.Random(seed)
    state, whole = (states(1, 1, separate=separate, dtype=torch.float32)[0] for _ in range(2))
    values = state._values
    for step in (1, 2, 3, 4):
        state.rebind([pages for part in whole for pages in cut_anywhere(part.pages, draw)], values)
        if draw.random() < 0.5:
            state.fingerprints()
        for one in (state, whole):
            update(one, step, 1.0 + step)
    state.rebind([part.pages for part in whole], values)
    for mine, wanted in zip(state, whole, strict=True):
        assert (mine.pages, mine.start, mine.stop, mine.version) == (wanted.pages, wanted.start, wanted.stop, 4)
        assert mine.written is None and all(map(torch.equal, mine.rows, wanted.rows))
        assert separate or mine.master.data_ptr() == state.compute_values(mine).data_ptr()


def cut_anywhere(pages: ReplicaSet, draw: random.Random) -> list[ReplicaSet]:
    """A page range in up to three parts."""
    inside = range(pages.first + 1, pages.stop)
    borders = [pages.first, *sorted(draw.sample(inside, min(len(inside), draw.randrange(3)))), pages.stop]
    return [ReplicaSet(pages.layer, a, b, pages.primary, pages.replicas) for a, b in pairwise(borders)]


def test_a_joined_range_of_which_a_part_was_given_up_has_no_state() -> None:
    """Its primary sends it as a whole: a worker that kept the other part would have a wrong version of that."""
    state = states(1, 1, separate=True, dtype=torch.float32)[0]
    whole = max((part.pages for part in state), key=lambda pages: pages.num_pages)
    middle = whole.first + 1
    others = [part.pages for part in state if part.pages != whole]
    halves = [
        ReplicaSet(whole.layer, a, b, 0, whole.replicas) for a, b in ((whole.first, middle), (middle, whole.stop))
    ]
    state.rebind([*others, *halves], {})
    state.disown([part for part in state if part.pages == halves[1]])
    state.rebind([*others, whole], {})
    assert {part.pages: part.version for part in state} == {**dict.fromkeys(others, 0), whole: -1}
