"""A member of the groups that `communicator` edits or rebuilds. Each kind of communicator is a class here.

All have the same two groups, as a worker of a mesh with stages has: all members, and the members of its stage. An
order names the members of the next mesh; the answer says when the communicator could be used, and when a small
all-reduce over all members and one over the stage were done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import (
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    ProcessGroupGloo,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed import distributed_c10d as c10d

from benchmarks.members import follow
from elaswave_spmd.determinism.reduction_tree import Node, Reduction
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.transport.links import Links
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox

SIZE = 256  # fp32 values of an all-reduce: 1 KiB
IN_PLACE, PARTIAL, BEST, FULL = "in place", "partial rebuild", "partial rebuild, at its best", "full rebuild"
RECONFIGURE = "c10d's reconfigure"
HAS_RECONFIGURE = hasattr(ProcessGroupGloo, "reconfigure")
"""True from torch 2.14 on."""
METHODS = (IN_PLACE, PARTIAL, BEST, FULL, *([RECONFIGURE] if HAS_RECONFIGURE else []))
_TIMEOUT_S = 60.0
_HOST = "127.0.0.1"

Stages = Sequence[Sequence[int]]


class Communicator(Protocol):
    """One member's end of both groups."""

    def address(self) -> str:
        """The address at which other members reach this one in the next change."""
        ...

    def change(self, number: int, stages: Stages, addresses: Mapping[int, str]) -> None:
        """Changes both groups to those of mesh `number`; afterwards they can be used."""
        ...

    def all_reduce(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sums of fp32 [SIZE] over all members, and over the stage."""
        ...

    def tidy(self) -> None:
        """Does the work that may wait until the sums are done; it is not measured."""


class InPlace:
    """The product's links, edited: one is dropped, or one is opened. Sums follow the order of the canonical tree."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._me, self._mailbox = int(spec["rank"]), Mailbox()
        self._links = Links(self._me, self._mailbox, directory=spec["directory"])
        self._stages: tuple[tuple[int, ...], ...] = ()
        self._early: dict[tuple[type, int, int, int], np.ndarray] = {}

    def address(self) -> str:
        return self._links.address

    def change(self, number: int, stages: Stages, addresses: Mapping[int, str]) -> None:
        """Does what the product's `Worker` does with the links when a new configuration arrives."""
        joins_now, self._number = not self._stages, number
        self._stages = tuple(map(tuple, stages))
        self._links.drop_all_but(addresses.keys())
        others = [peer for peer in addresses if peer != self._me]
        for peer in others:
            self._links.connect(peer, addresses[peer])
        if joins_now and (missing := self._links.wait_connected(others, _TIMEOUT_S)):
            raise RuntimeError(f"no link to {missing}")

    def all_reduce(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        everybody = tuple(key for stage in self._stages for key in stage)
        own = next(stage for stage in self._stages if self._me in stage)
        return self._sum(0, everybody, values), self._sum(1, own, values)

    def _sum(self, group: int, members: Sequence[int], values: np.ndarray) -> np.ndarray:
        """Reduces a page as the product does: partial sums go to the first member, the primary, which sends the sum."""
        primary, place = members[0], members.index(self._me)
        if primary != self._me:
            message = m.PartialSum(self._number, group, 0, 1, place, place + 1)
            self._links.send(primary, m.encode(message), [values])
            return self._receive(m.Publish, group, primary)
        tree, sums = Reduction(len(members)), cast(dict[Node, np.ndarray], {})
        for at, member in enumerate(members):
            node = (at, at + 1)
            sums[node] = values if member == self._me else self._receive(m.PartialSum, group, member)
            added = tree.add(node)
            assert added is not None
            for merge in added.merges:
                sums[merge.into] = sums.pop(merge.left) + sums.pop(merge.right)
        total = sums[0, len(members)]
        head = m.encode(m.Publish(self._number, group, 0, 1))
        for member in members[1:]:
            self._links.send(member, head, [total])
        return total

    def tidy(self) -> None:
        """Nothing is left over."""

    def _receive(self, kind: type, group: int, sender: int) -> np.ndarray:
        wanted = (kind, self._number, group, sender)
        while wanted not in self._early:
            item = self._mailbox.get(_TIMEOUT_S)
            if item is None:
                raise RuntimeError(f"no {kind.__name__} of group {group} from {sender}")
            if isinstance(item, Envelope):
                message: Any = m.decode(item.header)
                values = np.frombuffer(item.payloads[0], np.float32)
                self._early[type(message), message.step, message.layer, item.sender] = values
        return self._early.pop(wanted)


class _Gloo:
    """The base of both rebuilds: a store that stays through all meshes, and sums by c10d."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._me, self._team = int(spec["rank"]), spec["team"]
        self._store = TCPStore(_HOST, spec["port"], is_master=False, timeout=timedelta(seconds=_TIMEOUT_S))

    def address(self) -> str:
        return ""

    def tidy(self) -> None:
        """Nothing is left over."""

    def _options(self, *, lazy: bool, **more: Any) -> Any:
        """The options of a group outside of torch.distributed's registry. `lazy`: connections open when first used."""
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_HOST, lazy_init=lazy)]
        options._timeout = timedelta(seconds=_TIMEOUT_S)
        for name, value in more.items():
            setattr(options, name, value)
        return options

    def _store_of(self, number: int, name: str) -> Store:
        """A store with a new prefix for each mesh: the old prefixes have addresses of processes that have ended."""
        return PrefixStore(f"{self._team}/{number}/{name}", self._store)


