"""A user's own modules: their import from the folder where the command was started, and whether a file was edited."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType, ModuleType
from typing import Any

from elaswave_spmd.errors import ConfigError, UserError, is_user_code, place_in_user_code

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


def refuse_edited(target: str, keyword: str) -> None:
    """Refuse a class or function whose file was edited since this process imported it: workers import the file anew.

    Compared are the functions and methods of its module, and of the modules beside it that it uses, with those that
    the files have now. Lines, comments, and values of variables are not. A module that no process has imported yet, or
    that was not loaded from a plain source file, passes, and so does an installed library.

    Args:
        target: "module.Name", as it stands in the settings.
        keyword: of `elaswave_spmd.train` that gives it, "model" or "data".

    Raises:
        ConfigError: there is such a file.
    """
    module = sys.modules.get(target.rpartition(".")[0])
    for used in () if module is None else _modules_used(module):
        if (name := _edited_function(used)) is not None:
            raise ConfigError(
                f"{used.__file__} was edited since this process imported it: {name} is another function there now",
                rule="workers import a class in a file by its name, each from the file as it is, and this process "
                "plans their work",
                where=f"{keyword}={target}",
                fix=f"importlib.reload(sys.modules[{used.__name__!r}]), and take {keyword}={target} from it again; or "
                "restart the kernel",
            )


def _modules_used(module: ModuleType) -> list[ModuleType]:
    """A user's module, and those of its folder and below whose functions, classes or selves are its variables."""
    if (file := getattr(module, "__file__", None)) is None or not is_user_code(file):
        return []
    folder, found = os.path.join(os.path.dirname(file), ""), [module]
    for one in found:
        for value in list(vars(one).values()):
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            used = sys.modules.get(name) if isinstance(name, str) else None
            file = getattr(used, "__file__", None)
            if used is not None and used not in found and file and file.startswith(folder):
                found.append(used)
    return found


def _edited_function(module: ModuleType) -> str | None:
    """The name of a function of a module that its source file has with other code now; None: there is none.

    A function that the file does not have is passed over: whoever uses it finds out.
    """
    loader, file = getattr(module, "__loader__", None), getattr(module, "__file__", None)
    # Exactly this loader: those derived from it may compile something else than the file.
    if type(loader) is not SourceFileLoader or file is None:
        return None
    try:
        now = dict[str, list[object]]()
        for name, code in _codes(compile(loader.get_data(file), file, "exec", dont_inherit=True)):
            now.setdefault(name, []).append(_content(code))
    except (OSError, SyntaxError, ValueError):
        return None  # importing it in a worker says what is wrong
    for function in _functions(module):
        name, code = function.__qualname__, function.__code__
        if code.co_filename == file and name in now and _content(code) not in now[name]:
            return name
    return None


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions that a module defines, and the methods of its classes."""
    scopes, seen = list[Mapping[str, Any]]([vars(module)]), set[int]()
    for scope in scopes:
        for value in list(scope.values()):
            if inspect.isclass(value) and value.__module__ == module.__name__ and id(value) not in seen:
                seen.add(id(value))
                scopes.append(vars(value))
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            for one in (value.fget, value.fset) if isinstance(value, property) else (value,):
                if callable(one) and isinstance(plain := inspect.unwrap(one), FunctionType):
                    yield plain


def _codes(code: CodeType, prefix: str = "") -> Iterator[tuple[str, CodeType]]:
    """The code of all functions and classes within some code, each with its qualified name."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            name = f"{prefix}{inner.co_name}"
            yield name, inner
            yield from _codes(inner, f"{name}.<locals>." if inner.co_flags & inspect.CO_OPTIMIZED else f"{name}.")


def _content(code: CodeType) -> object:
    """What some code does, wherever it stands in its file."""
    constants = [_content(one) if isinstance(one, CodeType) else _constant(one) for one in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def _constant(value: object) -> object:
    # As text, since 1, 1.0 and True are equal; sets in an order of their own, as theirs differs between compilations.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


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
