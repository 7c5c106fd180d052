"""The live page of a run on 127.0.0.1.

Every address begins with a random token that only the command's output has, and a request must name this server as its
host. So neither another user of the machine nor a web page in the browser can read the run. Each connection has a
thread, since browsers open connections that they do not use. Only one thread at a time makes an answer, and what has
not changed is not made again.
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
_READ_S = 60.0  # the connection is closed if the client sends nothing for so long
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

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, live: LiveRun, port: int = 0) -> None:
        super().__init__((HOST, port), _Handler)
        self.daemon_threads = True
        self._live = live
        self._token = secrets.token_urlsafe(24)

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_port}/{self._token}/"

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

    timeout = _READ_S
    server_version, sys_version = "elaswave_spmd", ""

    def do_GET(self) -> None:
        assert isinstance(self.server, LiveServer)
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
