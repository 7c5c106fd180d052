"""Workers of `redistribute`: the product's, with pages of state or tiles of arrays, and those that use DCP.

The product's do with state exactly what workers of a run do (worker.step_commit): they enter a new configuration,
primaries send state, learners report. They compute nothing, so they have no layers, only state.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.members import follow
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.devices import device_of
from elaswave_spmd.runtime.devices.host import HostDevice
from elaswave_spmd.runtime.processes.malloc_tuning import keep_freed_memory
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox
from elaswave_spmd.scheduling.placement import Placement, place
from elaswave_spmd.sharding import P, Shardings, TileMap
from elaswave_spmd.sharding.layout import LayerUse, ModelLayout, ParameterInfo, lay_out
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.sharding.replicas import PageRange
from elaswave_spmd.worker.channel import Incoming, SocketChannel, WorkerStopped
from elaswave_spmd.worker.configuration import Configuration
from elaswave_spmd.worker.context import Datasets, LocalModel, WorkerContext
from elaswave_spmd.worker.learning_rate import LearningRate
from elaswave_spmd.worker.optimizers import AdamW
from elaswave_spmd.worker.spec import Job
from elaswave_spmd.worker.step_commit import StepCommit

LAYERS = 8
KINDS = ("master", *AdamW().state_names)
_HOST = HostDevice(device_of("cpu"))
_TIMEOUT_S = 60.0
_MICROBATCHES = 12
_EVEN = 768  # the elements of an array are a multiple of it: for 3 and 4 workers, and for the alignment of pages
_PERIOD = 4093


def elements_of(num_bytes: int) -> int:
    """The fp32 elements of each of the LAYERS x KINDS arrays, which have about `num_bytes` together."""
    return num_bytes // (4 * LAYERS * len(KINDS)) // _EVEN * _EVEN


def layout_of(num_bytes: int) -> ModelLayout:
    """Layers with one parameter each, whose state has `num_bytes` together."""
    shape = (elements_of(num_bytes),)
    return lay_out([LayerUse(f"layer{i}", (ParameterInfo(f"layer{i}.weight", shape),)) for i in range(LAYERS)])


def healthy(layout: ModelLayout, workers: int, mirror_count: int) -> Placement:
    """The first placement of a run with ZeRO-3 on dp, as `plan_run` makes it."""
    mesh = Mesh.initial(MeshShape.of(dp=workers))
    placement = place(mesh, layout, Shardings().with_zero(3), _MICROBATCHES)
    if not mirror_count:
        return placement
    replicas = place_replicas(layout, placement.state_sharding(mirror_count))
    return replace(placement, replicas=replicas)


@dataclass(frozen=True)
class TileChange:
    """A one-dimensional array that goes from even tiles over some workers to even tiles over others.

    Args:
        old, new: tile of each rank, as (start, stop).
    """

    old: tuple[tuple[int, int], ...]
    new: tuple[tuple[int, int], ...]

    def parts(self) -> list[tuple[int, int, int, int]]:
        """(source, destination, start, stop) of every overlap; source and destination may be one worker."""
        pairs = product(enumerate(self.old), enumerate(self.new))
        parts = [(src, dst, max(a, c), min(b, d)) for (src, (a, b)), (dst, (c, d)) in pairs]
        return [part for part in parts if part[2] < part[3]]


def tile_changes(num_bytes: int, before: int, after: int) -> dict[tuple[int, int], TileChange]:
    """(layer, kind) -> the change of that array from tiles over `before` workers to tiles over `after`."""
    starts_stops = (
        TileMap(MeshShape.of(dp=workers), P("dp"), (elements_of(num_bytes),)).bounds for workers in (before, after)
    )
    old, new = (tuple(zip(starts[:, 0].tolist(), stops[:, 0].tolist(), strict=True)) for starts, stops in starts_stops)
    return {(layer, kind): TileChange(old, new) for layer in range(LAYERS) for kind in range(len(KINDS))}


def pattern(layer: int, kind: int, start: int, stop: int) -> np.ndarray:
    """Elements [start, stop) of an array, fp32: each differs from its neighbours, and from other layers and kinds."""
    period = np.arange(_PERIOD, dtype=np.float32) + np.float32(8192 * (layer * len(KINDS) + kind))
    return np.resize(np.roll(period, -start), stop - start)


class Worker:
    """A worker of the product, without training."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self._rank, self._directory, self._num_bytes = int(spec["rank"]), spec["directory"], int(spec["bytes"])
        self._layout = layout_of(self._num_bytes)
        self._links: Links | None = None
        self._blocks: tuple[np.ndarray, np.ndarray] | None = None

    def hello(self) -> None:
        """Returns nothing: the driver needs no first answer."""

    def _open(self) -> Links:
        if self._links is not None:
            self._links.close()
        self._mailbox = Mailbox()
        self._links = Links(self._rank, self._mailbox, transport="shm", directory=self._directory)
        return self._links

    # ---- pages: as in a run

    def begin(self, workers: int, mirror_count: int, controller: str) -> dict[str, Any]:
        """Starts as a worker that waits for its first configuration. Returns the address of its links."""
        links = self._open()
        links.connect(CONTROLLER, controller)
        self._healthy = healthy(self._layout, workers, mirror_count)
        self._commit: StepCommit | None = None
        self._early: list[Incoming] = []
        self._port = SocketChannel(links, self._mailbox, torch.float32, _HOST)
        return {"address": links.address}

    def serve(self) -> dict[str, Any]:
        """Handles messages until Stop. Returns the state that is wrong then, and the number of bytes sent."""
        try:
            while True:
                for incoming in self._port.receive_all():
                    self._handle(incoming)
                # As the product's workers do while they wait: state is copied in pieces, between messages.
                if self._commit is not None and self._commit.replica.background.do_one():
                    continue
                if not self._mailbox.wait(_TIMEOUT_S):
                    raise RuntimeError("no message")
        except WorkerStopped:
            pass
        assert self._links is not None
        sent = sum(self._links.bytes_sent(peer) for peer in range(8))
        wrong = [
            str(part.pages) for part in (self._commit.replica.state if self._commit else ()) if not self._is_right(part)
        ]
        self._commit = None
        return {"sent": sent, "wrong": wrong}

    def _is_right(self, part: Any) -> bool:
        states = (part.master, *part.optimizer_state.values())
        layer = part.pages.layer
        return all(
            np.array_equal(values.numpy(), pattern(layer, kind, part.start, part.stop))
            for kind, values in enumerate(states)
        )

    def _handle(self, incoming: Incoming) -> None:
        match incoming.message:
            case m.Reconfigure():
                self._enter(incoming.message)
            case m.Prepare(epoch):
                assert self._commit is not None
                protocol = self._commit.protocol
                if protocol.promise(epoch):
                    self._port.send(CONTROLLER, m.StepReport(epoch, self._rank, protocol.version))
            case m.LinkClosed(peer=peer) if peer == CONTROLLER:
                raise WorkerStopped
            case _ if self._commit is None:
                self._early.append(incoming)
            case message:
                self._commit.handle(incoming.sender, message, incoming.payload)

    def _enter(self, message: m.Reconfigure) -> None:
        """Does what the product's worker does when a configuration arrives between two steps."""
        links = self._links
        assert links is not None
        links.drop_all_but({CONTROLLER, *message.addresses})
        others = [peer for peer in message.addresses if peer != self._rank]
        for peer in others:
            links.connect(peer, message.addresses[peer])
        configuration = Configuration.from_message(self._healthy, message)
        first = self._commit is None
        if self._commit is None:
            if missing := links.wait_connected(others, _TIMEOUT_S):
                raise RuntimeError(f"no link to {missing}")
            job = Job(0, 10**6, _MICROBATCHES, 1, 1, "fp32", AdamW(), LearningRate(1e-3))
            nothing = cast(Any, None)  # it computes nothing: no modules, programs or data
            model = LocalModel(self._layout, {}, nothing, nothing, nothing)
            data = Datasets(nothing, None)
            context = WorkerContext(self._rank, job, self._healthy, model, data, _HOST, self._port)
            self._commit = StepCommit(context, {}, configuration)
        placement, version = configuration.placement, configuration.version
        self._commit.enter_epoch(placement, placement.replica_map(self._layout), version, begun=version)
        if first and not configuration.epoch:
            self._commit.replica.state.restore(self._saved, 0)
            self._port.send(CONTROLLER, m.Heartbeat(self._rank, 0, True, "has its state"))
        self._commit.resume()
        early, self._early = self._early, []
        for incoming in early:
            self._handle(incoming)
        self._commit.replica.send_state()

    def _saved(self, run: PageRange, kind: str) -> Tensor:
        layer, first, stop = run
        start, end = self._layout.layers[layer].span(first, stop)
        return torch.from_numpy(pattern(layer, KINDS.index(kind), start, end))

    # ---- contiguous tiles, resharded

    def tiles(self, before: int, after: int) -> dict[str, Any]:
        """Makes the tiles of all arrays. Memory for the new ones is allocated and has been written to."""
        links = self._open()
        self._changes = tile_changes(self._num_bytes, before, after)
        self._old: dict[tuple[int, int], np.ndarray] = {}
        self._new: dict[tuple[int, int], np.ndarray] = {}
        self._start: dict[str, dict[tuple[int, int], int]] = {"old": {}, "new": {}}
        for key, change in self._changes.items():
            for name, tiles, arrays in (("old", change.old, self._old), ("new", change.new, self._new)):
                if self._rank < len(tiles):
                    start, stop = tiles[self._rank]
                    self._start[name][key] = start
                    arrays[key] = pattern(*key, start, stop)
                    if name == "new":
                        arrays[key].fill(-1.0)
        return {"address": links.address}

    def connect(self, addresses: Mapping[str, str]) -> None:
        """Opens links to the other workers."""
        assert self._links is not None
        others = {int(rank): address for rank, address in addresses.items() if int(rank) != self._rank}
        for rank, address in others.items():
            self._links.connect(rank, address)
        if missing := self._links.wait_connected(others, _TIMEOUT_S):
            raise RuntimeError(f"no link to {missing}")

    def reshard(self) -> dict[str, Any]:
        """Everything is sent from where it lies, what stays is copied, what comes is put in."""
        assert self._links is not None
        missing = 0
        for key, change in self._changes.items():
            for source, destination, first, stop in change.parts():
                missing += destination == self._rank != source
                if source == self._rank != destination:
                    start = self._start["old"][key]
                    header = msgspec.msgpack.encode([*key, first, stop])
                    self._links.send(destination, header, [self._old[key][first - start : stop - start]])
        for key, change in self._changes.items():
            for source, destination, first, stop in change.parts():
                if source == destination == self._rank:
                    a, b = self._start["new"][key], self._start["old"][key]
                    self._new[key][first - a : stop - a] = self._old[key][first - b : stop - b]
        while missing:
            item = self._mailbox.get(_TIMEOUT_S)
            if not isinstance(item, Envelope):
                raise RuntimeError(f"expected a part of a tile, got {item}")
            layer, kind, first, stop = msgspec.msgpack.decode(item.header)
            start = self._start["new"][layer, kind]
            self._new[layer, kind][first - start : stop - start] = np.frombuffer(item.payloads[0], np.float32)
            missing -= 1
        return {"done": time.monotonic()}

    def check_tiles(self) -> dict[str, Any]:
        """Returns the names of the tiles that are wrong."""
        wrong = []
        for key, tile in self._new.items():
            start = self._start["new"][key]
            if not np.array_equal(tile, pattern(*key, start, start + len(tile))):
                wrong.append(f"layer {key[0]}, {KINDS[key[1]]}")
        self._old, self._new = {}, {}
        return {"wrong": wrong}

    # ---- the bound

    def copy(self, size: int, *, fresh: bool) -> dict[str, Any]:
        """Copies this many bytes to memory that has been written to before, or to new memory, as a learner's is."""
        if self._blocks is None or len(self._blocks[0]) < size:
            self._blocks = np.ones(size, np.uint8), np.ones(size, np.uint8)
        source, target = self._blocks
        began = time.monotonic()
        if fresh:
            torch.empty(size, dtype=torch.uint8).copy_(torch.from_numpy(source[:size]))
        else:
            np.copyto(target[:size], source[:size])
        return {"began": began, "done": time.monotonic()}


