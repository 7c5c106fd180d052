"""The settings of several machines: what contradicts itself is refused by the name of its override."""

from __future__ import annotations

from typing import Any

import pytest

from elaswave_spmd.conf.schema import RAY, TORCHRUN, RuntimeSettings, Settings, Timeouts, endpoint
from elaswave_spmd.errors import ConfigError

GOOD: dict[str, Any] = {"transport": "tcp", "rendezvous": "node0:29400", "agents": 2, "token_file": "~/token"}


def test_several_machines() -> None:
    made = RuntimeSettings(**GOOD, local_workers=0, agents_timeout=5)
    assert (made.rendezvous, made.agents, made.agents_timeout) == ("node0:29400", 2, 5.0)
    assert isinstance(made.agents_timeout, float)


@pytest.mark.parametrize(
    ("change", "where", "fix"),
    [
        ({"transport": "ipc"}, "runtime.rendezvous=node0:29400", "runtime.transport=tcp"),
        ({"agents": None}, "runtime.rendezvous=node0:29400", "runtime.agents=1"),
        ({"token_file": None}, "runtime.rendezvous=node0:29400", "openssl rand"),
        ({"rendezvous": None}, "runtime.agents=2", "runtime.rendezvous=HOST:PORT"),
        ({"rendezvous": None, "agents": 0}, "runtime.token_file=~/token", "runtime.rendezvous=HOST:PORT"),
        (
            {"rendezvous": None, "agents": 0, "token_file": None, "local_workers": 0},
            "runtime.local_workers=0",
            "runtime.rendezvous=HOST:PORT",
        ),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other(change: dict[str, Any], where: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeSettings(**{**GOOD, **change})
    assert caught.value.where == where and fix in caught.value.fix


def test_an_address_of_links_is_for_tcp() -> None:
    assert RuntimeSettings(transport="tcp", host="10.0.0.1").host == "10.0.0.1"
    with pytest.raises(ConfigError, match="are tcp"):
        RuntimeSettings(host="10.0.0.1")


NO_ENDPOINTS = ["node0", "node0:", ":29400", "node0:0", "node0:65536", "node0:1x", "a b:1", "::1:80", 3, None]


@pytest.mark.parametrize("text", NO_ENDPOINTS)
def test_texts_that_are_no_endpoint(text: object) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        endpoint("runtime.rendezvous", text)


@pytest.mark.parametrize("host", ["node0..lan", ".node0", ".", "n" * 64, "n" * 300, "node0." + "n" * 64])
def test_hosts_that_can_be_no_name(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot be looked up") as caught:
        endpoint("runtime.rendezvous", f"{host}:29400")
    assert "1 to 63 characters" in caught.value.rule and caught.value.where == f"runtime.rendezvous={host}:29400"


@pytest.mark.parametrize("host", ["node0.lan.", "n" * 63 + ".lan", "knöten.lan", "node_0"])
def test_hosts_that_can_be_a_name(host: str) -> None:
    assert endpoint("runtime.rendezvous", f"{host}:1") == (host, 1)


@pytest.mark.parametrize(("text", "pair"), [("node0:29400", ("node0", 29400)), ("10.0.0.1:1", ("10.0.0.1", 1))])
def test_endpoints(text: str, pair: tuple[str, int]) -> None:
    assert endpoint("runtime.rendezvous", text) == pair


def test_agents_keep_their_workers_for_the_next_controller_but_not_those_of_torchrun() -> None:
    adopting = Timeouts(adopt=60.0)
    assert Settings(runtime=RuntimeSettings(**GOOD), timeouts=adopting).timeouts.orphan_grace == 90.0
    assert adopting.agent_grace == 35.0, "after their agent they have as long as without adoption"
    with pytest.raises(ConfigError, match="starts agents again with their controller") as caught:
        Settings(runtime=RuntimeSettings(**GOOD, launcher=TORCHRUN), timeouts=adopting)
    assert caught.value.where == "timeouts.adopt=60 runtime.launcher=torchrun"
    on_ray = Settings(runtime=RuntimeSettings(**GOOD, launcher=RAY), timeouts=adopting)
    assert on_ray.held_by_controller is None, "its supervisor tells agents where the next one is"
    assert Settings(runtime=RuntimeSettings(launcher=TORCHRUN), timeouts=adopting).runtime.rendezvous is None
