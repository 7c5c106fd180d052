"""The import of a user's own modules, which lie in the folder where the command was started."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from elaswave_spmd.errors import UserError, place_in_user_code

_LISTED = 5  # names of a user's that are shown where another one was given


def is_dotted_name(target: str) -> bool:
    """True if a text has the form of `module.Name`."""
    return "." in target and all(part.isidentifier() for part in target.split("."))


def import_here(name: str) -> ModuleType:
    """Import a module, with the working directory on the import path. Raises what the import raises."""
    # `python train.py` and `python -m` put the working directory on the path; an installed script and a worker may not.
    if (folder := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()  # the file may have been written after Python listed the folder
    return importlib.import_module(name)


def import_user_module(name: str, what: str, where: str, error_type: type[UserError]) -> ModuleType:
    """Import a module of the user's, with the working directory on the import path.

    Args:
        what: the setting that names it, with its value, for the error.
        where: where that setting is; the error names the line of the user's code instead, if there is one.
        error_type: the class of the error.

    Raises:
        UserError: of that class; the module cannot be imported.
    """
    try:
        return import_here(name)
    except (Exception, SystemExit) as error:
        raise error_type(
            f"the module of {what} cannot be imported ({type(error).__name__}: {error})",
            where=place_in_user_code(error) or where,
            exists="modules in the working directory: " + (names_like(name, modules_here()) or "none"),
            fix="run from the folder that holds the file, or correct its name",
        ) from error


def names_like(name: str, names: Sequence[str]) -> str:
    """The names for an error about one that is not among them: all, or of many those that are most like it."""
    if len(names) <= _LISTED:
        return ", ".join(names)
    found = difflib.get_close_matches(name, names, n=_LISTED, cutoff=0.0)
    rest = len(names) - len(found)
    return f"{', '.join(found)}, and {rest} other{'s' * (rest > 1)}"


def modules_here() -> list[str]:
    """The names of the modules in the working directory."""
    return sorted(name[:-3] for name in os.listdir() if name.endswith(".py"))
