"""Preparation of the data: from a `DataSpec` to a `PreparedData`. Runs in the controller, before any worker starts."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elaswave_spmd.by_value import as_given
from elaswave_spmd.data.bin_files import BIN_DTYPE, find_bin_files, read_bin_file
from elaswave_spmd.data.cache import TokenFile, default_cache, store_once, tokenize_once
from elaswave_spmd.data.columns import TEXT, TOKENS, kind_of_column, read_text_column, read_token_column
from elaswave_spmd.data.corpus import Corpus, stdlib_corpus, text_corpus
from elaswave_spmd.data.custom import choose_kwargs, has_tokens, length_of, make_dataset, read_sample
from elaswave_spmd.data.spec import BYTES, DataSpec, PreparedData, check_seq_len
from elaswave_spmd.data.tables import ARROW, TABLES, Table, find_tables
from elaswave_spmd.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from elaswave_spmd.errors import ConfigError, DataError, place_in_user_code


def prepare_data(spec: DataSpec, seq_len: int | None = None) -> PreparedData:
    """Find, check and tokenise the data, with a bar on stderr if that is a terminal.

    Args:
        spec: the data that the user asked for.
        seq_len: T, tokens per sample; may stand in `spec` instead.

    Raises:
        DataError: empty, missing, unreadable or malformed data; too short for one training sample and, where a
            validation split is asked for, one validation sample.
        ConfigError: no or contradictory `seq_len`, or a cache that cannot be written.
    """
    length = _choose_seq_len(spec.seq_len, seq_len)
    if spec.name == "custom":
        return _prepare_custom(spec, length)
    if spec.name == "bin":
        return _prepare_bin(spec, length)
    progress = sys.stderr.isatty()
    if spec.name in TABLES:
        return _prepare_table(spec, length, progress)
    return _prepare_tokens(spec, length, progress)


def split_samples(num_samples: int, fraction: float) -> tuple[int, int]:
    """The numbers of (training, validation) samples. The validation split is the tail, and its size is rounded up."""
    held_out = math.ceil(num_samples * fraction)
    return num_samples - held_out, held_out


def _choose_seq_len(in_spec: int | None, argument: int | None) -> int:
    if in_spec is not None and argument is not None and in_spec != argument:
        raise ConfigError(
            f"the sequence length is given twice, as {in_spec} and as {argument}", where="train.seq_len", fix="give one"
        )
    return check_seq_len(argument if argument is not None else in_spec)


def _prepare_tokens(spec: DataSpec, seq_len: int, progress: bool) -> PreparedData:
    tokenizer = load_tokenizer(spec.tokenizer)
    corpus = stdlib_corpus() if spec.name == "stdlib" else text_corpus(spec.path or "")

    def accept(num_tokens: int) -> None:
        _check_enough(corpus, num_tokens, seq_len, spec)

    if isinstance(tokenizer, ByteTokenizer):  # the number of tokens is known: refuse before anything is written
        accept(corpus.num_bytes)
    tokens = tokenize_once(corpus, tokenizer, _cache_of(spec), accept=accept, progress=progress)
    train, validation = split_samples((tokens.num_tokens - 1) // seq_len, spec.validation_fraction)
    return PreparedData(
        corpus=corpus.name,
        sha256=corpus.sha256,
        num_bytes=corpus.num_bytes,
        tokenizer=tokenizer.name,
        vocab_size=tokens.vocab_size,
        seq_len=seq_len,
        num_train_samples=train,
        num_validation_samples=validation,
        token_file=tokens.path,
        dtype=tokens.dtype,
        num_tokens=tokens.num_tokens,
        tokens_sha256=_hash_of_tokens(tokenizer, [tokens]),
    )


def _prepare_bin(spec: DataSpec, seq_len: int) -> PreparedData:
    train_path, validation_path = find_bin_files(spec.path or "")
    train = read_bin_file(train_path)
    num_train = _num_samples(train.path, train.num_tokens, seq_len)
    held_out, num_held_out = None, 0
    if validation_path is None:
        _check_split_sizes(num_train, spec, "data.path")
        num_train, num_held_out = split_samples(num_train, spec.validation_fraction)
    elif spec.validation_fraction > 0:
        _refuse_fraction(spec, validation_path)
        held_out = read_bin_file(validation_path)
        num_held_out = _num_samples(held_out.path, held_out.num_tokens, seq_len)
    files = [train] if held_out is None else [train, held_out]
    return PreparedData(
        corpus="bin",
        sha256=_hash_of_all([file.sha256 for file in files]),
        num_bytes=2 * sum(file.num_tokens for file in files),
        tokenizer=BIN_DTYPE,
        vocab_size=1 + max(file.largest for file in files),
        seq_len=seq_len,
        num_train_samples=num_train,
        num_validation_samples=num_held_out,
        token_file=train.path,
        dtype=BIN_DTYPE,
        num_tokens=train.num_tokens,
        validation_file="" if held_out is None else held_out.path,
        num_validation_tokens=0 if held_out is None else held_out.num_tokens,
    )


def _hash_of_all(hashes: Sequence[str]) -> str:
    """One hash of a corpus: its own, or where validation has a corpus of its own, the hash of both."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def _hash_of_tokens(tokenizer: Tokenizer, files: Sequence[TokenFile]) -> str:
    """The hash of the tokens that a tokenizer has made of text; empty for bytes, whose hash is the text's own."""
    return "" if isinstance(tokenizer, ByteTokenizer) else _hash_of_all([file.tokens_sha256 for file in files])


