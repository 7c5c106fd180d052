"""`DataSpec`, the data that a user asked for, and `PreparedData`, which workers open: plain immutable values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from elaswave_spmd.by_value import as_given
from elaswave_spmd.data.tables import TABLES
from elaswave_spmd.errors import ConfigError, DataError

CORPUS_NAMES = ("stdlib", "text", "bin", *TABLES, "custom")
SPLITS = ("train", "validation")
BYTES = "bytes"
Split = Literal["train", "validation"]


@dataclass(frozen=True)
class DataSpec:
    """The data that a run was asked to use.

    Attributes:
        name: `stdlib` (source text of the running Python's standard library), `text` (files matching `path`), `bin`
            (uint16 tokens: a file, or a folder with `train.bin` and `val.bin`, at `path`), `arrow` (a dataset that
            Hugging Face's `save_to_disk` wrote to the folder `path`), `parquet` (files at `path`) or `custom` (the
            user's map-style dataset `target`). A set `target` always means `custom`.
        path: a glob for `text`; a file or folder for `bin`; a folder for `arrow`; a file, a glob or a folder for
            `parquet`; handed to a custom dataset that names it.
        column: of `arrow` and `parquet`: text, or lists of token ids.
        tokenizer: `bytes`, or the path of a `tokenizers` JSON file.
        target: `my_file.MyDataset`, imported with the working directory on the path.
        args: further keyword arguments of a custom dataset.
        cache: directory of token files; default is `elaswave_spmd` in the user's cache directory.
        validation_fraction: share of the samples held out at the end, in [0, 1); 0 holds nothing out.
        seq_len: tokens per sample, where it is not given to `prepare_data`.

    Raises:
        ConfigError: unknown name, a setting out of range, or settings that contradict each other.
    """

    name: str = "stdlib"
    path: str | None = None
    tokenizer: str = BYTES
    target: str | None = None
    args: Mapping[str, object] = field(default_factory=dict, hash=False)
    cache: str | None = None
    validation_fraction: float = 0.02
    seq_len: int | None = None
    column: str | None = None

    def __post_init__(self) -> None:
        if self.name not in CORPUS_NAMES:
            raise ConfigError(
                f"data.name={self.name} is not one of the known corpora",
                where="data.name",
                exists=", ".join(CORPUS_NAMES),
                fix="data=stdlib, or data=text data.path='corpus/*.txt', or data.target=my_file.MyDataset",
            )
        if self.target:
            object.__setattr__(self, "name", "custom")
        object.__setattr__(self, "args", dict(self.args))
        self._check_numbers()
        self._check_combination()

    def _check_numbers(self) -> None:
        fraction = self.validation_fraction
        is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
        if not is_number or not 0 <= fraction < 1:
            raise ConfigError(
                f"data.validation_fraction={fraction} is not a number in [0, 1)",
                where="data.validation_fraction",
                fix="0.02 holds out two samples in a hundred; 0 holds out none",
            )
        if self.seq_len is not None:
            check_seq_len(self.seq_len)

    def _check_combination(self) -> None:
        if self.name == "custom" and not self.target:
            raise ConfigError(
                "data=custom is given without data.target", where="data.target", fix="data.target=my_file.MyDataset"
            )
        if self.name == "text" and not self.path:
            raise DataError(
                "data=text is given without data.path", where="data.path", fix="data=text data.path='corpus/**/*.txt'"
            )
        if self.name == "bin" and not self.path:
            raise DataError(
                "data=bin is given without data.path", where="data.path", fix="data=bin data.path=FOLDER or FILE.bin"
            )
        if self.name == "bin" and self.tokenizer != BYTES:
            raise ConfigError(
                f"data.tokenizer={self.tokenizer} is given with data=bin, whose files hold tokens already",
                where="data.tokenizer",
                fix="leave data.tokenizer out, or data=text with the text itself",
            )
        self._check_table()
        if self.name == "stdlib" and self.path:
            raise ConfigError(
                f"data.path={self.path} is given with data=stdlib, which takes no path",
                where="data.path",
                fix=f"data=text data.path='{self.path}'",
            )
        if self.args and self.name != "custom":
            raise ConfigError(
                f"data.args={dict(self.args)} is given with data={self.name}, which takes no arguments",
                where="data.args",
                fix="set data.target as well",
            )

    def _check_table(self) -> None:
        is_table = self.name in TABLES
        if is_table and not self.path:
            raise DataError(
                f"data={self.name} is given without data.path",
                where="data.path",
                fix=f"data={self.name} data.path=FOLDER data.column=text",
            )
        if self.column and not is_table:
            raise ConfigError(
                f"data.column={self.column} is given with data={self.name}, which has no columns",
                where="data.column",
                fix="leave it out, or data=arrow or data=parquet",
            )


@dataclass(frozen=True)
class PreparedData:
    """Data ready to be opened by any process, by `open_split`. Plain: `to_dict` gives JSON types only.

    Attributes:
        corpus: `stdlib`, `text`, `bin`, `arrow`, `parquet`, or the target of a custom dataset.
        sha256: of the corpus' bytes in order, or of a column's content (of both hashes, where validation has its own);
            equal bits of a run are claimed for equal values, with those of `tokens_sha256`. Empty for custom.
        num_bytes: size of the corpus in bytes; 0 for custom.
        tokenizer: `bytes`, or the file's name and the first digits of its sha256; empty for custom.
        vocab_size: every token lies in [0, vocab_size); 0 for a dataset whose samples are no tokens.
        seq_len: T; a sample is T+1 consecutive tokens and neighbours share one. Without tokens only what a dataset and
            a model may ask for.
        num_train_samples, num_validation_samples: lengths of the two splits.
        token_file: absolute path of the raw tokens; empty for custom.
        dtype: numpy name of the stored tokens (`uint8`, `uint16`, `uint32`; of tables any integers); empty for custom.
        num_tokens: tokens in the file; 0 for custom.
        validation_file, num_validation_tokens: a file of its own for validation, counted from its start; else empty.
        column: name of the column of `arrow_files` (and `arrow_validation_files`, like `validation_file`), files of
            token ids that are read in place and take the place of `token_file`; else empty.
        target, kwargs: class of a custom dataset and its keyword arguments, without `split`.
        tokens_sha256: of the token file (of both hashes, where validation has its own), if a tokenizer has made it of
            text: other tokens may come of the same text that is divided otherwise, or of another version of the
            package; empty for all other data.
        attributes: of a dataset without tokens: its plain integers and tuples of integers, such as `num_classes`, for
            the constructor of a model.
    """

    corpus: str
    sha256: str
    num_bytes: int
    tokenizer: str
    vocab_size: int
    seq_len: int
    num_train_samples: int
    num_validation_samples: int
    token_file: str = ""
    dtype: str = ""
    num_tokens: int = 0
    validation_file: str = ""
    num_validation_tokens: int = 0
    target: str = ""
    kwargs: Mapping[str, object] = field(default_factory=dict, hash=False)
    column: str = ""
    arrow_files: tuple[str, ...] = ()
    arrow_validation_files: tuple[str, ...] = ()
    tokens_sha256: str = ""
    attributes: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrow_files", tuple(self.arrow_files))
        object.__setattr__(self, "arrow_validation_files", tuple(self.arrow_validation_files))
        if [bool(self.token_file), bool(self.arrow_files), bool(self.target)].count(True) != 1:
            raise DataError(
                f"prepared data names token_file={self.token_file!r}, arrow_files={self.arrow_files!r} and "
                f"target={self.target!r}",
                rule="it is a token file, a column of Arrow files or a custom dataset",
            )
        if (
            self.vocab_size < (0 if self.target else 1)
            or self.seq_len < 1
            or self.num_train_samples < 1
            or self.num_validation_samples < 0
        ):
            raise DataError(
                f"prepared data has vocab_size={self.vocab_size}, seq_len={self.seq_len}, "
                f"{self.num_train_samples} training samples and {self.num_validation_samples} for validation",
                rule="it has a vocabulary, a sample length and a training sample",
            )

    @property
    def is_tokens(self) -> bool:
        """True if samples are tokens; else they are whatever the user's dataset returns (samples.py)."""
        return self.vocab_size > 0

    def num_samples(self, split: Split) -> int:
        """The number of samples of one split."""
        check_split(split)
        return self.num_train_samples if split == "train" else self.num_validation_samples

    @property
    def given(self) -> str:
        """The setting or keyword that named the data, for errors: "data=stdlib", "data.target=my_file.Rows"."""
        if not self.target:
            return f"data={self.corpus}"
        name = as_given(self.target, "data")
        return name if name != self.target else f"data.target={self.target}"

    @property
    def has_tokenizer(self) -> bool:
        """True if its tokens were made by a tokenizer that can turn them into text again."""
        return names_tokenizer(self.tokenizer)

    def to_dict(self) -> dict[str, object]:
        """The fields in JSON's own types; `from_dict` inverts it.

        Attributes and the hash of tokens are left out where there are none.
        """
        fields = dataclasses.asdict(self)
        for name in ("attributes", "tokens_sha256"):
            if not fields[name]:
                del fields[name]
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> PreparedData:
        """Inverse of `to_dict`.

        Raises:
            DataError: a field is missing or unknown.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        if unknown := set(fields) - names:
            raise DataError(f"prepared data has unknown fields {sorted(unknown)}", exists=", ".join(sorted(names)))
        try:
            return cls(**fields)  # type: ignore[arg-type]
        except TypeError as error:
            raise DataError(f"prepared data is incomplete: {error}", exists=", ".join(sorted(fields))) from error


def names_tokenizer(name: str) -> bool:
    """True if `PreparedData.tokenizer` names a tokenizer: bytes, or a file with its digest; not the form of tokens."""
    return name == BYTES or ":" in name


def check_seq_len(seq_len: object) -> int:
    """Check that `seq_len` is a positive integer, and return it.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(seq_len, int) or isinstance(seq_len, bool) or seq_len < 1:
        raise ConfigError(
            f"train.seq_len={seq_len} is not a positive integer",
            where="train.seq_len",
            fix="train.seq_len=128",
        )
    return seq_len


def check_split(split: object) -> None:
    """Refuse anything but `train` and `validation` (DataError)."""
    if split not in SPLITS:
        raise DataError(f"{split!r} is not one of the two splits", exists=", ".join(SPLITS))
