"""Recovery plans worked out by hand. Random stories are in test_recovery_plan_stories.py."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery import partial_step
from elaswave_spmd.recovery.messages import PartialStep
from elaswave_spmd.recovery.partial_step import recovery_plan
from elaswave_spmd.scheduling.placement import Placement, workers_of_microbatches
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.sharding.layout import LayerUse, ModelLayout, ParameterInfo, lay_out
from elaswave_spmd.sharding.replicas import ReplicaSet

STEP = 5
Stages = tuple[tuple[int, ...], ...]
Runs = dict[int, tuple[ReplicaSet, ...]]


def layers(count: int, pages: int = 2, *, tied: bool = False) -> ModelLayout:
    """`count` layers of so many pages each, and the loss page. `tied`: the last one reads the first one's weight."""
    uses = [LayerUse(f"l{i}", (ParameterInfo(f"l{i}.w", (pages * 64,)),)) for i in range(count)]
    if tied:
        uses[-1] = LayerUse(uses[-1].name, uses[-1].parameters, (("tied", "l0.w"),))
    return lay_out(uses, page_size=64)


def placed(
    stages: Stages, cuts: tuple[int, ...], counts: tuple[tuple[int, ...], ...], runs: Runs | None = None, zero: int = 0
) -> Placement:
    mesh = Mesh(MeshShape.of_stages(map(len, stages)), stages, epoch=1)
    return Placement(mesh, sum(counts[0]), cuts, counts, Shardings().with_zero(zero), replicas=runs)


def run(layer: int, first: int, stop: int, primary: int, *mirrors: int) -> ReplicaSet:
    return ReplicaSet(layer, first, stop, primary, frozenset((primary, *mirrors)))


def has(assigned: tuple[int, ...] = (), computed: tuple[int, ...] = (), **more: object) -> PartialStep:
    return PartialStep(STEP, assigned, computed, **more)  # pyright: ignore[reportArgumentType]


def plan_of(
    placement: Placement,
    layout: ModelLayout,
    held: Mapping[int, PartialStep | None],
    old_layers: Mapping[int, tuple[int, int]] | None = None,
) -> list[str]:
    """Lines like `1: 0FB by 4`: stage, micro-batch, worker; F forward, B backward in full, b for the input's gradient
    only.
    """
    if old_layers is None:
        cuts = placement.layer_cuts
        old_layers = {r: (cuts[s], cuts[s + 1]) for s, ranks in enumerate(placement.mesh.stages) for r in ranks}
    plan = recovery_plan(STEP, placement, layout, held, old_layers)
    assert list(plan) == sorted(plan, key=lambda w: (w.stage, w.microbatch))
    return [f"{w.stage}: {w.microbatch}{'F' * w.forward}{['', 'b', 'B'][w.backward]} by {w.worker}" for w in plan]


# ---- a healthy step


@pytest.mark.parametrize("zero", [0, 2])
def test_nothing_done_and_everybody_alive_is_the_placement(zero: int) -> None:
    p = placed(((0, 1, 2), (3, 4)), (0, 1, 3), ((1, 5, 2), (8, 0)), zero=zero)
    held = {rank: has(p.microbatches_of(rank)) for rank in p.mesh.members}
    wanted = [f"{s}: {u}FB by {p.worker_of_microbatch(s, u)}" for s in range(2) for u in range(8)]
    assert plan_of(p, layers(3), held) == wanted


def test_nobody_has_anything() -> None:
    p = placed(((0, 1, 2),), (0, 1), ((3, 2, 2),))
    wanted = [f"0: {u}FB by {w}" for u, w in enumerate(workers_of_microbatches((0, 1, 2), (3, 2, 2), "contiguous"))]
    assert plan_of(p, layers(1), dict.fromkeys(range(3))) == plan_of(p, layers(1), {}) == wanted


def test_all_entries_somewhere_is_an_empty_plan() -> None:
    runs = {0: (run(0, 0, 1, 0, 1), run(0, 1, 2, 1, 2), run(0, 2, 3, 2, 0))}
    p = placed(((0, 1, 2),), (0, 1), ((2, 2, 2),), runs)
    assert plan_of(p, layers(1), {1: has(reduced=((0, 0, 2),)), 2: has(reduced=((0, 2, 3),))}) == []