def _num_samples(path: str, num_tokens: int, seq_len: int) -> int:
    num_samples = (num_tokens - 1) // seq_len
    if num_samples < 1:
        raise DataError(
            f"{path} is shorter than one sample: {num_tokens} tokens, train.seq_len={seq_len}",
            rule="a sample takes train.seq_len + 1 tokens",
            where="data.path",
            fix="more tokens, or a shorter train.seq_len",
        )
    return num_samples


def _prepare_table(spec: DataSpec, seq_len: int, progress: bool) -> PreparedData:
    """A column of a table: token ids in place, or tokens that are made once and kept in the token cache."""
    train, held_out = find_tables(spec.name, spec.path or "")
    if held_out is not None:
        _refuse_fraction(spec, f"the held-out split of {spec.path}")
    tables = [train] if held_out is None or spec.validation_fraction == 0 else [train, held_out]
    kinds = [kind_of_column(table, spec.column) for table in tables]
    if len({*kinds}) > 1:
        raise DataError(
            f"data.column={spec.column} is {kinds[0]} in the split to train on and {kinds[1]} in the other",
            where="data.column",
            fix="save both splits with the same columns",
        )
    if kinds[0] == TEXT:
        return _prepare_text_column(spec, seq_len, tables, progress)
    return _prepare_token_column(spec, seq_len, tables)


def _prepare_text_column(spec: DataSpec, seq_len: int, tables: Sequence[Table], progress: bool) -> PreparedData:
    tokenizer = load_tokenizer(spec.tokenizer)
    texts = [read_text_column(table, spec.column or "") for table in tables]
    files = [tokenize_once(text, tokenizer, _cache_of(spec), progress=progress) for text in texts]
    train, validation = _table_samples(spec, seq_len, [file.num_tokens for file in files])
    return PreparedData(
        corpus=spec.name,
        sha256=_hash_of_all([text.sha256 for text in texts]),
        num_bytes=sum(text.num_bytes for text in texts),
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        seq_len=seq_len,
        num_train_samples=train,
        num_validation_samples=validation,
        tokens_sha256=_hash_of_tokens(tokenizer, files),
        **_token_files(files),
    )


