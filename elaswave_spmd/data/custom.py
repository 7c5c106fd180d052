"""A user's own map-style dataset, named by `data.target=my_file.MyDataset`."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from elaswave_spmd import by_value
from elaswave_spmd.errors import DataError, add_note, closest, exit_as_error, headline_of, place_in_user_code
from elaswave_spmd.user_code import import_user_module, is_dotted_name, names_like

_CONTRACT = "a class with __len__, __getitem__ -> 1-D integers of length seq_len + 1, and vocab_size"
_METHODS = {
    "__len__": "def __len__(self), which returns the number of samples",
    "__getitem__": "def __getitem__(self, index), which returns one sample",
}
_GENERIC_CONTRACT = "a class with __len__ and __getitem__; with vocab_size its samples are tokens, else anything"

_SETTINGS = ("path", "tokenizer")
"""Constructor arguments that have a setting of their own, such as `data.path`. All others are `data.args.NAME`."""


def load_target(target: str) -> Callable[..., Any]:
    """Import the class (or function) that `module.Name` names, with the working directory on the import path.

    Raises:
        DataError: the module cannot be imported, or has no class or function of this name.
    """
    module_name, _, name = target.rpartition(".")
    if not is_dotted_name(target):
        raise DataError(
            f"data.target={target} does not name a class in a module",
            where="data.target",
            fix="data.target=my_file.MyDataset",
        )
    by_value.check_given(target, "data", DataError)
    module = import_user_module(module_name, f"data.target={target}", "data.target", DataError)
    made = getattr(module, name, None)
    if not callable(made):
        classes = [
            key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        close = closest(name, classes)
        raise DataError(
            f"module {module_name} has no class {name}",
            where=f"data.target={target}",
            exists=names_like(name, classes) or "no classes",
            fix=f"data.target={module_name}.{close}" if close else "name one of its classes",
        )
    return made


def accepted_names(target: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
    """The names that a constructor takes as keywords, and True if it takes any name (`**kwargs`).

    A constructor whose signature cannot be inspected is taken to accept any name.
    """
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return (), True
    named = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def choose_kwargs(
    target: str, offered: Mapping[str, object], demanded: Mapping[str, object]
) -> tuple[dict[str, object], bool]:
    """Choose keyword arguments for `target`: those of `offered` that it has parameters for, and all of `demanded`.

    Args:
        offered: arguments that the run has for any dataset, such as `seq_len`.
        demanded: arguments that the user has set.

    Returns:
        The arguments, and True if the constructor has a parameter `split`.

    Raises:
        DataError: the constructor has no parameter for an argument that the user has set.
    """
    named, takes_any = accepted_names(load_target(target))
    for name, value in demanded.items():
        if name not in named and not takes_any:
            raise DataError(
                f"{by_value.as_given(target, 'data')} takes no argument {name} (data: {name}={value!r})",
                where="data",
                exists=", ".join(named) or "no arguments",
                fix=f"name {name} in its constructor, or leave it out",
            )
    chosen = {name: value for name, value in offered.items() if name in named}
    return {**chosen, **demanded}, "split" in named


def make_dataset(target: str, kwargs: Mapping[str, object]) -> Any:
    """Construct the user's dataset, and check its interface without reading a sample.

    Raises:
        DataError: the constructor failed, the object is not a map-style dataset, or its `vocab_size` cannot be read or
            is not a positive integer.
    """
    make, given = load_target(target), by_value.as_given(target, "data")
    try:
        dataset = make(**kwargs)
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        # Missing arguments explain the error only if the call itself failed, before any of the user's code ran. Python
        # shows the signature of the wrapped function for a wrapper, which may supply what seems to be missing.
        if isinstance(error, TypeError) and place_in_user_code(error) is None and (lacks := _lacking(make, kwargs)):
            raise _needs(target, lacks, kwargs) from error
        raise DataError(
            f"the constructor of {given} failed ({type(error).__name__}: {error})",
            where=place_in_user_code(error) or "data.target",
            exists=f"it was given {dict(kwargs)}",
            fix="correct it, or these arguments",
        ) from error
    _refuse_iterable(dataset, given)
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise DataError(
            f"{given} is not a map-style dataset: no {', '.join(missing)}",
            where="data.target",
            exists=_GENERIC_CONTRACT,
            fix=" and ".join(_METHODS[name] for name in missing),
        )
    _check_readable(dataset, given)
    if not has_tokens(dataset):
        return dataset
    size = dataset.vocab_size
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
        raise DataError(
            f"vocab_size of {given} is {size!r}, not a positive integer",
            where="data.target",
            fix="set it to the number of different tokens",
        )
    return dataset


def _check_readable(dataset: Any, given: str) -> None:
    """Refuse a dataset whose class has a `vocab_size` that cannot be read.

    If `vocab_size` is a property that raises an AttributeError, `hasattr` says that the dataset has none. Its tokens
    would then be treated as samples of another kind.

    Raises:
        DataError: reading `vocab_size` failed.
    """
    if not hasattr(type(dataset), "vocab_size"):
        return
    try:
        _ = dataset.vocab_size
    except (Exception, SystemExit) as error:
        raise DataError(
            f"vocab_size of {given} raised {headline_of(error)}",
            rule="a dataset whose samples are tokens has a vocab_size; any other has none",
            where=place_in_user_code(error) or "data.target",
            fix="correct it, or what it reads",
        ) from error


def _lacking(make: Callable[..., Any], kwargs: Mapping[str, object]) -> list[str]:
    """The parameters of a constructor that have no default and were not given."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return [p.name for p in named if p.default is p.empty and p.name not in kwargs]


