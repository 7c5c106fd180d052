"""Salvage plans in random stories: each can be carried out whatever happens when, and runs nothing without need."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.recovery import partial_step
from elaswave_spmd.recovery.messages import PartialStep, Recompute
from elaswave_spmd.recovery.partial_step import recovery_plan
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import ReplicaMap, all_replica_sets
from elaswave_spmd.worker.gradient_reduction import uses_of
from tests.unit.recovery.partial_step_stories import changed_placement, some_layout, some_placement
from tests.unit.recovery.partial_step_world import (
    STEP,
    Page,
    World,
    executor_view,
    pages_of,
    peer_of,
    runs_of,
    uses_of_page,
)


@dataclass
class Story:
    """A step through up to three changes of the mesh, all drawn from one seed; every plan is checked on its way."""

    draw: random.Random
    plans: list[tuple[Recompute, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layout = some_layout(self.draw)
        self.placement = some_placement(self.draw, self.layout)
        self.world = World(self.layout, self.placement, self.draw)

    def play(self) -> None:
        for _ in range(self.draw.choice((0, 1, 1, 2, 3))):
            self.world.advance(self.draw.randrange(self.draw.choice((10, 40, 150))))
            if self.draw.random() < 0.3:
                self.world.forget()
            self._change()
        self.world.advance(1_000_000)
        assert self.world.lacking(self.placement) == []
        assert not any(worker.tasks for worker in self.world.workers.values()), "a line is left"

    def _change(self) -> None:
        held: dict[int, PartialStep | None] = {}
        while not held or self.draw.random() < 0.2:  # the change is overtaken by another one
            self._lose_some()
            held = self._ask()
        layers = {rank: (w.layers.start, w.layers.stop) for rank, w in self.world.workers.items()}
        lost = set(self.placement.mesh.members) - self.world.workers.keys()
        self.placement = changed_placement(self.draw, self.placement, self.layout, lost)
        plan = recovery_plan(STEP, self.placement, self.layout, held, layers)
        self.plans.append(plan)
        self._compare(held)
        Need(self.placement, self.layout, held, layers).check(plan)
        self.world.advance(self.draw.randrange(20))
        self.world.place(self.placement, plan)

    def _compare(self, held: Mapping[int, PartialStep | None]) -> None:
        """Page ranges that need not be looked at one by one lack what they lack when they are."""
        said = {rank: part for rank, part in held.items() if part is not None and rank in self.placement.mesh}
        found = partial_step._missing_microbatches(self.placement, self.layout, said)
        keys = frozenset(run.key for run in all_replica_sets(runs_of(self.placement)))
        by_range = partial_step._Reports.of

        def all_special(replicas: ReplicaMap, reported: Mapping[int, PartialStep]) -> partial_step._Reports:
            return replace(by_range(replicas, reported), special=keys)

        with mock.patch.object(partial_step._Reports, "of", all_special):
            assert partial_step._missing_microbatches(self.placement, self.layout, said) == found

    def _lose_some(self) -> None:
        living = sorted(self.world.workers)
        self.world.kill(self.draw.sample(living, self.draw.randrange(min(3, len(living)))))

    def _ask(self) -> dict[int, PartialStep | None]:
        held: dict[int, PartialStep | None] = {}
        for rank in self.draw.sample(sorted(self.world.workers), len(self.world.workers)):
            worker = self.world.workers[rank]
            held[rank] = worker.status()
            if self.draw.random() < 0.1 and not (worker.sums or worker.open or worker.saved or worker.computed):
                held[rank] = None
                worker.tasks.clear()  # it is a version behind, and does nothing until it is placed
            self.world.advance(self.draw.randrange(4))
        return held


@dataclass
class Need:
    """The reports of members, and what of a plan follows from it by definition, page by page."""

    placement: Placement
    layout: ModelLayout
    held: Mapping[int, PartialStep | None]
    old_layers: Mapping[int, tuple[int, int]]

    def __post_init__(self) -> None:
        living = {rank: report for rank, report in self.held.items() if report is not None}
        self.said = {rank: report for rank, report in living.items() if rank in self.placement.mesh}

    def stays(self, stage: int, rank: int) -> bool:
        layers = self.placement.layers_of_stage(stage)
        return rank in self.said and self.old_layers[rank] == (layers.start, layers.stop)

    def claimers(self, stage: int, microbatch: int) -> list[int]:
        members = sorted(self.placement.mesh.stages[stage])
        return [rank for rank in members if self.stays(stage, rank) and microbatch in self.said[rank].assigned]

    def has_gradient(self, stage: int, microbatch: int) -> bool:
        at = (self.placement.layer_cuts[stage + 1] - 1, microbatch)
        return stage == self.placement.num_stages - 1 or any(at in r.gradients for r in self.said.values())

    def has_activation(self, stage: int, microbatch: int) -> bool:
        at = (self.placement.layer_cuts[stage], microbatch)
        return stage == 0 or any(at in r.activations for r in self.said.values())

    def check(self, plan: tuple[Recompute, ...]) -> None:
        """Every line is needed, and what is needed has a line."""
        lines = {(w.stage, w.microbatch): w for w in plan}
        assert list(lines) == sorted(lines) and len(lines) == len(plan)
        for stage in range(self.placement.num_stages):
            for microbatch in range(self.placement.num_microbatches):
                line = lines.get((stage, microbatch))
                below, above = lines.get((stage - 1, microbatch)), lines.get((stage + 1, microbatch))
                asked = below is not None and below.backward in (1, 2) and not self.has_gradient(stage - 1, microbatch)
                full = lacks(self.placement, self.layout, self.said, stage, microbatch)
                wanted = above is not None and above.forward and not self.has_activation(stage + 1, microbatch)
                assert (line is not None) == (full or asked or wanted), (stage, microbatch, line)
                assert peer_of(plan, stage, microbatch) == (line.worker if line else None)
                if line is None:
                    continue
                claimers = self.claimers(stage, microbatch)
                put_off = [rank for rank in claimers if microbatch in self.said[rank].put_off]
                full_level = 3 if put_off else 2
                assert not (put_off and asked), "what is put off has given its input's gradient, and keeps it"
                assert line.backward == (full_level if full else 1 if asked else 0), (line, full, asked)
                saved = self.stays(stage, line.worker) and microbatch in self.said[line.worker].forwarded
                assert line.forward == (wanted or (line.backward in (1, 2) and not saved)), line
                first = put_off[:1] if full else []
                assert line.worker in (first or claimers[:1] or self.placement.mesh.stages[stage])
                assert line in executor_view(plan, stage, line.worker)


def lacks(
    placement: Placement, layout: ModelLayout, said: Mapping[int, PartialStep], stage: int, microbatch: int
) -> bool:
    """True if the micro-batch's contribution to some page of the stage's layers is nowhere."""
    return any(
        not covered(placement, said, page, use, microbatch)
        for page, uses in uses_of_page(layout).items()
        for use in uses & set(placement.layers_of_stage(stage))
    )


def covered(placement: Placement, said: Mapping[int, PartialStep], page: Page, use: int, microbatch: int) -> bool:
    run = next(r for r in runs_of(placement)[page[0]] if page in pages_of(r))

    def of_run(layer: int, first: int, stop: int) -> bool:
        return layer == run.layer and first <= run.first and run.stop <= stop

    for rank, report in said.items():
        has_entry = any(of_run(*key) for key in report.reduced)
        trees = [(each, nodes) for *key, each, nodes in report.page_sums if of_run(*key)]
        in_tree = any(lo <= microbatch < hi for each, nodes in trees if each == use for lo, hi in nodes)
        in_node = any(lo <= microbatch < hi for lo, hi in report.layer_sums.get(use, ()))
        if in_tree or (has_entry and rank in run.replicas) or (in_node and not has_entry and not trees):
            return True
    return False


@given(st.integers(0, 2**64))
@settings(max_examples=300, deadline=None)
def test_a_plan_finishes_the_step_and_runs_nothing_without_need(seed: int) -> None:
    Story(random.Random(seed)).play()


def test_the_stories_have_all_kinds_of_lines() -> None:
    seen: Counter[tuple[bool, int]] = Counter()
    empty = 0
    for seed in range(400):
        story = Story(random.Random(seed))
        story.play()
        empty += sum(not plan for plan in story.plans)
        seen.update((line.forward, line.backward) for plan in story.plans for line in plan)
    assert set(seen) == {(True, 0), (True, 1), (True, 2), (False, 1), (False, 2), (False, 3)} and empty
    assert min(seen.values()) >= 5, seen


@given(st.integers(0, 2**64))
@settings(max_examples=50, deadline=None)
def test_uses_are_those_of_the_reduction(seed: int) -> None:
    draw = random.Random(seed)
    layout = some_layout(draw)
    uses = uses_of_page(layout)
    for runs in runs_of(some_placement(draw, layout)).values():
        for run in runs:
            assert all(uses[page] == set(uses_of(layout, run)) for page in pages_of(run))
