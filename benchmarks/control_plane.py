"""Processor time and bytes of the control plane on 100 to 100,000 workers, per step and per loss of a worker.

    python -m benchmarks.control_plane [--workers 100 1000 10000] [--stages 10] [--json PATH] [--quick]

The controller is the product's own, with its protocol, failure detector, log and files, and so is a worker's half of
the protocol. Made up are the workers, whose messages are encoded beforehand, and the links: what is sent is counted and
goes nowhere. So the time is that of one thread that decodes and decides, without sockets. In a second of a run with a
step a second a worker sends a report of the step, what it has measured, and heartbeats: ten, and fewer on many workers.
Those of four workers come together, from an agent with eight, which sends on what has come twice in their period.

A loss comes in the middle of a step: every survivor reports micro-batches that it has computed, and its partial sums.
Then the learners catch up and become replicas, which is a second change of the mesh. What the planner takes of both
(which micro-batches go where, within which limits) is timed apart.
"""

from __future__ import annotations

import io
import math
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import thread_time

import msgspec
from rich.console import Console

from benchmarks.harness import Result, parser, say
from elaswave_spmd.conf.schema import MeshSettings, ModelSettings, PageSettings, Settings, TrainSettings
from elaswave_spmd.controller.actions import AgentOrder
from elaswave_spmd.controller.checkpoints import CheckpointSpec
from elaswave_spmd.controller.events import Event, ManifestWritten, OldRemoved, Received, Rejected, Tick, WorkerEnded
from elaswave_spmd.controller.io import Spawned, heartbeats_in
from elaswave_spmd.controller.loop import Controller
from elaswave_spmd.controller.planning import HintRequest, PlanRequest
from elaswave_spmd.controller.resume import ResumePoint
from elaswave_spmd.controller.run_log import RunLog
from elaswave_spmd.data import PreparedData
from elaswave_spmd.determinism.exact_sum import expansion
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.controller_protocol import MicrobatchAssigner
from elaswave_spmd.recovery.packed_reconfigure import Unpacker
from elaswave_spmd.recovery.worker_protocol import Apply, SendVote, WorkerProtocol, held_ranges
from elaswave_spmd.run_dir import RunDir, RunObserver
from elaswave_spmd.run_dir.checkpoint_shard import ShardInfo
from elaswave_spmd.run_dir.display import PlainDisplay
from elaswave_spmd.run_dir.manifest import Manifest
from elaswave_spmd.runtime.processes import agent_messages as am
from elaswave_spmd.runtime.processes.launcher import Machine
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.split_backward import SplitBackward
from elaswave_spmd.scheduling.step_time import Assignment
from elaswave_spmd.sharding.replicas import ReplicaSet, all_replica_sets
from elaswave_spmd.worker.configuration import Configuration
from elaswave_spmd.worker.plan_run import RunPlan, plan_run

SIZES = (100, 1_000, 10_000)
VOTERS = (100_000,)
"""Sizes beyond those at which only a worker's votes are counted: they depend on nothing but the number of members."""
_STAGES, _LAYERS, _MICROBATCHES = 10, 18, 2  # layers besides embedding and head; micro-batches of a worker
_ON_A_HOST = 8
_STEPS = 10_000_000  # of the run, of which it does few


def made_up_plan(workers: int, stages: int = _STAGES) -> RunPlan:
    """A run on so many workers, each of which has pages of its own in every layer of its stage."""
    width = workers // stages
    settings = Settings(
        mesh=MeshSettings(stages=(width,) * stages),
        model=ModelSettings(layers=max(_LAYERS, stages - 2), d_model=256, heads=4),
        train=TrainSettings(steps=_STEPS, global_batch=width * _MICROBATCHES, microbatch_size=1, validate_every=0),
        page=PageSettings(size=64),
    )
    samples = settings.train.global_batch
    return plan_run(settings, PreparedData("made up", "", 0, "", 256, 128, samples, samples, target="made up"))


def address_of(rank: int) -> str:
    """Where a worker listens: eight on a machine, at any port."""
    machine = rank // 8
    return f"tcp://10.{machine >> 16 & 255}.{machine >> 8 & 255}.{machine & 255}:{32768 + rank * 7919 % 28232}"