def test_a_stage_without_parameters_runs_what_others_need() -> None:
    uses = [LayerUse(f"l{i}", (ParameterInfo(f"l{i}.w", (64,)),) if i != 1 else ()) for i in range(3)]
    p = placed(((0,), (1,), (2,)), (0, 1, 2, 3), ((1,), (1,), (1,)))
    assert plan_of(p, lay_out(uses, page_size=64), {}) == ["0: 0FB by 0", "1: 0Fb by 1", "2: 0FB by 2"]


# ---- a worker is lost: U = 10 dealt 4 / 3 / 3, worker 1 is dead and its pages are worker 0's now


LOST_ONE = {0: (run(0, 0, 1, 0, 2), run(0, 1, 2, 0, 2), run(0, 2, 3, 2, 0))}


def test_a_lost_workers_microbatches_are_dealt_contiguously() -> None:
    p = placed(((0, 2),), (0, 1), ((5, 5),), LOST_ONE)
    held = {
        0: has((0, 1, 2, 3), (0, 1, 2, 3), layer_sums={0: ((0, 4),)}, page_sums=((0, 0, 1, 0, ((0, 4), (8, 10))),)),
        2: has(
            (7, 8, 9),
            (7, 8, 9),
            layer_sums={0: ((7, 8), (8, 10))},
            page_sums=((0, 2, 3, 0, ((0, 4), (7, 8), (8, 10))),),
        ),
    }
    assert plan_of(p, layers(1), held) == ["0: 4FB by 0", "0: 5FB by 0", "0: 6FB by 2"]


def test_whoever_has_less_left_gets_more() -> None:
    p = placed(((0, 2),), (0, 1), ((5, 5),), LOST_ONE)
    held = {
        0: has((0, 1, 2, 3), (0, 1), forwarded=(2,), layer_sums={0: ((0, 2),)}, page_sums=((0, 0, 1, 0, ((0, 2),)),)),
        2: has((7, 8, 9), (7, 8, 9), layer_sums={0: ((7, 8), (8, 10))}, page_sums=((0, 2, 3, 0, ((7, 8), (8, 10))),)),
    }
    # What is worker 0's stays with it; then loads are 2 and 0, and the three lost micro-batches make them 3 and 2.
    assert plan_of(p, layers(1), held) == [
        *("0: 2B by 0", "0: 3FB by 0"),
        *("0: 4FB by 0", "0: 5FB by 2", "0: 6FB by 2"),
    ]


def test_time_major_microbatches_are_dealt_in_turn() -> None:
    p = placed(((0, 2),), (0, 1), ((5, 5),), LOST_ONE, zero=2)
    mine, other = (0, 3, 6, 9), (2, 5, 8)
    nodes = {rank: {0: tuple((u, u + 1) for u in microbatches)} for rank, microbatches in ((0, mine), (2, other))}
    held = {0: has(mine, mine, layer_sums=nodes[0]), 2: has(other, other, layer_sums=nodes[2])}
    assert plan_of(p, layers(1), held) == ["0: 1FB by 0", "0: 4FB by 2", "0: 7FB by 0"]


def test_a_node_that_the_lost_worker_delivered_to_all_is_not_computed_again() -> None:
    p = placed(((0, 2),), (0, 1), ((2, 2),), {0: (run(0, 0, 2, 0, 2), run(0, 2, 3, 2, 0))})
    held = {
        0: has((0, 1), (0, 1), layer_sums={0: ((0, 2),)}, page_sums=((0, 0, 2, 0, ((0, 2), (2, 3))),)),
        2: has((3,), (3,), layer_sums={0: ((3, 4),)}, page_sums=((0, 2, 3, 0, ((2, 4),)),)),
    }
    assert plan_of(p, layers(1), held) == []
    held[2] = has((3,), (3,), layer_sums={0: ((3, 4),)}, page_sums=((0, 2, 3, 0, ((3, 4),)),))
    assert plan_of(p, layers(1), held) == ["0: 2FB by 0"]


# ---- a primary is lost


def test_a_lost_primarys_trees_are_made_again_of_kept_sums() -> None:
    """Worker 2, its mirror, is the primary now: its own sums and the others' count, they are whole for these pages."""
    p = placed(((0, 2),), (0, 1), ((2, 2),), {0: (run(0, 0, 3, 2, 0),)})
    held = {0: has((0, 1), (0, 1), layer_sums={0: ((0, 2),)}), 2: has((2, 3), (2, 3), layer_sums={0: ((2, 3), (3, 4))})}
    assert plan_of(p, layers(1), held) == []


