"""Preparation of the data: from a `DataSpec` to a `PreparedData`. Runs in the controller, before any worker starts."""

from __future__ import annotations

import hashlib
import math
import sys
from pathlib import Path

from elaswave_spmd.data.bin_files import BIN_DTYPE, BinFile, find_bin_files, read_bin_file
from elaswave_spmd.data.cache import default_cache, tokenize_once
from elaswave_spmd.data.corpus import Corpus, stdlib_corpus, text_corpus
from elaswave_spmd.data.custom import choose_kwargs, make_dataset, read_sample
from elaswave_spmd.data.spec import BYTES, DataSpec, PreparedData, check_seq_len
from elaswave_spmd.data.tokenizer import ByteTokenizer, load_tokenizer
from elaswave_spmd.errors import ConfigError, DataError


def prepare_data(spec: DataSpec, seq_len: int | None = None, *, progress: bool | None = None) -> PreparedData:
    """Find, check and tokenise the data.

    Args:
        spec: the data that the user asked for.
        seq_len: T, tokens per sample; may stand in `spec` instead.
        progress: show a bar on stderr while tokenising; None means: if stderr is a terminal.

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
    return _prepare_tokens(spec, length, sys.stderr.isatty() if progress is None else progress)


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
    cache = Path(spec.cache) if spec.cache else default_cache()
    tokens = tokenize_once(corpus, tokenizer, cache, accept=accept, progress=progress)
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
    )


def _prepare_bin(spec: DataSpec, seq_len: int) -> PreparedData:
    train_path, validation_path = find_bin_files(spec.path or "")
    train = read_bin_file(train_path)
    num_train = _num_bin_samples(train, seq_len)
    held_out, num_held_out = None, 0
    if validation_path is None:
        _check_split_sizes(num_train, spec, "data.path")
        num_train, num_held_out = split_samples(num_train, spec.validation_fraction)
    elif spec.validation_fraction > 0:
        held_out = read_bin_file(validation_path)
        num_held_out = _num_bin_samples(held_out, seq_len)
    files = [train] if held_out is None else [train, held_out]
    hashes = "".join(file.sha256 for file in files)
    return PreparedData(
        corpus="bin",
        sha256=hashes if held_out is None else hashlib.sha256(hashes.encode()).hexdigest(),
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


def _num_bin_samples(file: BinFile, seq_len: int) -> int:
    num_samples = (file.num_tokens - 1) // seq_len
    if num_samples < 1:
        raise DataError(
            f"{file.path} is shorter than one sample: {file.num_tokens} tokens, train.seq_len={seq_len}",
            rule="a sample takes train.seq_len + 1 tokens",
            where="data.path",
            fix="more tokens, or a shorter train.seq_len",
        )
    return num_samples


def _check_enough(corpus: Corpus, num_tokens: int, seq_len: int, spec: DataSpec) -> None:
    num_samples = max(0, num_tokens - 1) // seq_len
    where = f"data={spec.name}" + (f" data.path={spec.path}" if spec.path else "")
    if num_samples < 1:
        raise DataError(
            f"the corpus is shorter than one sample: {num_tokens} tokens in {len(corpus.files)} files, "
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


def _prepare_custom(spec: DataSpec, seq_len: int) -> PreparedData:
    target = spec.target or ""
    demanded = dict(spec.args)
    if spec.path:
        demanded["path"] = spec.path
    if spec.tokenizer != BYTES:
        demanded["tokenizer"] = spec.tokenizer
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
        vocab_size=int(dataset.vocab_size),
        seq_len=seq_len,
        num_train_samples=train,
        num_validation_samples=validation,
        target=target,
        kwargs=kwargs,
    )


def _custom_lengths(
    spec: DataSpec, target: str, dataset: object, kwargs: dict[str, object], names_split: bool, seq_len: int
) -> tuple[int, int]:
    """The lengths of both splits. If the dataset has no parameter `split`, its tail is held out."""
    num_samples = _checked_length(dataset, target, seq_len)
    if num_samples < 1:
        raise DataError(f"{target} has no samples", where="data.target", fix="point it at data: data.path, data.args")
    if not names_split:
        _check_split_sizes(num_samples, spec, "data.target")
        return split_samples(num_samples, spec.validation_fraction)
    if spec.validation_fraction == 0:
        return num_samples, 0
    held_out = make_dataset(target, {**kwargs, "split": "validation"})
    if held_out.vocab_size != dataset.vocab_size:  # type: ignore[attr-defined]
        raise DataError(
            f"the splits of {target} have vocab_size {dataset.vocab_size} and {held_out.vocab_size}",  # type: ignore[attr-defined]
            rule="both splits have the same vocabulary",
            where="data.target",
            fix="return the larger one for both",
        )
    num_held_out = _checked_length(held_out, target, seq_len)
    if num_held_out < 1:
        raise DataError(
            f"the validation split of {target} is empty",
            where="data.target",
            fix="data.validation_fraction=0 asks for none",
        )
    return num_samples, num_held_out


def _checked_length(dataset: object, target: str, seq_len: int) -> int:
    """The length of a user's dataset, after a check of its first and last sample."""
    try:
        length = len(dataset)  # type: ignore[arg-type]
        for index in {0, length - 1} if length else ():
            read_sample(dataset, index, seq_len, target)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{target} failed when its first or last sample was read ({type(error).__name__}: {error})",
            where="data.target",
            fix="correct its __len__ or __getitem__",
        ) from error
    return length
