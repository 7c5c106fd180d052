"""The tokenizer whose tokens are bytes, in the format of Hugging Face: token b is byte b, and there are no merges."""

from __future__ import annotations

from typing import Any


def byte_tokenizer() -> dict[str, dict[str, Any]]:
    """The files of the tokenizer: name -> the fields of its JSON."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_characters())},
            "merges": [],
        },
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _characters() -> list[str]:
    """The character for each byte, as in GPT-2: the byte itself if it is visible, else one from U+0100 on, in order."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]