def test_sums_that_went_with_a_primary_are_computed_again_by_the_same_workers() -> None:
    p = placed(((0, 2),), (0, 1), ((2, 2),), {0: (run(0, 0, 3, 2, 0),)}, zero=2)
    held = {0: has((0, 2), (0, 2)), 2: has((1, 3), (1,), forwarded=(3,), layer_sums={0: ((1, 2),)})}
    assert plan_of(p, layers(1), held) == ["0: 0FB by 0", "0: 2FB by 0", "0: 3B by 2"]


def test_a_mirrors_entry_covers_all_of_it() -> None:
    p = placed(((0, 2),), (0, 1), ((2, 2),), {0: (run(0, 0, 3, 2, 0),)}, zero=2)
    assert plan_of(p, layers(1), {0: has((0, 2), (0, 2), reduced=((0, 0, 3),)), 2: has((1, 3), (1, 3))}) == []


def test_an_entry_at_nobody_who_holds_the_run_does_not_count() -> None:
    p = placed(((0, 2),), (0, 1), ((1, 1),), {0: (run(0, 0, 3, 2),)})
    held = {
        0: has((0,), (0,), layer_sums={0: ((0, 1),)}, reduced=((0, 0, 3),)),
        2: has((1,), (1,), layer_sums={0: ((1, 2),)}),
    }
    assert plan_of(p, layers(1), held) == ["0: 0FB by 0"]


def test_local_sums_of_somebody_with_trees_of_the_run_do_not_count_for_it() -> None:
    """It was the primary: what its trees do not name it has not."""
    p = placed(((0, 2),), (0, 1), ((2, 2),), {0: (run(0, 0, 3, 0),)})
    held = {
        0: has((0, 1), (0, 1), layer_sums={0: ((0, 1), (1, 2))}, page_sums=((0, 0, 3, 0, ((0, 1), (2, 4))),)),
        2: has((2, 3), (2, 3)),
    }
    assert plan_of(p, layers(1), held) == ["0: 1FB by 0"]


def test_a_sum_that_a_member_keeps_counts_though_another_that_had_it_too_has_trees() -> None:
    p = placed(((0, 2, 3),), (0, 1), ((1, 1, 1),), {0: (run(0, 0, 3, 0),)})
    held = {
        0: has((0,), (0, 1), layer_sums={0: ((0, 1), (1, 2))}, page_sums=((0, 0, 3, 0, ((0, 1),)),)),
        2: has((1,), (1,), layer_sums={0: ((1, 2),)}),
        3: has((2,), (2,), layer_sums={0: ((2, 3),)}),
    }
    assert plan_of(p, layers(1), held) == []
    held[2] = has((1,))
    assert plan_of(p, layers(1), held) == ["0: 1FB by 2"]


@given(st.dictionaries(st.integers(0, 5), st.integers(0, 63), max_size=6), st.sets(st.integers(0, 7), max_size=4))
def test_the_masks_of_all_but_some_are_the_same_however_they_are_added(
    local: dict[int, int], excluded: set[int]
) -> None:
    everybody, twice = partial_step._together(local.values())  # pyright: ignore[reportPrivateUsage]
    found = partial_step._without(excluded, local, everybody, twice)  # pyright: ignore[reportPrivateUsage]
    assert found == reduce(or_, (mask for rank, mask in local.items() if rank not in excluded), 0)


def test_reports_of_older_runs_count_for_their_parts_and_never_the_other_way_round() -> None:
    whole = {0: (run(0, 0, 2, 0), run(0, 2, 3, 0))}
    parts = {0: (run(0, 0, 1, 0), run(0, 1, 2, 0), run(0, 2, 3, 0))}
    entry = has(reduced=((0, 0, 2), (0, 2, 3)))
    tree = has(page_sums=((0, 0, 2, 0, ((0, 2),)), (0, 2, 3, 0, ((0, 2),))))
    assert plan_of(placed(((0, 2),), (0, 1), ((1, 1),), parts), layers(1), {0: entry}) == []
    assert plan_of(placed(((0, 2),), (0, 1), ((1, 1),), parts), layers(1), {0: tree}) == []
    halves = has(reduced=((0, 0, 1), (0, 2, 3)), page_sums=((0, 1, 2, 0, ((0, 2),)),))
    assert plan_of(placed(((0, 2),), (0, 1), ((1, 1),), parts), layers(1), {0: halves}) == []
    redone = ["0: 0FB by 0", "0: 1FB by 2"]
    assert plan_of(placed(((0, 2),), (0, 1), ((1, 1),), whole), layers(1), {0: halves}) == redone


