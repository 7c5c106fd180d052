"""A user's own map-style dataset, named by `data.target=my_file.MyDataset`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from elaswave_spmd.errors import DataError, place_in_user_code

_CONTRACT = "a class with __len__, __getitem__ -> 1-D integers of length seq_len + 1, and vocab_size"


def load_target(target: str) -> Callable[..., Any]:
    """Import the class (or function) that `module.Name` names, with the working directory on the import path.

    Raises:
        DataError: it cannot be imported, or there is no such name in it.
    """
    module_name, _, name = target.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in target.split(".")):
        raise DataError(
            f"data.target={target} does not name a class in a module",
            where="data.target",
            fix="data.target=my_file.MyDataset",
        )
    # `python train.py` and `python -m` put the working directory on the path; an installed script and a worker may not.
    if (folder := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise DataError(
            f"the module of data.target={target} cannot be imported ({type(error).__name__}: {error})",
            where=place_in_user_code(error) or "data.target",
            exists="modules in the working directory: " + (", ".join(_modules_here()) or "none"),
            fix="run from the folder that holds the file, or correct its name",
        ) from error
    made = getattr(module, name, None)
    if not callable(made):
        classes = [
            key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        raise DataError(
            f"module {module_name} has no class {name}",
            where=f"data.target={target}",
            exists=", ".join(classes) or "no classes",
            fix="name one of these",
        )
    return made


def _modules_here() -> list[str]:
    return sorted(name[:-3] for name in os.listdir() if name.endswith(".py"))


def accepted_names(target: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
    """The names that the constructor takes as keywords, and True if it takes any name (`**kwargs`)."""
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

    Returns:
        The arguments, and True if the constructor has a parameter `split`.

    Raises:
        DataError: the constructor has no parameter for something that the user set.
    """
    named, takes_any = accepted_names(load_target(target))
    for name, value in demanded.items():
        if name not in named and not takes_any:
            raise DataError(
                f"{target} takes no argument {name} (data: {name}={value!r})",
                where="data",
                exists=", ".join(named) or "no arguments",
                fix=f"name {name} in its constructor, or leave it out",
            )
    chosen = {name: value for name, value in offered.items() if name in named}
    return {**chosen, **demanded}, "split" in named


def make_dataset(target: str, kwargs: Mapping[str, object]) -> Any:
    """Construct the user's dataset, and check its interface without reading a sample.

    Raises:
        DataError: its constructor failed, or it is not a map-style dataset with a vocabulary.
    """
    try:
        dataset = load_target(target)(**kwargs)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"the constructor of {target} failed ({type(error).__name__}: {error})",
            where=place_in_user_code(error) or "data.target",
            exists=f"it was given {dict(kwargs)}",
            fix="correct it, or these arguments",
        ) from error
    missing = [name for name in ("__len__", "__getitem__", "vocab_size") if not hasattr(dataset, name)]
    if missing:
        raise DataError(
            f"{target} is not a map-style dataset: no {', '.join(missing)}", where="data.target", exists=_CONTRACT
        )
    size = dataset.vocab_size
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
        raise DataError(
            f"vocab_size of {target} is {size!r}, not a positive integer",
            where="data.target",
            fix="set it to the number of different tokens",
        )
    return dataset


def read_sample(dataset: Any, index: int, seq_len: int, name: str) -> np.ndarray:
    """Read one sample of a user's dataset as int64[seq_len + 1], and check it.

    Raises:
        DataError: wrong shape or kind, or a token outside the vocabulary.
    """
    try:
        sample = np.asarray(dataset[index])
    except Exception as error:
        # `add_note` of Python 3.11 does the same. The report of the failed worker then names the sample.
        vars(error).setdefault("__notes__", []).append(f"in sample {index} of {name}")
        raise
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
