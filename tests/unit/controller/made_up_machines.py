"""Agents whose machine has a made-up fork server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from elaswave_spmd.controller.agent import Agent
from elaswave_spmd.controller.agent_workers import AgentWorkers


def agent_of(
    links: object, mailbox: object, fork_server: object, workers: AgentWorkers | None = None, folder: str = ""
) -> Agent:
    """An agent on a machine with this fork server.

    Args:
        folder: of the fork server's sockets.
    """
    workers = AgentWorkers({}) if workers is None else workers
    machine = SimpleNamespace(
        fork_server=fork_server, scratch=SimpleNamespace(path=folder), workers=workers, prepare=lambda *_: None
    )
    return Agent(cast(Any, links), cast(Any, mailbox), cast(Any, machine))
