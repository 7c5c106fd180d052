"""Export of a run's model in the format of Hugging Face: config.json, safetensors files and the tokenizer's files."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from elaswave_spmd.data.spec import BYTES
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.run_dir.atomic_write import sync_directory, sync_file
from elaswave_spmd.run_dir.lock import take_flock
from elaswave_spmd.run_dir.weights import saving
from elaswave_spmd.weights.byte_tokenizer import byte_tokenizer
from elaswave_spmd.weights.families import CONFIG_JSON, FAMILIES, Family, Stored, family_of_target, stored_name
from elaswave_spmd.weights.given import owned_parameters
from elaswave_spmd.weights.sources import WeightSource, whole
from elaswave_spmd.weights.tensor_files import INDEX, MODEL, read_json
from elaswave_spmd.weights.trained import AS_WRITTEN, TrainedModel, check_parameters, is_on_tokens, tokenizer_file

MAX_FILE_BYTES = 2 * 10**9
"""The most bytes of tensors in one file, unless a single tensor is larger. An export holds one file in memory."""

_BESIDE_TOKENIZER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that may lie beside a tokenizer.json and belong to it. They are copied with it."""

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class _File:
    """A safetensors file that is to be written: its name, and the names of our parameters whose tensors it holds."""

    name: str
    parameters: tuple[str, ...]


