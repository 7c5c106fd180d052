"""The machines that a run's workers are started on: no machine takes all replicas of a stage's state along."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.conf.schema import MeshSettings, MirrorSettings, Settings
from elaswave_spmd.controller import launching
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.runtime.processes.launcher import Launcher
from tests.unit.runtime.test_launcher import FakeAgents, FakeForkServer


def hosts_of(stages: tuple[int, ...], capacities: tuple[int, ...], *, mirrors: int = 1) -> dict[int, str]:
    """Rank -> host of a run on machines with room for so many workers each."""
    fork_server: Any = FakeForkServer()
    agents: Any = FakeAgents(*capacities)
    settings = replace(Settings(), mesh=MeshSettings(stages=stages), mirror=MirrorSettings(count=mirrors))
    try:
        return launching._assigned(Launcher(fork_server, agents), settings)
    finally:  # before the collector comes there are hundreds, and tests after this one wait by select()
        fork_server.mailbox.close()
        agents.mailbox.close()


def test_each_machine_has_workers_of_all_stages_where_one_would_have_a_stage_alone() -> None:
    assert hosts_of((2, 2), (2, 2)) == {0: "a", 1: "b", 2: "a", 3: "b"}
    assert hosts_of((4, 4), (4, 4)) == {0: "a", 1: "a", 2: "b", 3: "b", 4: "a", 5: "a", 6: "b", 7: "b"}


def test_else_neighbours_of_a_stage_are_on_one_machine() -> None:
    assert hosts_of((4,), (2, 2)) == {0: "a", 1: "a", 2: "b", 3: "b"}
    assert hosts_of((2, 2), (1, 2, 1)) == {0: "a", 1: "b", 2: "b", 3: "c"}
    assert hosts_of((2, 2), (2, 2), mirrors=0) == {0: "a", 1: "a", 2: "b", 3: "b"}, "nothing is mirrored anyway"
    assert hosts_of((1, 1), (1, 1)) == {0: "a", 1: "b"}, "the mirrors are in the other stage"


@given(st.lists(st.integers(2, 5), min_size=1, max_size=4), st.integers(2, 4))
def test_no_machine_of_equal_ones_has_a_stage_alone(stages: list[int], machines: int) -> None:
    shape = MeshShape.of_stages(stages)
    each = -(-shape.num_workers // machines)
    hosts = hosts_of(tuple(stages), (each,) * machines)
    if len({*hosts.values()}) == machines and each < shape.num_workers:
        alone = [members for members in Mesh.initial(shape).stages if len({hosts[rank] for rank in members}) == 1]
        # Only where columns are longer than what a machine takes can a short stage be left on one of them.
        assert not alone or (max(stages) > 2 and min(stages) < max(stages)), (stages, machines, hosts)


def test_what_cannot_be_helped_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Agents(FakeAgents):
        def prepare(self, *_: object) -> None: ...

    fork_server: Any = FakeForkServer()
    agents: Any = Agents(1, 3)
    settings = replace(Settings(), mesh=MeshSettings(stages=(2, 2)), mirror=MirrorSettings(count=1))
    data: Any = type("Data", (), {"to_dict": lambda self: {}})()
    topology = launching.gather(Launcher(fork_server, agents), settings, data)
    assert topology is not None
    said = capsys.readouterr().out
    assert "workers: 1 on a, 3 on b" in said and "stage 1 is on b alone" in said and "stage 0" not in said
