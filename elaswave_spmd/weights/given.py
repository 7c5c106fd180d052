"""`model.init_from=FILE|DIR`: the weights that a run begins with are opened, and compared with its model.

The controller checks them before any worker starts, and refuses weights that do not fit. Workers open the same files
when they initialise their pages, and read only these pages. A run that is resumed does not read them.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.resume import CONFIG, fields_in
from elaswave_spmd.conf.schema import ModelSettings
from elaswave_spmd.data.spec import BYTES
from elaswave_spmd.errors import ConfigError, UserError
from elaswave_spmd.models import LayeredModel, build_model, import_model
from elaswave_spmd.run_dir.manifest import MANIFEST
from elaswave_spmd.sharding import Tie
from elaswave_spmd.weights.families import (
    CONFIG_JSON,
    VOCABULARY,
    Facts,
    Family,
    family_of_config,
    family_of_target,
    stored_name,
)
from elaswave_spmd.weights.intact import check_intact
from elaswave_spmd.weights.resolve import FORMS, SETTING, existing_path, unreadable
from elaswave_spmd.weights.sources import OwnTensors, SavedState, StoredTensors, WeightSource
from elaswave_spmd.weights.tensor_files import EXACT, TensorFiles, files_of, read_json

_LISTED = 5  # names in a message
_CHUNK = 1 << 22  # elements that are hashed at once
DIGEST_BYTES = 16


def check_weights(settings: ModelSettings, model: LayeredModel, *, tokenizer: str = BYTES) -> None:
    """Check that the weights of `model.init_from` fit a model, before any worker starts.

    Only the headers of files are read. The weights of a finished run are the exception: all of them are read, to be
    compared with their hash.

    Args:
        settings: the model's settings, as `resolve.resolved` returns them.
        model: the model that is trained, on the meta device.
        tokenizer: `data.tokenizer` of the run. The error about a vocabulary of another size advises the tokenizer that
            lies beside the weights, unless the run uses it already.

    Raises:
        ConfigError: tensors are missing, unknown, of another shape, or of a type that fp32 does not hold; the
            configuration beside the weights contradicts the model; files cannot be read.
        CheckpointError: a checkpoint is not whole, or the weights of a run are not those that it has trained.
    """
    assert settings.init_from is not None
    _check_configuration(settings, model, tokenizer)
    source = open_weights(settings, model, checked=True)
    try:
        _check_tensors(source, model, settings.init_from)
        check_intact(existing_path(settings.init_from), source)
    finally:
        source.close()


def open_weights(settings: ModelSettings, model: LayeredModel, *, checked: bool = False) -> WeightSource:
    """Open the weights of `model.init_from`.

    Args:
        settings: the model's settings, as `resolve.resolved` returns them.
        model: the model whose parameters are read; it may be on the meta device.
        checked: refuse a published model that has tensors for which this model has no parameter.

    Raises:
        ConfigError, CheckpointError: the path holds no weights, or they cannot be read.
    """
    assert settings.init_from is not None
    path, where = existing_path(settings.init_from), checks.override(SETTING, settings.init_from)
    if os.path.isfile(path):
        return OwnTensors(TensorFiles([path], where))
    if os.path.exists(path / MANIFEST):
        return SavedState(path)
    if os.path.exists(path / CONFIG_JSON):
        return _open_published(path, where, model, checked=checked)
    try:
        entries = sorted(os.listdir(path)) if os.path.isdir(path) else []  # a path may also be a device or a pipe
    except OSError as error:  # the directory may not be read, so none of the files above was found in it
        raise unreadable(path, where, error) from error
    raise ConfigError(
        f"{path} holds no weights",
        rule=FORMS,
        where=where,
        exists=", ".join(entries[:20]) or "nothing in it",
        fix=f"a directory with {CONFIG_JSON} and model.safetensors, or with {CONFIG}",
    )


class GivenWeights:
    """The weights of `model.init_from`, as a worker reads them. They are opened when they are first read.

    Args:
        settings: the model's settings.
        model: the model, on the meta device.
    """

    def __init__(self, settings: ModelSettings, model: LayeredModel) -> None:
        self._settings = settings
        self._model = model
        self._source: WeightSource | None = None

    def part(self, name: str, first: int, stop: int) -> Tensor:
        """Elements [first, stop) of a flattened parameter, fp32."""
        if self._source is None:
            self._source = open_weights(self._settings, self._model)
        return self._source.read(name, first, stop)

    def close(self) -> None:
        """Close the files, when the values are in the worker's state. A later read opens them again."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def digests(self, layers: Iterable[str]) -> Iterator[tuple[str, bool, bytes]]:
        """(name, False, digest) of each parameter of some layers, to compare the files of several machines.

        False says that these are parameters and not constants (`worker.initial_values.Row`).
        """
        owned = dict(owned_parameters(self._model))
        for layer in layers:
            for name, number in owned.items():
                if name.partition(".")[0] != layer:
                    continue
                hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
                for first in range(0, number, _CHUNK):
                    part = self.part(name, first, min(first + _CHUNK, number))
                    hashed.update(part.contiguous().view(torch.uint8).numpy().data)
                yield name, False, hashed.digest()


