"""Paths that begin with a home directory that is not there: they are names like any other, and bring no traceback."""

from __future__ import annotations

import pwd
from collections.abc import Callable
from typing import NoReturn

import pytest

from elaswave_spmd.conf.compose import settings_from
from elaswave_spmd.data import default_cache
from elaswave_spmd.data.bin_files import find_bin_files
from elaswave_spmd.data.tables import ARROW, find_tables
from elaswave_spmd.data.tokenizer import load_tokenizer
from elaswave_spmd.errors import ConfigError, UserError
from elaswave_spmd.report import report_command
from elaswave_spmd.runtime.processes.rendezvous import read_secret
from elaswave_spmd.simulator import scenario
from elaswave_spmd.weights.resolve import existing_path
from elaswave_spmd.weights.trained import open_run

NOBODYS = "~nobody-has-this-name/x"


@pytest.mark.parametrize(
    "reads",
    [
        lambda: settings_from([f"train.resume='{NOBODYS}'"]),
        lambda: find_bin_files(NOBODYS),
        lambda: find_tables(ARROW, NOBODYS),
        lambda: load_tokenizer(NOBODYS),
        lambda: existing_path(NOBODYS),
        lambda: open_run(NOBODYS),
        lambda: read_secret(NOBODYS, where="runtime.token_file"),
        lambda: report_command.main([NOBODYS], "elaswave-spmd"),
        lambda: scenario.load(NOBODYS),
    ],
    ids=["resume", "bin", "arrow", "tokenizer", "init_from", "run", "token_file", "report", "scenario"],
)
def test_a_path_in_the_home_of_nobody_is_refused_as_any_that_is_not_there(reads: Callable[[], object]) -> None:
    with pytest.raises(UserError, match="nobody-has-this-name"):
        reads()


def test_without_a_home_directory_the_cache_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> NoReturn:
        raise KeyError("no such user")

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match="there is no home directory") as caught:
        default_cache()
    assert caught.value.fix == "data.cache=DIR, or set HOME"
