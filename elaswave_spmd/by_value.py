"""Classes, functions and objects that a run gets by value: those of a script or a notebook, which no import finds.

They are pickled once, with cloudpickle. Every process of the run on this machine unpickles the same bytes, which it
gets through a descriptor that it has inherited, and has them in a module called `by_value` from then on: so
`model.target=by_value.MyModel` names one of them as `my_file.MyModel` names a class in a file. Nothing of it is ever
written into a run's directory: a pickle is code, and a run's files are data.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import mmap
import os
import pickle
import re
import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from elaswave_spmd.errors import ConfigError, RunError, UserError, place_in_user_code

MODULE = "by_value"
"""The module that these objects are in, while the run lasts, and so the begin of their names in settings."""

_MOST_PARTS = 200  # of an object that cannot be pickled, looked at for the part that is to blame
_DEEPEST = 8


@dataclass(frozen=True)
class ByValue:
    """Objects that a run gets by value, and their bytes.

    Args:
        objects: name in the module `by_value` -> the object.
        payload: all of them, pickled.
    """

    objects: Mapping[str, object] = field(repr=False, hash=False)
    payload: bytes = field(repr=False)

    @classmethod
    def of(cls, objects: Mapping[str, object]) -> ByValue:
        """Pickle objects.

        Raises:
            ConfigError: one cannot be pickled; names the part of it that is to blame.
        """
        import cloudpickle  # only where it is needed: importing takes time, and a command line never has such objects

        try:
            return cls(dict(objects), cloudpickle.dumps(dict(objects)))
        except Exception as error:
            raise _unpicklable(objects, error) from error

    @contextlib.contextmanager
    def importable(self) -> Iterator[None]:
        """A `with` in which this process has the objects in the module `by_value`.

        Of an object that is constructed already it has a copy, as workers have. The run reads samples of it here too,
        and what reading leaves behind, such as an open file, is not to be in the caller's own.

        Raises:
            RunError: another run of this process has objects by value now.
            ConfigError: an object cannot be unpickled.
        """
        if MODULE in sys.modules:
            raise RunError(f"a module {MODULE} is there already: another run of this process gets objects by value now")
        objects = {name: _copied(value) if isinstance(value, Held) else value for name, value in self.objects.items()}
        _make_module(objects)
        try:
            yield
        finally:
            del sys.modules[MODULE]

    def lend(self) -> int:
        """A new descriptor of the bytes, for child processes to inherit and `take`. The caller closes it."""
        fd = os.memfd_create(f"elaswave_spmd_{MODULE}")
        with open(fd, "wb", closefd=False) as file:
            file.write(self.payload)
        return fd


@dataclass(frozen=True)
class Held:
    """Stands for the class of an object that is constructed already: called, it returns the object."""

    value: Any

    def __call__(self) -> Any:
        return self.value


def _copied(value: Held) -> Held:
    """A copy of an object, by way of its pickle; the memory of numpy arrays is that of the original.

    Classes, functions and modules are not copied. Unpickled by cloudpickle in the process that has defined it, a class
    would get methods with globals of their own, and the caller goes on with that class.

    Raises:
        ConfigError: it cannot be unpickled.
    """
    import cloudpickle

    kept, buffers, pickled = list[object](), list[pickle.PickleBuffer](), io.BytesIO()
    # A tensor's memory would be copied, several times for a moment; that of numpy's arrays is shared by the buffers.
    torch = sys.modules.get("torch")
    shared = (type, FunctionType, ModuleType, *(() if torch is None else (torch.Tensor,)))

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, obj: object) -> int | None:
            if not isinstance(obj, shared):
                return None
            kept.append(obj)
            return len(kept) - 1

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: int) -> object:
            return kept[pid]

    Pickler(pickled, buffer_callback=buffers.append).dump(value)
    pickled.seek(0)
    try:
        return Unpickler(pickled, buffers=buffers).load()
    except Exception as error:
        raise untakeable(error) from error


def take(fd: int) -> None:
    """Make the module `by_value` of the bytes that `lend` has lent this process.

    Raises:
        Exception: whatever unpickling raises.
    """
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as view:
        _make_module(pickle.loads(view))


def target_of(name: str) -> str:
    """The name of an object in settings: "by_value.MyModel"."""
    return f"{MODULE}.{name}"


def is_by_value(target: str | None) -> bool:
    """True if a name in settings is of an object that a run gets, or got, by value."""
    return target is not None and target.startswith(f"{MODULE}.")


def as_given(target: str, keyword: str) -> str:
    """The name of an object for errors. Of one that goes by value the keyword that gave it: "data=[1, 2, 3]".

    Args:
        target: as it stands in the settings.
        keyword: of `elaswave_spmd.train`, "model" or "data".
    """
    objects = vars(sys.modules[MODULE]) if MODULE in sys.modules else {}
    if not is_by_value(target) or (value := objects.get(target.partition(".")[2])) is None:
        return target
    if not isinstance(value, Held):
        return f"{keyword}={plain_name(value, keyword)}"
    held = value.value
    if type(held).__module__ == "builtins":
        return f"{keyword}={' '.join(reprlib.repr(held).split())}"
    return f"{keyword}={type(held).__name__}(...)"


def check_given(target: str, keyword: str, kind: type[UserError]) -> None:
    """Refuse the name of an object that was given by value to another command, and not to this one.

    Args:
        target: as it stands in the settings.
        keyword: of `elaswave_spmd.train` that gives it, "model" or "data".
        kind: of the error.

    Raises:
        UserError: of that kind.
    """
    if not is_by_value(target) or hasattr(sys.modules.get(MODULE), target.partition(".")[2]):
        return
    name = target.partition(".")[2]
    raise kind(
        f"{keyword}.target={target} is not here: the run got its {keyword} by value, from a script or a notebook",
        rule="such code is in no file of a run, as a run's files are never executed",
        where=f"{keyword}.target={target}",
        fix=f"from Python: give it again, as in elaswave_spmd.train(resume=RUN, {keyword}={name}) or "
        f"load_model(RUN, model={name})",
    )


def importable_name(value: object) -> str | None:
    """The name "module.Name" by which other processes can import an object; None: they cannot."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "." in name or module == "__main__":
        return None
    found = sys.modules.get(module)
    # What no finder has found (a module made by hand) is not found by another process either.
    if found is None or getattr(found, "__spec__", None) is None or getattr(found, name, None) is not value:
        return None
    return f"{module}.{name}"


