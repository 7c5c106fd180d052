"""Safetensors files that are read in ranges: only those elements of a tensor that are asked for."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elaswave_spmd.conf.given_files import text_of
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.regular_files import open_regular

INDEX = "model.safetensors.index.json"
MODEL = "model.safetensors"
EXACT = ("F32", "BF16", "F16")
"""The types, as safetensors names them, whose values fp32 holds exactly."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the header of its file describes it. `dtype` is the name that safetensors has for it: "BF16"."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class TensorFiles:
    """The tensors of one or several safetensors files. Only the headers are read until values are asked for.

    The files are memory-mapped until `close`.

    Args:
        files: the paths of all files.
        where: the setting that named them, for errors.
        index: name of a tensor -> the file that holds it, as an index lists them. None if there is no index to compare
            with.

    Raises:
        ConfigError: a file cannot be read, is not safetensors, or lacks a tensor that the index lists for it; or a
            tensor is in two files.
    """

    def __init__(self, files: Sequence[Path], where: str, index: Mapping[str, Path] | None = None) -> None:
        self._where = where
        self._open: dict[Path, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for file in files:
            self._read_header(file)
        for name, file in (index or {}).items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise ConfigError(
                    f"{file} does not hold the tensor {name}",
                    rule=f"each file holds the tensors that {INDEX} lists for it",
                    where=where,
                    fix="download or copy the directory again",
                )

    def _read_header(self, file: Path) -> None:
        opened = self._opened(file)
        for name in opened.keys():  # noqa: SIM118 (it is no mapping)
            if name in self.tensors:
                raise ConfigError(
                    f"tensor {name} is in {self.tensors[name].file} and in {file}",
                    rule="each tensor is in one file",
                    where=self._where,
                    fix="remove the file that does not belong to the others",
                )
            found = opened.get_slice(name)
            self.tensors[name] = TensorInfo(file, tuple(found.get_shape()), found.get_dtype())

    def _opened(self, file: Path) -> Any:
        if file not in self._open:
            from safetensors import SafetensorError, safe_open

            try:
                open_regular(file).close()  # refuses a pipe, on which the library would wait without end
                self._open[file] = safe_open(str(file), framework="pt")
            except OSError as error:
                raise ConfigError(
                    f"cannot read {file} ({error.strerror or error})", where=self._where, fix="a file that can be read"
                ) from None
            except SafetensorError as error:
                raise ConfigError(
                    f"{file} is torn, or is no safetensors file ({error})",
                    rule="weights are read from safetensors files",
                    where=self._where,
                    fix="write it by safetensors.torch.save_file, or copy it again",
                ) from None
        return self._open[file]

    def rows(self, name: str, first: int, stop: int) -> Tensor:
        """Rows [first, stop) of a tensor along its first dim, converted to fp32. A tensor without dims is one row."""
        info = self.tensors[name]
        opened = self._opened(info.file)
        found = opened.get_slice(name)[first:stop] if info.shape else opened.get_tensor(name).reshape(1)[first:stop]
        return found.to(torch.float32)

    def columns(self, name: str, first: int, stop: int) -> Tensor:
        """Columns [first, stop) of a matrix, as the rows of its transpose, converted to fp32."""
        info = self.tensors[name]
        return self._opened(info.file).get_slice(name)[:, first:stop].to(torch.float32).T

    def close(self) -> None:
        """Unmap the files. They are opened again when values are asked for."""
        self._open.clear()


def elements(rows: Tensor, first_row: int, first: int, stop: int) -> Tensor:
    """Elements [first, stop) of a flattened tensor, whose rows from `first_row` on are `rows`."""
    width = math.prod(rows.shape[1:])
    return rows.reshape(-1)[first - first_row * width : stop - first_row * width]


def row_span(shape: Sequence[int], first: int, stop: int) -> tuple[int, int]:
    """The range of rows that contains elements [first, stop) of a flattened tensor of this shape."""
    width = max(math.prod(shape[1:]), 1)
    return first // width, -(-stop // width)


def files_of(folder: Path, where: str) -> TensorFiles:
    """The tensors of a directory in the format of Hugging Face: model.safetensors, or several files with an index.

    Args:
        where: the setting that named the directory, for errors.

    Raises:
        ConfigError: the directory has neither of the two, or as for `TensorFiles`.
    """
    if os.path.exists(folder / INDEX):
        index = _read_index(folder, where)
        return TensorFiles(sorted(set(index.values())), where, index)
    if os.path.exists(folder / MODEL):
        return TensorFiles([folder / MODEL], where)
    others = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".safetensors"))
    raise ConfigError(
        f"{folder} holds neither {MODEL} nor {INDEX}",
        rule="weights are read from safetensors files: others can run code while they are read",
        where=where,
        exists=", ".join(others) or "no file of weights",
        fix="load it by transformers and call save_pretrained(DIR)",
    )


def _read_index(folder: Path, where: str) -> dict[str, Path]:
    """The index of a sharded model: name of a tensor -> its file."""
    fields = read_json(folder / INDEX, where)
    listed = fields.get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(v, str) and Path(v).name == v for v in listed.values()):
        raise ConfigError(
            f"{folder / INDEX} has no weight_map from tensors to names of files beside it",
            where=where,
            fix="download or copy the directory again",
        )
    return {name: folder / file for name, file in listed.items()}


def read_json(file: Path, where: str) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        where: the setting that named the file, for errors.

    Raises:
        ConfigError: the file cannot be read, or does not hold a JSON object.
    """
    try:
        fields = json.loads(text_of(file))
    except OSError as error:
        raise ConfigError(
            f"cannot read {file} ({error.strerror or error})", where=where, fix="a directory that has this file"
        ) from None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f"{file} is not a JSON object", where=where, fix="download or copy the directory again")
    return fields