class Checkpointer:
    """One worker with its shards as DTensors, and torch.distributed.checkpoint over gloo."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        rank, world = int(spec["rank"]) - int(spec["first"]), int(spec["world"])
        dist.init_process_group("gloo", init_method=f"file://{spec['store']}", rank=rank, world_size=world)
        mesh = init_device_mesh("cpu", (world,))
        share = elements_of(int(spec["bytes"])) // world
        self._bounds = rank * share, (rank + 1) * share
        self._shards = {
            (layer, kind): torch.from_numpy(pattern(layer, kind, *self._bounds))
            for layer in range(LAYERS)
            for kind in range(len(KINDS))
        }
        self._state = {
            f"layer{layer}.{KINDS[kind]}": DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)
            for (layer, kind), shard in self._shards.items()
        }

    def hello(self) -> None:
        """Returns nothing: the driver needs no first answer."""

    def save(self, path: str) -> dict[str, Any]:
        save_checkpoint(self._state, checkpoint_id=Path(path))
        return {"done": time.monotonic()}

    def clear(self) -> None:
        """Overwrites all shards, so that a shard that is right after a load was loaded."""
        for shard in self._shards.values():
            shard.fill_(-1.0)

    def load(self, path: str) -> dict[str, Any]:
        load_checkpoint(self._state, checkpoint_id=Path(path))
        return {"done": time.monotonic()}

    def check(self) -> dict[str, Any]:
        """Returns the names of the shards that are wrong."""
        right = {key: pattern(*key, *self._bounds) for key in self._shards}
        return {"wrong": [str(key) for key, shard in self._shards.items() if not np.array_equal(shard, right[key])]}


def member(spec: dict[str, Any]) -> None:
    """Entry of a member's process."""
    follow(spec, {"ours": Worker, "dcp": Checkpointer}[spec["kind"]])
