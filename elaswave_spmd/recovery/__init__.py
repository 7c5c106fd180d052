"""The step protocol without I/O: messages, and the state machines of worker and controller. No torch."""

from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.recovery.worker_protocol import Apply, Install, SendVote, WorkerProtocol

__all__ = ["Apply", "ControllerProtocol", "Install", "SendVote", "WorkerProtocol"]
