"""The live page: its address, what it refuses, and a browser that sees a run go on."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from elaswave_spmd.report.recorded import RunReader
from elaswave_spmd.report.server import LiveRun, LiveServer
from elaswave_spmd.run_dir.metrics import MetricsLine
from tests.browser import browser
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
PLAN = {"mesh": "dp2", "stages": [[0, 1]], "layer_cuts": [0, 4], "microbatch_counts": [[2, 2]]}


def add(path: Path, *rows: dict[str, object]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def steps(first: int, last: int) -> list[dict[str, object]]:
    fields = {"mesh_epoch": 0, "loss": 2.5, "grad_norm": 1.0, "lr": 0.1, "tokens": 100, "seconds": 0.5, "workers": 2}
    return [MetricsLine.of(step=step, **fields).to_dict() for step in range(first, last + 1)]  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("model: m\n")
    add(
        folder / "events.jsonl",
        {"event": "start", "time": 1.0, "model": "m", "total_steps": 9, "first_step": 1, **PLAN},
    )
    add(folder / "metrics.jsonl", *steps(1, 3))
    return folder


@contextmanager
def watching(run: Path) -> Iterator[str]:
    """The address of the page that the command prints; the command ends with the block."""
    words = [sys.executable, "-m", "elaswave_spmd", "watch", str(run)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:"), process.stderr.read()
            yield address
        finally:
            process.terminate()


def asked(address: str, path: str, *, method: str = "GET", host: str = "", header: str = "Host") -> tuple[int, str]:
    url = urlsplit(address)
    link = http.client.HTTPConnection("127.0.0.1", url.port or 0, timeout=60)
    try:
        link.request(method, path, headers={header: host} if host else {})
        answer = link.getresponse()
        return answer.status, answer.read().decode()
    finally:
        link.close()


def test_only_who_has_the_address_can_read_the_run(run: Path) -> None:
    with watching(run) as address:
        url = urlsplit(address)
        token, local = url.path.strip("/"), url.netloc
        assert len(token) >= 32
        assert asked(address, url.path)[0] == 200
        for path in ("/", "/changes", f"/{token[:-1]}/", f"/{token}x/changes", "/../", "//"):
            status, text = asked(address, path)
            assert status == 404 and token not in text and "loss" not in text, path
        assert asked(address, f"{url.path}config.yaml")[0] == 404
        for host in ("evil.example", f"evil.example:{url.port}", "127.0.0.1", f"{local}.evil.example"):
            assert asked(address, url.path, host=host)[0] == 403, host
        assert asked(address, url.path, host=local, header="host")[0] == 200, "as some clients write it"
        assert asked(address, url.path, host="evil.example", header="host")[0] == 403
        assert asked(address, url.path, method="POST")[0] == 501
        assert token != urlsplit(address_of_another(run)).path.strip("/")


def test_clients_that_send_nonsense_or_leave_in_the_middle_bring_nothing_to_the_terminal(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()

    class Server(LiveServer):
        def shutdown_request(self, request: object) -> None:  # the last of a connection, after `handle_error`
            super().shutdown_request(request)  # type: ignore[arg-type]
            ended.set()

    with Server(LiveRun(RunReader(run))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            url = urlsplit(server.address)
            assert asked(server.address, "http://[/", host=url.netloc)[0] == 400
            ended.wait()
            ended.clear()
            with socket.create_connection(("127.0.0.1", server.server_port)) as left:
                left.sendall(f"GET {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
                # Closed by a reset, before the page is made: it cannot be sent.
                left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            ended.wait()
        finally:
            server.shutdown()
            thread.join()
    assert capfd.readouterr() == ("", "")


def address_of_another(run: Path) -> str:
    with watching(run) as address:
        return address


def test_changes_are_sent_once(run: Path) -> None:
    with watching(run) as address:
        path = f"{urlsplit(address).path}changes"
        first = json.loads(asked(address, f"{path}?since=")[1])
        assert first["columns"]["loss"]["step"] == [1, 2, 3] and first["state"] == "not ended"
        assert "columns" not in json.loads(asked(address, f"{path}?since={first['version']}")[1])
        add(run / "metrics.jsonl", *steps(4, 5))
        eventually(lambda: "columns" in asked(address, f"{path}?since={first['version']}")[1])
        assert json.loads(asked(address, path)[1])["columns"]["loss"]["step"] == [1, 2, 3, 4, 5]
        add(run / "metrics.jsonl", {"step": "x"})
        eventually(lambda: asked(address, path)[0] == 500)
        for _ in range(2):
            status, text = asked(address, path)
            assert status == 500 and "is not a line of metrics.jsonl" in text


def test_a_browser_sees_the_run_go_on(run: Path) -> None:
    with watching(run) as address, browser() as found:
        found.open(address)
        found.wait_for("document.getElementById('status').textContent === 'live'")
        drawn = "Bokeh.documents.some(d => d.get_model_by_name('loss')?.data.step?.length === {})"
        found.wait_for(drawn.format(3))
        add(run / "metrics.jsonl", *steps(4, 6))
        text = "worker 1 lost <b>x</b>"
        after = {"mesh": "single", "stages": [[0]], "layer_cuts": [0, 4], "microbatch_counts": [[4]]}
        add(
            run / "events.jsonl",
            {"event": "fail", "time": 3.0, "ranks": [1], "after_step": 4, "message": text, **after},
        )
        found.wait_for(drawn.format(6))
        found.wait_for(f"document.getElementById('table-incidents').textContent.includes({json.dumps(text)})")
        add(run / "events.jsonl", {"event": "finish", "time": 9.0})
        found.wait_for("document.getElementById('status').textContent === 'finished'")
        assert found.problems == []
        assert {urlsplit(asked).netloc for asked in found.requests if not asked.startswith("data:")} == {
            urlsplit(address).netloc
        }


def test_bad_input_is_refused_with_the_reason(run: Path, tmp_path: Path) -> None:
    for words, reason in (([str(tmp_path)], "is no run directory"), ([str(run), "--port", "70000"], "is no port")):
        done = subprocess.run(
            [sys.executable, "-m", "elaswave_spmd", "watch", *words], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 2 and reason in done.stderr
