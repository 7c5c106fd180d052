"""The controller's side of `ctl`: a socket in the run's directory, and the answers.

One thread reads a line from each client, files it in the controller's mailbox and writes the answer back; it waits for
none of them. The controller's own thread decides about requests, as about every event.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, cast

from elaswave_spmd.conf.schema import ElasticSettings
from elaswave_spmd.controller.actions import Action, Reply, Spawn
from elaswave_spmd.controller.admin_client import ANSWER_S, SOCKET
from elaswave_spmd.controller.machines import Machines
from elaswave_spmd.controller.notices import Notices
from elaswave_spmd.controller.replacements import Replacements
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.errors import ControlError
from elaswave_spmd.mesh.mesh import named_workers
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.run_dir import RunObserver
from elaswave_spmd.runtime.processes.fd_limit import fits_fd_limit
from elaswave_spmd.runtime.processes.launcher import Machine
from elaswave_spmd.runtime.transport.mailbox import Mailbox, Request
from elaswave_spmd.sharding.replicas import all_replica_sets, unsurvived_text

_COMMANDS = ("status", "add", "drain")
_CLIENT_S = 10.0  # how long a client may take to send its request, or to read the answer
_PAUSE_S = 0.1  # after a failed accept
_TICK_S = 0.1  # between two looks at the time that clients have
_MOST_CLIENTS = 256  # at once; further ones wait in the socket's queue
_LONGEST = 1 << 16  # bytes of a request
_NEVER_HERE = "with runtime.local_workers=0 no worker is ever started on the controller's machine"
_UNREADY = f".{SOCKET}"  # the socket's name until it can be connected to, by its user alone


class Administration:
    """The answers to the requests of administrators (`ctl`). It decides on the controller's thread.

    Args:
        observer: what is known of the run's progress.
    """

    def __init__(
        self,
        protocol: ControllerProtocol,
        roster: Roster,
        replacements: Replacements,
        machines: Machines,
        notices: Notices,
        observer: RunObserver,
        elastic: ElasticSettings,
    ) -> None:
        self._protocol = protocol
        self._roster = roster
        self._replacements = replacements
        self._machines = machines
        self._notices = notices
        self._observer = observer
        self._elastic = elastic

    def answer(self, request: Request, machines: Sequence[Machine] = (), now: float = 0.0) -> list[Action]:
        """Decide about a request. Returns the actions that follow from it, and the reply to it as the last one.

        Nothing follows from a request that nobody waits for any more. A client gives up when this process has stood
        still for a while, and its user asks again: each of these requests would be followed afterwards.

        Args:
            machines: of the run, as they are now; none: it is on one machine, and has no others.
        """
        if not request.is_awaited():
            return [Reply(request, _UNHEARD)]
        try:
            actions, answer = self._decide(request.body, machines, now)
        except ControlError as error:
            actions, answer = [], _error(error)
        return [*actions, Reply(request, answer)]

    def _decide(
        self, body: Mapping[str, Any], machines: Sequence[Machine], now: float
    ) -> tuple[list[Action], dict[str, object]]:
        command = body.get("command")
        if command == "status":
            return [], self.status() | self._of_machines(machines)
        if command not in _COMMANDS:
            raise ControlError(f"the request has no known command: {command!r}", exists=", ".join(_COMMANDS))
        self._refuse_changes()
        if command == "add":
            return self._add(body.get("count"), body.get("host"), machines)
        if "host" in body:
            return self._drain_host(body["host"], body.get("within"), machines, now)
        return self._drain(body.get("ranks"))

    def _of_machines(self, machines: Sequence[Machine]) -> dict[str, object]:
        """The part of the status that is about machines, which a run without agents has not."""
        if not machines:
            return {}
        elsewhere = {rank for machine in machines for rank in machine.ranks}
        rows: list[dict[str, object]] = []
        for machine in machines:
            here = machine.ranks if machine.agent is not None else self._roster.pids.keys() - elsewhere
            rows.append(
                {
                    "host": machine.host,
                    "places": machine.places,
                    "ranks": sorted(here & self._roster.pids.keys()),
                    "state": "leaving" if machine.is_leaving else "ready" if machine.is_ready else "preparing",
                }
            )
        return {"hosts": rows}

    def status(self) -> dict[str, object]:
        """The progress of the run and its workers, JSON-ready; docs/run_files.md lists the fields."""
        protocol, observer = self._protocol, self._observer
        mesh, last = protocol.placement.mesh, observer.last
        replicas = protocol.placement.replica_map(protocol.layout)
        pids, spares = self._roster.pids, self._replacements.spares
        beside = [rank for rank in sorted(pids) if rank not in mesh]
        return {
            "run_dir": str(observer.run_dir.path),
            "starting": not protocol.started,
            "step": min(protocol.version + 1, protocol.steps),
            "version": protocol.version,
            "total_steps": protocol.steps,
            "loss": last.to_dict()["loss"] if last else None,
            "loss_hex": last.loss_hex if last else None,
            "tokens_per_second": observer.pace.tokens_per_second,
            "unit": observer.pace.unit,
            "seconds_left": observer.pace.seconds_left,
            "mesh": mesh.shape.name,
            "mesh_epoch": mesh.epoch,
            "stages": mesh.stages,
            "members": [
                {"rank": rank, "stage": stage, "pid": pids.get(rank)}
                for stage, ranks in enumerate(mesh.stages)
                for rank in ranks
            ],
            "newcomers": [{"rank": rank, "pid": pids[rank]} for rank in beside if rank not in spares],
            "spares": [{"rank": rank, "pid": pids[rank], "ready": spares[rank]} for rank in beside if rank in spares],
            "leaving": protocol.leaving,
            "changing": protocol.changing,
            "learners": sorted({rank for pages in all_replica_sets(replicas) for rank in pages.learners}),
            "unsurvived": unsurvived_text(replicas, protocol.members) if len(protocol.members) > 1 else "",
            "events": list(observer.recent_events),
        }

    def _refuse_changes(self) -> None:
        protocol = self._protocol
        if not self._elastic.enabled:
            raise ControlError(
                "the run has elastic.enabled=false", rule="the workers of a run that is not elastic stay the same"
            )
        if not protocol.started:
            late = protocol.not_ready
            raise ControlError(
                f"{named_workers(late)} {'has' if len(late) == 1 else 'have'} not started yet",
                rule="the workers of a run change once all of the first have started",
                fix="try again in a few seconds",
            )
        if protocol.stops:
            raise ControlError("the run is about to stop", rule="nobody joins or leaves a run that is about to stop")
        if protocol.version >= protocol.steps:
            raise ControlError(
                f"the run has done its last step, {protocol.version}",
                rule="the workers of a run change before its last step",
            )

    def _add(self, number: object, host: object, machines: Sequence[Machine]) -> tuple[list[Action], dict[str, object]]:
        if not _is_whole(number) or number < 1:
            raise ControlError(
                f"{number!r} workers cannot be added", rule="at least 1 worker is added", fix="ctl RUN add 1"
            )
        if not fits_fd_limit(len(self._roster) + number):
            raise ControlError(
                f"{number} more beside {len(self._roster)} workers exceed the limit of open files",
                rule="the controller has a link to each worker, within its limit of open files",
                fix="a higher `ulimit -n` before the run starts",
            )
        most, workers = self._elastic.max_workers, self._machines.num_workers
        if most is not None and workers + number > most:
            raise ControlError(
                f"{number} more beside {workers} workers exceed elastic.max_workers={most}",
                rule="a run has at most elastic.max_workers workers",
                fix=f"ctl RUN add {most - workers}"
                if most > workers
                else "another elastic.max_workers, when it is resumed",
            )
        if host is not None:
            _check_room(host, number, machines)
        elif not _start_here(machines):
            _check_agents(number, machines)
        newcomers = self._roster.allocate(number)
        actions: list[Action] = [Spawn(newcomers, host=None if host is None else str(host))]
        return actions, {"added": list(newcomers)}

    def _drain(self, ranks: object) -> tuple[list[Action], dict[str, object]]:
        protocol = self._protocol
        if not isinstance(ranks, list) or not ranks or not all(map(_is_whole, ranks)):
            raise ControlError(
                f"{ranks!r} are no ranks", rule="workers are drained by their ranks", fix="ctl RUN drain 3"
            )
        if unknown := [rank for rank in ranks if rank not in protocol.members]:
            raise ControlError(
                f"worker {unknown[0]} "
                + ("has not joined yet" if unknown[0] in self._roster else "is not in the mesh"),
                rule="only a member of the mesh can leave it",
                exists=named_workers(sorted(protocol.members)),
            )
        self._check_who_stays(ranks)
        actions: list[Action] = [action for rank in ranks for action in protocol.drain(rank, "drained by ctl")]
        return actions, {"leaving": list(protocol.leaving)}

    def _drain_host(
        self, host: object, within: object, machines: Sequence[Machine], now: float
    ) -> tuple[list[Action], dict[str, object]]:
        if within is not None and (
            isinstance(within, bool)
            or not isinstance(within, int | float)
            # JSON as Python reads it has Infinity, and integers that no float holds.
            or not 0 < within <= sys.float_info.max
        ):
            raise ControlError(
                f"{within!r} seconds are no deadline",
                rule="a deadline is a number of seconds above 0",
                fix="ctl RUN drain --host NAME --within 60",
            )
        named = [machine for machine in machines if machine.host == host]
        if not named or any(machine.agent is None for machine in named):
            here = "the controller runs there" if named else f"{host!r} is no machine of the run"
            raise ControlError(
                f"{host} cannot be drained: {here}" if named else here,
                rule="a machine that is drained is that of an agent",
                exists=", ".join(machine.host for machine in machines if machine.agent is not None)
                or ("no agents" if machines else "the run is on one machine, without runtime.rendezvous"),
                fix="ctl RUN drain RANK ..., or Ctrl-C, which saves the state of the run"
                if named
                else "ctl RUN status",
            )
        members = set(self._protocol.members)
        ranks = [rank for machine in named for rank in sorted(machine.ranks) if rank in members]
        if ranks:
            self._check_who_stays(ranks)
        actions = self._notices.begin(named, None if within is None else float(within), "ctl", now)
        return actions, {"host": host, "leaving": list(self._protocol.leaving)}

    def _check_who_stays(self, ranks: Sequence[int]) -> None:
        """Check that the run has enough workers without these.

        Raises:
            ControlError: it has not.
        """
        protocol = self._protocol
        stay = set(protocol.members) - set(protocol.leaving) - set(ranks)
        if len(stay) < self._elastic.min_workers:
            least = self._elastic.min_workers
            raise ControlError(
                f"{len(stay)} workers would stay",
                rule="the last worker of a run stays" if least == 1 else "a run keeps elastic.min_workers workers",
                exists=f"{len(protocol.members)} workers, elastic.min_workers={least}",
                fix="ctl RUN add 1, and wait until it has joined",
            )


def _start_here(machines: Sequence[Machine]) -> bool:
    """True if workers that no agent has a place for are started on the controller's machine."""
    return all(machine.places is None for machine in machines if machine.agent is None)


