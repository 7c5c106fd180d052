"""Stages have groups: the same bits, whoever is lost and whatever fails in the middle of what goes through them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from elaswave_spmd.determinism.reduction_tree import Node
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.controller_protocol import Policy
from elaswave_spmd.worker.gradient_reduction import GradientReducer
from elaswave_spmd.worker.gradient_routes import Route
from elaswave_spmd.worker.sum_checks import SumChecks
from elaswave_spmd.worker.sum_exchange import Exchange, StageExchanges, SumExchange
from tests.cluster.faults import SENDER, AnyFault, Fault, MessageFault
from tests.cluster.grouped import GroupedCluster
from tests.cluster.schedules import run_many
from tests.simulated.bits_cases import MirroredCluster, Run, expected, one_thread, outcome

MESHES = ["dp2", "dp3", "dp4", "dp2_pp2", "dp3_pp2", "stages1-3"]
CHUNK = 30


class Grouped(GroupedCluster, MirroredCluster):
    """The workers of a run, and how often one sent something to another of its stage by a link, by step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.by_link: Counter[int] = Counter()
        self.sums_by_link: Counter[int] = Counter()
        self.gradients_by_link: Counter[int] = Counter()
        self.beside_groups = 0  # reduced gradients that went over a link while a group brought them to other mirrors
        super().__init__(*args, **kwargs)

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        mesh = self.protocol.placement.mesh
        counters = {m.Publish: self.by_link, m.PartialSum: self.sums_by_link, m.ReducedGradient: self.gradients_by_link}
        is_counted = isinstance(message, m.Publish | m.PartialSum | m.ReducedGradient)
        if is_counted and {sender, peer} <= {*mesh.members}:
            counters[type(message)][message.step] += mesh.stage_of(sender) == mesh.stage_of(peer)
        if isinstance(message, m.ReducedGradient) and (executor := self._workers[sender].executor) is not None:
            exchanges = executor.replica.parameters.grouped.exchanges
            by_group = exchanges.mirrors(message.step, (message.layer, message.first, message.stop))
            assert peer not in by_group, "whoever the group serves gets nothing over links"
            self.beside_groups += bool(by_group)
        if isinstance(message, m.Vote):
            executor = self._workers[sender].executor
            assert executor is None or executor.replica.parameters.grouped.idle, "nobody votes while it still copies"
        super().send(sender, peer, message, payload)


