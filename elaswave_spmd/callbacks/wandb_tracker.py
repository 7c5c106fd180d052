"""Weights & Biases as a tracker: `run.trackers=[wandb]`."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elaswave_spmd.callbacks.records import EndRecord, StartRecord
from elaswave_spmd.callbacks.tracker import PROJECT, Tracker, import_library
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.output import say

_SETTING = "run.trackers=[wandb]"
_SERVICE_PROCESS = "wandb-core"
_KILLED_S = 5.0


class WandbTracker(Tracker):
    """Brings a run to Weights & Biases.

    What is not given here is as wandb's own environment says: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline and so
    on. Else the project is `elaswave_spmd`, the name that of the run's directory, and wandb's files are in that one.

    Args:
        project: of wandb.
        name: of the run.
        options: further arguments of `wandb.init`.

    Raises:
        ConfigError: wandb is not installed, or has no API key and is not offline.
    """

    SERVICE = "wandb"

    def __init__(self, project: str | None = None, name: str | None = None, **options: Any) -> None:
        super().__init__()
        self._wandb: Any = import_library("wandb", _SETTING, "wandb")
        self._project, self._name, self._options = project, name, options
        self._run: Any = None
        self._is_waited_for = False  # from the begin of wandb's run to its end
        self._not_ours = _services()  # a user's program may have runs of its own
        with _as_guest():
            self._check_key()
        # Registered after wandb's own, so that it is called first.
        atexit.register(self._end_processes)

    def _check_key(self) -> None:
        """Refuse to go online without a key: wandb would ask for it at the terminal, in the middle of training."""
        wandb = self._wandb
        mode = self._options.get("mode") or wandb.setup(wandb.Settings(silent=True)).settings.mode
        if mode in ("offline", "disabled") or wandb.login(prompt=False, verify=False):
            return
        raise ConfigError(
            "wandb has no API key",
            rule="a run that is sent to Weights & Biases needs the key of an account",
            where=_SETTING,
            fix="wandb login, or WANDB_API_KEY=KEY; or WANDB_MODE=offline, then wandb sync RUN/wandb/offline-run-*",
        )

    def open(self, start: StartRecord, known: Mapping[str, Any]) -> dict[str, Any]:
        wandb = self._wandb
        options: dict[str, Any] = {
            "project": self._project or os.environ.get("WANDB_PROJECT") or PROJECT,
            "name": self._name or os.environ.get("WANDB_NAME") or start.run_dir.name,
            "dir": os.environ.get("WANDB_DIR") or str(start.run_dir),
            "config": {**start.settings, "params": start.params},
            # A run of the user's in this process stays what it is, and so does what is printed.
            "reinit": "create_new",
            "settings": wandb.Settings(console="off", silent=True),
        }
        if known:
            options |= {"id": known["id"], "resume": "allow"}
        self._is_waited_for = True
        with _as_guest():
            self._run = wandb.init(**{**options, **self._options})
        # Steps that are computed again come once more, which wandb's own count of steps does not allow.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if url := self._run.url:
            say(f"wandb: {url}")
        return {"id": self._run.id}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def tell(self, step: int, name: str, text: str) -> None:
        self._run.log({"step": step, name: text})

    def close(self, end: EndRecord) -> None:
        self._run.summary.update({"finished": end.is_finished, **({"error": end.error} if end.error else {})})
        self._run.summary.update(dict(end.summary))
        self._run.finish(exit_code=0 if end.is_finished else 1)
        self._is_waited_for = False

    def _end_processes(self) -> None:
        """End wandb's own process if its run has not ended: the wait for it is over, and wandb's has no bound.

        What it has not sent yet is in its files, for `wandb sync`.
        """
        if self._is_waited_for:
            for pid in _services() - self._not_ours:
                _kill(pid)
            # It complains that its process is gone, which it would print on its own.
            with contextlib.suppress(Exception, SystemExit):
                self._wandb.teardown()


@contextlib.contextmanager
def _as_guest() -> Iterator[None]:
    """A block after which the functions are as they were that wandb replaces, to learn how the process ends."""
    hooks = sys.exit, sys.excepthook
    try:
        yield
    finally:
        sys.exit, sys.excepthook = hooks


def _services() -> set[int]:
    """The ids of wandb's own processes, which are children of this one."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, file.read_text().split()))
    return {pid for pid in found if _command_of(pid) == _SERVICE_PROCESS}


def _kill(pid: int) -> None:
    """Kill a child of this process, and wait until it has ended, which takes longer for one that was stopped."""
    process: int | None = None
    with contextlib.suppress(OSError, AttributeError):  # an old kernel, or a Python that was built for one
        process = os.pidfd_open(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if process is not None:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.poll(1e3 * _KILLED_S)
        os.close(process)


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
