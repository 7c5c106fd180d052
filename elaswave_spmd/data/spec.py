"""`DataSpec` says which data a user asked for, `PreparedData` what workers open. Both are immutable plain values."""

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
            `parquet`. If it is set for `custom`, the constructor of the dataset gets it as `path`.
        column: for `arrow` and `parquet`, the name of a column of text or of lists of token ids.
        tokenizer: `bytes`, or the path of a `tokenizers` JSON file.
        target: `my_file.MyDataset`, imported with the working directory on the import path.
        args: further keyword arguments of a custom dataset.
        cache: directory of token files; default is `elaswave_spmd` in the user's cache directory.
        validation_fraction: share of the samples held out at the end, in [0, 1); 0 holds nothing out. Data that has a
            validation split of its own uses that instead, unless this is 0.
        seq_len: tokens per sample; may be given to `prepare_data` instead.

    Raises:
        ConfigError: unknown name, a setting out of range, or settings that contradict each other.
        DataError: `path` is missing for data that needs one.
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
    """Prepared data, which any process opens by `open_split`. `to_dict` makes it plain JSON.

    The tokens are in `token_file`, or in the column `column` of `arrow_files`, or the samples are those of the custom
    dataset `target`. Exactly one of the three is set.

    Attributes:
        corpus: `stdlib`, `text`, `bin`, `arrow`, `parquet`, or the target of a custom dataset.
        sha256: hash of the bytes of the corpus in order, or of the content of the column; where the validation split
            has data of its own, the hash of both hashes. Empty for custom. Two runs can have equal bits only if this
            and `tokens_sha256` are equal.
        num_bytes: size of the corpus in bytes; 0 for custom.
        tokenizer: `bytes`; or the name of a tokenizer file with the first digits of its sha256; or, for data that holds
            token ids already, `uint16` (`bin`) or `tokens` (a column). Empty for custom.
        vocab_size: every token lies in [0, vocab_size); 0 for a dataset whose samples are not tokens.
        seq_len: T. A sample is T + 1 consecutive tokens, and neighbouring samples share one token. For a dataset whose
            samples are not tokens, it is only an argument that the constructors of the dataset and the model may take.
        num_train_samples, num_validation_samples: lengths of the two splits.
        token_file: absolute path of the raw tokens, or empty.
        dtype: numpy name of the stored tokens: `uint8`, `uint16` or `uint32`; for `arrow_files` any integer type. Empty
            for custom.
        num_tokens: number of tokens in `token_file`, or in the column of `arrow_files`; 0 for custom.
        validation_file, num_validation_tokens: the token file of the validation split, where that has data of its own,
            and its number of tokens. Otherwise empty: the validation split is the tail of the training data.
        column: name of the column of token ids in `arrow_files`, or empty.
        arrow_files: absolute paths of Arrow files whose token ids are read in place, in order, or empty.
        arrow_validation_files: the same for the validation split, like `validation_file`.
        target, kwargs: class of a custom dataset and the keyword arguments of its constructor. The value of `split`, if
            it is among them, is replaced when a split is opened.
        tokens_sha256: hash of the token file, if a tokenizer has made it from text; where the validation split has data
            of its own, the hash of both hashes. It is needed beside `sha256` because the tokens also depend on how the
            text is divided into documents, and on the version of the tokenizers package. Empty for all other data.
        attributes: for a dataset whose samples are not tokens, its plain integers and lists of integers, such as
            `num_classes`. The constructor of the model may take them.

    Raises:
        DataError: none or several of the three are set, or a size is out of range.
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
        """The fields as plain values; `from_dict` inverts it.

        `attributes` and `tokens_sha256` are left out if they are empty.
        """
        fields = dataclasses.asdict(self)
        for name in ("attributes", "tokens_sha256"):
            if not fields[name]:
                del fields[name]
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> PreparedData:
        """The prepared data from its fields; the inverse of `to_dict`.

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
    """True if a value of `PreparedData.tokenizer` names a tokenizer, and not the form of given token ids (`uint16`)."""
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
    """Raise DataError unless `split` is `train` or `validation`."""
    if split not in SPLITS:
        raise DataError(f"{split!r} is not one of the two splits", exists=", ".join(SPLITS))
