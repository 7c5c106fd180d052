"""Messages that cannot be right, made of right ones: as a process that has gone wrong, with the run's keys, may send.

Each forgery changes one thing of a message that was sent: who it is from, its mesh epoch, its step, what it names, the
size of its payload, or the receiver. `ForgingCluster` sends them between the right ones.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.transport.links import CONTROLLER
from tests.cluster.cluster import SimulatedCluster

UNKNOWN_RANK = 10_000
FAR = 1_000_000

Sent = tuple[int, int, Any, Tensor | None]
"""(sender, receiver, message, payload)."""

# Fields that name something of which there are a few, and a value that there is none of.
_NAMES = ("layer", "microbatch", "first", "stop", "lo", "hi", "step", "version", "peer", "level")
_DATA = (m.Activation, m.ActivationGradient, m.PartialSum, m.ReducedGradient, m.Publish, m.PageState, m.Need)
_REPEATABLE = (*_DATA, m.Vote, m.StepReport, m.Applied, m.CaughtUp, m.ValidationLoss, m.Finished, m.Heartbeat)


def fields_of(message: m.Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def changed(message: m.Message, **fields: Any) -> m.Message:
    return msgspec.structs.replace(message, **fields)


@dataclass(frozen=True)
class Forgery:
    """A forged message.

    Args:
        what: the thing that was changed.
        sent: the message, with its sender and receiver.
        refused: it cannot be right. Else it is a message of an older mesh epoch, or the same one again: the protocol
            ignores it by its own rules.
    """

    what: str
    sent: Sent
    refused: bool = True


def forgeries(sent: Sent, draw: random.Random) -> Iterator[Forgery]:
    """All forgeries of a message, in an order that does not depend on the draw."""
    sender, peer, message, payload = sent
    fields = fields_of(message)
    to_controller = peer == CONTROLLER
    names = [name for name in ("rank", "sender") if name in fields]
    for name in names:
        yield Forgery("speaks for another", (sender, peer, changed(message, **{name: sender + 1}), payload))
    if names or to_controller:
        as_unknown = changed(message, **dict.fromkeys(names, UNKNOWN_RANK))
        # A worker cannot know who is a member of a later epoch than its own, and votes of older ones are void.
        certain = to_controller or not isinstance(message, m.Vote | m.GroupLost | m.PairLost)
        yield Forgery("unknown rank", (UNKNOWN_RANK, peer, as_unknown, payload), refused=certain)
    if "epoch" in fields:
        # Of a process group only the present epoch's is of interest.
        certain = not isinstance(message, m.GroupLost)
        yield Forgery("later epoch", (sender, peer, changed(message, epoch=FAR), payload), refused=certain)
        if fields["epoch"] > 0:
            yield Forgery("old epoch", (sender, peer, changed(message, epoch=0), payload), refused=False)
    for name in _NAMES:
        if name in fields and not (name == "step" and isinstance(message, m.Failed | m.Measured)):
            yield Forgery(f"{name} that there is not", (sender, peer, changed(message, **{name: FAR}), payload))
            yield Forgery(f"{name} below 0", (sender, peer, changed(message, **{name: -FAR}), payload))
    if isinstance(message, m.LinkClosed):
        yield Forgery("link to itself", (sender, peer, changed(message, peer=sender), payload))
    if isinstance(message, m.LinksClosed):
        yield Forgery("link to itself", (sender, peer, changed(message, peers=(0, sender)), payload))
    if isinstance(message, m.Adopted):
        yield Forgery("link to itself", (sender, peer, changed(message, closed=(0, sender)), payload))
    if payload is None:
        yield Forgery("payload of nothing", (sender, peer, message, torch.zeros(16)))
    else:
        flat = payload.reshape(-1)
        yield Forgery("payload too long", (sender, peer, message, torch.cat([flat, flat[:16]])))
        yield Forgery("payload too short", (sender, peer, message, flat[: flat.numel() // 2].clone()))
        yield Forgery("payload missing", (sender, peer, message, None))
    if "norms" in fields:
        yield Forgery("norms too long", (sender, peer, changed(message, norms=fields["norms"] + b"1234"), payload))
    other = next(iter(draw.sample([CONTROLLER, sender + 1], 1))) if to_controller else CONTROLLER
    if other != peer and not isinstance(message, m.GroupLost | m.PairLost):
        yield Forgery("another receiver", (sender, other, message, payload))
    if isinstance(message, _REPEATABLE):
        yield Forgery("again", sent, refused=False)


class ForgingCluster(SimulatedCluster):
    """A cluster in which forged messages come between the right ones, until some steps before the end.

    Args:
        share: of the right messages that are followed by a forged one.
    """

    def forge(self, seed: int, share: float, until: int) -> ForgingCluster:
        """Begin to forge; `until`: the version from which on nothing is forged, so that all of it arrives."""
        self._draw = random.Random(f"forgeries {seed}")
        self._share = share
        self._until = until
        self.forged: Counter[str] = Counter()
        self.num_to_refuse = 0
        self._forged_reports: set[bytes] = set()
        return self

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        super().send(sender, peer, message, payload)
        if self._draw.random() >= self._share or self.protocol.version >= self._until or sender not in self._workers:
            return
        some = [f for f in forgeries((sender, peer, message, payload), self._draw) if f.sent[1] in self._receivers]
        if not some:
            return
        forgery = self._draw.choice(some)
        as_sender, to, forged, content = forgery.sent
        self.forged[forgery.what] += 1
        self.num_to_refuse += forgery.refused
        if to == CONTROLLER and forged != message:
            self._forged_reports.add(m.encode(forged))
        self.note("FORGED", forgery.what, as_sender, "->", to, forged)
        self._wires.put(as_sender, to, forged, None if content is None else content.clone())

    @property
    def _receivers(self) -> set[int]:
        return {CONTROLLER, *self.protocol.members}

    def check(self, message: m.AnyMessage) -> None:
        """As for the right messages; that each worker applies step after step does not hold for forged ones."""
        if not isinstance(message, m.Applied) and m.encode(message) not in self._forged_reports:
            super().check(message)


@dataclass(frozen=True)
class Fuzzed:
    """Encoded messages with one thing changed at random: a byte, its length, or a field of any type.

    Args:
        seed: of the draws.
    """

    seed: int
    values: tuple[Any, ...] = field(
        default=(-1, 0, 1, 7, FAR, 2**63 - 1, -(2**63), 1e300, float("nan"), float("inf"), None, True, "", "x" * 5000),
        repr=False,
    )

    def frames(self, message: m.Message, count: int) -> Iterator[bytes]:
        """So many mutations of a message's encoding."""
        draw = random.Random(self.seed)
        whole = m.encode(message)
        mutations: Mapping[int, Callable[[], bytes]] = {
            0: lambda: _flipped(whole, draw),
            1: lambda: whole[: draw.randrange(len(whole))],
            2: lambda: whole + draw.randbytes(draw.randint(1, 20)),
            3: lambda: self._with_other_field(whole, draw),
            4: lambda: self._with_other_field(whole, draw),
            5: lambda: whole[: draw.randrange(len(whole))] + b"\x91" * draw.randint(1, 5000),  # arrays in arrays
        }
        for _ in range(count):
            yield mutations[draw.randrange(len(mutations))]()

    def _with_other_field(self, whole: bytes, draw: random.Random) -> bytes:
        found: Any = msgspec.msgpack.decode(whole)
        inside = found
        # Down into nested rows, where there are some.
        while True:
            places = list(inside) if isinstance(inside, dict) else range(len(inside))
            if not places:
                break
            place = draw.choice(list(places))
            deeper = inside[place]
            if isinstance(deeper, (list, dict)) and deeper and draw.random() < 0.7:
                inside = deeper
                continue
            inside[place] = draw.choice([*self.values, [], {}, [1, 2, 3], list(range(1000))])
            break
        return msgspec.msgpack.encode(found)


def _flipped(whole: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(whole))
    return whole[:place] + bytes((whole[place] ^ (1 << draw.randrange(8)),)) + whole[place + 1 :]
