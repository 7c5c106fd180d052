"""A run whose directory is moved, removed or replaced writes nothing there any more."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from elaswave_spmd.errors import FilesError
from elaswave_spmd.run_dir import RunDir
from elaswave_spmd.run_dir.in_place import InPlace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path / "run", "one")


def made(path: Path, run: str) -> Path:
    path.mkdir()
    (path / "epochs.jsonl").write_text(f'{{"run": "{run}"}}\n{{"epoch": 1}}\n')
    return path


def test_a_directory_that_stays_may_change_inside(folder: Path) -> None:
    place = InPlace(folder)
    place.check()
    (folder / "checkpoints").mkdir()
    (folder / "epochs.jsonl").write_text("of the same run")
    place.check()


@pytest.mark.parametrize("looked", [True, False])
def test_one_that_was_moved_removed_or_replaced_is_refused(folder: Path, looked: bool) -> None:
    place = InPlace(folder)
    if looked:
        place.check()
    aside = folder.rename(folder.with_name("aside"))
    with pytest.raises(FilesError, match="moved, removed or replaced"):
        place.check()
    made(folder, "two")
    with pytest.raises(FilesError, match="moved, removed or replaced"):
        place.check()
    shutil.rmtree(folder)
    aside.rename(folder)
    place.check()


def test_a_file_system_may_number_its_directories_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = InPlace(folder)
    place.check()
    found = os.stat(folder)
    monkeypatch.setattr(place, "_number_now", lambda: (found.st_dev, found.st_ino + 1))
    place.check()
    (folder / "epochs.jsonl").write_text('{"run": "two"}\n')
    place.check()  # at the number that is known by now
    monkeypatch.setattr(place, "_number_now", lambda: (found.st_dev, found.st_ino + 2))
    with pytest.raises(FilesError):
        place.check()


def test_one_that_is_made_later_is_known_from_then_on(tmp_path: Path) -> None:
    place = InPlace(tmp_path / "run")
    place.check()
    made(tmp_path / "run", "one")
    place.check()
    (tmp_path / "run").rename(tmp_path / "aside")
    with pytest.raises(FilesError):
        place.check()


def test_no_result_is_written_into_another_run(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "", model="m", mesh="dp2")
    (tmp_path / "run").rename(tmp_path / "aside")
    other = RunDir.create(tmp_path / "run", "", model="m", mesh="dp2")
    with pytest.raises(FilesError):
        run.write_summary({})
    with pytest.raises(FilesError):
        run.write_costs("{}")
    other.write_summary({})
    run.close()
    other.close()
