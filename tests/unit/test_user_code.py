"""The import of modules that lie in the working directory, and of such that were edited since."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elaswave_spmd import user_code
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.user_code import import_user_module, refuse_edited


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


BEFORE = """
import helping
from helping import double

WIDTH = 3

class Net:
    def __init__(self, width=WIDTH):
        self.width = width

    @property
    def size(self):
        return double(self.width)

    def forward(self, x):
        return x + 1 if self.width in {1, 2, "three"} else sorted(x, key=lambda one: -one)
"""
HELPING = "def double(x):\n    return 2 * x\n"


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes a model's file and one that it uses, imports them, and lets the test write them again."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "helped", raising=False)
    monkeypatch.delitem(sys.modules, "helping", raising=False)

    written = itertools.count()

    def write(*, model: str = BEFORE, helping: str = HELPING) -> None:
        at = 10 * next(written)  # Python takes a file of the same size and second for the one whose bytecode it has
        for name, text in (("helped.py", model), ("helping.py", helping)):
            (tmp_path / name).write_text(text)
            os.utime(tmp_path / name, (at, at))

    write()
    importlib.import_module("helped")
    return write


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("x + 1", "x + 2", "Net.forward"),
        ("x + 1", "x + 1.0", "Net.forward"),
        ('"three"}', '"four"}', "Net.forward"),
        ("-one", "+one", "Net.forward"),
        ("self.width = width", "self.width = 2 * width", "Net.__init__"),
        ("return double", "return -double", "Net.size"),
    ],
)
def test_a_class_whose_file_was_edited_since_it_was_imported_is_refused(
    edit: Callable[..., None], before: str, after: str, name: str
) -> None:
    assert before in BEFORE
    edit(model=BEFORE.replace(before, after))
    with pytest.raises(ConfigError) as refused:
        refuse_edited("helped.Net", "model")
    assert f"helped.py was edited since this process imported it: {name} is another function" in refused.value.what
    assert refused.value.fix.startswith("importlib.reload(sys.modules['helped'])")
    importlib.reload(sys.modules["helped"])
    refuse_edited("helped.Net", "model")


def test_what_a_model_uses_of_another_file_in_its_folder_is_compared_as_well(edit: Callable[..., None]) -> None:
    edit(helping=HELPING.replace("2", "3"))
    with pytest.raises(ConfigError, match=r"helping.py was edited .*: double is another function there now"):
        refuse_edited("helped.Net", "data")


def test_what_does_not_change_a_function_is_no_edit(edit: Callable[..., None]) -> None:
    refuse_edited("helped.Net", "model")
    edit(model="# A comment, so that all lines move.\n" + BEFORE + "\n\ndef another():\n    return 1\n")
    refuse_edited("helped.Net", "model")
    edit(model="class Net: this is no Python")  # the worker that imports it says so
    refuse_edited("helped.Net", "model")
    refuse_edited("not_imported_yet.Net", "model")
    refuse_edited("by_value.Net", "model")
    refuse_edited("llama", "model")


def test_a_library_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(user_code, "_codes", lambda *_: pytest.fail("its files were read"))
        refuse_edited("torch.nn.modules.linear.Linear", "model")
