"""An agent's preparations for a run, with a made-up fork server and no controller."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller import agent as module
from elaswave_spmd.controller.agent import Agent
from elaswave_spmd.controller.startup import data_spec
from elaswave_spmd.data import prepare_data
from elaswave_spmd.runtime.processes import agent_messages as am
from tests.unit.controller.made_up_workers import settings_in


def test_the_orphans_of_an_agent_have_the_time_that_the_settings_give_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fork server is started before anything is known of the run."""
    settings: Settings = settings_in(tmp_path, timeouts={"controller": 50.0, "shutdown": 70.0})
    data = prepare_data(data_spec(settings))
    told: list[Any] = []
    fork_server = SimpleNamespace(pid=0, ready=lambda: told.append("ready"), set_orphan_grace=told.append)
    links = SimpleNamespace(send=lambda peer, header: told.append(am.decode(header)))
    monkeypatch.setattr(module, "raise_fd_limit", lambda workers: None)
    agent = Agent(cast(Any, links), cast(Any, None), cast(Any, fork_server), {})
    agent._prepare(2, settings, data)
    assert told == ["ready", 120.0, am.Prepared()]