def _prepare_token_column(spec: DataSpec, seq_len: int, tables: Sequence[Table]) -> PreparedData:
    if spec.tokenizer != BYTES:
        raise ConfigError(
            f"data.tokenizer={spec.tokenizer} is given with data.column={spec.column}, which holds token ids already",
            where="data.tokenizer",
            fix="leave data.tokenizer out, or name the column of the text itself",
        )
    columns = [read_token_column(table, spec.column or "") for table in tables]
    numbers, vocab_size = [c.num_tokens for c in columns], 1 + max(c.largest for c in columns)
    train, validation = _table_samples(spec, seq_len, numbers)
    if spec.name == ARROW:
        places: dict[str, Any] = {
            "dtype": columns[0].dtype,
            "num_tokens": numbers[0],
            "num_validation_tokens": sum(numbers[1:]),
            "column": spec.column,
            "arrow_files": tables[0].files,
            "arrow_validation_files": tuple(file for table in tables[1:] for file in table.files),
        }
    else:
        # Samples are read in random order, and of parquet no less than a page can be decoded.
        places = _token_files([store_once(column, vocab_size, _cache_of(spec)) for column in columns])
    return PreparedData(
        corpus=spec.name,
        sha256=_hash_of_all([column.sha256 for column in columns]),
        num_bytes=sum(column.num_tokens * np.dtype(column.dtype).itemsize for column in columns),
        tokenizer=TOKENS,
        vocab_size=vocab_size,
        seq_len=seq_len,
        num_train_samples=train,
        num_validation_samples=validation,
        **places,
    )


def _table_samples(spec: DataSpec, seq_len: int, num_tokens: Sequence[int]) -> tuple[int, int]:
    """The numbers of (training, validation) samples of one or two columns."""
    numbers = [_num_samples(f"data.column={spec.column} of {spec.path}", number, seq_len) for number in num_tokens]
    if len(numbers) > 1:
        return numbers[0], numbers[1]
    _check_split_sizes(numbers[0], spec, "data.path")
    return split_samples(numbers[0], spec.validation_fraction)


def _token_files(files: Sequence[TokenFile]) -> dict[str, Any]:
    """The fields of `PreparedData` for one token file, or for one of each split."""
    train, held_out = files[0], files[1] if len(files) > 1 else None
    return {
        "token_file": train.path,
        "dtype": train.dtype,
        "num_tokens": train.num_tokens,
        "validation_file": "" if held_out is None else held_out.path,
        "num_validation_tokens": 0 if held_out is None else held_out.num_tokens,
    }


def _cache_of(spec: DataSpec) -> Path:
    return Path(spec.cache) if spec.cache else default_cache()


def _check_enough(corpus: Corpus, num_tokens: int, seq_len: int, spec: DataSpec) -> None:
    num_samples = max(0, num_tokens - 1) // seq_len
    where = f"data={spec.name}" + (f" data.path={spec.path}" if spec.path else "")
    if num_samples < 1:
        raise DataError(
            f"the corpus is shorter than one sample: {num_tokens} tokens in {corpus.num_documents} files, "
            f"train.seq_len={seq_len}",
            rule="a sample takes train.seq_len + 1 tokens",
            where=where,
            fix="more text" + (f", or train.seq_len={num_tokens - 1} at most" if num_tokens > 1 else ""),
        )
    _check_split_sizes(num_samples, spec, where)


def _check_split_sizes(num_samples: int, spec: DataSpec, where: str) -> None:
    train, held_out = split_samples(num_samples, spec.validation_fraction)
    if train < 1:
        raise DataError(
            f"the validation split leaves no sample to train on: data.validation_fraction={spec.validation_fraction} "
            f"takes {held_out} of {num_samples}",
            where=where,
            fix="more text, a shorter train.seq_len, a smaller fraction, or data.validation_fraction=0",
        )


def _refuse_fraction(spec: DataSpec, held_out: object) -> None:
    """Refuse a share of samples to hold out, of data that has a split of its own for that: nothing would read it.

    The default is no such share, and 0, with which nothing is held out, holds for all data.

    Args:
        held_out: what is validated on, for the error.

    Raises:
        ConfigError: it was given.
    """
    if spec.validation_fraction in (0, DataSpec.validation_fraction):
        return
    given = f"data.validation_fraction={spec.validation_fraction:g}"
    raise ConfigError(
        f"{given} is given with data that has a validation split of its own, {held_out}",
        rule="a share of the samples is held out where there is no such split",
        where=given,
        fix="leave data.validation_fraction out, or data.validation_fraction=0 for a run without validation",
    )


