"""The exit code of a worker that was stopped."""

from __future__ import annotations

from typing import Any

import pytest

from elaswave_spmd.worker import process
from elaswave_spmd.worker.channel import WorkerStopped


@pytest.mark.parametrize(("why", "code"), [("", 0), ("its state could not be written", 1)])
def test_a_state_that_could_not_be_written_is_told_by_the_exit_code(
    why: str, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Stopped:
        rank, is_closed = 3, False

        def __init__(self, spec: object) -> None: ...

        def run(self) -> None:
            raise WorkerStopped

        def save_if_orphaned(self) -> str:
            return why

        def close(self) -> None:
            Stopped.is_closed = True

    fields: dict[str, Any] = {}
    monkeypatch.setattr(process, "WorkerProcess", Stopped)
    monkeypatch.setattr(process.WorkerSpec, "from_dict", lambda _: None)
    assert process.main(fields) == code and Stopped.is_closed
    errors = capfd.readouterr().err
    assert (f"worker 3, whose controller is gone: {why}" in errors) if why else not errors
