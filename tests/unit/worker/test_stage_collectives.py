"""Collectives in the process group of a stage, on a group that is a list: order, failures, ends."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.models import GPT
from elaswave_spmd.recovery.admission import LONGEST_TEXT
from elaswave_spmd.recovery.messages import GROUPED, GroupLost, Message, Publish
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.placement import Placement, place
from elaswave_spmd.sharding.replicas import ReplicaMap, ReplicaSet
from elaswave_spmd.worker.buffers import GradientBuffer
from elaswave_spmd.worker.gradient_exchange import GradientExchange, ReducedPages
from elaswave_spmd.worker.model_layout import describe
from elaswave_spmd.worker.stage_collectives import NoCollectives, StageCollectives
from elaswave_spmd.worker.sum_exchange import SumExchange

ME = 1
with torch.device("meta"):
    MODEL = GPT(vocab_size=29, seq_len=6, layers=1, d_model=8, heads=2)
LAYOUT = describe(MODEL, page_size=64).layout
LAYER = 1
LAST = LAYOUT.layers[LAYER].num_value_pages
CPU = torch.device("cpu")


@dataclass
class ListedWork:
    done: bool = False
    error: RuntimeError | None = None

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass
class ListedGroup:
    """A group of which a test says what comes."""

    ready: int | None = None
    failure: str | None = None
    refuses: RuntimeError | None = None
    given_up: int = 0
    changes: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    gathers: list[tuple[Tensor, Tensor, ListedWork]] = field(default_factory=list)
    exchanges: list[tuple[Tensor, Tensor, ListedWork]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def enter_epoch(self, epoch: int, members: Sequence[int], rank: int) -> None:
        assert rank == ME
        self.ready, self.failure = None, None
        self.changes.append((epoch, tuple(members)))

    def give_up(self) -> None:
        self.ready = None
        self.given_up += 1

    def gather(self, share: Tensor, gathered: Tensor, what: str) -> ListedWork:
        if self.refuses is not None:
            raise self.refuses
        work = ListedWork()
        self.gathers.append((share, gathered, work))
        return work

    def exchange(
        self,
        sent: Tensor,
        received: Tensor,
        sent_sizes: Sequence[int],
        received_sizes: Sequence[int],
        what: str,
    ) -> ListedWork:
        if self.refuses is not None:
            raise self.refuses
        work = ListedWork()
        self.exchanges.append((sent, received, work))
        self.names.append(what)
        return work


def placement(epoch: int = 0) -> Placement:
    mesh = replace(Mesh.initial(MeshShape.parse("dp3")), epoch=epoch)
    return place(mesh, LAYOUT, MODEL.shardings.with_zero(1), 3)


def run(first: int, stop: int, primary: int, *mirrors: int) -> ReplicaSet:
    return ReplicaSet(LAYER, first, stop, primary, frozenset({primary, *mirrors}))


RUNS = (run(0, 1, 0), run(1, 2, ME, 2), run(2, 3, 0, ME, 2), run(3, LAST, 2))
"""The third is held by all."""


def replicas(runs: tuple[ReplicaSet, ...] = RUNS) -> ReplicaMap:
    return {layer: runs if layer == LAYER else () for layer in range(len(LAYOUT.layers))}


def make(runs: tuple[ReplicaSet, ...] = RUNS) -> tuple[StageCollectives, ListedGroup, list[tuple[int, Message]]]:
    group, sent = ListedGroup(), []
    grouped = StageCollectives(ME, LAYOUT, CPU, torch.float32, lambda p, m, _: sent.append((p, m)), group)
    grouped.enter_epoch(placement(), replicas(runs))
    group.ready = 0
    return grouped, group, sent


def values(of: ReplicaSet, number: float) -> Tensor:
    first, stop = LAYOUT.layers[LAYER].span(of.first, of.stop)
    return torch.full((stop - first,), number)


def gather(grouped: StageCollectives, version: int = 1) -> None:
    grouped.gather(LAYER, version, {RUNS[1].key: values(RUNS[1], 10.0)})


def test_a_layer_is_one_all_gather_of_equal_shares() -> None:
    """The largest share is that of the third member, whose page range is the longest."""
    grouped, group, _ = make()
    assert grouped.ready and grouped.reached(RUNS[1].key) == {0, 1, 2} and not grouped.reached(RUNS[2].key)
    gather(grouped)
    ((share, gathered, _),) = group.gathers
    mine = values(RUNS[1], 10.0)
    assert len(share) == len(values(RUNS[3], 0)) and len(gathered) == 3 * len(share)
    assert share.data_ptr() == gathered[len(share) :].data_ptr(), "it lies where it belongs in the result"
    assert torch.equal(share[: len(mine)], mine) and not share[len(mine) :].any() and not grouped.idle


def test_what_has_arrived_is_returned_in_order_and_once() -> None:
    grouped, group, _ = make((*RUNS[:2], run(2, 3, 0), RUNS[3]))
    gather(grouped)
    gather(grouped, 2)
    (_, gathered, first), (_, _, second) = group.gathers
    size = len(gathered) // 3
    page = len(values(RUNS[0], 0))
    gathered[:page], gathered[page : 2 * page], gathered[2 * size :] = 1.0, 2.0, 3.0
    second.done = True
    assert list(grouped.arrived()) == [] and not grouped.has_news, "one after the other"
    first.done = True
    assert grouped.has_news
    found = list(grouped.arrived())
    assert [publish for publish, _ in found] == [
        Publish(version, LAYER, first, stop) for version in (1, 2) for first, stop in ((0, 1), (2, 3), (3, LAST))
    ]
    for (_, tensor), (of, number) in zip(found, ((RUNS[0], 1.0), (run(2, 3, 0), 2.0), (RUNS[3], 3.0)), strict=False):
        assert torch.equal(tensor, values(of, number))
    assert grouped.idle and list(grouped.arrived()) == []


def lost(reason: str) -> list[tuple[int, Message]]:
    return [(peer, GroupLost(0, ME, reason)) for peer in (0, 2, CONTROLLER)]


def test_an_all_gather_that_fails_ends_the_group_for_everybody() -> None:
    grouped, group, sent = make()
    gather(grouped)
    group.gathers[0][2].done, group.gathers[0][2].error = True, RuntimeError("closed by peer")
    assert list(grouped.arrived()) == [] and sent == lost("closed by peer")
    assert grouped.idle and not grouped.serves and not grouped.ready and group.given_up == 1
    gather(grouped, 2)
    assert len(group.gathers) == 1 and len(sent) == 3, "links serve, and all know"


def test_others_hear_of_a_failure_that_is_told_at_length() -> None:
    """A message with a longer text than that is refused by whoever gets it."""
    grouped, group, sent = make()
    group.refuses = RuntimeError("a line of a log\n" * 1000)
    gather(grouped)
    reasons = [message.reason for _, message in sent if isinstance(message, GroupLost)]
    assert [len(reason) for reason in reasons] == 3 * [LONGEST_TEXT]


def test_a_library_that_refuses_ends_it_too() -> None:
    grouped, group, sent = make()
    group.refuses = RuntimeError("communicator was aborted")
    gather(grouped)
    assert sent == lost("communicator was aborted") and grouped.idle and not grouped.serves


NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


def no_memory(*_: object, **__: object) -> Tensor:
    raise torch.OutOfMemoryError(NO_MEMORY)


def test_no_memory_for_an_all_gather_ends_the_group_and_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped, group, sent = make()
    mine = {RUNS[1].key: values(RUNS[1], 10.0)}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", no_memory)
        grouped.gather(LAYER, 1, mine)
    assert group.gathers == [] and sent == lost(NO_MEMORY) and grouped.idle and not grouped.serves


@pytest.mark.parametrize("function", ["cat", "empty"], ids=["what it sends", "what it receives"])
def test_no_memory_for_an_exchange_returns_its_sums(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    grouped, group, sent = make()
    give_sums(grouped)
    monkeypatch.setattr(torch, function, no_memory)
    grouped.begin_exchanges()
    assert group.exchanges == [] and sent == lost(NO_MEMORY) and not grouped.serves
    assert grouped.idle and {layer for layer, _ in grouped.exchanges.take_back()} == {LAYER}
    assert grouped.exchanges.next() is None


def test_the_memory_of_a_layer_goes_once_the_layer_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped, group, _ = make()
    buffers = list[weakref.ref[np.ndarray]]()

    def watched(size: int, **_: object) -> Tensor:
        buffer = np.zeros(size, dtype=np.float32)
        buffers.append(weakref.ref(buffer))
        return torch.from_numpy(buffer)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", watched)
        gather(grouped, 1)
        gather(grouped, 2)
    while group.gathers:
        group.gathers.pop()[2].done = True
    held = [[buffer() is not None for buffer in buffers] for _ in grouped.arrived()]
    assert held == 2 * [[True, True]] + 2 * [[False, True]], "two members have sent pages of each of the two"
    assert all(buffer() is None for buffer in buffers)


def test_a_primary_without_state_begins_no_all_gather_of_its_layer() -> None:
    grouped, group, sent = make()
    grouped.gather(LAYER, 1, {})
    assert group.gathers == []
    assert sent == lost("this worker has no state of pages that it is the primary of") and not grouped.serves


def test_a_group_that_cannot_be_made_is_given_up() -> None:
    grouped, group, sent = make()
    group.ready, group.failure = None, "timed out"
    assert not grouped.ready
    grouped.check()
    grouped.check()
    assert sent == lost("timed out") and not grouped.serves


def test_another_epoch_has_another_group() -> None:
    grouped, group, sent = make()
    gather(grouped)
    grouped.enter_epoch(placement(1), replicas())
    assert grouped.idle and not grouped.ready and group.changes == [(0, (0, 1, 2)), (1, (0, 1, 2))]
    group.gathers[0][2].done = True
    assert list(grouped.arrived()) == []
    group.ready = 1
    assert grouped.ready and sent == []


def test_after_a_failure_the_next_epoch_tries_again() -> None:
    grouped, group, _ = make()
    grouped.give_up()
    assert not grouped.ready
    grouped.enter_epoch(placement(1), replicas())
    group.ready = 1
    assert grouped.ready and grouped.serves


def test_where_all_hold_all_pages_the_group_is_for_sums() -> None:
    grouped, group, _ = make((run(0, LAST, 0, 1, 2),))
    assert group.changes == [(0, (0, 1, 2))] and grouped.ready
    gather(grouped)
    assert group.gathers == [] and grouped.idle


def test_where_nobody_has_anything_for_another_no_group_is_made() -> None:
    grouped, group, _ = make(())
    assert group.changes == [(0, (ME,))] and grouped.ready, "nothing keeps other stages from theirs"
    gather(grouped)
    assert group.gathers == [] and grouped.idle


def test_pages_of_another_stage_come_over_links() -> None:
    grouped, group, _ = make((run(0, LAST, 7),))
    assert group.changes == [(0, (ME,))] and not grouped.reached((LAYER, 0, LAST))


def begin_a_step(grouped: StageCollectives, step: int = 2) -> None:
    """A step that goes through the group. All of its sums are complete, and no reduced gradient is."""
    give_sums(grouped, step)
    grouped.begin_exchanges()


def give_sums(grouped: StageCollectives, step: int = 2) -> None:
    exchanges = grouped.exchanges
    assert exchanges.plan is not None
    exchanges.agree(step)
    exchanges.begin(step)
    buffer = GradientBuffer(LAYOUT.layers[LAYER], CPU)
    for exchange in exchanges.plan.order:
        for node in exchange.nodes[ME] if isinstance(exchange, SumExchange) else ():
            exchanges.add(exchange.layer, node, buffer)


def test_an_exchange_is_returned_when_it_is_complete() -> None:
    grouped, group, _ = make()
    begin_a_step(grouped)
    ((_, received, work),) = group.exchanges
    assert not grouped.idle and list(grouped.arrived()) == []
    work.done = True
    ((exchange, found),) = grouped.arrived()
    assert isinstance(exchange, SumExchange) and exchange.layer == LAYER and found is received and grouped.idle
    grouped.begin_exchanges()
    assert grouped.idle and not grouped.exchanges.is_over, "the reduced gradients of the layer are to come"
    grouped.exchanges.add_gradient(ReducedPages(RUNS[1], values(RUNS[1], 3.0), [7.0]))
    grouped.begin_exchanges()
    assert group.names == ["PartialSum", "ReducedGradient"]
    (sent, _, work) = group.exchanges[1]
    assert torch.equal(sent[64:128], values(RUNS[1], 3.0)) and sent[128] == 7.0 and not sent[:64].any()
    work.done = True
    ((exchange, _),) = grouped.arrived()
    assert isinstance(exchange, GradientExchange) and exchange.layer == LAYER


@pytest.mark.parametrize("how", ["refused", "failed", "another member gives it up", "a new epoch"])
def test_sums_of_an_exchange_that_fails_are_returned(how: str) -> None:
    grouped, group, sent = make()
    group.refuses = RuntimeError("gone") if how == "refused" else None
    begin_a_step(grouped)
    if how == "failed":
        group.exchanges[0][2].done, group.exchanges[0][2].error = True, RuntimeError("gone")
        assert list(grouped.arrived()) == []
    elif how == "another member gives it up":
        grouped.give_up()
    elif how == "a new epoch":
        grouped.enter_epoch(placement(1), replicas())
    assert sent == (lost("gone") if how in ("refused", "failed") else [])
    assert grouped.idle and {layer for layer, _ in grouped.exchanges.take_back()} == {LAYER}
    assert grouped.exchanges.next() is None


def test_a_vote_offers_the_group_once_the_group_is_there_and_messages_were_handled() -> None:
    grouped, _, _ = make()
    assert grouped.offered() == ""
    grouped.update_offer()
    assert grouped.offered() == GROUPED
    grouped.enter_epoch(placement(1), replicas())
    assert grouped.offered() == "", "a group belongs to an epoch"


def test_with_the_option_off_nothing_is_under_way_or_reached_by_a_group() -> None:
    none = NoCollectives()
    none.enter_epoch(placement(), replicas())
    none.check()
    none.update_offer()
    assert none.idle and not none.has_news and not none.serves
    none.begin_exchanges()
    assert list(none.arrived()) == [] and not none.exchanges.takes(1, LAYER, (0, 1)) and not none.reached(RUNS[1].key)
    assert not none.exchanges.mirrors(1, RUNS[1].key)
    with pytest.raises(AssertionError, match="no vote"):
        none.gather(LAYER, 1, {})