def owned_parameters(model: LayeredModel) -> Iterator[tuple[str, int]]:
    """(name, number of elements) of each parameter of a model, without the readers of ties, whose values are shared."""
    readers = {tie.reader for tie in model.ties}
    for layer in model.layer_names:
        for name, parameter in model.get_submodule(layer).named_parameters(prefix=layer):
            if name not in readers:
                yield name, parameter.numel()


def words_of(facts: Mapping[str, Any]) -> str:
    """Facts as words of a command line, which set the settings to these values."""
    return " ".join(_word(name, value) for name, value in facts.items())


def _word(name: str, value: Any) -> str:
    word = ("++" if name.startswith("model.args.") else "") + checks.override(name, value)
    return f"'{word}'" if isinstance(value, Mapping) else word


def _open_published(path: Path, where: str, model: LayeredModel, *, checked: bool) -> StoredTensors:
    config = read_json(path / CONFIG_JSON, where)
    family = family_of_config(config, path / CONFIG_JSON)
    files = files_of(path, where)
    prefix = family.prefix if any(name.startswith(family.prefix) for name in files.tensors) else ""
    heads = family.facts_of_model(model)["model.heads"]
    wanted = {name: family.stored(name, heads) for name, _ in owned_parameters(model)}
    stored = {name: replace(how, name=stored_name(how, prefix)) for name, how in wanted.items()}
    if checked:
        # Some files also store a tied head. It is not read, as it equals the embedding.
        tied = {stored_name(family.stored(tie.reader, heads), prefix) for tie in model.ties}
        known = {how.name for how in stored.values()} | tied
        extra = [name for name in files.tensors if name not in known and not family.is_constant(name)]
        _refuse_extra(extra, where, path)
    return StoredTensors(files, stored)


def _check_tensors(source: WeightSource, model: LayeredModel, given: str) -> None:
    """Refuse weights that lack a parameter, have one of another shape or type, or one that the model does not have."""
    where = checks.override(SETTING, given)
    wanted = {name: tuple(model.get_parameter(name).shape) for name, _ in owned_parameters(model)}
    missing = [name for name in wanted if name not in source.shapes]
    if missing:
        there = _listed(source.shapes) if source.shapes else "no tensor with a name of this model"
        hint = ""
        if os.path.isfile(given) and os.path.exists(Path(given).parent / CONFIG_JSON):
            hint = f"{SETTING}={Path(given).parent}, its directory, if it is one of Hugging Face; or "
        raise ConfigError(
            f"{given} lacks {_listed(missing)} of the model's {len(wanted)} parameters",
            rule="given weights hold every parameter of the model; two that are tied are one",
            where=where,
            exists=there,
            fix=f"{hint}the settings of the model that these weights are of; for a model that has more than these, a "
            "file with its own initial values beside them (docs/weights.md)",
        )
    _refuse_tied([tie for tie in model.ties if tie.reader in source.shapes], where, Path(given))
    _refuse_extra([name for name in source.shapes if name not in wanted], where, Path(given))
    for name, shape in wanted.items():
        if source.shapes[name] != shape:
            raise ConfigError(
                f"{name} has the shape {source.shapes[name]} in {given}, and {shape} in the model",
                rule="given weights have the shapes of the model",
                where=where,
                fix=_fix_of_shape(name),
            )
        if source.dtypes[name] not in EXACT:
            raise ConfigError(
                f"{name} is of type {source.dtypes[name]} in {given}",
                rule="given weights are read into fp32 without rounding",
                where=where,
                exists=", ".join(EXACT),
                fix="convert them first: quantized weights by the library that made them, others by tensor.float()",
            )


def _fix_of_shape(name: str) -> str:
    """The advice about a parameter that has another shape in the weights than in the model."""
    if name == "embed.weight":
        return f"data.tokenizer=FILE, the tokenizer of these weights; or ++{VOCABULARY}=ROWS, if it has fewer tokens"
    if name == "embed.positions":
        return "++model.args.positions=ROWS, with train.seq_len at most that"
    return "the settings of the model that these weights are of"


def _refuse_tied(ties: list[Tie], where: str, path: Path) -> None:
    """Refuse weights that also hold the reader of a tie: its values may differ from its owner's, and are not used."""
    if ties:
        raise ConfigError(
            f"{path} holds {_listed(tie.reader for tie in ties)}, which the model ties: "
            f"{_listed(str(tie) for tie in ties)}",
            rule="two tied parameters are one array, which given weights hold under the name of its owner",
            where=where,
            fix=f"leave {_listed(tie.reader for tie in ties)} out of the file, or the tie out of the model",
        )