def train(run: Run, mesh: str, zero: int, *faults: AnyFault, **how: Any) -> Grouped:
    cluster = Grouped(run, mesh, zero, faults=faults, **how)
    assert outcome(cluster.run()) == expected(run)
    return cluster


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many sums and reduced gradients exchanges had been given and may not have brought."""
    found = Counter[str]()
    for kind, name in (("sums", "take_back"), ("gradients", "take_back_gradients")):
        take_back = getattr(StageExchanges, name)

        def _take_back(self: StageExchanges, kind: str = kind, take_back: Any = take_back) -> Any:
            taken = take_back(self)
            found[kind] += len(taken)
            return taken

        monkeypatch.setattr(StageExchanges, name, _take_back)
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", MESHES)
@one_thread()
def test_a_stage_publishes_and_adds_up_through_its_group(mesh: str, zero: int) -> None:
    cluster = train(Run(microbatches=5, steps=4), mesh, zero, failing=0.0, seed=zero)
    ended = cluster.hub.ended
    # With one mirror for each page of a stage of two nobody lacks any parameters; sums go to primaries all the same.
    assert (ended["gathered"] > 0) == (zero > 0 and mesh not in ("dp2", "dp2_pp2"))
    assert ended["exchanged"] > 0 and not ended["failed"] + ended["refused"]
    # A group may come too late for the first steps; none is needed for what its last step leaves behind.
    assert cluster.by_link[4] == 0
    assert cluster.sums_by_link[1] > 0 == cluster.sums_by_link[4], "the first step of an epoch goes by links"
    assert cluster.gradients_by_link[1] > 0 == cluster.gradients_by_link[4]


@pytest.mark.parametrize("model", ["gpt_tied", "llama_tied", "inf"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@one_thread()
def test_ties_and_steps_without_an_update(model: str, dtype: str) -> None:
    cluster = train(Run(model=model, dtype=dtype, microbatches=5, steps=6), "stages1-3", 2, failing=0.0)
    assert cluster.hub.ended["gathered"] > 0 and cluster.hub.ended["exchanged"] > 0


@pytest.mark.parametrize("seed", range(4))
@one_thread()
def test_links_take_over_from_a_group_that_fails(seed: int) -> None:
    cluster = train(Run(microbatches=5, steps=8), "dp4", 1 + seed % 3, failing=0.01, seed=seed, uneven=bool(seed % 2))
    assert cluster.hub.ended["failed"] + cluster.hub.ended["refused"] > 0
    assert sum(cluster.by_link[step] for step in range(1, 9)) > 0 and not cluster.result.epochs, "in the same epoch"


@pytest.mark.parametrize("point", ["apply", "publish"])
@pytest.mark.parametrize("seed", range(4))
@one_thread()
def test_a_worker_is_lost_while_its_stage_publishes(point: str, seed: int) -> None:
    fault = Fault(3, "kill" if seed % 2 else "stop", 1, point, turns=30)
    cluster = train(Run(microbatches=5, steps=6), "dp4", 1 + seed % 3, fault, failing=0.0, seed=seed)
    assert cluster.result.epochs and cluster.hub.ended["gathered"] > 0


@pytest.mark.parametrize("point", ["backward", "reduce", "norm"])
@pytest.mark.parametrize("kind", ["kill", "stop"])
@pytest.mark.parametrize("zero", range(4))
@one_thread()
def test_a_worker_is_lost_while_its_stage_exchanges(point: str, kind: str, zero: int, returned: Counter[str]) -> None:
    fault = Fault(4, kind, 1, point, count=2, turns=30)
    cluster = train(Run(microbatches=8, steps=6), "dp4", zero, fault, failing=0.0, seed=zero)
    assert cluster.result.epochs and cluster.hub.ended["exchanged"] > 0
    assert returned["sums"] and (point != "norm" or returned["gradients"])


@pytest.mark.parametrize("zero", range(4))
@one_thread()
def test_a_change_that_loses_nobody_is_in_the_middle_of_exchanges(zero: int, returned: Counter[str]) -> None:
    """A link is lost: what the group may not have brought is sent again, in the next epoch, over links."""
    fault = MessageFault("unlink", "ActivationGradient", SENDER, False, 32)
    cluster = train(Run(microbatches=8, steps=6), "dp3_pp2", zero, fault, failing=0.0, seed=zero)
    assert cluster.result.epochs and cluster.hub.ended["exchanged"] > 0
    assert returned["sums"] and returned["gradients"]


@pytest.mark.parametrize("zero", range(4))
@one_thread()
def test_mirrors_in_another_stage_get_reduced_gradients_over_links(zero: int) -> None:
    """A stage of two has one mirror for each page of its own; the other of two mirrors is in the other stage."""
    policy = Policy(mirror_count=2)
    cluster = train(Run(microbatches=5, steps=4), "dp2_pp2", zero, failing=0.0, policy=policy, seed=zero)
    assert cluster.hub.ended["exchanged"] > 0 and cluster.beside_groups > 0


@one_thread()
def test_a_worker_without_microbatches_takes_part_in_exchanges() -> None:
    cluster = train(Run(microbatches=3, steps=4), "dp4", 2, failing=0.0)
    assert cluster.hub.ended["exchanged"] > 0 == cluster.sums_by_link[4]


# ---- stages with several workers on each of several hosts


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many exchanges of sums were complete on some worker, by their way."""
    found, exchanged = Counter[str](), GradientReducer.exchanged

    def _exchanged(self: GradientReducer, exchange: Exchange, values: Tensor) -> Any:
        if isinstance(exchange, SumExchange):
            found[exchange.way.value] += 1
        return exchanged(self, exchange, values)

    monkeypatch.setattr(GradientReducer, "exchanged", _exchanged)
    return found


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("mesh", "hosts"), [("dp4", 2), ("dp6", 3), ("dp4_pp2", 4), ("dp4_pp2", 2)])
@one_thread()
def test_sums_are_added_up_on_a_host_first(mesh: str, hosts: int, zero: int, ways: Counter[str]) -> None:
    model = "gpt_tied" if zero in (1, 2) else "gpt"
    run = Run(model=model, microbatches=12 if mesh == "dp6" else 8, steps=4)
    cluster = train(run, mesh, zero, failing=0.0, seed=zero, hosts=hosts)
    is_on_one = mesh == "dp4_pp2" and hosts == 2  # each stage has a host of its own
    assert bool(ways["between hosts"]) != is_on_one and bool(ways["direct"]) == is_on_one
    assert cluster.sums_by_link[4] == 0 or model == "gpt_tied"


