"""Answers to `ctl`, by a run whose protocol is real and whose workers are made up; and the socket itself."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_spmd.conf.schema import ElasticSettings
from elaswave_spmd.controller import admin_client
from elaswave_spmd.controller import admin_server as module
from elaswave_spmd.controller.actions import Action, DrainAgent, Record, Reply, Spawn
from elaswave_spmd.controller.admin_server import Administration, ControlSocket
from elaswave_spmd.controller.machines import Machines
from elaswave_spmd.controller.notices import Notices
from elaswave_spmd.controller.replacements import ReplacementPolicy, Replacements
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.errors import ControlError, RunError
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery.actions import Broadcast, RemoveMember
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, ProtocolSpec
from elaswave_spmd.recovery.messages import Applied, Prepare, Ready
from elaswave_spmd.run_dir import MetricsLine, RunDir, RunInfo, RunObserver
from elaswave_spmd.runtime.processes.launcher import Machine
from elaswave_spmd.runtime.transport.mailbox import Mailbox, Request
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.sharding.layout import LayerUse, ParameterInfo, lay_out
from elaswave_spmd.sharding.replicas import ReplicaSet
from tests.waiting import PATIENCE_S, eventually

USES = [LayerUse(name, (ParameterInfo(f"{name}.w", (64,)),)) for name in "ab"]
LAYOUT = lay_out(USES, page_size=64)
REPLICAS = {
    layer.index: tuple(
        ReplicaSet(layer.index, block.first_page, block.first_page + block.num_pages, 2 * layer.index, replicas)
        for block in layer.blocks
    )
    for layer, replicas in zip(LAYOUT.layers, (frozenset({0, 1}), frozenset({2})), strict=True)
}


class World:
    """A run of workers 0 and 1 on stage 0 and worker 2 on stage 1; nothing is sent, workers are numbers."""

    def __init__(self, folder: Path, elastic: ElasticSettings) -> None:
        mesh = Mesh.initial(MeshShape.of_stages((2, 1)))
        placement = Placement(mesh, 4, (0, 1, 2), ((2, 2), (4,)), Shardings(), replicas=REPLICAS)
        self.protocol = ControllerProtocol(placement, ProtocolSpec(LAYOUT, 9))
        self.roster = Roster(mesh.members)
        for rank, pid in {0: 100, 1: 101, 2: None}.items():
            self.roster.add(rank, pid)
        self.effects: list[Action] = []
        self.mailbox = Mailbox()
        self.folder = folder / "run"
        self.observer = RunObserver(RunDir.create(self.folder, "", model="m", mesh="x"), board=False)
        self.observer.on_start(RunInfo("m", "x", "", 9, 9, 3))
        self.replacements = Replacements(ReplacementPolicy.from_settings(elastic), self.roster)
        machines = Machines(elastic, self.protocol, self.roster, self.replacements, len(mesh.members))
        self.machines: tuple[Machine, ...] = ()
        self.gone: list[int] = []
        self.notices = Notices(elastic, self.protocol, self.roster, cast(Any, self))
        self.control = Administration(
            self.protocol, self.roster, self.replacements, machines, self.notices, self.observer, elastic
        )
        self.socket: ControlSocket | None = None

    # In the place of the handler of failures.
    def withdrawn(self, rank: int, reason: str, now: float) -> list[Action]:
        self.gone.append(rank)
        return []

    @property
    def workers(self) -> Mapping[int, int | None]:
        return self.roster.pids

    def spawn(self, number: int) -> None:
        for rank in self.roster.allocate(number):
            self.roster.add(rank, 100 + rank)

    def answer(self, request: Request) -> None:
        """Carry actions out as the controller does."""
        for action in self.control.answer(request, self.machines):
            match action:
                case Reply(asked, answer):
                    asked.reply(answer)
                case Spawn(ranks):
                    for rank in ranks:
                        self.roster.add(rank, 100 + rank)
                case _:
                    self.effects.append(action)

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()

    def start(self) -> None:
        for rank in (0, 1, 2):
            self.protocol.ready(Ready(rank, "address"))

    def ask(self, **body: object) -> Any:
        answers: list[Mapping[str, Any]] = []
        self.answer(Request(body, answers.append))
        (answer,) = answers
        return json.loads(json.dumps(answer))

    def refusal(self, **body: object) -> str:
        """The refusal, as a person sees it."""
        answer, before = self.ask(**body), dict(self.workers)
        assert list(answer) == ["error"] and not self.effects and self.workers == before
        return str(ControlError(**answer["error"]))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def of(**elastic: Any) -> World:
        made.append(World(tmp_path, ElasticSettings(**elastic)))
        return made[-1]

    yield of
    for world in made:
        world.close()
        world.observer.close()


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    world = make()
    world.start()
    return world


def committed(step: int) -> MetricsLine:
    return MetricsLine.of(step=step, mesh_epoch=0, loss=1.5, grad_norm=0.5, lr=0.1, tokens=30, seconds=0.5, workers=3)


def test_status_before_the_first_step(make: Callable[..., World]) -> None:
    status = make().ask(command="status")
    assert (status["starting"], status["version"], status["step"], status["total_steps"]) == (True, 0, 1, 9)
    assert status["loss"] is status["loss_hex"] is None and status["events"] == []
    rows = dict(admin_client.status_rows(status))
    assert rows["run"].endswith("run, its workers are starting") and rows["committed"] == "0 of 9 steps"


def test_status_says_how_far_it_is_and_who_takes_part(world: World) -> None:
    world.protocol.applied(Applied(1, 0, 2, 1.5, 0.5, True))
    world.observer.on_step(committed(1))
    for number in range(7):
        world.observer.on_event("skip", step=number, message=f"a [message] {number}")
    world.spawn(1)
    assert world.ask(command="drain", ranks=[1])["leaving"] == [1]
    status = world.ask(command="status")
    assert (status["starting"], status["version"], status["step"]) == (False, 1, 2)
    assert (status["loss"], status["loss_hex"]) == (1.5, (1.5).hex())
    assert (status["tokens_per_second"], status["unit"]) == (60, "tokens")
    assert (status["mesh"], status["mesh_epoch"], status["stages"]) == ("stages2-1", 0, [[0, 1], [2]])
    assert status["members"] == [
        {"rank": 0, "stage": 0, "pid": 100},
        {"rank": 1, "stage": 0, "pid": 101},
        {"rank": 2, "stage": 1, "pid": None},
    ]
    assert status["newcomers"] == [{"rank": 3, "pid": 103}]
    assert (status["leaving"], status["changing"], status["learners"]) == ([1], [0, 1, 2], [])
    assert status["unsurvived"] == "3 of 3 pairs of simultaneous losses lose some page"
    assert [event["text"] for event in status["events"]] == [f"skip: a [message] {n}" for n in range(2, 7)]
    rows = admin_client.status_rows(status)
    assert ("stage 0", "0 (pid 100), 1 (pid 101)") in rows and ("stage 1", "2") in rows
    assert ("newcomers", "3 (pid 103)") in rows and ("leaving", "1") in rows
    assert ("mesh", "stages2-1, epoch 0, changing, waits for workers 0-2") in rows
    assert ("committed", "1 of 9 steps, loss 1.5000, 60 tokens/s, 0:04 left") in rows


def test_status_of_a_loss_that_json_has_no_number_for(world: World) -> None:
    world.observer.on_step(dataclasses.replace(committed(1), loss=float("nan"), loss_hex="nan"))
    status = world.ask(command="status")
    assert status["loss"] is None and "loss nan, " in dict(admin_client.status_rows(status))["committed"]


def test_learners_are_named(world: World) -> None:
    (run,) = REPLICAS[0]
    learning = {**REPLICAS, 0: (dataclasses.replace(run, learners=frozenset({2})),)}
    world.protocol.placement = dataclasses.replace(world.protocol.placement, replicas=learning)
    assert world.ask(command="status")["learners"] == [2]


def test_lost_members_no_longer_count(world: World) -> None:
    world.protocol.lost(0, "killed")
    world.roster.remove(0)
    status = world.ask(command="status")
    assert status["members"][0] == {"rank": 0, "stage": 0, "pid": None} and status["changing"] == [1, 2]
    assert status["unsurvived"] == "1 of 1 pairs of simultaneous losses lose some page"
    assert "exists: workers 1, 2" in world.refusal(command="drain", ranks=[0])


AGENTS = (
    Machine(None, "node0", None),
    Machine(-2, "node1", 2, frozenset({1, 2})),
    Machine(-3, "node2", 3),
    Machine(-4, "node3", 4, is_ready=False),
)


def test_add_starts_newcomers_on_the_machine_that_is_named(world: World) -> None:
    world.machines = AGENTS
    request = Request({"command": "add", "count": 3, "host": "node2"}, lambda _: None)
    assert world.control.answer(request, AGENTS)[0] == Spawn((3, 4, 5), host="node2")
    assert world.ask(command="add", count=9, host="node0")["added"] == list(range(6, 15)), "which has no limit"


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("node1", "node1 has 0 free places for 1 more"),
        ("node3", "still preparing"),
        ("node9", "is no machine of the run"),
        (7, "is no machine of the run"),
        (["node2"], "is no machine of the run"),
    ],
    ids=str,
)
def test_nobody_is_added_where_there_is_no_room(world: World, host: object, why: str) -> None:
    world.machines = AGENTS
    refusal = world.refusal(command="add", count=1, host=host)
    assert why in refusal and "node2 (3 of 3 places free)" in refusal
    world.machines = ()
    assert "the run is on one machine" in world.refusal(command="add", count=1, host=host)


def test_where_the_controllers_machine_is_to_have_none_workers_are_added_on_agents_with_room(world: World) -> None:
    world.machines = machines = (Machine(None, "node0", 0), *AGENTS[1:])
    refusal = world.refusal(command="add", count=4)
    assert "the agents have 3 free places for 4 more workers" in refusal and "node2 (3 of 3 places free)" in refusal
    assert "no worker is ever started on the controller's machine" in refusal
    here = world.refusal(command="add", count=1, host="node0")
    assert "the controller runs on node0, with runtime.local_workers=0" in here
    request = Request({"command": "add", "count": 3}, lambda _: None)
    assert world.control.answer(request, machines)[0] == Spawn((3, 4, 5))


def test_a_machine_is_drained_as_its_workers_are(world: World) -> None:
    machines = (AGENTS[0], Machine(-2, "node1", 2, frozenset({1})), *AGENTS[2:])
    world.machines = machines
    world.spawn(1)
    machines = (AGENTS[0], Machine(-2, "node1", 2, frozenset({1, 3})))
    answers: list[Mapping[str, Any]] = []
    request = Request({"command": "drain", "host": "node1", "within": 60}, answers.append)
    drain, notice, prepare, _ = world.control.answer(request, machines, 100.0)
    assert drain == DrainAgent(-2, 60.0, "")
    assert isinstance(notice, Record) and notice.kind == "notice"
    about = {name: notice.fields[name] for name in ("host", "ranks", "deadline", "from")}
    assert about == {"host": "node1", "ranks": [1, 3], "deadline": 60.0, "from": "ctl"}
    assert isinstance(prepare, Broadcast) and isinstance(prepare.message, Prepare)
    assert world.protocol.leaving == (1,) and world.gone == [3], "who is no member has nothing that could be lost"


@pytest.mark.parametrize(
    ("host", "within", "why"),
    [
        ("node0", None, "the controller runs there"),
        ("node9", None, "'node9' is no machine of the run"),
        (None, None, "None is no machine of the run"),
        ("node2", 0, "0 seconds are no deadline"),
        ("node2", float("inf"), "inf seconds are no deadline"),
        ("node2", float("nan"), "nan seconds are no deadline"),
        ("node2", 10**400, "seconds are no deadline"),
        ("node2", "soon", "'soon' seconds are no deadline"),
        ("node2", True, "True seconds are no deadline"),
        ("node1", None, "1 workers would stay"),
    ],
    ids=str,
)
def test_machines_that_cannot_be_drained(make: Callable[..., World], host: object, within: object, why: str) -> None:
    world = make(min_workers=2)
    world.start()
    world.machines = AGENTS
    assert why in world.refusal(command="drain", host=host, within=within)
    assert not world.notices.is_waiting and world.protocol.leaving == ()


def test_nobody_is_added_beyond_max_workers(make: Callable[..., World]) -> None:
    world = make(max_workers=5)
    world.start()
    refusal = world.refusal(command="add", count=3)
    assert "exceed elastic.max_workers=5" in refusal and "ctl RUN add 2" in refusal
    assert world.ask(command="add", count=2) == {"added": [3, 4]}
    assert "another elastic.max_workers" in world.refusal(command="add", count=1)


def test_status_has_the_machines(world: World) -> None:
    assert "hosts" not in world.ask(command="status"), "of a run on one machine"
    world.machines = AGENTS
    status = world.ask(command="status")
    assert [tuple(row.values()) for row in status["hosts"]] == [
        ("node0", None, [0], "ready"),
        ("node1", 2, [1, 2], "ready"),
        ("node2", 3, [], "ready"),
        ("node3", 4, [], "preparing"),
    ]
    rows = [text for name, text in admin_client.status_rows(status) if name == "host"]
    assert rows[:2] == ["node0: worker 0", "node1: workers 1, 2; 2 places"]
    assert rows[3] == "node3: no workers; 4 places; preparing"


def test_add_starts_newcomers(world: World) -> None:
    assert world.ask(command="add", count=2) == {"added": [3, 4]}
    assert sorted(world.workers) == [0, 1, 2, 3, 4] and not world.effects


@pytest.mark.parametrize("count", [0, -1, None, "2", 1.0, True])
def test_at_least_one_is_added(world: World, count: object) -> None:
    refusal = world.refusal(command="add", count=count)
    assert "at least 1 worker is added" in refusal and refusal.startswith(f"{count!r} workers")


def test_no_more_are_added_than_open_files_allow(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fits_fd_limit", lambda workers: workers <= 5)
    assert "ulimit -n" in world.refusal(command="add", count=3)
    assert world.ask(command="add", count=2) == {"added": [3, 4]}


def test_drain_asks_for_a_boundary(world: World) -> None:
    assert world.ask(command="drain", ranks=[2, 0]) == {"leaving": [0, 2]}
    assert world.effects == [Broadcast((0, 1, 2), Prepare(1, 1))], "both leave in one change"
    assert not any(isinstance(effect, RemoveMember) for effect in world.effects)


def test_draining_twice_changes_nothing_more(world: World) -> None:
    world.ask(command="drain", ranks=[1])
    before = list(world.effects)
    assert world.ask(command="drain", ranks=[1]) == {"leaving": [1]} and world.effects == before


@pytest.mark.parametrize(
    ("ranks", "what"),
    [([5], "worker 5 is not in"), ([0, 3], "worker 3 has not joined yet\n"), ([-1], "worker -1 is not in")],
)
def test_only_members_are_drained(world: World, ranks: list[int], what: str) -> None:
    world.spawn(1)
    refusal = world.refusal(command="drain", ranks=ranks)
    assert refusal.startswith(what) and "exists: workers 0, 1, 2" in refusal


@pytest.mark.parametrize("ranks", [None, [], 1, ["1"], [True], {"1": 1}])
def test_ranks_are_whole_numbers(world: World, ranks: object) -> None:
    assert "by their ranks" in world.refusal(command="drain", ranks=ranks)


def test_the_last_worker_stays(world: World) -> None:
    assert "the last worker of a run stays" in world.refusal(command="drain", ranks=[0, 1, 2])
    world.ask(command="drain", ranks=[0, 1])
    world.effects.clear()
    assert "0 workers would stay" in world.refusal(command="drain", ranks=[2])


def test_min_workers_stay(make: Callable[..., World]) -> None:
    world = make(min_workers=2)
    world.start()
    world.spawn(5)  # who has not joined does not count
    assert "elastic.min_workers=2" in world.refusal(command="drain", ranks=[0, 1])
    assert world.ask(command="drain", ranks=[0]) == {"leaving": [0]}


@pytest.mark.parametrize("body", [{"command": "add", "count": 1}, {"command": "drain", "ranks": [1]}])
def test_members_do_not_change_while_they_start_or_end(make: Callable[..., World], body: dict[str, Any]) -> None:
    world = make()
    world.protocol.ready(Ready(1, "address"))
    assert "workers 0, 2 have not" in world.refusal(**body)
    world.start()
    world.protocol.version = 9
    assert "before its last step" in world.refusal(**body)


@pytest.mark.parametrize("body", [{"command": "add", "count": 1}, {"command": "drain", "ranks": [1]}])
def test_members_of_a_run_that_is_not_elastic_stay(make: Callable[..., World], body: dict[str, Any]) -> None:
    world = make(enabled=False)
    world.start()
    assert "elastic.enabled=false" in world.refusal(**body)
    assert world.ask(command="status")["version"] == 0


@pytest.mark.parametrize("body", [{"command": "add", "count": 1}, {"command": "drain", "ranks": [1]}])
def test_nobody_joins_or_leaves_a_run_that_is_about_to_stop(world: World, body: dict[str, Any]) -> None:
    world.start()
    world.protocol.stop("asked to")
    assert "about to stop" in world.refusal(**body)


@pytest.mark.parametrize("command", [None, "stop", 7, ["status"]])
def test_other_commands_are_refused(world: World, command: object) -> None:
    assert "exists: status, add, drain" in world.refusal(command=command)


# ---- the socket


@pytest.fixture
def served(world: World) -> Iterator[World]:
    """With its socket open, and a thread in the place of the controller's loop."""
    world.socket = ControlSocket(world.folder, world.mailbox)
    done = threading.Event()

    def loop() -> None:
        while not done.is_set():
            item = world.mailbox.get(0.02)
            if isinstance(item, Request):
                world.answer(item)

    thread = threading.Thread(target=loop)
    thread.start()
    yield world
    done.set()
    thread.join()


