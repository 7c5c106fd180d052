"""Seeded random runs of the whole product in one process, with losses, newcomers and delays at any message.

A schedule is drawn from a seed: mesh, sharding, placement, pace, faults. It must end with the bits of the undisturbed
run. `python -m tests.cluster.schedules --count 1000` runs them and prints where workers were lost.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.mesh.topology import Topology
from elaswave_spmd.recovery.controller_protocol import Policy
from elaswave_spmd.recovery.vote_exchange import WIDEST
from elaswave_spmd.scheduling.placement import Placement, place
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.sharding.replicas import ReplicaMap, ReplicaSet
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.faults import LOSSES, RECEIVER, SENDER, AnyFault, Cell, Fault, MessageFault
from tests.cluster.grouped import GroupedCluster
from tests.cluster.link_breaks import SHARE, LinkBreak, draw_breaks
from tests.cluster.paired import PairedCluster
from tests.cluster.processes import LostStateError, Trained
from tests.cluster.starting import Starting
from tests.cluster.stories import (
    MESSAGES,
    TO_CONTROLLER,
    draw_ahead,
    draw_counts,
    draw_faults,
    draw_moves,
    happens,
    silenced,
)
from tests.cluster.tiny import TRAIN, VALIDATION, TinyRun
from tests.cluster.wires import PUT_OFF, Lateness

MESHES = ("dp2", "dp3", "dp4", "pp2", "pp3", "dp2_pp2", "dp3_pp2", "stages3-2", "stages1-3")
_WIDE = ("dp2_pp3", "dp3_pp3", "dp2_pp4", "stages2-3-2", "stages1-4-2", "stages2-1-3-2")
_SPREAD = ("dp4", "dp5", "dp6", "dp4_pp2", "stages4-2", "stages1-5")
_BEFORE_AN_UPDATE = ("forward", "backward", "reduce", "norm", "apply")
"""Points of a step at which state is what the update before it has written."""
_IN_STAGES = {"dp2": "pp2", "dp3": "pp3", "dp4": "dp2_pp2"}
"""Meshes of one stage -> those of several with as many workers."""


@dataclass(frozen=True)
class Schedule:
    """One run.

    Args:
        seed: of everything that is drawn, the order of messages included.
        run: the arithmetic.
        mesh, zero: the healthy mesh, and how state is sharded.
        mirror_count, scatter: of replicas.
        hosts: failure domains that the workers are spread over.
        neighbours: workers of neighbouring ranks share a host; else hosts take turns.
        planned: pages, layers and micro-batches are where the product puts them on a new mesh; else at random.
        uneven: some workers and links are slow.
        faults: what happens.
        grouped: stages publish through groups.
        paired: boundary tensors and state go through pairs as well.
        checkpoint_every: steps between checkpoints, from which a run that has lost state begins again; 0: none.
        starting: workers take time to start, may be lost meanwhile, and are replaced; None: none of this.
        verify_rate: share of micro-batches that are checked by a second worker.
        verify_every: versions between comparisons of replicas; 0: none.
        action: what becomes of a worker that is wrong.
        late: when the controller's messages arrive; None: as any other.
        widest: members up to which all vote to all; on larger meshes votes are passed on.
        deaths: acts of controllers that are their last, as in SimulatedCluster.
        breaks: links between living workers that are lost.
        relayed: agents of all hosts but the first send on the heartbeats of their workers.
        loses: a message that is lost, as in SimulatedCluster.
        joined: pages for each worker of a stage below which layers are cut together; 0: none are.
    """

    seed: int
    run: TinyRun = field(default_factory=TinyRun)
    mesh: str = "dp4"
    zero: int = 1
    mirror_count: int = 1
    scatter: int = 0
    hosts: int = 1
    planned: bool = True
    uneven: bool = False
    faults: tuple[AnyFault, ...] = ()
    grouped: bool = False
    paired: bool = False
    checkpoint_every: int = 0
    starting: Starting | None = None
    verify_rate: float = 0.0
    verify_every: int = 0
    action: str = "evict"
    late: Lateness | None = None
    widest: int = WIDEST
    deaths: tuple[int, ...] = ()
    breaks: tuple[LinkBreak, ...] = ()
    neighbours: bool = False
    relayed: bool = False
    loses: tuple[str, int] | None = None
    joined: int = 0

    @classmethod
    def draw(
        cls,
        seed: int,
        *,
        moving: bool = False,
        grouped: bool = False,
        checkpoints: bool = False,
        silent: bool = False,
        starting: bool = False,
        frozen: bool = False,
        miscompute: bool = False,
        late: bool = False,
        votes: bool = False,
        peers: bool = False,
        controllers: bool = False,
        paired: bool = False,
        links: bool = False,
        spread: bool = False,
        flips: bool = False,
        relayed: bool = False,
        losing: bool = False,
        joined: bool = False,
    ) -> Schedule:
        """The schedule of a seed. In some, links between living workers are lost, drawn from a stream of their own.

        Args:
            moving: the same, and micro-batches, layers and workers are moved meanwhile.
            grouped, checkpoints: the same, with process groups, or with checkpoints.
            silent: the same, and workers that stop are taken for lost however soon they go on.
            starting: the same, and workers take time to start; some are lost meanwhile, in a later life of the run as
                well; replacements and spares are drawn.
            frozen: the same, and some parameters are not trained.
            miscompute: the same, and micro-batches are checked; where all are, workers compute some of them wrongly.
            late: the same on a mesh with stages, and the controller's messages arrive in the middle of actions.
            votes: the same, and votes are passed on, in up to three rounds.
            peers: the same on a larger mesh of more stages, where not everybody has a link to everybody.
            controllers: the same, and the controller dies up to three times, anywhere, and another one comes.
            paired: the same with process groups, and boundary tensors and state go through pairs.
            links: the same, and links are lost in each.
            spread: the same with process groups, and stages have several workers on each of several hosts.
            flips: the same, and replicas are compared while bits of workers' state flip.
            relayed: the same on several hosts, whose agents send on heartbeats, now and then late.
            losing: the same, and one message is lost that nobody misses but who waits for it.
            joined: the same, and pages are where the product puts them, with small layers cut together.
        """
        r = random.Random(seed)
        run = TinyRun(
            blocks=r.choice((1, 1, 2)),
            tied=r.random() < 0.3,
            dtype=r.choice(("fp32", "fp32", "fp32", "bf16")),
            microbatches=r.choice((3, 4, 5, 6)),
            steps=r.choice((3, 4, 4)),
            checkpointing=r.random() < 0.1,
        )
        if frozen:
            run = replace(run, frozen=_drawn_frozen(random.Random(f"frozen {seed}"), run))
        mesh = r.choice(MESHES)
        if peers:
            mesh, run = random.Random(f"peers {seed}").choice(_WIDE), replace(run, blocks=2)
        if late:
            mesh = _IN_STAGES.get(mesh, mesh)
        more_hosts = random.Random(f"spread {seed}")
        if spread:
            mesh, run = more_hosts.choice(_SPREAD), replace(run, microbatches=more_hosts.choice((4, 6, 8)))
        workers = sum(MeshShape.parse(mesh).stage_sizes)
        faults, longer = draw_faults(r, workers, run.steps)
        if moving:
            faults, longer = draw_moves(r, faults), longer + 2
        drawn = cls(
            seed=seed,
            run=replace(run, steps=run.steps + longer),
            mesh=mesh,
            zero=r.randrange(4),
            mirror_count=r.choice((1, 1, 2)),
            scatter=r.choice((0, 0, 1, 2)),
            hosts=r.choice((1, 1, 1, 2)),
            planned=r.random() < 0.5,
            uneven=r.random() < 0.5,
            faults=tuple(map(silenced, draw_ahead(r, faults))) if silent else draw_ahead(r, faults),
            grouped=grouped or paired or spread,
            paired=paired,
        )
        if spread:
            drawn = replace(drawn, hosts=more_hosts.choice((2, 2, 3)), neighbours=True)
        if relayed:
            drawn = replace(drawn, hosts=max(2, drawn.hosts), relayed=True)
        if starting:
            drawn = replace(drawn, starting=Starting.draw(random.Random(f"starting {seed}"), workers))
        if miscompute:
            drawn = drawn._with_miscomputes(random.Random(f"miscompute {seed}"), workers)
        if flips:
            drawn = drawn._with_flips(random.Random(f"flips {seed}"), workers)
        if late:
            drawn = drawn._late(random.Random(f"late {seed}"))
        if controllers and not drawn.verify_every:  # the settings refuse the two together
            acts = random.Random(f"controllers {seed}")
            number = acts.choice((1, 1, 2, 3))
            drawn = replace(drawn, deaths=tuple(acts.randint(1, acts.choice((20, 60, 200))) for _ in range(number)))
        lost_links = random.Random(f"links {seed}")
        if lost_links.random() < SHARE or links:
            # A wrong update was drawn with so few losses that somebody who is right is left.
            again, checks = not drawn.verify_every, drawn.verify_rate > 0
            breaks = draw_breaks(lost_links, workers, checks=checks, adopts=bool(drawn.deaths), again=again)
            drawn = replace(drawn, breaks=breaks)
        if losing:
            drawn = replace(drawn, loses=_drawn_loss(random.Random(f"losing {seed}")))
        if joined:
            drawn = replace(drawn, planned=True, joined=random.Random(f"joined {seed}").choice((2, 4, 8, 100)))
        if votes or peers:
            drawn = replace(drawn, widest=random.Random(f"votes {seed}").choice((2, 2, 3)))
        if not checkpoints:
            return drawn
        more = random.Random(f"checkpoints {seed}")  # with fewer mirrors, so that more losses need a checkpoint
        every, mirrors = more.choice((1, 1, 2)), more.choice((0, 0, 1))
        # A wrong update shows where there are others to compare it with.
        return replace(drawn, checkpoint_every=every, mirror_count=2 if drawn.verify_every else mirrors)

    def _with_miscomputes(self, draw: random.Random, workers: int) -> Schedule:
        rate = draw.choice((1.0, 1.0, 1.0, 0.4))
        wrong = [
            Fault(
                draw.randint(1, self.run.steps),
                "miscompute",
                draw.randrange(workers),
                draw.choice(("forward", "backward", "reduce")),
                draw.randint(1, 5),
            )
            for _ in range(draw.choice((1, 1, 2)))
        ]
        more = random.Random(f"sums {self.seed}")
        if more.random() < 0.7:
            step, rank, point = more.randint(1, self.run.steps), more.randrange(workers), more.choice(("sum", "norm"))
            wrong.append(Fault(step, "miscompute", rank, point, more.randint(1, 5)))
        checked = replace(self, verify_rate=rate, faults=(*self.faults, *(wrong if rate == 1.0 else ())))
        return checked._with_a_wrong_update(random.Random(f"update {self.seed}"), workers)

    def _with_a_wrong_update(self, draw: random.Random, workers: int) -> Schedule:
        """Half of the schedules: replicas are compared, and one update is wrong by a bit.

        With three copies, one wrong and at most one lost leave somebody who is right. Of two that differ it cannot be
        told which: then the run ends, or goes back to its checkpoint. Where workers are lost while they start there may
        never be three.
        """
        if workers < 3 or self.starting is not None or draw.random() < 0.5:
            return self
        wrong = Fault(
            draw.randint(1, self.run.steps), "miscompute", draw.randrange(workers), "apply", draw.randint(1, 4)
        )
        rate = draw.choice((0.0, self.verify_rate))
        found = [fault for fault in self.faults if rate == 1.0 or fault.kind != "miscompute"]
        losses = [fault for fault in found if fault.kind in (*LOSSES, "term", "miscompute")]
        kept = [fault for fault in found if fault not in losses[1:]]
        action = draw.choice(("evict", "report"))
        if any(fault.kind == "miscompute" for fault in kept):
            action = "evict"  # what is only reported of a micro-batch is committed; wrong state is learned anew
        return replace(
            self,
            verify_every=1,
            verify_rate=rate,
            mirror_count=2,
            action=action,
            faults=(wrong, *kept),
        )

    def _with_flips(self, draw: random.Random, workers: int) -> Schedule:
        """Bits flip in memory, in the middle of steps and of changes of the mesh."""
        flips: list[AnyFault] = []
        for _ in range(draw.choice((1, 1, 2))):
            kind, count = draw.choice(("flip", "flip", "corrupt")), draw.randint(1, 6)
            if draw.random() < 0.6:
                step, point = draw.randint(1, self.run.steps), draw.choice(_BEFORE_AN_UPDATE)
                flips.append(Fault(step, kind, draw.randrange(workers), point, count))
                continue
            message = draw.choice(("Prepare", "StepReport", "Reconfigure", "PageState", "Need"))
            side = SENDER if message in TO_CONTROLLER else RECEIVER
            flips.append(MessageFault(kind, message, side, draw.random() < 0.5, count))
        return replace(self, verify_every=1, faults=(*flips, *self.faults))

    def _late(self, draw: random.Random) -> Schedule:
        """The same with late messages of the controller, and losses in the middle of steps with more micro-batches."""
        late = Lateness(
            draw.choice((PUT_OFF, PUT_OFF, "backward", "weights")), draw.choice((30, 100)), draw.choice((0.0, 0.3, 0.7))
        )
        if random.Random(f"limits {self.seed}").random() < 0.5:
            late = replace(late, limits=self.seed + 1)
        drawn = replace(self, late=late, run=replace(self.run, microbatches=draw.choice((5, 6, 8))))
        if self.verify_every:  # a wrong update was drawn with so few losses that somebody who is right is left
            return drawn
        workers = sum(MeshShape.parse(self.mesh).stage_sizes)
        points = ("forward", "backward", "input", "weights", "reduce")
        kinds = ("kill", "kill", "replace", "stop", "term", "join")
        faults = [
            Fault(step, draw.choice(kinds), draw.randrange(workers), draw.choice(points), draw.randint(1, 4), 50)
            for step in draw.sample(range(1, self.run.steps + 1), 2)
        ]
        kept = [fault for i, fault in enumerate(self.faults) if not i or fault.kind in ("rebalance", "miscompute")]
        return replace(drawn, faults=(*faults, *kept))

    @property
    def placement(self) -> Placement:
        """The placement of the first epoch, with its replicas."""
        layout, shardings = self.run.description.layout, self.run.shardings.with_zero(self.zero)
        mesh = Mesh.initial(MeshShape.parse(self.mesh))
        if self.hosts > 1:
            number = len(mesh.members)
            host = {r: r * self.hosts // number if self.neighbours else r % self.hosts for r in mesh.members}
            mesh = replace(mesh, topology=Topology.of({r: (f"host{of}",) for r, of in host.items()}))
        found = replace(place(mesh, layout, shardings, self.run.microbatches), by_groups=self.grouped)
        draw = random.Random(f"placement {self.seed}")
        if not self.planned:
            found = replace(found, **_drawn_work(draw, found, len(layout.layers)))
        sharding = found.state_sharding(self.mirror_count, self.scatter)
        replicas = place_replicas(layout, sharding, least_joined=self.joined)
        if not self.planned and shardings.optim.axes:
            replicas = _drawn_replicas(draw, replicas, mesh.members, self.mirror_count)
        return replace(found, replicas=replicas)

    def __str__(self) -> str:
        happens = "".join(f"\n  {it}" for it in (*self.faults, *self.breaks))
        return f"{replace(self, faults=(), breaks=())!r}{happens}"


def _drawn_frozen(draw: random.Random, run: TinyRun) -> tuple[str, ...]:
    """Some parameters, neither none nor all of them; two that are tied both or neither."""
    tied = {"head.weight": "embed.weight"} if run.tied else {}
    while True:
        drawn = {name: draw.random() < 0.5 for name in run.names}
        found = tuple(name for name in run.names if drawn[tied.get(name, name)])
        if found and len(found) < len(run.names):
            return found


def _drawn_work(draw: random.Random, placement: Placement, layers: int) -> dict[str, tuple]:
    """Layers and micro-batches anywhere."""
    cuts = (0, *sorted(draw.sample(range(1, layers), placement.num_stages - 1)), layers)

    microbatches = placement.num_microbatches
    return {
        "layer_cuts": cuts,
        "microbatch_counts": tuple(draw_counts(draw, microbatches, len(r)) for r in placement.mesh.stages),
    }


def _drawn_replicas(draw: random.Random, replicas: ReplicaMap, members: Sequence[int], mirror_count: int) -> ReplicaMap:
    """The same pages in other page ranges, with their replicas on any workers."""
    held = min(mirror_count + 1, len(members))

    def cut(pages: ReplicaSet) -> list[ReplicaSet]:
        inside = range(pages.first + 1, pages.stop)
        at = [pages.first, *sorted(draw.sample(inside, draw.randint(0, min(2, len(inside))))), pages.stop]
        pieces = []
        for first, stop in itertools.pairwise(at):
            ranks = draw.sample(list(members), held)
            pieces.append(ReplicaSet(pages.layer, first, stop, ranks[0], frozenset(ranks)))
        return pieces

    return {layer: tuple(piece for pages in some for piece in cut(pages)) for layer, some in replicas.items()}


_NEEDED = (
    *("Activation", "ActivationGradient", "PartialSum", "ReducedGradient", "Publish", "Need", "Vote", "PageState"),
    *("CheckDigests", "Addend", "Fingerprints", "StepReport", "CaughtUp", "Damaged", "ValidationLoss", "Finished"),
)
"""Messages that somebody may wait for. Not those that a worker's next one shows to be missing."""