def _needs(target: str, lacks: Sequence[str], kwargs: Mapping[str, object]) -> DataError:
    """The error about arguments that a constructor needs and the settings do not give."""
    settings = [f"data.{name}" if name in _SETTINGS else f"data.args.{name}" for name in lacks]
    if by_value.is_by_value(target):  # the class was given from Python, and so are settings: as a dict
        fix = "settings={" + ", ".join(f'"{setting}": VALUE' for setting in settings) + "}"
    else:
        fix = " ".join(f"{'+' * setting.startswith('data.args.')}{setting}=VALUE" for setting in settings)
    return DataError(
        f"{by_value.as_given(target, 'data')} needs {', '.join(lacks)}, which the settings do not give",
        rule="its constructor gets those of seq_len and split that it names, data.path and data.tokenizer as path and "
        "tokenizer if they are set, and all of data.args",
        where="data.target",
        exists=f"it was given {', '.join(kwargs) or 'nothing'}",
        fix=fix,
    )


def length_of(dataset: Any, name: str) -> int:
    """The number of samples of a user's dataset.

    Raises:
        DataError: `__len__` raises, or does not return a whole number of at least 0.
    """
    rule = "a dataset has a fixed number of samples: __len__ returns a whole number, 0 or more"
    try:
        length = type(dataset).__len__(dataset)  # not len(), whose error does not show the returned value
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(
            f"__len__ of {name} raised {headline_of(error)}",
            rule=rule,
            where=place_in_user_code(error) or "data.target",
            fix="correct it, or what it reads",
        ) from error
    try:
        number = operator.index(length)
    except TypeError:
        number = -1
    if not 0 <= number <= sys.maxsize:
        raise DataError(
            f"__len__ of {name} returned {length!r}",
            rule=rule,
            where="data.target",
            fix="divide with //" if isinstance(length, float) else "return the number of samples",
        )
    return number


def has_tokens(dataset: Any) -> bool:
    """True if a dataset has a `vocab_size`: its samples are tokens. Those of other datasets are trees (samples.py)."""
    return hasattr(dataset, "vocab_size")


def _refuse_iterable(dataset: object, name: str) -> None:
    """Refuse a dataset that can only be iterated over.

    torch's IterableDataset inherits a `__getitem__` that always raises, so having the method is not enough.

    Raises:
        DataError: the dataset has `__iter__` and no `__getitem__` of its own.
    """
    cls = type(dataset)
    inherited = getattr(getattr(cls, "__getitem__", None), "__module__", "") == "torch.utils.data.dataset"
    if not hasattr(cls, "__iter__") or (hasattr(cls, "__getitem__") and not inherited):
        return
    raise DataError(
        f"{name} is an iterable dataset: it has __iter__, and no __getitem__ of its own",
        rule="any worker can read any sample by its number: samples come in a keyed random order, and workers that "
        "take over for a lost one, join or resume begin in the middle, which an iterator reaches from its start only",
        where="data.target",
        exists=_GENERIC_CONTRACT,
        fix="derive it from elaswave_spmd.data.ShardedDataset: shards, shard_length(shard) and "
        "open_shard(shard, offset), which returns an iterator from there on",
    )


def read_sample(dataset: Any, index: int, seq_len: int, name: str) -> np.ndarray:
    """Read one sample of a user's dataset as int64[seq_len + 1], and check it.

    Raises:
        DataError: the sample has another shape or dtype, or a token outside the vocabulary.
        Exception: whatever the dataset raises, with a note that names the sample.
    """
    try:
        sample = np.asarray(dataset[index])
    except Exception as error:
        add_note(error, f"in sample {index} of {name}")  # so the report of the failed worker names the sample
        raise
    except SystemExit as end:
        raise exit_as_error(end, f"in sample {index} of {name}") from end
    if sample.ndim != 1 or sample.shape[0] != seq_len + 1 or sample.dtype.kind not in "iu":
        raise DataError(
            f"sample {index} of {name} has shape {sample.shape} and dtype {sample.dtype}",
            rule=f"a sample is {seq_len + 1} integers: the sequence and one target more",
            where="data.target",
            exists=_CONTRACT,
            fix="return tokens[start : start + seq_len + 1]",
        )
    low, high = int(sample.min()), int(sample.max())
    if low < 0 or high >= dataset.vocab_size:
        raise DataError(
            f"sample {index} of {name} has tokens from {low} to {high}, and vocab_size is {dataset.vocab_size}",
            rule="tokens lie in [0, vocab_size)",
            where="data.target",
            fix="correct vocab_size or the tokens",
        )
    return sample.astype(np.int64)
