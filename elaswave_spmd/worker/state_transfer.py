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
    """Copy the state of a page range, then send the copy to all its learners. Yields after every piece.

    A copy is sent since the state changes with the next step, while links may still be sending.

    Args:
        source: the page range; or, for the loss page, the payload itself, which is sent without a copy.
        message: the message to send with it.
        learners: their ranks.
    """
    if isinstance(source, Tensor):
        payload = source
    else:
        # The training thread makes the copy piece by piece while it waits (BackgroundCopies). If the channel shares
        # memory with the last learner, the copy is made where that learner reads it.
        size = state.state_size(source)
        payload = channel.lend(learners[-1], size)
        if payload is None:
            payload = torch.empty(size, device=source.master.device)
        yield from state.copy_state(source, payload)
        if source.version == LEARNING or not state.is_as_written(source, payload):
            return  # the state is damaged: this worker gives it up, if it has not yet, and other replicas send it
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
    """Copy state that `send_state` has sent to the held ranges that lack it. Yields after every piece.

    The protocol gets the norms that came with the state: a learner that becomes primary may have to vote with them.

    Args:
        payload: fp32, flat, as `HeldState.copy_state` makes it.
        done: called when all pieces are copied.
        hashed: make hashes of the state as it has come, so that later damage is found.
    """
    frozen = state.is_frozen(message.layer, message.first)
    norms = np.frombuffer(message.norms, "<f4").tolist()  # one per page; empty for frozen pages

    # The sender may be in an older or a newer epoch, with other page ranges. So one message can complete several ranges
    # of this worker.
    def received(pages: ReplicaSet) -> None:
        if frozen:
            return
        own = norms[pages.first - message.first : pages.stop - message.first]
        protocol.state_received(message.step, pages.key, own, None)

    # A frozen page is current at every version, however old the message is, or if its sender is a step ahead.
    version = protocol.version if frozen else message.step
    yield from state.receive(message.layer, message.first, message.stop, version, payload, received, hashed=hashed)
    done()