def _drawn_loss(r: random.Random) -> tuple[str, int]:
    """A message that is lost: its kind, and its number among those of its kind."""
    return r.choice(_NEEDED), r.randint(1, r.choice((3, 20, 60)))


# ---- running


@dataclass(frozen=True)
class Outcome:
    """The results of a run that must be equal, bit for bit."""

    losses: tuple[str, ...]
    norms: tuple[str, ...]
    validation: tuple[tuple[int, str], ...]
    weights: tuple[tuple[str, bytes], ...]

    @classmethod
    def of(cls, trained: Trained) -> Outcome:
        return cls(
            tuple(trained.losses),
            tuple(trained.norms),
            tuple((step, loss.hex()) for step, loss in sorted(trained.validation.items())),
            tuple((name, array.tobytes()) for name, array in sorted(trained.weights.items())),
        )


@cache
def undisturbed(run: TinyRun) -> Outcome:
    """The outcome of the run on one worker when nothing happens."""
    schedule = Schedule(0, run.key, mesh="single")
    return Outcome.of(cluster_of(schedule).run())


def cluster_of(
    schedule: Schedule,
    trace: Callable[[str], None] | None = None,
    *,
    min_workers: int = 1,
    kind: type[SimulatedCluster] | None = None,
) -> SimulatedCluster:
    """The cluster that a schedule describes, before its first step; of another class than its own, if one is given."""
    run = schedule.run
    cluster = kind or (PairedCluster if schedule.paired else GroupedCluster if schedule.grouped else SimulatedCluster)
    options: dict[str, Any] = {"deaths": schedule.deaths} if schedule.deaths else {}
    options |= {"breaks": schedule.breaks} if schedule.breaks else {}
    options |= {"relays": True} if schedule.relayed else {}
    options |= {"loses": schedule.loses} if schedule.loses else {}
    options |= {"joined": schedule.joined} if schedule.joined else {}
    return cluster(
        replace(run.job(), verify_rate=schedule.verify_rate, verify_every=schedule.verify_every),
        schedule.placement,
        run.description,
        run.make_model,
        TRAIN,
        VALIDATION,
        seed=schedule.seed,
        faults=schedule.faults,
        policy=Policy(schedule.mirror_count, schedule.scatter, min_workers),
        uneven=schedule.uneven,
        trace=trace,
        checkpoint_every=schedule.checkpoint_every,
        widest=schedule.widest,
        starting=schedule.starting,
        action=schedule.action,
        late=schedule.late,
        **options,
    )