@pytest.mark.parametrize("point", ["backward", "reduce", "norm"])
@pytest.mark.parametrize(
    ("kind", "zero"), [("kill", 0), ("stop", 1), ("replace", 1), ("kill", 2), ("stop", 2), ("kill", 3)]
)
@one_thread()
def test_a_worker_is_lost_while_hosts_exchange(
    point: str, kind: str, zero: int, ways: Counter[str], returned: Counter[str]
) -> None:
    fault = Fault(4, kind, 1, point, count=2, turns=30)
    cluster = train(Run(microbatches=8, steps=6), "dp4", zero, fault, failing=0.0, seed=zero, hosts=2)
    assert cluster.result.epochs and ways["between hosts"] > 0 and returned["sums"]


@one_thread()
def test_links_take_over_from_exchanges_between_hosts(ways: Counter[str], returned: Counter[str]) -> None:
    """Groups fail anywhere in the exchanges of a step, in the same mesh epoch."""
    failed = 0
    for seed in range(9):
        run = Run(microbatches=8, steps=6)
        cluster = train(run, "dp4", 1 + seed % 3, failing=0.004, seed=seed, hosts=2, uneven=bool(seed % 2))
        assert not cluster.result.epochs
        failed += bool(cluster.hub.ended["failed"] + cluster.hub.ended["refused"])
    assert failed >= 5 and ways["between hosts"] > 50 and returned["sums"]


@pytest.mark.parametrize("zero", [1, 2])
@one_thread()
def test_a_collector_that_adds_wrongly_is_found(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever sum of worker 1 is wrong, of its own micro-batches or of its host's: it is evicted, and nobody else."""
    found, made, wrong = SumChecks.collected, Counter[str](), 0

    def collected(self: SumChecks, step: int, route: Route, node: Node, value: Tensor) -> Tensor:
        sent = found(self, step, route, node, value)
        made["wrong"] += not torch.equal(sent, value)
        return sent

    monkeypatch.setattr(SumChecks, "collected", collected)
    for count in range(1, 40):
        fault, made["wrong"] = Fault(4, "miscompute", 1, "sum", count), 0
        run = Run(microbatches=8, steps=6)
        cluster = Grouped(run, "dp4", zero, faults=(fault,), failing=0.0, hosts=2, verify_rate=1.0)
        trained = cluster.run()
        assert outcome(trained) == expected(run)
        lost = [rank for begun in trained.epochs for rank, kind in begun.kinds.items() if kind == "fail"]
        assert lost == [1] * cluster.plan.num_injected, (count, made)
        wrong += bool(made["wrong"])
        if wrong == 3:
            return
    raise AssertionError("three of these are sums that it has collected")


@pytest.mark.parametrize(("mesh", "microbatches", "zero", "rank"), [("dp4", 10, 1, 3), ("dp6", 14, 2, 2)])
@one_thread()
def test_a_collector_does_not_answer_for_what_it_passes_on(mesh: str, microbatches: int, zero: int, rank: int) -> None:
    """Some sums of a host's workers are merged with no other, and leave the host as they were made."""
    run, injected = Run(microbatches=microbatches, steps=6), 0
    for count in (1, 2, 3, 7):
        fault = Fault(4, "miscompute", rank, "sum", count)
        cluster = Grouped(run, mesh, zero, faults=(fault,), failing=0.0, hosts=2, verify_rate=1.0)
        trained = cluster.run()
        assert outcome(trained) == expected(run)
        lost = [who for begun in trained.epochs for who, kind in begun.kinds.items() if kind == "fail"]
        assert lost in ([], [rank]), count  # a bit of padding, or one too small to be seen, is none
        injected += len(lost)
    assert injected >= 2


@pytest.mark.parametrize("miscompute", [False, True])
def test_no_schedule_with_several_hosts_changes_a_bit_or_gets_stuck(miscompute: bool) -> None:
    tally = run_many(range(CHUNK // 2), spread=True, miscompute=miscompute)
    assert tally.failures == {}
    assert tally.injected > CHUNK // 2 and tally.ends["bits"] > CHUNK // 4


@one_thread()
def test_a_primary_whose_state_is_damaged_has_nothing_to_publish() -> None:
    cluster = train(
        Run(microbatches=5, steps=6), "dp3", 1, Fault(3, "corrupt", 1, "forward"), failing=0.0, verify_every=1, seed=2
    )
    assert cluster.result.epochs and cluster.hub.ended["gathered"] > 0


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("first", range(0, 2 * CHUNK, CHUNK))
def test_no_schedule_of_faults_changes_a_bit_or_gets_stuck(first: int, moving: bool) -> None:
    tally = run_many(range(first, first + CHUNK), moving=moving, grouped=True)
    assert tally.failures == {}
    assert tally.injected > CHUNK and tally.ends["bits"] > CHUNK // 2, "faults did happen, and runs came to their ends"
