"""The lock of a run that is resumed, where its directory cannot be written to."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from elaswave_spmd.controller.resume import lock_resumed
from elaswave_spmd.errors import ConfigError, FilesError
from elaswave_spmd.run_dir import lock


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EROFS, ConfigError), (errno.EACCES, ConfigError), (errno.ENOSPC, FilesError)]
)
def test_a_run_that_cannot_be_locked_is_bad_input_where_nobody_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def fail(path: Path, flags: int) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock, "open_private", fail)
    with pytest.raises(kind, match=os.strerror(number)) as caught:
        lock_resumed(tmp_path, f"train.resume={tmp_path}")
    if isinstance(caught.value, ConfigError):
        assert f"cp -r {tmp_path} DIR" in caught.value.fix and caught.value.where == f"train.resume={tmp_path}"


def test_any_other_run_is_locked(tmp_path: Path) -> None:
    with lock_resumed(tmp_path, "train.resume=x"), pytest.raises(ConfigError, match="is in use"):
        lock_resumed(tmp_path, "train.resume=x")