@dataclass(frozen=True)
class Ended:
    """How a schedule ended.

    Args:
        how: "bits" (all as undisturbed), "lost" (state that nobody held any more), "undecided" (copies of state differ,
            and nobody can tell which is wrong), or "" with a failure.
        failure: what was wrong, in a form that equal causes share.
        detail: more of it.
        injected: the number of faults that did happen.
        lost_at: where workers were killed.
        epochs: changes of the mesh.
        moves: those in which the members stayed, and micro-batches, layers or workers went elsewhere.
        restarts: how often the run began again from a checkpoint.
        put_off: micro-batches that StepReports named of which only the weight gradients were left.
        weights_only: lines of plans that asked for these alone.
        comebacks: controllers that were killed and followed by another one.
        strangers: the most members that a worker had no link to.
        lost_links: links between living workers that were lost, each direction by itself.
        standstills: how often nothing moved.
    """

    how: str
    failure: str = ""
    detail: str = ""
    injected: int = 0
    lost_at: Counter[Cell] = field(default_factory=Counter)
    epochs: int = 0
    turns: int = 0
    moves: int = 0
    restarts: int = 0
    put_off: int = 0
    weights_only: int = 0
    comebacks: int = 0
    strangers: int = 0
    lost_links: int = 0
    standstills: int = 0