def _summed(groups: Iterable[Any], values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sums of the values over two groups, one after the other."""
    both = torch.from_numpy(values.copy()), torch.from_numpy(values.copy())
    for group, tensor in zip(groups, both, strict=True):
        group.allreduce([tensor]).wait()
    return both[0].numpy(), both[1].numpy()


class FullRebuild(_Gloo):
    """Destroys everything, and creates it again by init_process_group and new_group."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__(spec)
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)  # what is imported late is imported
        dist.all_reduce(torch.zeros(1))
        self._stage: Any = None

    def change(self, number: int, stages: Stages, addresses: Mapping[int, str]) -> None:
        self._stage = None
        dist.destroy_process_group()
        members = [key for stage in stages for key in stage]
        dist.init_process_group(
            "gloo",
            store=self._store_of(number, "all"),
            rank=members.index(self._me),
            world_size=len(members),
            timeout=timedelta(seconds=_TIMEOUT_S),
        )
        for stage in stages:
            group = dist.new_group([members.index(key) for key in stage])
            if self._me in stage:
                self._stage = group

    def all_reduce(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        both = torch.from_numpy(values.copy()), torch.from_numpy(values.copy())
        dist.all_reduce(both[0])
        dist.all_reduce(both[1], group=self._stage)
        return both[0].numpy(), both[1].numpy()


class PartialRebuild(_Gloo):
    """Destroys and creates again the groups whose members change; the others stay.

    The groups are ProcessGroupGloo objects outside of torch.distributed's registry, whose default group could not be
    changed alone. torchft rebuilds its groups in this way, too.

    Args:
        best: open connections when they are first used, and destroy old groups after the measured time.
    """

    def __init__(self, spec: Mapping[str, Any], *, best: bool = False) -> None:
        super().__init__(spec)
        self._best = best
        self._old: list[ProcessGroup] = []
        self._groups: dict[str, tuple[tuple[int, ...], ProcessGroup]] = {}
        alone = self._make(HashStore(), 0, 1)
        alone.allreduce([torch.zeros(1)]).wait()

    def _make(self, store: Store, rank: int, size: int) -> Any:
        return ProcessGroupGloo(store, rank, size, self._options(lazy=self._best))

    def change(self, number: int, stages: Stages, addresses: Mapping[int, str]) -> None:
        everybody = tuple(key for stage in stages for key in stage)
        own = next(tuple(stage) for stage in stages if self._me in stage)
        stale = [name for name, members in (("all", everybody), ("stage", own)) if self._is_stale(name, members)]
        for name in stale:
            if name in self._groups:
                self._old.append(self._groups.pop(name)[1])
        if not self._best:
            self.tidy()
        for name in stale:
            members = everybody if name == "all" else own
            store = self._store_of(number, f"{name}{members[0]}")
            self._groups[name] = members, self._make(store, members.index(self._me), len(members))

    def tidy(self) -> None:
        self._old.clear()  # the last references: threads end, sockets close

    def _is_stale(self, name: str, members: tuple[int, ...]) -> bool:
        return name not in self._groups or self._groups[name][0] != members

    def all_reduce(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _summed((self._groups[name][1] for name in ("all", "stage")), values)


class Reconfigured(_Gloo):
    """Changes both groups by c10d's experimental `reconfigure`, which every member is given all handles for.

    A group is made once, by its process alone; a handle names its process, and the change that it comes from.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__(spec)
        self._groups = {name: self._alone(name) for name in ("all", "stage")}
        self._members: dict[str, tuple[int, ...]] = {}

    def _alone(self, name: str) -> Any:
        store = PrefixStore(f"{self._team}/{name}", self._store)
        return ProcessGroupGloo(store, self._me, self._me + 1, self._options(lazy=False, enable_reconfigure=True))

    def address(self) -> str:
        return json.dumps({name: group.get_reconfigure_handle() for name, group in self._groups.items()})

    def change(self, number: int, stages: Stages, addresses: Mapping[int, str]) -> None:
        handles = {key: json.loads(address) for key, address in addresses.items()}
        everybody = tuple(key for stage in stages for key in stage)
        at = next(at for at, stage in enumerate(stages) if self._me in stage)
        for name, members, kind in (("all", everybody, 0), ("stage", tuple(stages[at]), 1 + at)):
            if self._members.get(name) == members:
                continue
            options: Any = getattr(c10d, "ReconfigureOptions")()  # noqa: B009  (older torch has none)
            options.uuid = number * (1 + len(stages)) + kind
            options.handles = [handles[key][name] for key in members]
            options.timeout = timedelta(seconds=_TIMEOUT_S)
            self._groups[name].reconfigure(options).wait()
            self._members[name] = members

    def all_reduce(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _summed((self._groups[name] for name in ("all", "stage")), values)


class Member:
    """The orders that `communicator` can give."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self._me = int(spec["rank"])
        make = {
            IN_PLACE: InPlace,
            PARTIAL: PartialRebuild,
            BEST: lambda spec: PartialRebuild(spec, best=True),
            FULL: FullRebuild,
            RECONFIGURE: Reconfigured,
        }
        self._communicator: Communicator = make[spec["method"]](spec)

    def hello(self) -> dict[str, Any]:
        return {"address": self._communicator.address()}

    def change(self, number: int, stages: Stages, addresses: Mapping[str, str]) -> dict[str, Any]:
        """Changes to mesh `number` and sums. Times are of CLOCK_MONOTONIC."""
        began = time.monotonic()
        self._communicator.change(number, stages, {int(key): address for key, address in addresses.items()})
        usable = time.monotonic()
        sums = self._communicator.all_reduce(np.full(SIZE, self._me + 1, np.float32))
        done = time.monotonic()
        found = {"began": began, "usable": usable, "done": done, "sums": [float(total[-1]) for total in sums]}
        return found | {"address": self._communicator.address()}

    def tidy(self) -> None:
        """Does the work that may wait until the sums are done; it is not measured."""
        self._communicator.tidy()

    def nothing(self) -> dict[str, Any]:
        """Does nothing: an order whose time is that of sending orders."""
        return {"done": time.monotonic()}


def member(spec: dict[str, Any]) -> None:
    """Entry of a member's process."""
    follow(spec, Member)
