"""The controller's side of `ctl`: a socket in the run's directory, and the answers.

One thread waits at the socket, reads a line, files it in the controller's mailbox and writes the answer back. The
controller's own thread decides about requests, as about every event.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from elaswave_spmd.conf.schema import ElasticSettings
from elaswave_spmd.controller.admin_client import ANSWER_S, SOCKET
from elaswave_spmd.controller.events import Action, Reply, Spawn
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.errors import ControlError
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.run_dir import RunObserver
from elaswave_spmd.runtime.processes.fd_limit import fits_fd_limit
from elaswave_spmd.runtime.transport.mailbox import Mailbox, Request
from elaswave_spmd.sharding.replicas import all_replica_sets, unsurvived_text

_COMMANDS = ("status", "add", "drain")
_CLIENT_S = 2.0  # how long a client may take to send its request, or to read the answer
_PAUSE_S = 0.1  # after a failed accept
_LONGEST = 1 << 16  # bytes of a request


class Administration:
    """The answers to the requests of administrators (`ctl`). It decides on the controller's thread.

    Args:
        observer: what is known of the run's progress.
    """

    def __init__(
        self, protocol: ControllerProtocol, roster: Roster, observer: RunObserver, elastic: ElasticSettings
    ) -> None:
        self._protocol = protocol
        self._roster = roster
        self._observer = observer
        self._elastic = elastic

    def answer(self, request: Request) -> list[Action]:
        """Decide about a request. Returns the actions that follow from it, and the reply to it as the last one."""
        try:
            actions, answer = self._decide(request.body)
        except ControlError as error:
            actions, answer = [], _error(error)
        return [*actions, Reply(request, answer)]

    def _decide(self, body: Mapping[str, Any]) -> tuple[list[Action], dict[str, object]]:
        command = body.get("command")
        if command == "status":
            return [], self.status()
        if command not in _COMMANDS:
            raise ControlError(f"the request has no known command: {command!r}", exists=", ".join(_COMMANDS))
        self._refuse_changes()
        return self._add(body.get("count")) if command == "add" else self._drain(body.get("ranks"))

    def status(self) -> dict[str, object]:
        """The progress of the run and its workers, JSON-ready; docs/run_files.md lists the fields."""
        protocol, observer = self._protocol, self._observer
        mesh, last = protocol.placement.mesh, observer.last
        replicas = protocol.placement.replica_map(protocol.layout)
        pids = self._roster.pids
        return {
            "run_dir": str(observer.run_dir.path),
            "starting": not protocol.started,
            "step": min(protocol.version + 1, protocol.steps),
            "version": protocol.version,
            "total_steps": protocol.steps,
            "loss": last.to_dict()["loss"] if last else None,
            "loss_hex": last.loss_hex if last else None,
            "tokens_per_second": observer.pace.tokens_per_second,
            "seconds_left": observer.pace.seconds_left,
            "mesh": mesh.shape.name,
            "mesh_epoch": mesh.epoch,
            "stages": mesh.stages,
            "members": [
                {"rank": rank, "stage": stage, "pid": pids.get(rank)}
                for stage, ranks in enumerate(mesh.stages)
                for rank in ranks
            ],
            "newcomers": [{"rank": rank, "pid": pids[rank]} for rank in sorted(pids) if rank not in mesh],
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
            missing = [rank for rank in protocol.placement.mesh.members if rank not in protocol.addresses]
            raise ControlError(
                f"workers {missing} have not started yet",
                rule="the workers of a run change once all of the first have started",
                fix="try again in a few seconds",
            )
        if protocol.version >= protocol.steps:
            raise ControlError(
                f"the run has done its last step, {protocol.version}",
                rule="the workers of a run change before its last step",
            )

    def _add(self, number: object) -> tuple[list[Action], dict[str, object]]:
        if not _is_whole(number) or number < 1:
            raise ControlError(
                f"{number!r} workers cannot be added", rule="at least 1 worker is added", fix="ctl RUN add 1"
            )
        if not fits_fd_limit(len(self._roster) + number):
            raise ControlError(
                f"{number} more beside {len(self._roster)} workers exceed the limit of open files",
                rule="every worker has a link to every other, within its limit of open files",
                fix="a higher `ulimit -n` before the run starts",
            )
        newcomers = self._roster.allocate(number)
        return [Spawn(newcomers)], {"added": list(newcomers)}

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
                exists=f"workers {', '.join(map(str, sorted(protocol.members)))}",
            )
        stay = set(protocol.members) - set(protocol.leaving) - set(ranks)
        if len(stay) < self._elastic.min_workers:
            least = self._elastic.min_workers
            raise ControlError(
                f"{len(stay)} workers would stay",
                rule="the last worker of a run stays" if least == 1 else "a run keeps elastic.min_workers workers",
                exists=f"{len(protocol.members)} workers, elastic.min_workers={least}",
                fix="ctl RUN add 1, and wait until it has joined",
            )
        actions: list[Action] = [action for rank in ranks for action in protocol.drain(rank, "drained by ctl")]
        return actions, {"leaving": list(protocol.leaving)}


class ControlSocket:
    """A Unix socket in a run's directory, for its user alone. One client at a time; each has one request.

    Args:
        folder: the run's directory, which this run alone uses: a socket in it is that of a dead run, and is replaced.
        mailbox: of the thread that answers requests.

    Raises:
        OSError: the file system has no sockets.
    """

    def __init__(self, folder: Path, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._closing = threading.Event()
        self._answers: queue.SimpleQueue[Mapping[str, Any]] | None = None  # of the client that is served
        with contextlib.ExitStack() as undo:
            self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, self._folder)
            self._server = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(SOCKET, dir_fd=self._folder)
            self._server.bind(f"/proc/self/fd/{self._folder}/{SOCKET}")  # admin_client.socket_address has the reason
            os.chmod(SOCKET, 0o600, dir_fd=self._folder)  # before `listen`: until then nobody can connect
            self._server.listen()
            undo.pop_all()
        self._thread = threading.Thread(target=self._serve, name="ctl", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closing again is allowed."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            os.unlink(SOCKET, dir_fd=self._folder)
        self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if (answers := self._answers) is not None:
            answers.put(_ENDING)
        self._thread.join(2 * _CLIENT_S)
        self._server.close()
        os.close(self._folder)

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._server.accept()
            except OSError:  # it is closed, or too many files are open
                self._closing.wait(_PAUSE_S)
                continue
            with client, contextlib.suppress(OSError):
                client.settimeout(_CLIENT_S)
                with client.makefile("rb") as lines:
                    line = lines.readline(_LONGEST)
                if line:
                    client.sendall(json.dumps(self._answer(line), ensure_ascii=False).encode() + b"\n")

    def _answer(self, line: bytes) -> Mapping[str, Any]:
        try:
            body = json.loads(line)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return _error(
                ControlError(f"{line[:80]!r} is no request", rule="a request is an object of JSON, in one line")
            )
        answers: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._answers = answers
        self._mailbox.put(Request(body, answers.put))
        if self._closing.is_set():
            answers.put(_ENDING)
        try:
            return answers.get(timeout=ANSWER_S)
        except queue.Empty:
            return _error(ControlError("the controller is busy; it will follow the request later"))
        finally:
            self._answers = None


def _error(error: ControlError) -> dict[str, object]:
    return {"error": error.fields()}


_ENDING = _error(ControlError("the run is ending"))


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
