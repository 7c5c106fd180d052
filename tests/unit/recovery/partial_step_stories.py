"""Random layouts, ragged placements and changes of them, for the tests of recovery plans."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Sequence
from typing import TypeVar

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.sharding.layout import LayerUse, ModelLayout, ParameterInfo, lay_out
from elaswave_spmd.sharding.replicas import ReplicaSet
from tests.unit.recovery.partial_step_world import runs_of

T = TypeVar("T")


def some_layout(draw: random.Random) -> ModelLayout:
    """One to five layers of up to four pages; some without parameters, some with the last one tied to the first."""
    sizes = [draw.randrange(1, 200) for _ in range(draw.choice((1, 2, 3, 3, 4, 5)))]
    uses = [LayerUse(f"l{i}", (ParameterInfo(f"l{i}.w", (size,)),)) for i, size in enumerate(sizes)]
    if draw.random() < 0.2:
        at = draw.randrange(len(uses))
        uses[at] = LayerUse(f"l{at}", ())
    if len(uses) > 1 and uses[0].parameters and draw.random() < 0.4:
        uses[-1] = LayerUse(uses[-1].name, uses[-1].parameters, (("tied", "l0.w"),))
    return lay_out(uses, page_size=64)


def cut(draw: random.Random, items: Sequence[T], parts: int) -> list[tuple[T, ...]]:
    """Items in order, in parts that are not empty."""
    cuts = [0, *sorted(draw.sample(range(1, len(items)), parts - 1)), len(items)]
    return [tuple(items[a:b]) for a, b in itertools.pairwise(cuts)]


def some_counts(draw: random.Random, num_microbatches: int, parts: int) -> tuple[int, ...]:
    owners = [draw.randrange(parts) for _ in range(num_microbatches)]
    return tuple(owners.count(part) for part in range(parts))


def some_runs(draw: random.Random, layout: ModelLayout, members: Sequence[int]) -> dict[int, tuple[ReplicaSet, ...]]:
    """A replica map with anybody as a replica of anything."""
    found: dict[int, tuple[ReplicaSet, ...]] = {}
    for layer in layout.layers:
        runs = []
        for block in (b for b in layer.blocks if b.source is None):
            for pages in cut(draw, block.pages, draw.randrange(1, block.num_pages + 1)):
                replicas = draw.sample(members, draw.randrange(1, min(3, len(members)) + 1))
                runs.append(ReplicaSet(layer.index, pages[0], pages[-1] + 1, replicas[0], frozenset(replicas)))
        found[layer.index] = tuple(runs)
    return found


def changed_runs(draw: random.Random, old: Placement, members: Sequence[int]) -> dict[int, tuple[ReplicaSet, ...]]:
    """The map after a change of members: runs split here and there, replicas that are left, some new ones."""
    found: dict[int, tuple[ReplicaSet, ...]] = {}
    for layer, runs in runs_of(old).items():
        new = []
        for run in runs:
            pages = range(run.first, run.stop)
            for part in cut(draw, pages, draw.randrange(1, len(pages) + 1) if draw.random() < 0.3 else 1):
                left = sorted(run.replicas & set(members)) or [draw.choice(members)]
                if draw.random() < 0.1:
                    left = draw.sample(left, draw.randrange(1, len(left) + 1))  # a replica is let off
                primary = run.primary if run.primary in left and draw.random() < 0.9 else draw.choice(left)
                more = draw.sample(members, draw.randrange(2)) if draw.random() < 0.3 else []
                new.append(ReplicaSet(layer, part[0], part[-1] + 1, primary, frozenset((*left, *more))))
        found[layer] = tuple(new)
    return found


def some_placement(draw: random.Random, layout: ModelLayout) -> Placement:
    members = list(range(draw.choice((1, 2, 3, 4, 5, 6, 7, 7))))
    mesh = Mesh(MeshShape.of_stages([len(members)]), (tuple(members),))
    mesh, cuts = regrouped(draw, mesh, layout, members)
    num_microbatches = draw.randrange(1, 10)
    counts = tuple(some_counts(draw, num_microbatches, len(stage)) for stage in mesh.stages)
    shardings = Shardings().with_zero(draw.choice((0, 2)))
    return Placement(mesh, num_microbatches, cuts, counts, shardings, replicas=some_runs(draw, layout, members))


def regrouped(
    draw: random.Random, mesh: Mesh, layout: ModelLayout, members: Sequence[int]
) -> tuple[Mesh, tuple[int, ...]]:
    """Any stages of any layers."""
    members = draw.sample(members, len(members)) if draw.random() < 0.3 else list(members)
    num_stages = min(len(members), len(layout.layers), draw.choice((1, 2, 3, 3, 4)))
    layers = cut(draw, layout.layers, num_stages)
    return mesh.with_stages(cut(draw, members, num_stages)), (0, *(part[-1].index + 1 for part in layers))


def changed_placement(draw: random.Random, old: Placement, layout: ModelLayout, lost: Collection[int]) -> Placement:
    """The next epoch: mostly the same stages without the lost ones and with newcomers, or any other stages."""
    stages = [[rank for rank in stage if rank not in lost] for stage in old.mesh.stages]
    first = max(old.mesh.members) + 1
    for newcomer in range(first, first + draw.choice((0, 0, 0, 1, 2))):
        draw.choice(stages).append(newcomer)
    members = [rank for stage in stages for rank in stage]
    mesh, cuts = old.mesh.with_stages([stage for stage in stages if stage]), old.layer_cuts
    if not all(stages):
        keep = [s for s, stage in enumerate(stages) if stage]  # a stage goes to its neighbour
        cuts = (0, *(cuts[s] for s in keep[1:]), cuts[-1])
    if draw.random() < 0.25:
        mesh, cuts = regrouped(draw, mesh, layout, members)
    counts = tuple(some_counts(draw, old.num_microbatches, len(stage)) for stage in mesh.stages)
    return Placement(mesh, old.num_microbatches, cuts, counts, old.shardings, replicas=changed_runs(draw, old, members))