def mailbox_of(put: Callable[[Request], object]) -> Mailbox:
    """A mailbox that hands requests on at once."""
    return cast(Mailbox, SimpleNamespace(put=put))


def raw(folder: Path, line: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(PATIENCE_S)
        with admin_client.socket_address(folder) as address:
            link.connect(address)
        try:
            link.sendall(line)
            link.shutdown(socket.SHUT_WR)
            with link.makefile("rb") as lines:
                return lines.read()
        except (BrokenPipeError, ConnectionResetError):  # it did not read to the end
            return b""


def test_requests_go_through_the_socket(served: World) -> None:
    assert admin_client.ask(str(served.folder), {"command": "add", "count": 1}) == {"added": [3]}
    assert admin_client.ask(str(served.folder), {"command": "status"})["newcomers"] == [{"rank": 3, "pid": 103}]
    with pytest.raises(
        ControlError, match=r"worker 7 is not in the mesh\n  rule:   only a member of the mesh can leave it"
    ):
        admin_client.ask(str(served.folder), {"command": "drain", "ranks": [7]})


def test_the_socket_is_its_users_alone_and_goes_with_the_run(served: World) -> None:
    status = os.lstat(served.folder / "ctl.sock")
    assert stat.S_ISSOCK(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
    served.close()
    served.close()
    assert not (served.folder / "ctl.sock").exists()


@pytest.mark.parametrize("line", [b"hello\n", b"[1]\n", b"\xff\n", b"[" * 60_000 + b"\n", b"{" * 70_000])
def test_what_is_no_request_is_refused_and_the_next_one_served(served: World, line: bytes) -> None:
    answer = raw(served.folder, line)
    assert b"a request is an object of JSON" in answer or not answer
    assert admin_client.ask(str(served.folder), {"command": "status"})["version"] == 0


def test_a_client_that_says_nothing_is_let_go_when_its_time_is_over(
    served: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert raw(served.folder, b"") == b""
    with monkeypatch.context() as short, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        short.setattr(module, "_CLIENT_S", 0.1)
        silent.settimeout(PATIENCE_S)
        with admin_client.socket_address(served.folder) as address:
            silent.connect(address)
        assert silent.recv(1) == b""
    assert admin_client.ask(str(served.folder), {"command": "status"})["version"] == 0


@pytest.mark.parametrize("number", [10, 200])
def test_many_silent_clients_delay_nobody(served: World, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """They are let go when their time is over, which is far above what anybody waits for an answer here."""
    monkeypatch.setattr(module, "_CLIENT_S", 1000.0)
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            with admin_client.socket_address(served.folder) as address:
                silent.connect(address)
        for _ in range(3):
            assert admin_client.ask(str(served.folder), {"command": "status"}, timeout_s=30.0)["version"] == 0


def test_a_request_may_come_in_pieces(served: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLIENT_S", PATIENCE_S)  # others are answered between the pieces
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(PATIENCE_S)
        with admin_client.socket_address(served.folder) as address:
            link.connect(address)
        for piece in (b'{"comm', b'and": "sta', b'tus"}\n'):
            link.sendall(piece)
            assert admin_client.ask(str(served.folder), {"command": "status"})["version"] == 0
        with link.makefile("rb") as lines:
            assert json.loads(lines.readline())["version"] == 0


def test_a_directory_with_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120) / ("e" * 120)
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    requests: list[Request] = []

    def put(request: Request) -> None:
        requests.append(request)
        request.reply({"fine": True})

    served = ControlSocket(folder, mailbox_of(put))
    assert admin_client.ask(str(folder), {"command": "x"}) == {"fine": True} and requests[0].body == {"command": "x"}
    served.close()
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


def test_the_socket_of_a_dead_run_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead, admin_client.socket_address(tmp_path) as address:
        dead.bind(address)
        dead.listen()
    with pytest.raises(ControlError, match="goes on on another machine, has ended without a word, or"):
        admin_client.ask(str(tmp_path), {"command": "status"})
    served = ControlSocket(tmp_path, mailbox_of(lambda request: request.reply({"alive": True})))
    assert admin_client.ask(str(tmp_path), {"command": "status"}) == {"alive": True}
    served.close()


def test_who_waits_is_told_of_the_end(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    asked = threading.Event()
    served = ControlSocket(tmp_path, mailbox_of(lambda _: asked.set()))
    found: list[str] = []

    def client() -> None:
        with pytest.raises(ControlError) as caught:
            admin_client.ask(str(tmp_path), {"command": "add", "count": 1})
        found.append(str(caught.value))

    thread = threading.Thread(target=client)
    thread.start()
    assert asked.wait(PATIENCE_S)
    served.close()
    thread.join(PATIENCE_S)
    assert found == ["the run is ending"]


def test_what_came_while_nobody_looked_came_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the run stood still, longer than clients may take."""
    (tmp_path / "config.yaml").touch()
    stands_still, goes_on = threading.Event(), threading.Event()

    def put(request: Request) -> None:
        if request.body["command"] == "first":
            stands_still.set()
            assert goes_on.wait(PATIENCE_S)
        request.reply({"to": request.body["command"]})

    served = ControlSocket(tmp_path, mailbox_of(put))
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in range(2)]
        for link, command in zip(links, (b"first", b"second"), strict=True):
            link.settimeout(PATIENCE_S)
            with admin_client.socket_address(tmp_path) as address:
                link.connect(address)
            link.sendall(b'{"command": "%b"}\n' % command)
            assert stands_still.wait(PATIENCE_S)
        with monkeypatch.context() as short:  # until both have their answers: `close` waits for the thread as long
            short.setattr(module, "_CLIENT_S", 0.0)
            goes_on.set()
            answers = [json.loads(stack.enter_context(link.makefile("rb")).readline()) for link in links]
        assert answers == [{"to": "first"}, {"to": "second"}]
    served.close()


def test_a_controller_that_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.05)
    (tmp_path / "config.yaml").touch()
    late: list[Request] = []
    served = ControlSocket(tmp_path, mailbox_of(late.append))
    with pytest.raises(ControlError, match="the controller is busy"):
        admin_client.ask(str(tmp_path), {"command": "status"})
    assert late[0].is_awaited(), "its client was told that it will be followed"
    late[0].reply({})  # in vain, and harmless
    served.close()


@pytest.mark.parametrize("is_let_go", [False, True], ids=["before the socket has noticed", "afterwards"])
def test_requests_whose_clients_have_given_up_are_not_followed(world: World, is_let_go: bool) -> None:
    """The process of the run stood still, and the user has asked again and again."""
    requests: list[Request] = []
    world.socket = served = ControlSocket(world.folder, mailbox_of(requests.append))
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            with admin_client.socket_address(world.folder) as address:
                link.connect(address)
            link.sendall(b'{"command": "add", "count": 2}\n')
    eventually(lambda: len(requests) == 3 and not (is_let_go and served._clients))
    for request in requests:
        world.answer(request)
    assert len(world.workers) == 3


def test_a_client_that_sends_nothing_more_and_waits_is_answered(served: World) -> None:
    assert json.loads(raw(served.folder, b'{"command": "add", "count": 1}\n')) == {"added": [3]}


def test_a_queue_that_is_full_is_not_taken_for_nobody(tmp_path: Path) -> None:
    """Each `ctl` that has given up stays in the queue of a process that stands still."""
    (tmp_path / "config.yaml").touch()
    with contextlib.ExitStack() as stack, admin_client.socket_address(tmp_path) as address:
        stopped = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        stopped.bind(address)
        stopped.listen(0)
        with pytest.raises(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                waiting.setblocking(False)
                waiting.connect(address)
        with pytest.raises(RunError, match="too many requests wait for it already; is its process stopped"):
            admin_client.ask(str(tmp_path), {"command": "status"})


# ---- the command


@pytest.mark.parametrize("within", ["inf", "nan", "0"])
def test_the_command_takes_no_deadline_that_never_comes(
    served: World, capsys: pytest.CaptureFixture[str], within: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        run_main(capsys, served.folder, "drain", "--host", "node1", "--within", within)
    assert caught.value.code == 2 and f"--within {within} is no deadline" in capsys.readouterr().err


def run_main(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    assert admin_client.main([str(folder), *words], "elaswave-spmd") == 0
    return capsys.readouterr().out


def test_the_command_prints_what_a_person_needs(served: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(capsys, served.folder, "add", "2").startswith("workers 3, 4 will join")
    assert run_main(capsys, served.folder, "drain", "1").startswith("worker 1 will leave")
    lines = run_main(capsys, served.folder, "status").splitlines()
    assert lines[0] == f"run        {served.folder}" and "stage 1    2" in lines
    assert json.loads(run_main(capsys, served.folder, "status", "--json"))["leaving"] == [1]
    assert json.loads(run_main(capsys, served.folder, "add", "1", "--json")) == {"added": [5]}


@pytest.mark.parametrize(
    ("last", "how"),
    [(("finish", {}), "which has finished"), (("stop", {"message": "a [bug]"}), r"which has stopped: a \[bug\]")],
)
@pytest.mark.parametrize("after", ["", "callback", "generated", "not_generated"])
def test_a_run_that_has_ended_says_how(world: World, last: tuple[str, dict[str, str]], how: str, after: str) -> None:
    world.observer.run_dir.write_event(last[0], time.time(), last[1])
    if after:
        world.observer.run_dir.write_event(after, time.time(), {})
    with pytest.raises(ControlError, match=how):
        admin_client.ask(str(world.folder), {"command": "status"})


def test_what_is_no_run(tmp_path: Path) -> None:
    for run in (str(tmp_path), str(tmp_path / "nothing"), "~nobody-has-this-name"):
        with pytest.raises(ControlError, match="a run is named by its directory"):
            admin_client.ask(run, {"command": "status"})


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("run",),
        ("run", "stop"),
        ("run", "add"),
        ("run", "add", "x"),
        ("run", "drain"),
        ("run", "drain", "1", "--host", "b"),
        ("run", "drain", "1", "--within", "9"),
    ],
)
def test_the_shape_of_the_command(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        admin_client.main(words, "elaswave-spmd")
    assert ended.value.code == 2 and "usage: elaswave-spmd ctl" in capsys.readouterr().err
