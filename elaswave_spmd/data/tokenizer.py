"""Tokenizers: plain bytes, or a JSON file of the optional `tokenizers` package."""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from elaswave_spmd.data.spec import BYTES
from elaswave_spmd.errors import DataError
from elaswave_spmd.regular_files import read_regular

BLOCK_CHARACTERS = 1 << 20


class Tokenizer(Protocol):
    """A map from the bytes of a document to tokens, which lie in [0, vocab_size).

    `name` is for people. `identity` is part of the key of the token cache: tokenizers with equal identities give equal
    tokens.
    """

    @property
    def name(self) -> str: ...
    @property
    def identity(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    def encode(self, blocks: Iterable[bytes]) -> Iterator[np.ndarray]:
        """The tokens of one document, as arrays of any unsigned integer dtype.

        Args:
            blocks: the bytes of the document, in order.

        Raises:
            UnicodeDecodeError: the document is not UTF-8 and the tokenizer needs text.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text that the tokens stand for. Bytes that are not UTF-8 become replacement characters."""
        ...


class ByteTokenizer:
    """The tokenizer whose tokens are bytes, with a vocabulary of 256. Any file is valid."""

    name = BYTES
    identity = BYTES
    vocab_size = 256

    def encode(self, blocks: Iterable[bytes]) -> Iterator[np.ndarray]:
        """The document's bytes as uint8 arrays, one per block."""
        for block in blocks:
            yield np.frombuffer(block, dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """The tokens as bytes, decoded as UTF-8."""
        return bytes(tokens).decode("utf-8", "replace")


class JsonTokenizer:
    """A tokenizer saved as JSON by the `tokenizers` package. No special tokens are added, and no text is left out.

    The file may ask for truncation and padding, which are meant for the inputs of a model. Both are switched off here.
    A file is cut after a newline about every million characters and encoded piece by piece, so that a file of any size
    can be tokenised in little memory. A row of a column comes as one block, and is cut once at most. The cuts depend on
    the document only, so its tokens are always the same.

    Args:
        path: path of the JSON file; it may begin with `~`.

    Raises:
        DataError: the file cannot be read, is not a tokenizer or has no tokens, or the package is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        content = _read_file(Path(path))
        package = _tokenizers_package(path)
        try:
            self._tokenizer = package.Tokenizer.from_str(content.decode("utf-8"))
            # Ids may have gaps, so the size of the vocabulary is the largest id plus one, not the number of entries.
            self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        except Exception as error:  # the package raises bare Exception
            raise DataError(
                f"{path} is not one that the tokenizers package reads ({error})",
                where="data.tokenizer",
                exists="bytes, or a tokenizer.json",
                fix="save one with Tokenizer.save('tokenizer.json'), or use data.tokenizer=bytes",
            ) from error
        if self.vocab_size < 1:
            raise DataError(f"the tokenizer {path} has no tokens", where="data.tokenizer", fix="train it first")
        digest = hashlib.sha256(content).hexdigest()
        # Earlier versions obeyed truncation and padding. Where the file asks for either, the identity has a suffix, so
        # that token files which such a version has cached are not used again.
        cut = self._tokenizer.truncation is not None or self._tokenizer.padding is not None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.identity = f"json:{digest}:{package.__version__}" + (":whole" if cut else "")
        self.name = f"{Path(path).name}:{digest[:12]}"

    def encode(self, blocks: Iterable[bytes]) -> Iterator[np.ndarray]:
        """The document's tokens as uint32 arrays, one per piece of about `BLOCK_CHARACTERS` characters."""
        for text in _cut_text(blocks):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            yield np.asarray(ids, dtype=np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        """The tokens as text, special ones included."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer with this name: `bytes`, or the one in a JSON file.

    Raises:
        DataError: as for `JsonTokenizer`.
    """
    return ByteTokenizer() if name == BYTES else JsonTokenizer(name)


def _cut_text(blocks: Iterable[bytes]) -> Iterator[str]:
    """Decode a document, and cut it at its last newline whenever `BLOCK_CHARACTERS` characters have come."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    text = ""
    for block in blocks:
        text += decoder.decode(block)
        if len(text) >= BLOCK_CHARACTERS:
            cut = text.rfind("\n") + 1 or len(text)
            yield text[:cut]
            text = text[cut:]
    text += decoder.decode(b"", final=True)
    if text:
        yield text


def _read_file(path: Path) -> bytes:
    file = Path(os.path.expanduser(path))
    try:
        return read_regular(file)
    except OSError as error:
        inside = path / "tokenizer.json"
        raise DataError(
            f"data.tokenizer={path} cannot be read ({error.strerror or error})",
            where="data.tokenizer",
            exists="bytes, or the path of a tokenizer.json",
            fix=f"data.tokenizer={inside}"
            if os.path.isfile(file / inside.name)
            else "data.tokenizer=bytes needs no file",
        ) from error


def _tokenizers_package(path: str | Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"data.tokenizer={path} needs the optional package tokenizers, which is not installed",
            where="data.tokenizer",
            exists="bytes",
            fix="pip install 'elaswave-spmd[tokenizers]' (in a checkout: pip install -e '.[tokenizers]')",
        ) from error
    return tokenizers