def test_trees_of_two_members_add_up() -> None:
    p = placed(((0, 2),), (0, 1), ((1, 2),), {0: (run(0, 0, 3, 0, 2),)})
    held = {rank: has(page_sums=((0, 0, 3, 0, (node,)),)) for rank, node in ((0, (0, 1)), (2, (1, 2)))}
    assert plan_of(p, layers(1), held) == ["0: 2FB by 0"]


# ---- who is asked


def test_only_members_count() -> None:
    p = placed(((0, 2),), (0, 1), ((1, 1),), {0: (run(0, 0, 3, 0, 2),)})
    held = {1: has((0, 1), (0, 1), layer_sums={0: ((0, 2),)}, page_sums=((0, 0, 3, 0, ((0, 2),)),))}
    assert plan_of(p, layers(1), held, {0: (0, 1), 1: (0, 1), 2: (0, 1)}) == ["0: 0FB by 0", "0: 1FB by 2"]


def test_the_lowest_rank_of_two_claimers_runs_the_microbatch() -> None:
    p = placed(((2, 0),), (0, 1), ((1, 1),), {0: (run(0, 0, 3, 0, 2),)})
    assert plan_of(p, layers(1), {2: has((0, 1)), 0: has((1,))}) == ["0: 0FB by 2", "0: 1FB by 0"]


def test_a_newcomer_takes_its_share() -> None:
    p = placed(((0, 7),), (0, 1), ((2, 2),), {0: (run(0, 0, 3, 0),)})
    held = {0: has((0, 1)), 7: None}
    assert plan_of(p, layers(1), held) == ["0: 0FB by 0", "0: 1FB by 0", "0: 2FB by 7", "0: 3FB by 7"]


def test_a_report_of_another_step_is_a_mistake() -> None:
    p = placed(((0,),), (0, 1), ((1,),))
    with pytest.raises(AssertionError):
        plan_of(p, layers(1), {0: PartialStep(STEP + 1)})


# ---- stages: micro-batches 0 and 1 went 0 -> 2 -> 4, micro-batches 2 and 3 went 1 -> 3 -> 5; all pages are held by 1,
# 3 and 5


PIPELINE = {s: (run(s, 0, 2, 1, 3), run(s, 2, 3, 1, 3))[: 2 if s == 2 else 1] for s in range(3)}
DONE_ABOVE = {s: ((2, 4),) for s in range(3)}


def pipeline(stages: Stages) -> Placement:
    return placed(stages, (0, 1, 2, 3), tuple((4,) if len(s) == 1 else (2, 2) for s in stages), PIPELINE)


def survivors(**of_two: object) -> dict[int, PartialStep]:
    """Workers 1, 3, 5 have done micro-batches 2 and 3; worker 2 as said."""
    microbatches = (2, 3)
    return {
        1: has(microbatches, microbatches, layer_sums={0: ((2, 4),)}, activations=((1, 2), (1, 3))),
        3: has(
            microbatches,
            microbatches,
            layer_sums={1: ((2, 4),)},
            activations=((2, 2), (2, 3)),
            gradients=((0, 2), (0, 3)),
        ),
        5: has(microbatches, microbatches, layer_sums={2: ((2, 4),)}, gradients=((1, 2), (1, 3))),
        2: has((0, 1), **of_two),  # pyright: ignore[reportArgumentType]
    }


def test_both_neighbours_of_microbatches_are_lost_and_the_one_between_has_done_them() -> None:
    p = pipeline(((1,), (2, 3), (5,)))
    held = survivors(
        computed=(0, 1), layer_sums={1: ((0, 2),)}, activations=((2, 0), (2, 1)), gradients=((0, 0), (0, 1))
    )
    assert plan_of(p, layers(3), held) == ["0: 0FB by 1", "0: 1FB by 1", "2: 0FB by 5", "2: 1FB by 5"]
    # If it reports none of what it sent: the gradients of its inputs and its outputs once more, but no weight gradient.
    held = survivors(computed=(0, 1), layer_sums={1: ((0, 2),)})
    assert plan_of(p, layers(3), held) == [
        *("0: 0FB by 1", "0: 1FB by 1"),
        *("1: 0Fb by 2", "1: 1Fb by 2"),
        *("2: 0FB by 5", "2: 1FB by 5"),
    ]