def _rooms(machines: Sequence[Machine]) -> str:
    """The machines and their free places, in words."""
    return ", ".join(
        f"{m.host}{'' if m.places is None else f' ({m.free} of {m.places} places free)'}" for m in machines
    )


def _check_agents(number: int, machines: Sequence[Machine]) -> None:
    """Check that the agents have places for so many workers.

    Raises:
        ControlError: they have not.
    """
    if (free := sum(machine.free for machine in machines)) < number:
        raise ControlError(
            f"the agents have {free} free places for {number} more workers",
            rule=_NEVER_HERE,
            exists=_rooms(machines),
            fix="another agent: python -m elaswave_spmd agent HOST:PORT",
        )


def _check_room(host: object, number: int, machines: Sequence[Machine]) -> None:
    """Check that a machine has places for so many workers.

    Raises:
        ControlError: it has not, or the run has no machine of this name.
    """
    named, known = [machine for machine in machines if machine.host == host], _rooms(machines)
    if not named:
        raise ControlError(
            f"{host!r} is no machine of the run",
            rule="workers are added on the controller's machine, or on that of an agent",
            exists=known or "the run is on one machine, without runtime.rendezvous",
            fix="an agent there: python -m elaswave_spmd agent HOST:PORT",
        )
    if any(machine.places is None for machine in named):
        return
    if all(machine.agent is None for machine in named):
        raise ControlError(
            f"the controller runs on {host}, with runtime.local_workers=0",
            rule=_NEVER_HERE,
            exists=known,
            fix=f"ctl RUN add {number}, which takes places of agents",
        )
    if (free := sum(machine.free for machine in named)) < number:
        state = "" if any(machine.is_ready for machine in named) else ", as its agent is still preparing"
        state = ", as it is about to leave" if all(machine.is_leaving for machine in named) else state
        raise ControlError(
            f"{host} has {free} free places for {number} more workers{state}",
            rule="an agent takes as many workers as it has places (its option --workers)",
            exists=known,
            fix="try again in a few seconds"
            if "preparing" in state
            else "fewer workers, or ctl RUN add N without --host",
        )


