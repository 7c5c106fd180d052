"""How state gets from a run's primary to those who learn it: copies in small pieces, chores of both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.worker_protocol import WorkerProtocol
from elaswave_spmd.sharding.replicas import ReplicaSet
from elaswave_spmd.worker.stage_boundary import Send
from elaswave_spmd.worker.state import HeldRange, HeldState


def teach(
    state: HeldState, what: HeldRange | Tensor, message: m.PageState, learners: Sequence[int], send: Send
) -> Iterator[None]:
    """Copies the state of a run and sends it; a tensor, what there is to learn of the loss page, as it is."""
    if isinstance(what, Tensor):
        payload = what
    else:
        payload = torch.empty(state.state_size(what), device=what.master.device)
        yield from state.copy_state(what, payload)
    for learner in learners:
        send(learner, message, payload)


def learn(
    state: HeldState, message: m.PageState, payload: Tensor, protocol: WorkerProtocol, done: Callable[[], None]
) -> Iterator[None]:
    """Takes in what `teach` has sent."""
    norms = np.frombuffer(message.norms, "<f4").tolist()

    def learned(run: ReplicaSet) -> None:
        own = norms[run.first - message.first : run.stop - message.first]
        protocol.learned(message.step, run.key, own, None)

    yield from state.learn(message.layer, message.first, message.stop, message.step, payload, learned)
    done()