def _prepare_custom(spec: DataSpec, seq_len: int) -> PreparedData:
    target = spec.target or ""
    settings = {"path": spec.path or None, "tokenizer": None if spec.tokenizer == BYTES else spec.tokenizer}
    given = {name: value for name, value in settings.items() if value is not None}
    _check_arguments(spec.args, given)
    demanded = {**spec.args, **given}
    offered: dict[str, object] = {"seq_len": seq_len}
    kwargs, names_split = choose_kwargs(target, offered, demanded)
    if names_split:
        kwargs["split"] = "train"
    dataset = make_dataset(target, kwargs)
    train, validation = _custom_lengths(spec, target, dataset, kwargs, names_split, seq_len)
    return PreparedData(
        corpus=target,
        sha256="",
        num_bytes=0,
        tokenizer="",
        vocab_size=int(dataset.vocab_size) if has_tokens(dataset) else 0,
        seq_len=seq_len,
        num_train_samples=train,
        num_validation_samples=validation,
        target=target,
        kwargs=kwargs,
        attributes={} if has_tokens(dataset) else _attributes(dataset),
    )


def _check_arguments(args: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Refuse arguments of a user's dataset that would be replaced: one that the run gives, or a setting of its own.

    Raises:
        ConfigError: there is one.
    """
    if "split" in args:
        raise ConfigError(
            f"data.args.split={args['split']} is given",
            rule="a dataset whose constructor names split gets it from the run: train, and validation for what is held "
            "out",
            where="data.args.split",
            fix="another name for it in the constructor, such as part; data.validation_fraction=0 holds nothing out",
        )
    for name, value in given.items():
        if name in args and args[name] != value:
            raise ConfigError(
                f"data.args.{name}={args[name]} contradicts data.{name}={value}",
                rule=f"the constructor of a dataset gets data.{name} as {name}",
                where=f"data.args.{name}",
                fix="leave one of them out",
            )


def _attributes(dataset: object) -> dict[str, object]:
    from elaswave_spmd.data.samples import plain_attributes  # imports torch

    return plain_attributes(dataset)


def _custom_lengths(
    spec: DataSpec, target: str, dataset: object, kwargs: dict[str, object], names_split: bool, seq_len: int
) -> tuple[int, int]:
    """The lengths of both splits. If the dataset has no parameter `split`, its tail is held out."""
    given = as_given(target, "data")
    num_samples = _checked_length(dataset, given, seq_len)
    if num_samples < 1:
        raise DataError(f"{given} has no samples", where="data.target", fix="point it at data: data.path, data.args")
    if not names_split:
        _check_split_sizes(num_samples, spec, "data.target")
        return split_samples(num_samples, spec.validation_fraction)
    if spec.validation_fraction == 0:
        return num_samples, 0
    _refuse_fraction(spec, f"split='validation' of {given}")
    held_out = make_dataset(target, {**kwargs, "split": "validation"})
    sizes = [getattr(one, "vocab_size", 0) for one in (dataset, held_out)]
    if sizes[0] != sizes[1]:
        raise DataError(
            f"the splits of {given} have vocab_size {sizes[0]} and {sizes[1]}",
            rule="both splits have the same vocabulary",
            where="data.target",
            fix="return the larger one for both",
        )
    num_held_out = _checked_length(held_out, given, seq_len)
    if num_held_out < 1:
        raise DataError(
            f"the validation split of {given} is empty",
            where="data.target",
            fix="data.validation_fraction=0 asks for none",
        )
    return num_samples, num_held_out


def _checked_length(dataset: object, name: str, seq_len: int) -> int:
    """The length of a user's dataset, after a check of its first and last sample."""
    length = length_of(dataset, name)
    try:
        if has_tokens(dataset):
            for index in {0, length - 1} if length else ():
                read_sample(dataset, index, seq_len, name)
        elif length:
            _check_batch(dataset, length, name)
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(
            f"{name} failed when its first or last sample was read ({type(error).__name__}: {error})",
            where=place_in_user_code(error) or "data.target",
            fix="correct its __getitem__ or collate",
        ) from error
    return length


def _check_batch(dataset: object, length: int, name: str) -> None:
    """Read the first and the last sample of a dataset without tokens, as a batch."""
    from elaswave_spmd.data.samples import GenericDataset  # imports torch

    GenericDataset(dataset, 0, length, name).batch(np.array(sorted({0, length - 1})))
