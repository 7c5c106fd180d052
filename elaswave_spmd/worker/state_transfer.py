"""State transfer of a page range, from its primary to its learners: copied in small pieces on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.worker_protocol import WorkerProtocol
from elaswave_spmd.sharding.replicas import ReplicaSet
from elaswave_spmd.worker.channel import Channel
from elaswave_spmd.worker.state import LEARNING, HeldRange, HeldState


def send_state(
    state: HeldState, source: HeldRange | Tensor, message: m.PageState, learners: Sequence[int], channel: Channel
) -> Iterator[None]:
    """Copy the state of a page range, then send the copy to all its learners. One item per piece.

    The copy is what is sent because the state changes with the next step, while links may still be sending.

    Args:
        source: the page range, or the state of the loss page, which is sent as it is.
    """
    if isinstance(source, Tensor):
        payload = source
    else:
        # The training thread makes the copy piece by piece while it waits (BackgroundCopies): where the last learner
        # reads it, if memory is shared.
        size = state.state_size(source)
        payload = channel.lend(learners[-1], size)
        if payload is None:
            payload = torch.empty(size, device=source.master.device)
        yield from state.copy_state(source, payload)
        if source.version == LEARNING or not state.is_as_written(source, payload):
            return  # it is damaged: this worker gives it up, if it has not yet, and others send it
    for learner in learners:
        channel.send(learner, message, payload)


def receive_state(
    state: HeldState,
    message: m.PageState,
    payload: Tensor,
    protocol: WorkerProtocol,
    done: Callable[[], None],
    *,
    hashed: bool = False,
) -> Iterator[None]:
    """Copy in what `send_state` has sent, for the ranges that wait for it. One item per piece.

    The protocol gets the norms that came with it: a learner which becomes the primary votes with them.

    Args:
        hashed: the state is held to what has come, from now on.
    """
    frozen = state.is_frozen(message.layer, message.first)
    norms = np.frombuffer(message.norms, "<f4").tolist()  # one per page; none of a frozen one

    # The sender may cut pages as an older or a newer epoch does, so one message can complete several of our ranges.
    def received(pages: ReplicaSet) -> None:
        if frozen:
            return
        own = norms[pages.first - message.first : pages.stop - message.first]
        protocol.state_received(message.step, pages.key, own, None)

    # A frozen page is current at every version, however old the message is.
    version = max(message.step, protocol.version) if frozen else message.step
    yield from state.receive(message.layer, message.first, message.stop, version, payload, received, hashed=hashed)
    done()