class Planner:
    """The assigner of a run, with the seconds that it takes."""

    def __init__(self, assigner: MicrobatchAssigner) -> None:
        self._assigner = assigner
        self.seconds = 0.0

    def assign(
        self,
        old: Placement,
        stages: tuple[tuple[int, ...], ...],
        num_microbatches: int,
        *,
        split: SplitBackward | None = None,
    ) -> tuple[tuple[int, ...], ...]:
        began = thread_time()
        found = self._assigner.assign(old, stages, num_microbatches, split=split)
        self.seconds += thread_time() - began
        return found

    def limited(self, placement: Placement, split: SplitBackward) -> Assignment:
        began = thread_time()
        found = self._assigner.limited(placement, split)
        self.seconds += thread_time() - began
        return found


class _ScriptEnded(Exception):  # noqa: N818  (the regular end)
    """Nothing else is to happen to the controller."""


class CountingIO:
    """The outside of a controller: events come from a script, what is sent is counted.

    Attributes:
        sent: rank -> bytes of what was sent to it.
        pace: seconds of the made-up clock from one event to the next.
        witness: a worker whose messages are kept.
        kept: these.
        is_timed: sends are.
        sent_at: of the thread's clock, when something was sent last while they were.
    """

    def __init__(self) -> None:
        self.is_timed = False
        self.sent_at = 0.0
        self.script: Iterator[Event] = iter(())
        self.sent: Counter[int] = Counter()
        self.pace = 0.0
        self.witness = 0
        self.kept: list[bytes] = []
        self._clock = 0.0

    def now(self) -> float:
        return self._clock

    def next_event(self, until: float) -> Event:
        if self._clock >= until:
            return Tick()
        self._clock += self.pace
        if (event := next(self.script, None)) is None:
            raise _ScriptEnded
        return event

    def next_ends(self) -> list[WorkerEnded]:
        return []

    def send(self, rank: int, message: bytes) -> None:
        self.sent[rank] += len(message)
        if self.is_timed:
            self.sent_at = thread_time()
        if rank == self.witness:
            self.kept.append(message)

    def spawn(self, rank: int, host: str | None = None) -> Spawned:
        return Spawned()

    def connect(self, rank: int, address: str, *, holds_mutex: bool) -> str:
        return ""

    def machines(self) -> tuple[Machine, ...]:
        return ()

    def stop_requested(self, number: int) -> None: ...
    def adopt(self, rank: int, generation: int) -> None: ...
    def settle(self) -> None: ...

    def disconnect(self, rank: int) -> None: ...
    def order_agent(self, order: AgentOrder) -> None: ...
    def kill(self, rank: int) -> None: ...
    def report_exits(self) -> None: ...
    def journal(self, prepare: m.Prepare, next_rank: int) -> None: ...
    def plan(self, request: PlanRequest | HintRequest) -> None: ...

    def write_manifest(self, manifest: Manifest, trusted: int | None, best: Sequence[int]) -> None: ...
    def remove_shards(self, step: int, names: Sequence[str]) -> None: ...
    def find_checkpoint(self, newest: int | None) -> None: ...
    def close(self) -> None: ...

    def reject(self, reason: str) -> None:
        raise AssertionError(f"the controller has refused a message: {reason}")

    def last_rejections(self) -> list[Rejected]:
        return []

    def faulted_at(self, rank: int) -> float | None:
        return None

    def open_admin(self) -> str:
        return ""

    def find_shards(self) -> list[ShardInfo]:
        return []

    def finish_writing(self) -> list[ManifestWritten | OldRemoved]:
        return []


@dataclass(frozen=True)
class Loss:
    """What a loss has cost the controller, in seconds of its thread; and the bytes to and from a worker.

    Args:
        prepared: from the event to the Prepare.
        reported: all reports but the last.
        decided: the last report, with which the new mesh is decided and sent, without the planner.
        logged: what the controller does after that, when all workers have been told: the lines of its log.
        planned: what the planner took.
        promoted: the second change, when learners become replicas, without the planner.
        received, sent: bytes to a worker that the loss does not concern, in both changes, and those of its reports.
    """

    prepared: float
    reported: float
    decided: float
    logged: float
    planned: float
    promoted: float
    received: int
    sent: int