def plain_name(value: object, default: str) -> str:
    """A name for an object, of letters that a module's attribute may have."""
    while isinstance(value, functools.partial):
        value = value.func
    found = getattr(value, "__name__", None) or type(value).__name__
    name = re.sub(r"\W", "_", found).strip("_")
    return name if name.isidentifier() else default


def _make_module(objects: Mapping[str, object]) -> None:
    module = ModuleType(MODULE, "What this run was given by value.")
    vars(module).update(objects)
    sys.modules[MODULE] = module


# ---- what cannot be pickled, or unpickled


def untakeable(error: Exception) -> ConfigError:
    """The refusal of bytes that a worker's process cannot make objects of."""
    return ConfigError(
        f"what the run got by value cannot be unpickled in a worker's process ({type(error).__name__}: {error})",
        rule="classes and data of a script or a notebook go to the workers by value, pickled",
        where=place_in_user_code(error) or "model, data",
        fix="what it imports must be importable there, on the same sys.path; its __reduce__ or __setstate__ must work",
    )


def leaves_threads(number: int) -> ConfigError:
    """The refusal of objects whose unpickling, or what it imports, has started threads."""
    return ConfigError(
        f"unpickling what the run got by value left {number} threads running",
        rule="workers are forked from the process that has unpickled it, which may have one thread",
        where="model, data",
        fix="start threads where they are used, not when a module is imported or an object is unpickled",
    )


def _unpicklable(objects: Mapping[str, object], error: Exception) -> ConfigError:
    name, value = next(((n, v) for n, v in objects.items() if _problem(v)), next(iter(objects.items())))
    path, part = _culprit(value, name, (), _DEEPEST)
    why = _problem(part) or error
    blamed = f"{path}, a {type(part).__name__}," if path != name else name
    return ConfigError(
        f"{blamed} cannot be pickled ({type(why).__name__}: {why})",
        rule="classes and data of a script or a notebook go to the workers by value, pickled",
        where=name,
        fix="make it where it is used (open files and locks in __getitem__ or forward), leave it out of closures and "
        "global variables that this code uses, or move the code into a file: what is imported is not pickled",
    )


def _problem(value: object) -> Exception | None:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return error
    return None


def _culprit(value: object, path: str, around: tuple[int, ...], depth: int) -> tuple[str, object]:
    """The innermost part of a value that cannot be pickled, with the way to it: "Rows.lock", "make.<closure f>"."""
    if depth and id(value) not in around:
        for number, (step, part) in enumerate(_parts(value)):
            if number >= _MOST_PARTS:
                break
            if _problem(part) is not None:
                return _culprit(part, f"{path}{step}", (*around, id(value)), depth - 1)
    return path, value


def _parts(value: object) -> Iterable[tuple[str, object]]:
    """The parts of which a value consists for cloudpickle, each with what leads to it."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, FunctionType):
        used = inspect.getclosurevars(value)
        yield from ((f".<variable {name}>", item) for name, item in {**used.globals, **used.nonlocals}.items())
    elif inspect.isclass(value):
        yield from ((f".{name}", item) for name, item in vars(value).items() if not name.startswith("__weakref"))
        yield from ((f".<base {base.__name__}>", base) for base in value.__bases__)
    else:
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())
        if importable_name(type(value)) is None:
            yield f".<class {type(value).__name__}>", type(value)
