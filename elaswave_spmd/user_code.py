"""The import of a user's own modules, which lie in the folder where the command was started."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

from elaswave_spmd.errors import UserError, place_in_user_code


def is_dotted_name(target: str) -> bool:
    """True if a text has the form of `module.Name`."""
    return "." in target and all(part.isidentifier() for part in target.split("."))


def import_user_module(name: str, what: str, where: str, error_type: type[UserError]) -> ModuleType:
    """Import a module of the user's, with the working directory on the import path.

    Args:
        what: the setting that names it, with its value, for the error.
        where: where that setting is; the error names the line of the user's code instead, if there is one.
        error_type: the class of the error.

    Raises:
        UserError: of that class; the module cannot be imported.
    """
    # `python train.py` and `python -m` put the working directory on the path; an installed script and a worker may not.
    if (folder := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise error_type(
            f"the module of {what} cannot be imported ({type(error).__name__}: {error})",
            where=place_in_user_code(error) or where,
            exists="modules in the working directory: " + (", ".join(_modules_here()) or "none"),
            fix="run from the folder that holds the file, or correct its name",
        ) from error


def _modules_here() -> list[str]:
    return sorted(name[:-3] for name in os.listdir() if name.endswith(".py"))
