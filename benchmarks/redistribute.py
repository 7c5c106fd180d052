"""Time until optimizer state is where it belongs after a worker leaves (4 to 3) or joins (3 to 4).

    python -m benchmarks.redistribute [--quick] [--repeats N] [--mib N] [--json PATH]

512 MiB of state, fp32 master and both moments of AdamW of 8 layers, over real processes on one machine. All ways are
measured in turn in each repeat; the time begins with the first order and ends when the last process has its part.

- learners: what the product does (the worker's state replica under recovery.controller_protocol, over its links, by
  memory that workers of a host share, as is the default; the driver is the controller, and nobody trains meanwhile).
  The mesh changes as planned, primaries send pages as PageState, learners report, and a second change promotes them;
  the time is until the run has settled. With mirror.count=1, the default, the pages of a leaving worker have a mirror:
  the new mesh trains at once ("new mesh"), and the bytes that move are the new mirrors. With mirror.count=0 a worker
  cannot leave before others have its pages. ZeRO-3: state is separate from parameters.
- contiguous tiles: every array is cut in even tiles, as DTensor or ZeRO implementations cut it, and goes from one cut
  to another. The product moves pages instead; this is in benchmarks/redistribute_members.py, over the product's links.
  Memory for the new tiles is allocated and written to before.
- DCP: torch.distributed.checkpoint.save by the old workers and load by the new ones, the same tiles as DTensors, over
  gloo, into /dev/shm. Both groups and the tensors to load into exist before the clock starts.

"Memory copy": all receivers at the same time copy as many bytes as they received, from memory to memory that has been
written to before; "fresh copy": to new memory, as a learner's is, which the machine gives them page by page. Every byte
of every tile and page is checked after each turn.
"""

from __future__ import annotations

import random
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, estimate, parser, say
from benchmarks.members import Members
from benchmarks.processes import new_directory, stop_on_signals
from benchmarks.redistribute_members import KINDS, LAYERS, elements_of, healthy, layout_of, tile_changes
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import Broadcast, EpochBegun, ProtocolAction, Send, Unrecoverable
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, Policy, ProtocolSpec
from elaswave_spmd.recovery.packed_reconfigure import Packer
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox

_PRELOAD = ("numpy", "torch", "torch._dynamo", "torch.distributed", "zmq", "benchmarks.redistribute_members")
_TIMEOUT_S = 60.0
_SHM = Path("/dev/shm")
_MIB = 2**20
_OURS = range(4)  # ranks of the product's workers; the last one leaves and joins
LEARN_1, LEARN_0 = "learners, mirror.count=1", "learners, mirror.count=0"
TILES, DCP = "contiguous tiles over links", "DCP save + load"
WAYS = (LEARN_1, LEARN_0, TILES, DCP)
CHANGES = ((4, 3), (3, 4))


