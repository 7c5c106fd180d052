"""The step that a loss falls into: what the simulator executes again is what the recovery plan of a run orders."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.recovery.messages import PartialStep
from elaswave_spmd.recovery.partial_step import FULL, INPUT_GRADIENT, WEIGHTS_ONLY, recovery_plan
from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, WEIGHTS, PipelineAction
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.step_time import Assignment
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.sharding.layout import LayerUse, ParameterInfo, lay_out
from elaswave_spmd.simulator.recompute import recompute_step
from elaswave_spmd.simulator.work import owners_of
from tests.unit.scheduling.planning_cases import assigned, costs_of, split_at_random

STEP = 7
KINDS_OF = {0: (), INPUT_GRADIENT: (BACKWARD,), FULL: (BACKWARD, WEIGHTS), WEIGHTS_ONLY: (WEIGHTS,)}


def held(assignment: Assignment, stage: int, rank: int, done: set[PipelineAction]) -> PartialStep:
    """The report of a survivor: its micro-batches, those that are finished, and all that it has sent and keeps."""
    mine = [microbatch for microbatch, owner in enumerate(owners_of(assignment)[stage]) if owner == rank]
    forward = [microbatch for microbatch in mine if PipelineAction(stage, FORWARD, microbatch) in done]
    begun = [microbatch for microbatch in mine if PipelineAction(stage, BACKWARD, microbatch) in done]
    splits = assignment.put_off and assignment.put_off[stage]
    computed = [u for u in begun if not splits or PipelineAction(stage, WEIGHTS, u) in done]
    first, stop = assignment.layer_cuts[stage : stage + 2]
    return PartialStep(
        STEP,
        tuple(mine),
        tuple(computed),
        forwarded=tuple(microbatch for microbatch in forward if microbatch not in begun),
        activations=tuple((stop, microbatch) for microbatch in forward if stage < assignment.num_stages - 1),
        gradients=tuple((first - 1, microbatch) for microbatch in begun if stage > 0),
        layer_sums={
            layer: tuple((microbatch, microbatch + 1) for microbatch in computed)
            for layer in range(first, stop)
            if computed
        },
        put_off=tuple(microbatch for microbatch in begun if microbatch not in computed),
    )


@given(st.data())
@settings(max_examples=60)
def test_what_is_run_again_is_what_the_recovery_plan_orders(data):
    dp, pp = data.draw(st.integers(2, 4), label="dp"), data.draw(st.integers(1, 4), label="pp")
    microbatches = data.draw(st.integers(dp, 3 * dp + 1), label="microbatches")
    costs = costs_of([1.0] * (pp + 1))
    assignment, costs = split_at_random(data.draw, assigned([dp] * pp, microbatches, costs), costs)
    gone = data.draw(st.sets(st.sampled_from([r for m in assignment.stages for r in m[1:]]), min_size=1, max_size=3))
    moment = data.draw(st.floats(0, 1), label="moment")
    found = recompute_step(assignment, costs, gone, moment * 3 * (microbatches + pp))
    assert found is not None, "the first worker of each stage lives"
    stages = tuple(tuple(rank for rank in members if rank not in gone) for members in assignment.stages)
    done = {span.action for span in found.kept if span.worker not in gone}
    reported = {rank: held(assignment, s, rank, done) for s, members in enumerate(stages) for rank in members}
    cuts = assignment.layer_cuts
    placement = Placement(
        Mesh(MeshShape.of_stages(map(len, stages)), stages, epoch=1),
        microbatches,
        cuts,
        tuple(even_counts(microbatches, len(members)) for members in stages),
        Shardings().with_zero(0),
    )
    layout = lay_out([LayerUse(f"l{i}", (ParameterInfo(f"l{i}.w", (64,)),)) for i in range(cuts[-1])], page_size=64)
    old = {rank: (cuts[s], cuts[s + 1]) for s, members in enumerate(stages) for rank in members}
    ordered = recovery_plan(STEP, placement, layout, reported, old)
    again = {(span.action.stage, span.action.kind, span.action.microbatch) for span in found.rest}
    kinds = [KINDS_OF[w.backward] for w in ordered]
    splits = assignment.put_off or (0,) * pp
    assert again == {(w.stage, FORWARD, w.microbatch) for w in ordered if w.forward} | {
        (w.stage, kind, w.microbatch)
        for w, of_line in zip(ordered, kinds, strict=True)
        for kind in of_line
        if kind == BACKWARD or splits[w.stage]
    }
    worker = {(span.action.stage, span.action.microbatch): span.worker for span in found.rest}
    for line in ordered:  # who has begun a micro-batch ends it
        if line.microbatch in reported[line.worker].assigned:
            assert worker[line.stage, line.microbatch] == line.worker