def test_both_neighbours_are_lost_halfway() -> None:
    """Worker 2 has forward of micro-batch 0 only; micro-batch 1 has not come to it."""
    p = pipeline(((1,), (2, 3), (5,)))
    held = survivors(forwarded=(0,), activations=((2, 0),))
    assert plan_of(p, layers(3), held) == [
        *("0: 0FB by 1", "0: 1FB by 1"),
        *("1: 0B by 2", "1: 1FB by 2"),
        *("2: 0FB by 5", "2: 1FB by 5"),
    ]


def test_activations_are_computed_again_down_to_one_that_is_kept() -> None:
    """Only the last stage lost something; on the way to it outputs are made again without any gradient."""
    p = pipeline(((0, 1), (2, 3), (5,)))
    held = survivors(computed=(0, 1), layer_sums={1: ((0, 2),)}, gradients=((0, 0), (0, 1)))
    held[0] = has((0, 1), (0, 1), layer_sums={0: ((0, 2),)}, activations=((1, 1),))
    assert plan_of(p, layers(3), held) == [
        "0: 0F by 0",
        *("1: 0F by 2", "1: 1F by 2"),
        *("2: 0FB by 5", "2: 1FB by 5"),
    ]


def test_outputs_alone_go_to_whoever_has_the_least_to_do() -> None:
    p = placed(((0, 7), (2, 3), (5,)), (0, 1, 2, 3), ((2, 2), (2, 2), (4,)), PIPELINE)
    p = placed(p.mesh.stages, p.layer_cuts, p.microbatch_counts, {**PIPELINE, 0: (run(0, 0, 2, 0),)})
    held = survivors(
        computed=(0, 1), layer_sums={1: ((0, 2),)}, activations=((2, 0), (2, 1)), gradients=((0, 0), (0, 1))
    )
    del held[1], held[3]
    held[0] = has((0, 1), forwarded=(0, 1), page_sums=((0, 0, 2, 0, ((2, 4),)),))
    # Worker 1 delivered its sums of micro-batches 2 and 3, but its outputs, which stage 1 needs again, went with it.
    assert plan_of(p, layers(3), held)[:4] == ["0: 0B by 0", "0: 1B by 0", "0: 2F by 7", "0: 3F by 7"]


def test_a_gradient_that_nobody_keeps_is_made_again_by_all_stages_above() -> None:
    """Stage 0 has yet to run its backward. No sum of the stages above is missing, so they make no weight gradients."""
    p = pipeline(((0, 1), (2, 3), (4, 5)))
    held = survivors(computed=(0, 1), layer_sums={1: ((0, 2),)})
    held[0] = has((0, 1), forwarded=(0, 1))
    held[4] = has((0, 1), (0, 1), layer_sums={2: ((0, 2),)})
    assert plan_of(p, layers(3), held) == [
        f"{s}: {u}F{g} by {w}" for s, g, w in ((0, "B", 0), (1, "b", 2), (2, "b", 4)) for u in (0, 1)
    ]


def test_an_activation_that_nobody_keeps_is_made_again() -> None:
    """Stage 0 has saved its forwards, so it runs them again only because stage 1 needs their outputs."""
    p = pipeline(((0, 1), (2, 3), (5,)))
    held = survivors(forwarded=(0,))
    held[0] = has((0, 1), forwarded=(0, 1))
    wanted = ["0: 0FB by 0", "0: 1FB by 0", "1: 0FB by 2", "1: 1FB by 2", "2: 0FB by 5", "2: 1FB by 5"]
    assert plan_of(p, layers(3), held) == wanted
    held[0] = has((0, 1), forwarded=(0, 1), activations=((1, 1),))
    wanted[1] = "0: 1B by 0"  # the only input that is kept
    assert plan_of(p, layers(3), held) == wanted