class _Client:
    """One connection: what has come of its request, what is left of its answer, and until when it may take its time."""

    def __init__(self, link: socket.socket, now: float) -> None:
        self.link = link
        self.until = now + _CLIENT_S
        self.request = b""
        self.answer = b""
        self.asked = False  # its request is with the controller
        self.was_told = False  # it was told what becomes of its request, perhaps by the controller that is busy
        self.has_left = False  # before it was told

    @property
    def events(self) -> int:
        """The events that the socket is watched for; 0: nothing, until the controller has answered."""
        return selectors.EVENT_WRITE if self.answer else 0 if self.asked else selectors.EVENT_READ

    def is_there(self) -> bool:
        """False if it has left without an answer. Any thread."""
        return self.was_told or not (self.has_left or _is_closed_by_peer(self.link))


class ControlSocket:
    """A Unix socket in a run's directory, for its user alone. Each client has one request.

    One thread serves all clients: none waits for another, and one that says nothing is closed after 10 seconds.

    Args:
        folder: the run's directory, which this run alone uses: a socket in it is that of a dead run, and is replaced.
        mailbox: of the thread that answers requests.

    Raises:
        OSError: the file system has no sockets.
    """

    def __init__(self, folder: Path, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._closing = threading.Event()
        self._clients: dict[socket.socket, _Client] = {}
        self._answers: queue.SimpleQueue[tuple[_Client, Mapping[str, Any]]] = queue.SimpleQueue()
        with contextlib.ExitStack() as undo:
            self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, self._folder)
            self._server = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            for name in (SOCKET, _UNREADY):  # of a run that has died
                self._remove(name)
                undo.callback(self._remove, name)
            self._server.bind(f"/proc/self/fd/{self._folder}/{_UNREADY}")  # admin_client.socket_address has the reason
            os.chmod(_UNREADY, 0o600, dir_fd=self._folder)  # before `listen`: until then nobody can connect
            self._server.listen(_MOST_CLIENTS)
            os.rename(_UNREADY, SOCKET, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            self._server.setblocking(False)
            self._woken, self._wakes = socket.socketpair()
            for end in (self._woken, self._wakes):
                undo.enter_context(end)
                end.setblocking(False)
            undo.pop_all()
        self._thread = threading.Thread(target=self._serve, name="ctl", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closing again is allowed. Who waits for an answer is told that the run is ending."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            self._remove(SOCKET)
        self._wake()
        self._thread.join(2 * _CLIENT_S)
        for end in (self._server, self._woken, self._wakes):
            end.close()
        os.close(self._folder)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)

    def _wake(self) -> None:
        """Have the thread look at the answers. Any thread; never blocks."""
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
            self._wakes.send(b"\0")

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._closing.is_set() or self._clients:
                self._watch(selector)
                looked_at = time.monotonic()
                ready = [key.fileobj for key, _ in selector.select(_TICK_S if self._clients else None)]
                if self._woken in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                if self._server in ready:
                    self._accept()
                for link in [link for link in ready if link in self._clients]:
                    self._go_on(self._clients[cast(socket.socket, link)])
                self._take_answers()
                self._drop_late(looked_at)

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Watch for what each socket waits for now."""
        room = not self._closing.is_set() and len(self._clients) < _MOST_CLIENTS
        wanted: dict[socket.socket, int] = {link: client.events for link, client in self._clients.items()}
        wanted |= {self._woken: selectors.EVENT_READ, self._server: selectors.EVENT_READ * room}
        registered = {cast(socket.socket, key.fileobj): key.events for key in selector.get_map().values()}
        for link, events in registered.items():
            if wanted.get(link, 0) != events:
                selector.unregister(link)
        for link, events in wanted.items():
            if events and registered.get(link) != events:
                selector.register(link, events)

    def _accept(self) -> None:
        try:
            link, _ = self._server.accept()
        except OSError:  # the client has left again, or too many files are open
            self._closing.wait(_PAUSE_S)
            return
        link.setblocking(False)
        self._clients[link] = _Client(link, time.monotonic())

    def _go_on(self, client: _Client) -> None:
        """Read some more of a request, or write some more of an answer."""
        try:
            if client.answer:
                client.answer = client.answer[client.link.send(client.answer) :]
                if not client.answer:
                    self._drop(client)
                return
            data = client.link.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            self._drop(client)
            return
        client.request += data
        line, newline, _ = client.request.partition(b"\n")
        if not newline and data and len(client.request) < _LONGEST:
            return
        if line:
            self._ask(client, line)
        else:
            self._drop(client)

    def _ask(self, client: _Client, line: bytes) -> None:
        """Hand a request to the controller's thread."""
        client.asked = True
        client.until = time.monotonic() + ANSWER_S
        try:
            body = json.loads(line)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            rule = "a request is an object of JSON, in one line"
            self._reply(client, _error(ControlError(f"{line[:80]!r} is no request", rule=rule)))
        elif self._closing.is_set():
            self._reply(client, _ENDING)
        else:
            self._mailbox.put(Request(body, lambda answer: self._reply(client, answer), client.is_there))

    def _reply(self, client: _Client, answer: Mapping[str, Any]) -> None:
        """Answer a client. Any thread; never blocks."""
        self._answers.put((client, answer))
        self._wake()

    def _take_answers(self) -> None:
        while not self._answers.empty():
            client, answer = self._answers.get()
            self._answer(client, answer)

    def _answer(self, client: _Client, answer: Mapping[str, Any]) -> None:
        if client.link in self._clients and not client.answer:  # else it was told that the controller is busy
            client.answer = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
            client.was_told = True
            client.until = time.monotonic() + _CLIENT_S

    def _drop_late(self, now: float) -> None:
        """Answer for a controller that is busy, or is gone, and drop clients that take too long.

        Args:
            now: the time of the last look at what has come: what came while this process stood still came in time.
        """
        for client in list(self._clients.values()):
            waits = client.asked and not client.answer
            if waits and not client.is_there():
                client.has_left = True
                self._drop(client)
            elif waits and self._closing.is_set():
                self._answer(client, _ENDING)
            elif waits and now > client.until:
                self._answer(client, _BUSY)
            elif now > client.until or (self._closing.is_set() and not client.asked):
                self._drop(client)

    def _drop(self, client: _Client) -> None:
        del self._clients[client.link]
        client.link.close()


def _is_closed_by_peer(link: socket.socket) -> bool:
    """True if the peer has closed its end of a Unix socket as a whole; it may have closed its sending side before."""
    if (descriptor := link.fileno()) < 0:  # this end is closed as well
        return True
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _error(error: ControlError) -> dict[str, object]:
    return {"error": error.fields()}


_BUSY = _error(ControlError("the controller is busy; it will follow the request later"))
_UNHEARD = _error(ControlError("nobody waits for the answer any more"))
_ENDING = _error(ControlError("the run is ending"))


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