class Controller:
    """The product's controller protocol over real links, for one change."""

    def __init__(self, members: Members, directory: Path, num_bytes: int, workers: int, mirror_count: int) -> None:
        self._members, self._layout = members, layout_of(num_bytes)
        self._mailbox = Mailbox()
        self._packer = Packer()
        self._links = Links(CONTROLLER, self._mailbox, directory=str(directory))
        placement = healthy(self._layout, workers, mirror_count)
        self.protocol = ControllerProtocol(
            placement, ProtocolSpec(self._layout, 10**6), Policy(mirror_count=mirror_count)
        )
        self._filled: set[int] = set()
        self.received: Counter[int] = Counter()
        self.new_mesh_at = 0.0
        rest = {"workers": workers, "mirror_count": mirror_count, "controller": self._links.address}
        hellos = members.all(_OURS, "begin", **rest)
        self._ready = {rank: m.Ready(rank, said["address"]) for rank, said in hellos.items()}
        for rank, ready in self._ready.items():
            self._links.connect(rank, ready.address)
        members.give({rank: {"do": "serve"} for rank in _OURS})
        for rank in range(workers):
            self._perform(self.protocol.ready(self._ready[rank]))
        self._until(lambda: len(self._filled) == workers)

    def change(self, workers: int) -> float:
        """Makes rank 3 leave or join. Returns the seconds until all state is where it belongs."""
        began = time.monotonic()
        if workers == 3:
            self._perform(self.protocol.drain(3, "asked to leave"))
        else:
            self._perform(self.protocol.ready(self._ready[3]))
        self._until(lambda: self.protocol.settled and self.protocol.placement.mesh.num_workers == workers)
        took = time.monotonic() - began
        self.new_mesh_at -= began
        return took

    def end(self) -> list[dict[str, Any]]:
        """Ends the workers. Returns their last reports."""
        for rank in _OURS:
            self._links.send(rank, m.encode(m.Stop()))
        try:
            return [self._members.answer(rank) for rank in _OURS]
        finally:
            self._links.close()

    def _until(self, condition: Any) -> None:
        while not condition():
            item = self._mailbox.get(_TIMEOUT_S)
            if item is None:
                raise RuntimeError(f"no message for {_TIMEOUT_S:g} s; changing: {self.protocol.changing}")
            if not isinstance(item, Envelope):
                raise RuntimeError(f"unexpected: {item}")
            match m.decode(item.header):
                case m.Heartbeat(rank):
                    self._filled.add(rank)
                case m.StepReport() as status:
                    self._perform(self.protocol.report_received(status))
                case m.CaughtUp() as learned:
                    self._perform(self.protocol.caught_up(learned))
                case message:
                    raise RuntimeError(f"unexpected: {message}")

    def _perform(self, effects: Sequence[ProtocolAction]) -> None:
        for effect in effects:
            match effect:
                case Send(rank, message):
                    self._links.send(rank, m.encode(message))
                case Broadcast(ranks, message):
                    for receivers, header in self._packer.encoded(ranks, message):
                        for rank in receivers:
                            self._links.send(rank, header)
                case EpochBegun():
                    self._begun(effect)
                case Unrecoverable():
                    raise RuntimeError(effect.reason)

    def _begun(self, epoch: EpochBegun) -> None:
        if epoch.kinds:
            self.new_mesh_at = time.monotonic()
        assert epoch.plan is not None
        for copy in epoch.plan.copies:
            self.received[copy.destination] += 4 * len(KINDS) * epoch.plan.elements(copy.pages)


class Bench:
    """The processes of all ways.

    Args:
        num_bytes: of the state.
    """

    def __init__(self, members: Members, directory: Path, shm: Path, num_bytes: int) -> None:
        self._members, self._directory, self._shm, self._bytes = members, directory, shm, num_bytes
        members.start({"kind": "ours", "directory": str(directory), "bytes": num_bytes}, 4)
        self._dcp: dict[int, list[int]] = {}
        for world in (3, 4):
            first, store = members.next_key, str(directory / f"dcp{world}.store")
            spec = {"kind": "dcp", "first": first, "world": world, "store": store, "bytes": num_bytes}
            self._dcp[world] = sorted(members.start(spec, world))

    def turn(self, way: str, before: int, after: int) -> dict[str, float]:
        """Makes one change in one way. Returns ms (`took`, `copy` of the bytes moved), `moved`, and further figures."""
        if way == DCP:
            return self._checkpoint(before, after)
        found, received = self._tiles(before, after) if way == TILES else self._learn(way, before, after)
        found["moved"] = float(sum(received.values()))
        self._copy(received, fresh=False)  # what it copies from is written now
        found["copy"] = self._copy(received, fresh=False)
        found["fresh"] = self._copy(received, fresh=True)
        return found

    def _copy(self, received: Mapping[int, int], *, fresh: bool) -> float:
        """Has all receivers copy as many bytes as they received, at the same time. Returns ms."""
        orders = {rank: {"do": "copy", "size": size, "fresh": fresh} for rank, size in received.items() if size}
        copies = self._members.order(orders)
        return 1e3 * (max(said["done"] for said in copies.values()) - min(said["began"] for said in copies.values()))

    def _learn(self, way: str, before: int, after: int) -> tuple[dict[str, float], dict[int, int]]:
        controller = Controller(self._members, self._directory, self._bytes, before, int(way == LEARN_1))
        try:
            took = controller.change(after)
        finally:
            said = controller.end()
        _refuse(way, said)
        sent = float(sum(one["sent"] for one in said))
        return {"took": 1e3 * took, "new_mesh": 1e3 * controller.new_mesh_at, "sent": sent}, dict(controller.received)

    def _tiles(self, before: int, after: int) -> tuple[dict[str, float], dict[int, int]]:
        ours = self._members.all
        hellos = ours(_OURS, "tiles", before=before, after=after)
        ours(_OURS, "connect", addresses={rank: said["address"] for rank, said in hellos.items()})
        began = time.monotonic()
        answers = ours(_OURS, "reshard")
        took = max(said["done"] for said in answers.values()) - began
        _refuse(TILES, ours(_OURS, "check_tiles").values())
        received: Counter[int] = Counter()
        for change in tile_changes(self._bytes, before, after).values():
            for source, destination, start, stop in change.parts():
                if source != destination:
                    received[destination] += 4 * (stop - start)
        return {"took": 1e3 * took}, dict(received)

    def _checkpoint(self, before: int, after: int) -> dict[str, float]:
        path = self._shm / "checkpoint"
        theirs, savers, loaders = self._members.all, self._dcp[before], self._dcp[after]
        theirs(loaders, "clear")
        try:
            began = time.monotonic()
            saved = theirs(savers, "save", path=str(path))
            save = max(said["done"] for said in saved.values()) - began
            began = time.monotonic()
            loaded = theirs(loaders, "load", path=str(path))
            load = max(said["done"] for said in loaded.values()) - began
        finally:
            shutil.rmtree(path, ignore_errors=True)
        _refuse(DCP, theirs(loaders, "check").values())
        return {"took": 1e3 * (save + load), "save": 1e3 * save, "load": 1e3 * load}