def _refuse_extra(extra: list[str], where: str, path: Path) -> None:
    if extra:
        raise ConfigError(
            f"{path} holds {_listed(extra)}, which the model has not",
            rule="all given weights are used: a model with fewer layers, or a tied head, would be another one",
            where=where,
            fix="the settings of the model that these weights are of; or a file with the model's named_parameters() "
            "alone, of tied ones the owner",
        )


def _listed(names: Iterable[str]) -> str:
    """Names as an error lists them: all of them, or the first `_LISTED` and the number of the others."""
    first, *rest = [", ".join(part) for part in _parts(sorted(names))]
    return f"{first} and {rest[0]} more" if rest else first


def _parts(names: list[str]) -> list[list[str]]:
    return [names] if len(names) <= _LISTED + 1 else [names[:_LISTED], [str(len(names) - _LISTED)]]


def _check_configuration(settings: ModelSettings, model: LayeredModel, tokenizer: str) -> None:
    """Refuse a model that contradicts the configuration of the weights in settings that shapes do not show.

    The configuration is the config.json of a published model, or the config.yaml of the run that wrote the weights.
    """
    assert settings.init_from is not None
    path, where = existing_path(settings.init_from), checks.override(SETTING, settings.init_from)
    ours = family_of_target(settings.target)
    if os.path.isdir(path) and not os.path.exists(path / MANIFEST) and os.path.exists(path / CONFIG_JSON):
        file = path / CONFIG_JSON
        config = read_json(file, where)
        theirs = family_of_config(config, file)
        facts = theirs.facts_of_config(config, file)
        if ours is None or ours is not theirs:
            raise ConfigError(
                f"{file} is of model_type {theirs.model_type}, and model.target={settings.target}",
                rule=f"weights of {theirs.model_type} are for model.target={theirs.target}",
                where=where,
                fix=f"model.target={theirs.target} {words_of(facts)}",
            )
        _compare(ours, facts, model, file, where, tokenizer)
        return
    if ours is None:
        return  # a user's own model: the shapes of its parameters are all that is known of it
    saved = _saved_model(path)
    if saved is not None and saved.target == settings.target:
        known = ours.facts_of_model(model)
        sizes = {"vocab_size": known[VOCABULARY], "seq_len": 1, "layers": saved.layers, "d_model": saved.d_model}
        import_model(saved.target)
        with torch.device("meta"):
            other = build_model(saved.target, {**sizes, "heads": saved.heads, "dropout": 0.0}, saved.args)
        facts = dict(ours.facts_of_model(other))
        for name in (VOCABULARY, "model.args.positions"):  # they follow from the data, and shapes show them
            facts.pop(name, None)
        _compare(ours, facts, model, path, where, tokenizer)


def _saved_model(path: Path) -> ModelSettings | None:
    """The model settings of the run that wrote the weights; None if there is no config.yaml of a run beside them."""
    # weights.safetensors lies in the directory of its run, a checkpoint two levels below it.
    folder = path.parent if os.path.isfile(path) else path.parent.parent
    try:
        return ModelSettings.from_fields((fields_in(folder / CONFIG) or {})["model"])
    except (OSError, ValueError, TypeError, KeyError, UserError):
        return None


def _compare(family: Family, facts: Facts, model: LayeredModel, file: Path, where: str, tokenizer: str) -> None:
    """Refuse a model with other facts than those of the weights.

    Args:
        facts: the facts of the weights.
        file: the file or directory that they were read from.
        where: the setting that named the weights, for errors.
        tokenizer: as for `check_weights`.

    Raises:
        ConfigError: facts differ; with the settings that make them equal.
    """
    present = family.facts_of_model(model)
    wrong = {name: value for name, value in facts.items() if present[name] != value}
    if not wrong:
        return
    lines = [
        f"\n  {name}: {checks.shown(value)} there, {checks.shown(present[name])} here" for name, value in wrong.items()
    ]
    fix = words_of(wrong)
    beside = file.parent / "tokenizer.json"
    # The tokenizer beside the weights is advised unless the run uses it already: if the vocabulary was padded, the
    # embedding has more rows than this tokenizer has tokens.
    if VOCABULARY in wrong and os.path.exists(beside) and not _is_same_file(tokenizer, beside):
        rest = words_of({name: value for name, value in wrong.items() if name != VOCABULARY})
        fix = f"data.tokenizer={beside} {rest}".rstrip()
    raise ConfigError(
        f"{file} contradicts the settings of the model:" + "".join(lines),
        rule="given weights are of the model that is trained",
        where=where,
        fix=fix,
    )


def _is_same_file(tokenizer: str, beside: Path) -> bool:
    """True if the run's tokenizer is this file, or a copy of it."""
    file = Path(os.path.expanduser(tokenizer))
    try:
        return tokenizer != BYTES and file.is_file() and filecmp.cmp(file, beside, shallow=False)
    except OSError:
        return False