class MadeUpRun:
    """The controller of a run, and what its workers send, as a script.

    Attributes:
        beats, reports: seconds of the controller's thread for a second's heartbeats, and for a step's reports.
        losses: one for each worker that was lost.
    """

    def __init__(self, plan: RunPlan, run_dir: Path, seconds: int, losses: int) -> None:
        self.plan = plan
        self.io = CountingIO()
        self.beats: list[float] = []
        self.reports: list[float] = []
        self.losses: list[Loss] = []
        self.bytes_to_controller = 0  # in a second of an undisturbed run
        self.places: Counter[int] = Counter()  # rank -> bytes with which it was told its place in the first mesh
        self.links: list[list[int]] = []  # numbers of workers that each has links to: in the first mesh, after losses
        self._seconds, self._losses = seconds, losses
        self._version = 0
        self._random = random.Random(0)
        self._observer = RunObserver(
            RunDir.create(run_dir, "", model="made up", mesh="made up"),
            display=PlainDisplay(Console(file=io.StringIO())),
            board=False,
        )
        start = ResumePoint("made up", 1)
        log = RunLog(plan, self._observer, start)
        self.controller = Controller(plan, self.io, log, CheckpointSpec.for_run(plan, start, run_dir))
        self.planner = Planner(self.controller.protocol._assigner)  # pyright: ignore[reportPrivateUsage]
        self.controller.protocol._assigner = self.planner  # pyright: ignore[reportPrivateUsage]

    def run(self) -> None:
        """Plays the script to its end."""
        self.io.script = self._script()
        try:
            self.controller.run()
        except _ScriptEnded:
            return
        finally:
            self._observer.close()
        raise AssertionError(f"the run has ended: {self.controller.outcome}")

    @property
    def placement(self) -> Placement:
        return self.controller.protocol.placement

    def _script(self) -> Generator[Event]:
        yield from self._play([(rank, m.Ready(rank, address_of(rank))) for rank in self.placement.mesh.members])
        self.places = self.io.sent.copy()
        self.links.append(self._num_links())
        for _ in range(self._seconds):
            yield from self._second()
        for _ in range(self._losses):
            yield from self._lose()
        self.links.append(self._num_links())

    def _num_links(self) -> list[int]:
        peers, number = self.controller.protocol.peers, self.placement.mesh.num_workers
        return [number - 1] * number if peers is None else [*peers.numbers().values()]

    def _play(self, messages: Iterable[tuple[int, m.Message]], seconds: float = 0.0) -> Generator[Event, None, float]:
        """Messages of workers, at even distances in so many seconds. Returns the controller's seconds for them."""
        encoded = [(rank, m.encode(message)) for rank, message in messages]
        self.bytes_to_controller += sum(len(header) for _, header in encoded)
        events = (Received(m.decode(header), (), rank) for rank, header in encoded)
        return (yield from self._timed(events, len(encoded), seconds))

    def _timed(self, events: Iterable[Event], number: int, seconds: float) -> Generator[Event, None, float]:
        """So many events, at even distances in so many seconds. Returns the controller's seconds for them."""
        self.io.pace = seconds / max(1, number)
        began = thread_time()
        yield from events
        took = thread_time() - began
        self.io.pace = 0.0
        return took

    def _second(self) -> Generator[Event]:
        members = self.placement.mesh.members
        self.bytes_to_controller = 0
        each = round(1 / self.plan.settings.timeouts.heartbeat_of(len(members)))
        # Twice in a period an agent sends on what has come.
        hosts = [members[i : i + _ON_A_HOST // 2] for i in range(0, len(members), _ON_A_HOST // 2)]
        self.beats.append((yield from self._beat([host for _ in range(each) for host in hosts])))
        self.reports.append((yield from self._step()))

    def _beat(self, hosts: Sequence[Sequence[int]]) -> Generator[Event, None, float]:
        """Heartbeats of these workers, at even distances in a second. Returns the controller's seconds for them."""
        messages = [
            am.encode(am.Beats(tuple((rank, m.encode(m.Heartbeat(rank, 1, True, "forward"))) for rank in host)))
            for host in hosts
        ]
        self.bytes_to_controller += sum(map(len, messages))

        def received() -> Iterator[Event]:
            for header in messages:
                message = am.decode(header)
                assert isinstance(message, am.Beats) and am.encode(am.BeatsHeard())  # the answer
                event, refused = heartbeats_in(message.beats)
                assert event is not None and not refused
                yield event

        return (yield from self._timed(received(), len(messages), 1.0))

    def _step(self) -> Generator[Event, None, float]:
        self._version += 1
        step, epoch = self._version, self.placement.mesh.epoch
        return (yield from self._play(self._reports_of(step, epoch)))

    def _reports_of(self, step: int, epoch: int) -> Iterator[tuple[int, m.Message]]:
        placement = self.placement
        for stage, ranks in enumerate(placement.mesh.stages):
            layers = placement.layers_of_stage(stage)
            for rank in ranks:
                number = max(1, len(placement.microbatches_of(rank)))
                rows = tuple((layer, 0.01 * number, 0.02 * number, number, number) for layer in layers)
                yield rank, m.Applied(step, epoch, rank, 2.5, 0.75, True)
                yield rank, m.Measured(rank, step, rows)

    def _lose(self) -> Generator[Event]:
        """A worker of the middle stage is lost in the middle of a step; its mirrors get new mirrors."""
        protocol = self.controller.protocol
        victim = protocol.placement.mesh.stages[protocol.placement.num_stages // 2][0]
        before, planned = self.io.sent.copy(), self.planner.seconds
        answers = list(self._answers(victim))
        began = thread_time()
        yield WorkerEnded(victim, "its process ended", self.io.now())
        prepared = thread_time() - began
        reported, decided, logged = yield from self._answered(answers)
        took = self.planner.seconds - planned
        yield from self._step()
        promoted = yield from self._promote()
        witness = self.io.witness
        size = self.io.sent[witness] - before[witness]
        sent = next(len(m.encode(report)) for rank, report in answers if rank == witness)
        self.losses.append(Loss(prepared, reported, decided - took, logged, took, promoted, size, sent))

    def _answered(self, answers: Sequence[tuple[int, m.Message]]) -> Generator[Event, None, tuple[float, float, float]]:
        """StepReports, which end in a new mesh epoch: seconds of all but the last; of the last, until all workers have
        been told; and after that.
        """
        epoch = self.placement.mesh.epoch
        reported = yield from self._play(answers[:-1])
        assert self.placement.mesh.epoch == epoch
        self.io.is_timed = True
        decided = yield from self._play(answers[-1:])
        self.io.is_timed = False
        logged = thread_time() - self.io.sent_at
        assert self.placement.mesh.epoch > epoch
        return reported, decided - logged, logged

    def _promote(self) -> Generator[Event, None, float]:
        """Learners have caught up, and become replicas in the changes that follow."""
        protocol, took, planned = self.controller.protocol, 0.0, self.planner.seconds
        while not protocol.settled:
            epoch = self.placement.mesh.epoch
            if not protocol.changing:
                caught_up = [(rank, m.CaughtUp(rank, epoch)) for rank in sorted(protocol.learners)]
                took += yield from self._play(caught_up)
            step = self._version
            if protocol.unanswered[1] == ():  # a planned change, after the step under way
                took += yield from self._step()
                step = self._version
            last = protocol.last_epoch
            reports = [(rank, m.StepReport(last, rank, step)) for rank in self.placement.mesh.members]
            took += sum((yield from self._answered(reports)))
        return took - (self.planner.seconds - planned)

    def _answers(self, victim: int) -> Iterator[tuple[int, m.Message]]:
        """What survivors report: some of their micro-batches are computed, and primaries have summed them up."""
        placement, epoch = self.placement, self.controller.protocol.last_epoch + 1
        step = self._version + 1
        owned: dict[int, list[tuple[int, int, int, int]]] = {rank: [] for rank in placement.mesh.members}
        for pages in all_replica_sets(placement.replica_map(self.plan.description.layout)):
            owned[pages.primary].append((pages.layer, pages.first, pages.stop, pages.layer))
        for stage, ranks in enumerate(placement.mesh.stages):
            for rank in ranks:
                if rank == victim:
                    continue
                mine = placement.microbatches_of(rank)
                done = mine[: self._random.randint(0, len(mine))]  # they are not all at the same place
                nodes = tuple((u, u + 1) for u in sorted(done))
                sums = dict.fromkeys(placement.layers_of_stage(stage), nodes)
                pages = tuple((*row, nodes) for row in owned[rank])
                part = m.PartialStep(step, mine, done, layer_sums=sums, page_sums=pages)
                yield rank, m.StepReport(epoch, rank, self._version, (part,))


@dataclass(frozen=True)
class Voting:
    """What a step's votes cost a worker: seconds of its thread, messages that it gets, rounds, and bytes."""

    seconds: float
    messages: int
    rounds: int
    received: int
    sent: int


def votes_of(placement: Placement, plan: RunPlan, members: Sequence[int], repeats: int) -> Voting:
    """The votes of a step on the first worker, the fastest of several steps."""
    held = held_ranges(placement.replica_map(plan.description.layout), members[0])
    return min((_vote(members, held) for _ in range(repeats)), key=lambda voting: voting.seconds)


def _vote(members: Sequence[int], held: Sequence[ReplicaSet]) -> Voting:
    """From the worker's own vote to the decision, without sockets."""
    protocol, norm = WorkerProtocol(members[0], 0, members, held), expansion([1 / 3, 1e-9 / 7])
    for pages in held:
        protocol.gradient_complete(1, pages.key, (1 / 7,))
    voters = [(level, rank) for level, ranks in enumerate(protocol.voters) for rank in ranks]
    votes = [m.Vote(1, 0, rank, norm, level=level) for level, rank in voters]
    votes[0] = msgspec.structs.replace(votes[0], loss=2.5)  # one of them has it
    others = [m.encode(vote) for vote in votes]
    began = thread_time()
    effects = protocol.computed(1)
    for header in others:
        vote = m.decode(header)
        assert isinstance(vote, m.Vote)
        effects += protocol.vote_received(vote)
    own = [effect for effect in effects if isinstance(effect, SendVote)]
    headers = [m.encode(effect.vote) for effect in own]
    took = thread_time() - began
    assert isinstance(effects[-1], Apply), effects
    sent = sum(len(header) * len(effect.receivers) for header, effect in zip(headers, own, strict=True))
    return Voting(took, len(others), len(protocol.voters), sum(map(len, others)), sent)


def entering(run: MadeUpRun) -> float:
    """Seconds in which a worker that no loss concerns works out a Reconfigure: the least of all that it got."""
    first, rank, unpacker = run.plan.placement, run.io.witness, Unpacker()
    taken = []
    for header in run.io.kept:
        packed = m.decode(header)
        if isinstance(packed, m.PeerAddresses):
            unpacker.addresses_received(packed)
        if not isinstance(packed, m.PackedReconfigure):
            continue
        began = thread_time()
        message = unpacker.unpacked(packed)
        placement = Configuration.from_message(first, message).placement
        held = held_ranges(placement.replica_map(run.plan.description.layout), rank)
        placement.microbatches_of(rank)
        taken.append(thread_time() - began)
        assert held
    return min(taken[1:])  # the first one is no change


@dataclass(frozen=True)
class Row:
    """The figures of one size; None where it was not played."""

    workers: int
    run: MadeUpRun | None
    voting: Voting
    entering: float | None


def measure(workers: int, stages: int, seconds: int, losses: int, repeats: int) -> Row:
    plan = made_up_plan(workers, stages)
    with tempfile.TemporaryDirectory() as folder:
        run = MadeUpRun(plan, Path(folder) / "run", seconds, losses)
        run.run()
    members = plan.placement.mesh.members
    return Row(workers, run, votes_of(plan.placement, plan, members, repeats), entering(run))


def more_voters(workers: int, repeats: int) -> Row:
    """The votes of a larger mesh, of which nothing else is made."""
    plan = made_up_plan(SIZES[0])
    return Row(workers, None, votes_of(plan.placement, plan, range(workers), repeats), None)


def growth(sizes: Sequence[int], values: Sequence[float]) -> str:
    """The exponent between the last two sizes: 1 if ten times the workers take ten times as much."""
    if len(values) < 2 or min(values[-2:]) <= 0:
        return ""
    return f"{math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2]):.2f}"


def table(result: Result, title: str, columns: Sequence[str], rows: Sequence[Sequence[float]], form: str) -> None:
    """Adds a table with the number of workers in front and a line of exponents below."""
    sizes = [int(row[0]) for row in rows]
    lines = [[f"{size:,}", *(form.format(value) for value in row[1:])] for size, row in zip(sizes, rows, strict=True)]
    exponents = [growth(sizes, [row[i] for row in rows]) for i in range(1, len(columns))]
    result.table(title, columns, [*lines, ["exponent", *exponents]])


def publish(result: Result, rows: Sequence[Row]) -> None:
    played = [(row.workers, row.run) for row in rows if row.run is not None]

    def middle(values: Iterable[float]) -> float:
        return statistics.median(values)

    table(
        result,
        "The controller in a second of a run with a step a second: ms of its thread, kB that it gets",
        ("workers", "heartbeats", "reports of the step", "together", "kB"),
        [
            (n, b := 1e3 * middle(run.beats), r := 1e3 * middle(run.reports), b + r, run.bytes_to_controller / 1e3)
            for n, run in played
        ],
        "{:,.1f}",
    )
    table(
        result,
        "A loss in the middle of a step: ms of the controller's thread; kB to and from a worker it does not concern",
        (
            "workers",
            "Prepare",
            "reports",
            "decision",
            "together",
            "log, after that",
            "planner",
            "learners become replicas",
            "kB to",
            "kB from",
        ),
        [(n, *loss_row(run.losses)) for n, run in played],
        "{:,.2f}",
    )
    table(
        result,
        "A worker's votes of a step: us of its thread, without sockets; kB",
        ("workers", "us", "messages received", "rounds", "kB received", "kB sent"),
        [
            (r.workers, 1e6 * v.seconds, v.messages, v.rounds, v.received / 1e3, v.sent / 1e3)
            for r in rows
            for v in [r.voting]
        ],
        "{:,.1f}",
    )
    table(
        result,
        "The first mesh: kB with which a worker is told its place (median), MB to all; links of a worker then (median, "
        "most), and after the losses",
        ("workers", "kB to a worker", "MB to all", "links", "most", "links at last", "most at last"),
        [
            (
                n,
                middle(run.places.values()) / 1e3,
                sum(run.places.values()) / 1e6,
                *(value for links in run.links for value in (middle(links), max(links))),
            )
            for n, run in played
        ],
        "{:,.1f}",
    )
    table(
        result,
        "A worker that a loss does not concern: ms of its thread for the Reconfigure",
        ("workers", "ms"),
        [(row.workers, 1e3 * row.entering) for row in rows if row.entering is not None],
        "{:,.2f}",
    )


def loss_row(losses: Sequence[Loss]) -> tuple[float, ...]:
    def ms(name: str) -> float:
        return 1e3 * statistics.median(getattr(loss, name) for loss in losses)

    steps = ms("prepared"), ms("reported"), ms("decided")
    last = losses[-1]
    return (*steps, sum(steps), ms("logged"), ms("planned"), ms("promoted"), last.received / 1e3, last.sent / 1e3)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    words = parser(__doc__)
    words.add_argument("--workers", type=int, nargs="+", default=list(SIZES), metavar="N")
    words.add_argument("--stages", type=int, default=_STAGES, metavar="N")
    args = words.parse_args(argv)
    sizes, voters = (SIZES[:1], ()) if args.quick else (args.workers, VOTERS)
    seconds, losses, repeats = (1, 1, 1) if args.quick else (5, 5, 5)
    result = Result("control_plane", {"seconds": seconds, "losses": losses, "stages": args.stages, "quick": args.quick})
    rows = []
    for workers in sizes:
        say(f"{workers:,} workers")
        rows.append(measure(workers, args.stages, seconds, losses, repeats))
    rows += [more_voters(workers, repeats) for workers in voters]
    publish(result, rows)
    return result.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