def export_model(trained: TrainedModel, folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> list[str]:
    """Write a trained model in the format that transformers loads.

    The files are written into a scratch folder, which is then renamed. So the folder is complete, or does not exist,
    also after a crash of the machine. The next export to this folder removes what one that was killed has left.

    Args:
        folder: a new directory, or an empty one; it may begin with `~`.
        max_file_bytes: bytes of tensors after which another safetensors file is begun.

    Returns:
        The names of the files.

    Raises:
        ConfigError: the model is of no family that transformers has; the folder is not empty or cannot be written; the
            tokenizer of the run is missing or has changed.
        ModelError: the model's parameters are not those that were trained.
    """
    family = _family_of(trained)
    check_parameters(trained.model, trained.source, str(trained.path), AS_WRITTEN)
    folder = Path(os.path.expanduser(folder))
    if _is_taken(folder):
        raise ConfigError(
            f"{folder} exists already",
            rule="a model is written into a new directory, or an empty one",
            where=str(folder),
            fix="another DIR, or remove it",
        )
    tokenizer = tokenizer_file(trained)  # before anything is written
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _scratch_of(folder) as scratch:
            _write(trained, family, scratch, tokenizer, max_file_bytes)
            for file in scratch.iterdir():
                sync_file(file)
            scratch.chmod(0o755)
            sync_directory(scratch)
            scratch.replace(folder)  # also replaces an empty directory
            sync_directory(folder.parent)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return sorted(file.name for file in folder.iterdir())


def _is_taken(folder: Path) -> bool:
    """True if something exists at this path, other than an empty directory."""
    try:
        return os.path.lexists(folder) and not (os.path.isdir(folder) and not os.listdir(folder))
    except OSError as error:
        raise _unwritable(folder, error) from error


@contextlib.contextmanager
def _scratch_of(folder: Path) -> Iterator[Path]:
    """Context in which an empty directory beside `folder` belongs to this process. Removes it, unless it is renamed.

    Its name is always the same, so that the next export finds what a killed one has left. Its lock, which ends with its
    process, keeps two exports apart. Where there are no such locks nothing does.

    Raises:
        ConfigError: another export writes to the folder now.
        OSError: it cannot be made.
    """
    path = folder.with_name(f".{folder.name}.exported")
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                raise OSError(errno.EEXIST, f"{path} is of another user")
            with contextlib.suppress(ConfigError):  # a file system without locks
                take_flock(fd, path)
            if not _is_at(path, fd):
                continue  # the export that had it has just ended
            for left in path.iterdir():
                left.unlink()
            try:
                yield path
            finally:
                if _is_at(path, fd):
                    shutil.rmtree(path, ignore_errors=True)
            return
        except BlockingIOError:
            raise ConfigError(
                f"another export writes to {folder} now",
                rule="a model is written into a directory by one export at a time",
                where=str(folder),
                fix="wait until it has ended, or another DIR",
            ) from None
        finally:
            os.close(fd)


def _is_at(path: Path, fd: int) -> bool:
    """True if the open directory is still at this path."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except OSError:
        return False


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{folder} cannot be written ({error.strerror or error})", where=str(folder), fix="another DIR")


def _family_of(trained: TrainedModel) -> Family:
    family = family_of_target(trained.settings.target)
    if family is None:
        raise ConfigError(
            f"model.target={trained.settings.target} has no form in transformers",
            rule="a model is exported as one of the families that transformers computes alike",
            where=str(trained.path),
            exists=", ".join(f"model.target={family.target}" for family in FAMILIES),
            fix="read weights.safetensors of the run, which has the parameters by their names",
        )
    return family


def _write(trained: TrainedModel, family: Family, folder: Path, tokenizer: Path | None, max_file_bytes: int) -> None:
    (folder / CONFIG_JSON).write_text(json.dumps(config_of(trained, family), indent=2) + "\n", encoding="utf-8")
    _write_tensors(trained, family, folder, max_file_bytes)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
        for name in _BESIDE_TOKENIZER:
            if os.path.isfile(tokenizer.parent / name):
                shutil.copyfile(tokenizer.parent / name, folder / name)
    elif has_byte_tokenizer(trained):
        for name, fields in byte_tokenizer().items():
            (folder / name).write_text(json.dumps(fields, ensure_ascii=False) + "\n", encoding="utf-8")


def has_byte_tokenizer(trained: TrainedModel) -> bool:
    """True if the model was trained on bytes, and not on a user's own dataset or on given token ids."""
    data = trained.data
    return data.target is None and data.tokenizer == BYTES and not is_on_tokens(trained)


def config_of(trained: TrainedModel, family: Family) -> dict[str, Any]:
    """The fields of the config.json.

    If the run began with the weights of a published model, its special tokens are kept, and the longest input of its
    config.json is not shortened to that of the run.
    """
    begun = _begun_with(trained, family)
    longest = begun.get("max_position_embeddings")
    seq_len = max(trained.seq_len, longest if isinstance(longest, int) else 0)
    return {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "torch_dtype": "float32",
        **family.config_of(family.facts_of_model(trained.model)),
        **family.context(seq_len, trained.settings.dropout),
        # Our corpora have no special tokens. Those of a tokenizer are named in its own files.
        "bos_token_id": None,
        "eos_token_id": None,
        **{name: value for name, value in begun.items() if name in _SPECIAL_TOKENS},
    }


def _begun_with(trained: TrainedModel, family: Family) -> Mapping[str, Any]:
    """The config.json of the published model whose weights the run began with.

    Empty if the run began with other weights, or if the file is gone or is of another family.
    """
    if trained.settings.init_from is None:
        return {}
    file = Path(os.path.expanduser(trained.settings.init_from)) / CONFIG_JSON
    if not os.path.isfile(file):
        return {}
    fields = read_json(file, str(file))
    return fields if fields.get("model_type") == family.model_type else {}


def _write_tensors(trained: TrainedModel, family: Family, folder: Path, max_file_bytes: int) -> None:
    from safetensors.torch import save_file

    heads = family.facts_of_model(trained.model)["model.heads"]
    stored = {}
    for name, _ in owned_parameters(trained.model):
        how = family.stored(name, heads)
        stored[name] = Stored(stored_name(how, family.prefix), how.transposed, how.heads)
    sizes = {name: 4 * math.prod(trained.source.shapes[name]) for name in stored}
    files = list(_files(sizes, max_file_bytes))
    for file in files:
        tensors = {stored[name].name: as_stored(trained.source, name, stored[name]) for name in file.parameters}
        with saving():
            save_file(tensors, folder / file.name, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {stored[name].name: file.name for file in files for name in file.parameters}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def as_stored(source: WeightSource, name: str, how: Stored) -> Tensor:
    """The values of our parameter `name` in the form `how` of a published model, fp32 and contiguous."""
    values = whole(source, name)
    if how.heads:
        parts = values.reshape(how.heads, 3, -1, *values.shape[1:])
        values = parts.transpose(0, 1).reshape(values.shape)
    return (values.T if how.transposed else values).contiguous().clone()


def _files(sizes: Mapping[str, int], most: int) -> Iterator[_File]:
    """Distribute parameters, in their order, over files of at most `most` bytes, or of a single larger parameter.

    Args:
        sizes: name of a parameter -> bytes.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    for number, group in enumerate(groups):
        yield _File(_file_name(number, groups), tuple(group))


def _file_name(number: int, groups: Sequence[object]) -> str:
    return MODEL if len(groups) == 1 else f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