def test_a_stage_goes_to_its_neighbour() -> None:
    """No worker claims a micro-batch of a new stage of two layers; sums and boundaries of single layers count."""
    p = placed(((0, 1),), (0, 2), ((2, 2),), {0: (run(0, 0, 2, 0, 1),), 1: (run(1, 0, 2, 1), run(1, 2, 3, 0))})
    old = {0: (0, 1), 1: (0, 1)}
    held = {
        0: has((0, 1), (0,), forwarded=(1,), layer_sums={0: ((0, 1),)}, activations=((1, 0), (1, 1))),
        1: has((2, 3), (2, 3), layer_sums={0: ((2, 4),)}, page_sums=((1, 0, 2, 1, ((0, 1), (2, 4))),)),
    }
    # Of layer 1 only worker 1 has trees, and of its loss page nobody: all micro-batches, dealt anew, with their
    # forwards.
    everything = [f"0: {u}FB by {u // 2}" for u in range(4)]
    assert plan_of(p, layers(2), held, old) == everything
    held[0] = has((0, 1), (0,), forwarded=(1,), layer_sums={0: ((0, 1),)}, page_sums=((1, 2, 3, 1, ((0, 1), (2, 4))),))
    assert plan_of(p, layers(2), held, old) == ["0: 1FB by 0"]


def test_kept_boundaries_are_found_by_layer_under_other_cuts() -> None:
    """Three stages become two: the edge between layers 1 and 2 is there still, that between 0 and 1 is not."""
    runs = {0: (run(0, 0, 2, 1),), 1: (run(1, 0, 2, 1),), 2: (run(2, 0, 2, 2), run(2, 2, 3, 2))}
    p = placed(((1,), (2,)), (0, 2, 3), ((2,), (2,)), runs)
    old = {1: (1, 2), 2: (2, 3)}
    held = {
        1: has((0, 1), (0,), activations=((2, 0), (2, 1)), gradients=((0, 0),), layer_sums={1: ((0, 1),)}),
        2: has(
            (0, 1), (0, 1), gradients=((1, 0), (1, 1)), page_sums=((2, 0, 2, 2, ((0, 2),)), (2, 2, 3, 2, ((0, 2),)))
        ),
    }
    assert plan_of(p, layers(3), held, old) == ["0: 0FB by 1", "0: 1FB by 1"]


# ---- tied parameters: layer 2 reads the weight of layer 0; stages (0, 1) and (2, 3) of 2 micro-batches each


TIED = {0: (run(0, 0, 2, 0, 1),), 1: (run(1, 0, 2, 1, 0),), 2: (run(2, 0, 2, 2, 0), run(2, 4, 5, 2, 0))}


def test_a_lost_reader_is_computed_again_and_the_owner_is_not() -> None:
    p = placed(((0, 1), (2,)), (0, 2, 3), ((1, 1), (2,)), TIED)
    owners = {0: ((0, 2),), 1: ((0, 2),)}
    held = {
        0: has(
            (0,),
            (0,),
            layer_sums=owners,
            activations=((2, 0),),
            page_sums=((0, 0, 2, 0, ((0, 2),)), (0, 0, 2, 2, ((0, 1),))),
        ),
        1: has((1,), (1,), layer_sums={0: ((1, 2),), 1: ((1, 2),)}, activations=((2, 1),), reduced=((1, 0, 2),)),
        2: has((0,), (0,), reduced=((2, 0, 2), (2, 4, 5))),
    }
    # Worker 3's micro-batch 1 is in the entries of layer 2's own pages, but its part of the tied weight was not
    # delivered.
    assert plan_of(p, layers(3, tied=True), held) == ["1: 1FB by 2"]
    held[2] = has((0, 1), (0, 1), reduced=((2, 0, 2), (2, 4, 5)), layer_sums={2: ((0, 2),)})
    assert plan_of(p, layers(3, tied=True), held) == []
    held[1] = has((1,), (1,), reduced=((0, 0, 2), (1, 0, 2)))
    held[2] = has((0,), (0,), reduced=((2, 0, 2), (2, 4, 5)))
    assert plan_of(p, layers(3, tied=True), held) == [], "a mirror has the entry, of all uses"


def test_trees_of_one_use_say_nothing_of_another() -> None:
    p = placed(((0, 1), (2,)), (0, 2, 3), ((1, 1), (2,)), TIED)
    held = {
        0: has((0,), (0,), page_sums=((0, 0, 2, 2, ((0, 2),)),)),
        1: has((1,), (1,), reduced=((1, 0, 2),)),
        2: has((0, 1), (0, 1), reduced=((2, 0, 2), (2, 4, 5)), gradients=((1, 0), (1, 1))),
    }
    assert plan_of(p, layers(3, tied=True), held) == ["0: 0FB by 0", "0: 1FB by 1"]