def run(schedule: Schedule, trace: Callable[[str], None] | None = None) -> Ended:
    """Runs a schedule to its end and checks everything that must hold. Whatever goes wrong is in the result."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker: part of a run's identity
    cluster = None
    try:
        wanted = undisturbed(schedule.run.key)
        cluster = cluster_of(schedule, trace)
        how, failure, detail = judge(schedule, cluster, wanted)
        if not failure and cluster.rejected:
            how, failure, detail = "", "a message of the product was refused", str(dict(cluster.rejected))
    except Exception as error:
        how, failure, detail = "", _classified(error), "".join(traceback.format_exception(error))
    finally:
        torch.set_num_threads(threads)
    if cluster is None:
        return Ended(how, failure, detail)
    trained, plan = cluster.result, cluster.plan
    placements = [schedule.placement, *(begun.placement for begun in trained.epochs)]
    moves = sum(_moved(a, b) for a, b in itertools.pairwise(placements))
    counts = len(trained.epochs), trained.turns, moves, len(trained.restarts)
    counts = *counts, trained.num_put_off, trained.num_weights_only, trained.comebacks, trained.most_strangers
    counts = *counts, cluster.link_breaks.lost.total(), len(cluster.standstills)
    return Ended(how, failure, detail, plan.num_injected, plan.lost_at, *counts)


def _moved(old: Placement, new: Placement) -> bool:
    if sorted(old.mesh.members) != sorted(new.mesh.members):
        return False
    return (old.mesh.stages, old.layer_cuts, old.microbatch_counts) != (
        new.mesh.stages,
        new.layer_cuts,
        new.microbatch_counts,
    )


def judge(schedule: Schedule, cluster: SimulatedCluster, wanted: Outcome) -> tuple[str, str, str]:
    """How a cluster ended, as `Ended` has it: (how, failure, detail).

    No fault leads to a standstill, and a message that is lost to one that is over when all is sent again. So does a
    message of the controller that is late for longer than a standstill takes, such as a worker's first Reconfigure: it
    is still on its way then.
    """
    how, failure, detail = _judge(schedule, cluster, wanted)
    stood = [fields["message"] for fields in cluster.standstills]
    allowed = 1 if schedule.loses is not None else cluster.held_up if schedule.late is not None else 0
    if len(stood) > min(1, allowed):
        return "", "the run stood still", f"{stood}; then: {failure or how}, {detail}"
    return how, failure, detail


def _judge(schedule: Schedule, cluster: SimulatedCluster, wanted: Outcome) -> tuple[str, str, str]:
    try:
        found = Outcome.of(cluster.run(mends=("standstill", "rejected")))  # judged by `judge` and `run`
    except LostStateError as lost:
        if lost.left == 0 or lost.losses > min(schedule.mirror_count, lost.members - 1):
            return "lost", "", str(lost)
        return "", "state lost that had a replica left", f"{lost} after {lost.losses} losses"
    except AssertionError as error:
        if schedule.verify_every and "nothing shows which of them is wrong" in str(error):
            return "undecided", "", str(error)
        raise
    wrong = {rank for kind, about in cluster.events if kind == "corrupt" for rank in cast(list[int], about["ranks"])}
    if wrong - {fault.rank for fault in schedule.faults if isinstance(fault, Fault) and fault.kind == "miscompute"}:
        return "", "a worker that is right is said to be wrong", str(wrong)
    given_up = [fields for kind, fields in cluster.events if kind == "fail" and "was lost again" in str(fields)]
    if given_up and max(cluster.link_breaks.lost.values(), default=0) < 2:
        return "", "a worker is given up for a link that was lost once", str(given_up)
    for name in ("losses", "norms", "validation", "weights"):
        here, there = getattr(found, name), getattr(wanted, name)
        if here != there:
            where = [i for i, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]]
            return "", f"other bits: {name}", f"at {where}, {len(here)} of {len(there)}"
    return "bits", "", ""


def _classified(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    words = str(error).split(":")[0] if isinstance(error, AssertionError) else ""
    return f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno} {words[:60]}".strip()


# ---- many of them


@dataclass
class Tally:
    """The ends of many schedules."""

    ends: Counter[str] = field(default_factory=Counter)
    lost_at: Counter[Cell] = field(default_factory=Counter)
    failures: dict[str, list[int]] = field(default_factory=dict)
    injected: int = 0
    epochs: int = 0
    moves: int = 0
    restarts: int = 0
    put_off: int = 0
    weights_only: int = 0
    comebacks: int = 0
    strangers: int = 0
    lost_links: int = 0
    standstills: int = 0

    def add(self, seed: int, ended: Ended) -> None:
        """Counts the end of one schedule."""
        self.ends[ended.how or "failed"] += 1
        self.lost_at += ended.lost_at
        self.injected += ended.injected
        self.epochs += ended.epochs
        self.moves += ended.moves
        self.restarts += ended.restarts
        self.put_off += ended.put_off
        self.weights_only += ended.weights_only
        self.comebacks += ended.comebacks
        self.strangers += ended.strangers
        self.lost_links += ended.lost_links
        self.standstills += ended.standstills
        if ended.failure:
            self.failures.setdefault(ended.failure, []).append(seed)

    def coverage(self) -> str:
        """Message kind by message kind, where workers were killed and how often."""
        lines = [f"{'worker killed':20} before sending  after  before taking  after"]
        for message in MESSAGES:
            cells = [
                "-" if not happens(message, side) else str(self.lost_at[message, side, after])
                for side in (SENDER, RECEIVER)
                for after in (False, True)
            ]
            lines.append("{:20} {:>14}  {:>5}  {:>13}  {:>5}".format(message, *cells))
        return "\n".join(lines)

    def uncovered(self) -> list[Cell]:
        """The cells in which no worker was killed."""
        cells = [
            (message, side, after) for message in MESSAGES for side in (SENDER, RECEIVER) for after in (False, True)
        ]
        return [cell for cell in cells if happens(cell[0], cell[1]) and not self.lost_at[cell]]


def run_many(seeds: Iterable[int], jobs: int = 1, **kinds: bool) -> Tally:
    """Runs the schedules of these seeds, in so many processes. `kinds`: arguments of `Schedule.draw`."""
    tally = Tally()
    run_seed = partial(_run_seed, kinds)
    if jobs == 1:
        for seed in seeds:
            tally.add(*run_seed(seed))
        return tally
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for seed, ended in pool.imap_unordered(run_seed, seeds, chunksize=20):
            tally.add(seed, ended)
    return tally


def _run_seed(kinds: Mapping[str, bool], seed: int) -> tuple[int, Ended]:
    return seed, run(Schedule.draw(seed, **kinds))


_KINDS = (
    "moving",
    "grouped",
    "checkpoints",
    "silent",
    "starting",
    "frozen",
    "miscompute",
    "late",
    "votes",
    "peers",
    "controllers",
    "paired",
    "links",
    "spread",
    "flips",
    "relayed",
    "losing",
    "joined",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns 1 if any schedule failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.schedules", description=__doc__)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="first seed (default 0)")
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="schedules (default 1000)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument("--moving", action="store_true", help="micro-batches, layers and workers are moved meanwhile")
    parser.add_argument("--grouped", action="store_true", help="stages publish through groups")
    parser.add_argument("--paired", action="store_true", help="and boundary tensors and state go through pairs")
    parser.add_argument("--checkpoints", action="store_true", help="a run that has lost state begins again from one")
    parser.add_argument("--silent", action="store_true", help="workers that stop are lost however soon they go on")
    parser.add_argument("--starting", action="store_true", help="workers are lost while they start, and are replaced")
    parser.add_argument("--frozen", action="store_true", help="some parameters are not trained")
    parser.add_argument("--miscompute", action="store_true", help="micro-batches are checked, and some are wrong")
    parser.add_argument("--late", action="store_true", help="the controller's messages arrive in the middle of actions")
    parser.add_argument("--controllers", action="store_true", help="the controller dies, and another one comes")
    parser.add_argument("--votes", action="store_true", help="votes are passed on, in rounds")
    parser.add_argument("--peers", action="store_true", help="workers have links to some of the others only")
    parser.add_argument("--links", action="store_true", help="links between living workers are lost in each schedule")
    parser.add_argument("--spread", action="store_true", help="stages with groups have workers on several hosts")
    parser.add_argument("--flips", action="store_true", help="bits of workers' state flip, and replicas are compared")
    parser.add_argument("--relayed", action="store_true", help="agents of several hosts send on heartbeats")
    parser.add_argument("--losing", action="store_true", help="one message is lost, and nobody notices")
    parser.add_argument("--joined", action="store_true", help="small layers are cut over the workers together")
    parser.add_argument("--seed", type=int, metavar="N", help="run this one only, and print everything")
    options = parser.parse_args(arguments)
    kind = {name: getattr(options, name) for name in _KINDS}
    if options.seed is not None:
        schedule = Schedule.draw(options.seed, **kind)
        print(schedule)
        ended = run(schedule, print)
        print(f"{ended.how or 'failed'}: {ended.failure}\n{ended.detail}")
        return int(bool(ended.failure))
    seeds = range(options.first, options.first + options.count)
    tally = run_many(seeds, options.jobs, **kind)
    counts = (
        f"{tally.injected} faults, {tally.epochs} mesh epochs begun, {tally.moves} moves, {tally.restarts} restarts"
    )
    print(f"{options.count} schedules, {counts}, {tally.lost_links} links lost between living workers")
    print(f"{tally.strangers / options.count:.1f} members, on average, that some worker had no link to")
    print(f"{tally.standstills} standstills")
    print(f"{tally.put_off} micro-batches reported as put off, {tally.weights_only} lines for their weight gradients")
    print(", ".join(f"{count} {how}" for how, count in tally.ends.most_common()))
    print(tally.coverage())
    for failure, seeds in sorted(tally.failures.items(), key=lambda item: -len(item[1])):
        print(f"{len(seeds)} times {failure}: seeds {seeds[:20]}")
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
