"""Paths that may not be entered, and names that are too long for one: commands refuse them in words, exit code 2."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from elaswave_spmd import cli
from elaswave_spmd.conf.compose import settings_from
from elaswave_spmd.conf.resume import saved
from elaswave_spmd.conf.schema import ModelSettings, Settings
from elaswave_spmd.controller.admin_client import ask
from elaswave_spmd.errors import ConfigError, ControlError, DataError, UserError
from elaswave_spmd.report.recorded import RunReader
from elaswave_spmd.weights import export
from elaswave_spmd.weights.given import open_weights
from elaswave_spmd.weights.resolve import existing_path, resolved
from elaswave_spmd.weights.trained import open_run

NOBODY = 65534
LONG = "a" * 300


@pytest.fixture
def forbidden() -> Iterator[Path]:
    """The path of a run in a directory that this user may not enter: one of mode 0, of root if root runs the tests."""
    # Not `tmp_path`, which lies in a directory that only its own user may enter.
    with tempfile.TemporaryDirectory() as outer:
        folder, user = Path(outer, "closed"), os.geteuid()
        (folder / "run").mkdir(parents=True)
        (folder / "run" / "config.yaml").write_text("model: m\n")
        os.chmod(outer, 0o755)
        folder.chmod(0)
        if user == 0:
            os.seteuid(NOBODY)
        try:
            yield folder / "run"
        finally:
            os.seteuid(user)
            folder.chmod(0o700)


def init_from(path: Path) -> Settings:
    return Settings(model=ModelSettings(init_from=str(path)))


def test_a_run_of_another_user_is_told_as_one(forbidden: Path) -> None:
    with pytest.raises(ControlError, match="belongs to another user"):
        ask(str(forbidden), {"command": "status"})
    with pytest.raises(DataError, match=r"cannot read .*config\.yaml \(Permission denied\)"):
        RunReader(forbidden)
    with pytest.raises(ConfigError, match=r"cannot read .*config\.yaml \(Permission denied\)"):
        saved(str(forbidden))
    with pytest.raises(ConfigError, match=r"cannot read .*config\.yaml \(Permission denied\)"):
        open_run(str(forbidden))


def test_weights_that_may_not_be_read_are_told_as_such(forbidden: Path) -> None:
    with pytest.raises(ConfigError, match=r"run cannot be read \(Permission denied\)"):
        resolved(init_from(forbidden))
    closed = forbidden.parent
    assert resolved(init_from(closed)) == init_from(closed), "whether it holds a run is not known"
    model: Any = None
    with pytest.raises(ConfigError, match=r"closed cannot be read \(Permission denied\)"):
        open_weights(init_from(closed).model, model)


@pytest.mark.parametrize("name", ["model", "a/model"])
def test_a_model_that_is_to_be_written_there_is_refused(
    forbidden: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert_not_exported(monkeypatch, forbidden / name, "Permission denied")


def test_a_model_whose_name_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_not_exported(monkeypatch, tmp_path / LONG, "File name too long")


def assert_not_exported(monkeypatch: pytest.MonkeyPatch, folder: Path, why: str) -> None:
    for name in ("_family_of", "check_parameters", "tokenizer_file", "_write"):
        monkeypatch.setattr(export, name, lambda *_: None)

    class Trained:
        model = source = path = None

    trained: Any = Trained()
    with pytest.raises(ConfigError, match=rf"cannot be written \({why}\)"):
        export.export_model(trained, folder)


@pytest.mark.parametrize(
    "reads",
    [
        lambda: ask(LONG, {"command": "status"}),
        lambda: RunReader(Path(LONG)),
        lambda: settings_from([f"train.resume={LONG}/x"]),
        lambda: existing_path(LONG),
        lambda: resolved(Settings(model=ModelSettings(init_from=LONG))),
        lambda: open_run(LONG),
    ],
    ids=["ctl", "report", "resume", "init_from", "resolved", "run"],
)
def test_a_name_that_is_too_long_is_refused(reads: Callable[[], object]) -> None:
    with pytest.raises(UserError, match=LONG):
        reads()


def full(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device", "page.html")


def test_an_error_of_a_file_that_a_command_has_no_answer_to_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_report", full)
    monkeypatch.setattr(sys, "argv", ["elaswave-spmd", "report", "run"])
    assert cli.main() == cli.BAD_INPUT
    assert "error: report has failed: page.html: No space left on device" in capsys.readouterr().err


def test_in_a_command_that_trains_it_is_a_mistake_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_agent", full)
    monkeypatch.setattr(sys, "argv", ["elaswave-spmd", "agent", "host:1"])
    with pytest.raises(OSError, match="No space left"):
        cli.main()
