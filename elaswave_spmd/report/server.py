"""The live page of a run on 127.0.0.1.

Every address begins with a random token that only the command's output has, and a request must name this server as its
host. So neither another user of the machine nor a web page in the browser can read the run. Each connection has a
thread, since browsers open connections that they do not use. Only one thread at a time makes an answer, and what has
not changed is not made again. Anybody on the machine can connect, so connections are few, and a request has a deadline.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from elaswave_spmd.errors import DataError
from elaswave_spmd.report.columns import as_json, columns_of
from elaswave_spmd.report.history import history_of
from elaswave_spmd.report.page import fragments_of, page_of
from elaswave_spmd.report.recorded import RecordedRun, RunReader

HOST = "127.0.0.1"
SHARE = 0.01
"""The share of one core's time that bringing a page up to date may take."""
_NAMES = (HOST, "localhost")
MOST_CONNECTIONS = 32
"""At once. Further ones wait in the socket's queue."""
REQUEST_S = 10.0
"""The longest time that a client may take to send its request."""
_ANSWER_S = 60.0  # the longest time for which the answer is sent, perhaps through a tunnel
_PAUSE_S = 0.1  # after a failed accept
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class Answer:
    """An answer to a request. `kind` is its content type."""

    status: HTTPStatus
    kind: str
    body: bytes


class LiveRun:
    """The page of a run that goes on, and its changes. Any thread may call it.

    Training shares the machine with this server. So changes are computed again only so often that this takes at most
    `SHARE` of the time. As it takes longer for a long run, its page is brought up to date less often.

    Args:
        reader: reads the run's files.
        clock: returns seconds of a clock that never runs backwards.
        spent: returns the seconds of processor time of the calling thread.
    """

    def __init__(
        self,
        reader: RunReader,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._reader = reader
        self._clock, self._spent = clock, spent
        self._lock = threading.Lock()
        self._shown: RecordedRun | None = None
        self._version = self._state = ""
        self._changes = b""
        self._next_at = 0.0

    def page(self) -> bytes:
        """The page, which asks this server for changes."""
        with self._lock:
            return page_of(self._reader.read(), live=True).encode()

    def changes(self, since: str) -> bytes:
        """The changing content of the page as JSON. Only version and state if its version is still `since`."""
        with self._lock:
            if self._shown is None or self._clock() >= self._next_at:
                self._look()
            if since == self._version:
                return json.dumps({"version": self._version, "state": self._state}).encode()
            return self._changes

    def _look(self) -> None:
        """Read the files, and make the content of the page again if they have changed."""
        began, run = self._spent(), self._reader.read()
        if run is not self._shown:
            history = history_of(run)
            self._shown, self._state = run, history.state
            self._version = f"{len(run.metrics)}.{len(run.events)}"
            columns, fragments = as_json(columns_of(run, history)), fragments_of(run, history)
            state = {"version": self._version, "state": self._state}
            self._changes = json.dumps({**state, "columns": columns, "fragments": fragments}, allow_nan=False).encode()
        self._next_at = self._clock() + (self._spent() - began) / SHARE


class LiveServer(ThreadingHTTPServer):
    """Serves the live page of one run.

    Args:
        live: the run.
        port: the port; 0 for any free one.
        clock: returns seconds of a clock that never runs backwards.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, live: LiveRun, port: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__((HOST, port), _Handler)
        self._live = live
        self._token = secrets.token_urlsafe(24)
        self._clock = clock
        self._ended = threading.Event()
        self._places = threading.Semaphore(MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._until: dict[socket.socket, float] = {}  # open connection -> when its request has to be there

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_port}/{self._token}/"

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._until)

    def shutdown(self) -> None:
        """End `serve_forever`, from another thread."""
        self._ended.set()
        super().shutdown()

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """The next connection, once there is a place for it.

        Raises:
            OSError: there is no place for it yet, it was closed meanwhile, or too many files are open. Who calls this
                looks again at once, so it waits a little before.
        """
        if not self._places.acquire(timeout=_PAUSE_S):
            raise TimeoutError
        try:
            link, address = super().get_request()
        except OSError:
            self._places.release()
            self._ended.wait(_PAUSE_S)
            raise
        with self._lock:
            self._until[link] = self._clock() + REQUEST_S
        return link, address

    def service_actions(self) -> None:
        """End connections whose requests are late. Called every now and then."""
        now = self._clock()
        with self._lock:
            for link in [link for link, until in self._until.items() if until <= now]:
                self._until[link] = math.inf
                with contextlib.suppress(OSError):  # its client has closed it
                    link.shutdown(socket.SHUT_RDWR)  # ends the wait of its thread, which closes it

    def has_asked(self, link: socket.socket) -> None:
        """Note that the request of a connection is there: however long its answer takes to be made, it is not late."""
        with self._lock:
            self._until[link] = math.inf

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, whose place is free then."""
        with self._lock:
            known = self._until.pop(request, None) is not None
        super().shutdown_request(request)
        if known:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error of a client that leaves in the middle, such as a closed browser tab. Others are shown."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def answer(self, target: str, headers: Mapping[str, str]) -> Answer:
        """The answer to a GET request for `target`, the path and query of an address."""
        if headers.get("Host", "") not in [f"{name}:{self.server_port}" for name in _NAMES]:
            return _refusal(HTTPStatus.FORBIDDEN, "this server answers at 127.0.0.1 only")
        try:
            url = urlsplit(target)
        except ValueError:  # "http://[/"
            return _refusal(HTTPStatus.BAD_REQUEST, "this is no address")
        _, _, rest = url.path.partition("/")
        token, _, name = rest.partition("/")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return _refusal(HTTPStatus.NOT_FOUND, "the address of the page is in the output of `watch`")
        try:
            if name == "":
                return Answer(HTTPStatus.OK, "text/html; charset=utf-8", self._live.page())
            if name == "changes":
                since = parse_qs(url.query).get("since", [""])[0]
                return Answer(HTTPStatus.OK, "application/json", self._live.changes(since))
        except DataError as error:
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        return _refusal(HTTPStatus.NOT_FOUND, "there is no such page")


class _Handler(BaseHTTPRequestHandler):
    """One connection with one request. Methods other than GET are answered with 501, as there is no do_* for them."""

    timeout = _ANSWER_S
    server_version, sys_version = "elaswave_spmd", ""

    def do_GET(self) -> None:
        assert isinstance(self.server, LiveServer)
        self.server.has_asked(self.connection)
        # Names of headers are case-insensitive, and some clients write `host`.
        answer = self.server.answer(self.path, {"Host": self.headers.get("Host", "")})
        self.send_response(answer.status)
        for name, value in {**_HEADERS, "Content-Type": answer.kind, "Content-Length": str(len(answer.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, since addresses contain the token."""


def _refusal(status: HTTPStatus, why: str) -> Answer:
    return Answer(status, "text/plain; charset=utf-8", f"{why}\n".encode())
