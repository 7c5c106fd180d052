"""The training data: text is tokenised once, and any process reads fixed-length samples by id. See README.md."""

from __future__ import annotations

from elaswave_spmd.data.cache import default_cache
from elaswave_spmd.data.corpus import Corpus, stdlib_corpus, text_corpus
from elaswave_spmd.data.dataset import DataSplit, TokenDataset, open_split
from elaswave_spmd.data.prepare import prepare_data
from elaswave_spmd.data.shards import ShardedDataset
from elaswave_spmd.data.spec import DataSpec, PreparedData, Split
from elaswave_spmd.data.tokenizer import ByteTokenizer, JsonTokenizer

__all__ = [
    "ByteTokenizer",
    "Corpus",
    "DataSpec",
    "DataSplit",
    "JsonTokenizer",
    "PreparedData",
    "ShardedDataset",
    "Split",
    "TokenDataset",
    "default_cache",
    "open_split",
    "prepare_data",
    "stdlib_corpus",
    "text_corpus",
]
