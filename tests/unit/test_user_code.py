"""The import of modules that lie in the working directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.user_code import import_user_module


def test_a_module_is_found_that_was_written_after_python_has_listed_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python looks at a folder's time to see whether its list is old; two moments may have one time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def value() -> int:
        return import_user_module("written_after_the_list", "run.callbacks=[...]", "run.callbacks", ConfigError).VALUE

    with pytest.raises(ConfigError, match="cannot be imported"):
        value()
    listed = os.stat(tmp_path)
    (tmp_path / "written_after_the_list.py").write_text("VALUE = 3")
    os.utime(tmp_path, ns=(listed.st_atime_ns, listed.st_mtime_ns))
    assert value() == 3
