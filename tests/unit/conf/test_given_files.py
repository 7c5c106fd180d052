"""Files that a setting names: what has no end, or has another one, is not read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elaswave_spmd.conf.given_files import text_of, yaml_of


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):  # /dev/zero is the same, and never ends
        for reads in (text_of, yaml_of):
            with pytest.raises(OSError, match="it is no regular file"):
                reads(Path(path))
    with pytest.raises(IsADirectoryError):
        text_of(tmp_path)


def test_a_path_may_be_a_link_and_begin_with_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a").write_text("1")
    (tmp_path / "link").symlink_to("a")
    assert text_of("~/link") == "1" and text_of(str(tmp_path / "a")) == "1"


def test_yaml_has_no_aliases(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("a: {b: [1, null]}\nc: '*x'\n")
    assert yaml_of(file) == {"a": {"b": [1, None]}, "c": "*x"}
    file.write_text("a: &x [1]\nb: *x\n")
    with pytest.raises(ValueError, match="it has an alias"):
        yaml_of(file)
