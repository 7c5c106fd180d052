"""The command that writes a run's report: where the page cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.report.report_command import main

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none/page.html", "No such file or directory"),
        ("config.yaml/page.html", "Not a directory"),
        ("a" * 300, "File name too long"),
    ],
)
def test_a_page_that_cannot_be_written_is_told_with_the_path_and_the_reason(
    tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "config.yaml").write_text("model: m\n")
    with pytest.raises(ConfigError) as caught:
        main([str(tmp_path), "--out", str(tmp_path / name)], "elaswave-spmd")
    assert caught.value.what == f"the report cannot be written to {tmp_path / name} ({why})"
    assert caught.value.where == f"--out {tmp_path / name}" and caught.value.fix.startswith("--out FILE")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.yaml"]


def test_a_page_takes_the_place_of_no_pipe_or_device(tmp_path: Path) -> None:
    """Root would have replaced /dev/null by a file."""
    (tmp_path / "config.yaml").write_text("model: m\n")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is no regular file"):
        main([str(tmp_path), "--out", str(tmp_path / "pipe")], "elaswave-spmd")
    assert (tmp_path / "pipe").is_fifo()


def test_a_page_is_written_to_the_file_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: m\n")
    (tmp_path / "newest.html").symlink_to("page.html")
    assert main([str(tmp_path), "--out", str(tmp_path / "newest.html")], "elaswave-spmd") == 0
    assert (tmp_path / "newest.html").is_symlink() and "<html" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_link_in_the_directory_of_a_run_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """The directory may come from somebody else, and the link point to any file of the user."""
    run, mine = tmp_path / "run", tmp_path / "mine.txt"
    run.mkdir()
    (run / "config.yaml").write_text("model: m\n")
    mine.write_text("of the user")
    (run / "report.html").symlink_to(mine)
    assert main([str(run)], "elaswave-spmd") == 0
    assert mine.read_text() == "of the user"
    page = run / "report.html"
    assert not page.is_symlink() and "<html" in page.read_text(encoding="utf-8")


def test_a_run_whose_path_is_no_utf_8_has_a_report_whatever_the_output_can_show(tmp_path: Path) -> None:
    folder = tmp_path / "a\udcff\u00e9"
    folder.mkdir()
    (folder / "config.yaml").write_text("model: m\n")
    words = [sys.executable, "-m", "elaswave_spmd", "report", str(folder)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path}/a\\udcff\\xe9/report.html\n"
    assert "a\\udcff\u00e9" in (folder / "report.html").read_text(encoding="utf-8")
