"""What policies come to: by hand, against each other, and against the optimum over all groupings."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.errors import PlanError
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.cost_model import CostModel, LayerCost, MemoryRule
from elaswave_spmd.scheduling.dvfs import FrequencyRange
from elaswave_spmd.scheduling.microbatch_assignment import assign_microbatches
from elaswave_spmd.scheduling.split_backward import SplitBackward, executed
from elaswave_spmd.scheduling.step_time import Assignment, memory_of, step_time
from elaswave_spmd.simulator.changes import Change, remaining_share
from elaswave_spmd.simulator.optimum import optimum
from elaswave_spmd.simulator.policies import Case, DropReplica, Ours, Policy, Restart, columns_of
from elaswave_spmd.simulator.reroute import Reroute
from elaswave_spmd.simulator.scenario import EventCase, Events
from elaswave_spmd.simulator.shapes import alike, healthy
from elaswave_spmd.simulator.tables import cases_of
from elaswave_spmd.simulator.templates import Templates
from tests.unit.scheduling.planning_cases import costs_of, rule_of
from tests.unit.simulator.sim_cases import case_of

POLICIES: tuple[Policy, ...] = (Ours(), Reroute(), DropReplica(), Templates(), Restart())


def ratios(mesh: str, microbatches: int, event: str, **more) -> dict[str, float]:
    case = case_of(mesh, microbatches, event, **more)
    return {policy.name: case.ratio(policy.answer(case)) for policy in POLICIES}


# ---- changes


@pytest.mark.parametrize(
    "text, change",
    [
        ("fail 6", Change((6,))),
        ("fail 3 6", Change((3, 6))),
        ("slow 2 0.5", Change((), ((2, 0.5),))),
        ("join 1", Change(joined=1)),
        (" fail 1;  slow 2 .25 ; join 2 ", Change((1,), ((2, 0.25),), 2)),
    ],
)
def test_events_are_read_and_written(text, change):
    assert Change.parse(text) == change
    assert Change.parse(str(change)) == change


@pytest.mark.parametrize(
    "text, telling",
    [
        ("", "an event is known"),
        ("explode 6", "an event is known"),
        ("fail", "fail is followed by"),
        ("slow 2", "slow is followed by"),
        ("join 1 2", "join is followed by"),
        ("fail six", "whole numbers"),
        ("fail -1", "whole numbers"),
        ("slow 2 fast", "a speed is a number"),
        ("slow 2 1.5", "between 0 and 1"),
        ("slow 2 0", "between 0 and 1"),
        ("slow 2 nan", "between 0 and 1"),
        ("fail 3 3", "one thing happens"),
        ("fail 3; slow 3 0.5", "one thing happens"),
    ],
)
def test_events_that_are_none_are_refused(text, telling):
    with pytest.raises(PlanError, match=telling):
        Change.parse(text)


def test_an_event_is_of_workers_that_exist_and_leaves_one():
    mesh = Mesh.initial(MeshShape.parse("dp2_pp2"))
    with pytest.raises(PlanError, match="rank 4") as caught:
        Change.parse("fail 1 4").check(mesh)
    assert "0-3" in caught.value.exists
    with pytest.raises(PlanError, match="somebody is left"):
        Change.parse("fail 0 1 2 3").check(mesh)
    assert Change.parse("fail 0 1 2 3; join 1").check(mesh).stages(mesh) == ((4,),)
    assert Change.parse("fail 1; join 1").stages(mesh) == ((0, 4), (2, 3))


def test_speed_that_is_left():
    mesh = Mesh.initial(MeshShape.parse("dp4"))
    costs = costs_of([1.0]).with_speeds({3: 0.5})
    assert remaining_share(mesh, costs, Change((3,))) == pytest.approx(3 / 3.5)
    assert remaining_share(mesh, costs, Change((), ((0, 0.25),), 1)) == pytest.approx((0.25 + 2 + 0.5 + 1) / 3.5)


# ---- by hand


def test_one_stage_by_hand():
    """8 micro-batches of 3 s on 4 workers: 2 each. Of three, somebody has 3."""
    found = ratios("dp4", 8, "fail 1", seconds=(3.0,))
    assert found == pytest.approx(
        {
            "ours": (6 / 9) / 0.75,
            "reroute": (6 / 9) / 0.75,
            "drop replica": 1.0,  # three quarters of the micro-batches in the same time
            "templates": (6 / 9) / 0.75,
            "restart": 1.0,
        }
    )


def test_a_pipeline_of_two_by_hand():
    """dp2_pp2, 8 micro-batches, a micro-batch takes 12 s on a stage; one of stage 1 is lost, whose peer has all 8
    micro-batches then.
    """
    case = case_of("dp2_pp2", 8, "fail 3", steps=0)
    assert case.before_s == pytest.approx((4 + 1) * 12)
    whole = Reroute(split=False).answer(case)
    assert whole.step_s >= 8 * 12 + 12 and whole.microbatches == 8
    split = Reroute().answer(case)
    assert 8 * 12 <= split.step_s < whole.step_s
    drop = DropReplica().answer(case)
    assert (drop.step_s, drop.microbatches) == (pytest.approx(60), 4)
    chains = Templates().answer(
        case
    )  # [0, 2] goes on; 1 alone runs all layers: 24 s a micro-batch, against 12 and once 12
    assert chains.step_s == pytest.approx(min(max((u + 1) * 12, (8 - u) * 24) for u in range(9)))


def test_slow_workers_are_waited_for_or_dropped():
    late, lame = (case_of("dp4", 16, f"slow 2 {speed}", seconds=(3.0,)) for speed in (0.9, 0.1))
    for policy in (DropReplica(), Reroute(), Templates(), Restart()):
        assert policy.answer(late).throughput < 16 / 12
    assert DropReplica().answer(late).microbatches == 16 and DropReplica().answer(late).step_s == pytest.approx(
        12 / 0.9
    )
    assert DropReplica().answer(lame).microbatches == 12 and DropReplica().answer(lame).step_s == pytest.approx(12)
    assert Reroute().answer(lame).step_s == pytest.approx(18), "6 micro-batches of 3 s on one of the three others"
    assert Ours().answer(late).step_s == pytest.approx(12 / 0.9), "whole micro-batches: nobody else can have a fifth"
    half = case_of("dp4", 16, "slow 2 0.5", seconds=(3.0,))
    assert (Ours().answer(half).step_s, Reroute().answer(half).step_s) == pytest.approx((15, 18))


def test_a_stage_that_is_gone_stops_those_that_keep_layers_where_they_are():
    found = ratios("dp4_pp4", 16, "fail 4 5 6 7")
    assert found["reroute"] == found["drop replica"] == 0
    assert found["ours"] > 0.7 and found["restart"] == pytest.approx(1.0) and found["templates"] > 0
    case = case_of("dp4_pp4", 16, "fail 4 5 6 7")
    assert DropReplica().answer(case).step_s == math.inf
    assert Ours().answer(case).recovery_s >= case.before_s * 0.4, "nothing of the step is kept"


def test_a_pipeline_that_is_gone_costs_a_replica_nothing_more():
    found = ratios("dp4_pp4", 64, "fail 1 5 9 13")
    assert found["drop replica"] == found["restart"] == pytest.approx(1.0)


def test_replicas_need_an_even_mesh():
    case = case_of("stages3-2", 6, "fail 4")
    for policy in (DropReplica(), Restart(), Templates()):
        with pytest.raises(PlanError, match="stages of equal size"):
            policy.answer(case)
    assert Reroute().answer(case).step_s > 0 and Ours().answer(case).step_s > 0


def test_templates_make_up_pipelines_of_those_that_are_too_short():
    """dp2_pp4: one pipeline loses three of four; the last one joins the other pipeline."""
    case = case_of("dp2_pp4", 16, "fail 1 3 5")
    found = Templates().answer(case)
    assert found.note.startswith("pipelines of [5] workers") and found.microbatches == 16
    two = Templates().answer(case_of("dp3_pp4", 16, "fail 0 1 3 4 6 7"))
    assert two.note.startswith("pipelines of [4, 2] workers"), "what two of them have left makes up another one"


def test_recovery_seconds_say_what_is_done_again():
    case = case_of("dp4_pp2", 16, "fail 6", state_bytes=10**12)
    found = {policy.name: policy.answer(case).recovery_s for policy in POLICIES}
    assert found["restart"] == pytest.approx(1 + 600 + 300)
    assert found["reroute"] == found["drop replica"] == pytest.approx(1 + case.before_s / 2)
    assert 1 < found["ours"] < 1 + case.before_s
    assert found["templates"] == pytest.approx(1 + case.before_s / 2 + 4), "four layers of a TB at a TB/s"
    slow = case_of("dp4_pp2", 16, "slow 6 0.9")
    assert all(policy.answer(slow).recovery_s == 0 for policy in POLICIES)


# ---- invariants

EVENTS = st.tuples(st.integers(2, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 2), st.integers(0, 999))


@given(EVENTS)
@settings(max_examples=40)
def test_what_holds_for_all_policies(shape):
    """Layers that are alike, as many for each stage, as many micro-batches for each worker."""
    dp, pp, microbatches, lost, seed = shape
    workers = dp * pp
    gone = sorted({seed % workers, (seed // 7 + 1) % workers} if lost == 2 else {seed % workers})
    if len(gone) == workers:
        return
    event = "fail " + " ".join(map(str, gone))
    case = case_of(f"dp{dp}_pp{pp}", dp * microbatches, event, (3.0,) * (2 * pp))
    columns = {rank % dp for rank in gone}
    answers = {policy.name: policy.answer(case) for policy in POLICIES}
    for outcome in answers.values():
        assert outcome.recovery_s >= 0 and outcome.throughput >= 0
    drop = case.ratio(answers["drop replica"])
    assert drop == pytest.approx((dp - len(columns)) / dp / case.share) and drop <= 1 + 1e-9
    assert answers["reroute"].step_s >= case.before_s * (1 - 1e-9)
    assert answers["reroute"].step_s <= Reroute(split=False).answer(case).step_s * (1 + 1e-9)
    axes = [Ours(layers=False, stages=False), Ours(stages=False), Ours()]
    seconds = [policy.answer(case).step_s for policy in axes]
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(seconds)), "each axis only helps"
    assert answers["ours"].microbatches == case.healthy.num_microbatches


@given(EVENTS)
@settings(max_examples=40)
def test_ours_computes_no_longer_than_rerouting_where_both_keep_layers(shape):
    """Dealing is optimal: nobody has more micro-batches than the one with most of them when micro-batches are
    rerouted.
    """
    dp, pp, microbatches, _, seed = shape
    event = f"fail {seed % (dp * pp)}"
    case = case_of(f"dp{dp}_pp{pp}", dp * microbatches, event, (3.0,) * (2 * pp))
    decision = Ours(layers=False, stages=False).answer(case).decision
    assert decision is not None
    work = Reroute(split=False)
    ours = decision.now.time.bottleneck_s
    assert ours <= work.answer(case).step_s * (1 + 1e-9)
    most = -(-dp * microbatches // (dp - 1)) * 6
    assert ours == pytest.approx(most)


def test_frequencies_take_back_what_whole_microbatches_cost():
    case = case_of("dp4_pp2", 64, "fail 6")
    plain = Ours(layers=False, stages=False).answer(case)
    raised = Ours(layers=False, stages=False, frequencies=FrequencyRange(0.8, 1.1)).answer(case)
    assert plain.step_s / 1.1 <= raised.step_s * (1 + 1e-9) and raised.step_s < plain.step_s
    assert raised.decision is not None and raised.decision.hints


def test_columns_are_the_replicas():
    case = case_of("dp2_pp3", 4, "fail 1")
    assert columns_of(case.healthy, "any") == [(0, 2, 4), (1, 3, 5)]


# ---- optimum


def every_grouping(costs: CostModel, ranks: list[int], microbatches: int):
    """All orders of workers into stages, all cuts, micro-batches assigned by the first aim or by all."""
    layers = len(costs.layers)
    for number in range(1, min(len(ranks), layers) + 1):
        for inner in combinations(range(1, layers), number - 1):
            for places in product(range(number), repeat=len(ranks)):
                stages = tuple(tuple(r for r, p in zip(ranks, places, strict=True) if p == s) for s in range(number))
                if all(stages):
                    speeds = [costs.speeds_of(members) for members in stages]
                    for fewest_nodes in (True, False):
                        counts = assign_microbatches(microbatches, speeds, fewest_nodes=fewest_nodes).counts
                        yield Assignment(stages, (0, *inner, layers), counts)


@given(
    st.lists(st.sampled_from([1.0, 2.0, 3.5]), min_size=1, max_size=4),
    st.lists(st.sampled_from([1.0, 1.0, 0.5]), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from([math.inf, math.inf, 9.0]),
)
@settings(max_examples=25)
def test_the_optimum_is_the_best_of_all_groupings(seconds, speeds, microbatches, limit):
    costs = costs_of(seconds, value_bytes=3).with_speeds(dict(enumerate(speeds)))
    rule = rule_of(0)
    ranks = sorted(range(len(speeds)), key=lambda rank: -speeds[rank])  # the fastest first, as it groups them
    fit = [a for a in every_grouping(costs, ranks, microbatches) if max(memory_of(a, costs, rule)) <= limit]
    found = optimum(costs, ranks, microbatches, rule=rule, memory_limit=limit, most=10_000)
    if found is None:
        assert not fit
        return
    best = min(step_time(a, costs, rule).seconds for a in fit)
    assert found.proven and found.bound_s <= found.best_s * (1 + 1e-9)
    assert found.best_s == pytest.approx(best)
    assert found.best_s == pytest.approx(step_time(found.assignment, costs, rule).seconds)


@given(
    st.lists(st.sampled_from([1.0, 2.0, 3.5]), min_size=1, max_size=4),
    st.lists(st.sampled_from([1.0, 1.0, 0.5]), min_size=1, max_size=4),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([15.0, 25.0, 40.0]),
)
@settings(max_examples=25, deadline=None)
def test_the_optimum_leaves_out_no_grouping_that_fits_in_memory(seconds, speeds, microbatches, splits, limit):
    layers = costs_of(seconds, value_bytes=3, gradient_bytes=2, activation_bytes=5, put_off_bytes=1).layers
    layers = tuple(replace(layer, weight_share=0.5 * splits) for layer in layers)
    costs, rule = CostModel(layers, 1e9, speeds=tuple(enumerate(speeds))), rule_of(0)
    split = SplitBackward.of_costs(costs, rule, limit)
    ranks = sorted(range(len(speeds)), key=lambda rank: -speeds[rank])
    every = [executed(a, split) for a in every_grouping(costs, ranks, microbatches)]
    fit = [a for a in every if max(memory_of(a, costs, rule)) <= limit]
    found = optimum(costs, ranks, microbatches, rule=rule, memory_limit=limit, split=split, most=10_000)
    if fit:
        assert found is not None and found.proven
        assert found.best_s <= min(step_time(a, costs, rule).seconds for a in fit) * (1 + 1e-9)


def test_the_optimum_knows_that_with_backwards_in_two_parts_fewer_are_in_flight():
    layer = LayerCost("l", 1.0, 2.0, value_bytes=3, activation_bytes=5, weight_share=0.5)
    costs = CostModel((layer, layer), 1e9)
    split = SplitBackward.of_costs(costs, rule_of(0), 9.0)
    found = optimum(costs, (0, 1), 4, rule=rule_of(0), memory_limit=9.0, split=split)
    assert found is not None and found.proven
    assert (found.assignment.layer_cuts, found.assignment.in_flight) == ((0, 1, 2), (1, 1))
    assert optimum(costs, (0, 1), 4, rule=rule_of(0), memory_limit=9.0) is None, "else two are on the first stage"


def test_the_optimum_may_be_asked_for_some_numbers_of_stages():
    costs = costs_of([1.0] * 4)
    both = [optimum(costs, range(4), 4, stage_counts=[n]) for n in (1, 4)]
    assert [len(o.assignment.stages) for o in both if o] == [1, 4]
    cut_off = optimum(costs_of([1.0, 2.0, 1.0, 2.0]), range(4), 7, most=1)
    assert cut_off is not None and cut_off.looked_at == 1


def test_no_plan_beats_the_optimum():
    for event in ("fail 3", "slow 3 0.5"):
        case = case_of("dp2_pp2", 6, event, (3.0, 1.0, 2.0, 3.0))
        present = [rank for members in case.change.stages(case.placement.mesh) for rank in members]
        least = optimum(case.after, present, 6, rule=case.rule)
        assert least is not None and least.best_s <= Ours().answer(case).step_s * (1 + 1e-9)


@pytest.mark.parametrize("policy", [Reroute(split=False), DropReplica(), Restart()])
def test_only_ours_and_reroute_run_backwards_in_two_parts(policy):
    """A step before the loss is the same for all: with whole backwards. What ours takes then stands beside it."""
    whole = case_of("dp3_pp4", 12, "fail 4")
    layers = tuple(replace(layer, weight_share=0.5) for layer in whole.costs.layers)
    split = replace(whole, costs=replace(whole.costs, layers=layers))
    assert split.before_s == whole.before_s and policy.answer(split) == policy.answer(whole)
    assert split.seconds(split.healthy_split, split.costs) < split.before_s
    ours, decision = Ours().answer(split), Ours().answer(split).decision
    assert ours.step_s < Ours().answer(whole).step_s and ours.recovery_s < Ours().answer(whole).recovery_s * 1.1
    assert decision is not None and any(decision.last.assignment.put_off)


def test_what_is_put_off_fits_in_the_memory_of_a_case():
    costs = alike(16)
    placement = healthy(Mesh.initial(MeshShape.parse("dp2_pp4")), costs, 16)
    needed = max(memory_of(Assignment.of(placement), costs, MemoryRule(placement.shardings)))
    of_limit = [
        Case(placement, costs, Change(), memory_limit=limit).healthy_split.put_off
        for limit in (math.inf, needed, 100 * needed)
    ]
    assert of_limit[0] == (0, 1, 2, 3) and of_limit[2] == (0, 8, 8, 8)
    assert of_limit[1][0] == 0 and 0 < of_limit[1][3] < 8
    assert Case(placement, alike(16, weight_share=0), Change()).split is None


def test_no_plan_is_left_for_one_that_takes_longer_as_a_whole():
    """Steps of 12,288 actions and more: where a part told that 43 stages were faster, they took 5 % longer."""
    row = EventCase("34B", "dp6_pp16", 384, model={"llama": "34B"}, lose=(4,))
    ((_, (_, second)),) = cases_of(Events("", (row,), memory=1.25, draws=2), row)
    decision = Ours().answer(second).decision
    assert decision is not None
    now_s, last_s = (second.seconds(each.assignment, second.after) for each in (decision.now, decision.last))
    assert decision.now.time.seconds == now_s, "it was judged as a whole"
    assert last_s <= now_s