def _refuse(way: str, answers: Any) -> None:
    wrong = [text for said in answers for text in said["wrong"]]
    if wrong:
        raise RuntimeError(f"{way}: {len(wrong)} parts of the state are wrong: {wrong[:3]}")


Turns = dict[tuple[int, int], dict[str, list[dict[str, float]]]]


def measure(num_bytes: int, repeats: int, seed: int) -> Turns:
    """Measures all ways, interleaved, after one repeat that is not counted."""
    draw = random.Random(seed)
    found: Turns = {change: {way: [] for way in WAYS} for change in CHANGES}
    with (
        new_directory("redistribute-") as directory,
        _shared_memory() as shm,
        Members("benchmarks.redistribute_members:member", _PRELOAD, directory) as members,
    ):
        bench = Bench(members, directory, shm, num_bytes)
        for repeat in range(-1, repeats):
            for change in CHANGES:
                for way in draw.sample(WAYS, len(WAYS)):
                    turn = bench.turn(way, *change)
                    if repeat >= 0:
                        found[change][way].append(turn)
            if repeat >= 0:
                times = {way: round(found[CHANGES[0]][way][-1]["took"]) for way in WAYS}
                say(f"{repeat + 1}/{repeats}: 4 to 3, ms: {times}")
    return found


def _shared_memory() -> Any:
    if not _SHM.is_dir():
        raise SystemExit(f"{_SHM} is needed: a file system in memory")
    return new_directory("redistribute-", _SHM)


def rows(found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[list[str]]:
    """The lines of the table for one change."""
    dcp = [turn["took"] for turn in found[DCP]]
    lines = []
    for way in WAYS:
        turns = found[way]
        took = [turn["took"] for turn in turns]

        def median(name: str, turns: Sequence[Mapping[str, float]] = turns, scale: float = 1.0) -> str:
            values = [turn[name] / scale for turn in turns if name in turn]
            return f"{statistics.median(values):,.0f}" if values else "-"

        ratio = estimate([[b / a for a, b in zip(took, dcp, strict=True)]])
        lines.append(
            [
                way,
                median("moved", scale=_MIB),
                median("took"),
                f"{min(took):,.0f} - {max(took):,.0f}",
                median("new_mesh"),
                median("copy"),
                median("fresh"),
                str(ratio) if way != DCP else "1",
            ]
        )
    return lines


def main() -> None:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, help="of each way (7; with --quick 2)")
    options.add_argument("--mib", type=int, help="of state (512; with --quick 64)")
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args()
    stop_on_signals()
    repeats, mib = args.repeats or (2 if args.quick else 7), args.mib or (64 if args.quick else 512)
    num_bytes = mib * _MIB
    state = LAYERS * len(KINDS) * 4 * elements_of(num_bytes)
    result = Result("redistribute", {"mib": mib, "state_bytes": state, "repeats": repeats, "seed": args.seed})
    found = measure(num_bytes, repeats, args.seed)
    columns = ["how", "MiB moved", "ms, median", "min - max", "new mesh after, ms", "memory copy, ms"]
    columns += ["fresh copy, ms", "DCP / this [95 %]"]
    for (before, after), turns in found.items():
        result.table(f"{mib} MiB of state, {before} to {after} workers", columns, rows(turns))
    save, load = (
        statistics.median(turn[name] for turns in found.values() for turn in turns[DCP]) for name in ("save", "load")
    )
    result.data = {"turns": {f"{a} to {b}": turns for (a, b), turns in found.items()}, "save_ms": save, "load_ms": load}
    result.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
