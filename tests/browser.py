"""A headless Chromium that tests look at pages with, spoken to over two pipes (the Chrome DevTools Protocol).

Debian and Ubuntu have it in the package `chromium`. Nothing is downloaded.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE_S, eventually

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with one empty page, which ends with the block. Skips the test where there is none."""
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium (Debian's package chromium) is installed")
    to_browser, from_test = os.pipe()
    to_test, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(prefix="ewb", ignore_cleanup_errors=True) as profile:
        words = ["--headless", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        words += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"]
        words += ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to run as root with one
        # It expects the pipes at 3 and 4, which are taken in this process: the shell puts them there.
        line = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        process = subprocess.Popen(
            ["bash", "-c", line, program, *words, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Browser(from_test, to_test)
        finally:
            os.close(from_test)
            os.close(to_test)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Browser:
    """One page of a browser.

    Attributes:
        problems: errors and warnings of the console, and exceptions, so far.
        requests: the addresses of everything that pages have asked for, so far.
    """

    def __init__(self, writes: int, reads: int) -> None:
        self._writes, self._reads = writes, reads
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        eventually(self._pages)  # it answers before it has opened its first one
        self._session = self.call("Target.attachToTarget", targetId=self._pages()[0], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _pages(self) -> list[str]:
        found = self.call("Target.getTargets")["targetInfos"]
        return [page["targetId"] for page in found if page["type"] == "page"]

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """One command and its result. Events that come before it are noted."""
        self._number += 1
        request: dict[str, object] = {"id": self._number, "method": method, "params": params}
        if self._session:
            request["sessionId"] = self._session
        message = json.dumps(request).encode() + b"\0"
        while message:
            message = message[os.write(self._writes, message) :]
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def open(self, address: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a page on a screen of this size, and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        loader = self.call("Page.navigate", url=address)["loaderId"]
        # Until the page has come the one before is asked, which is complete.
        eventually(lambda: self.call("Page.getFrameTree")["frameTree"]["frame"]["loaderId"] == loader)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Returns when a condition holds in the page."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"{condition} does not hold; {self.problems}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press a key, as Tab or Enter."""
        text = {"Enter": "\r"}.get(key, "")
        codes = {"Tab": 9, "Enter": 13}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=codes[key], text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=codes[key])

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Save what is seen, or the whole page, as a PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF")["data"])

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._reads, 1 << 20)
            assert read, "the browser has ended"
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
