"""Splits of tokens: what tests of data read."""

from __future__ import annotations

from elaswave_spmd.data import PreparedData, Split, TokenDataset, open_split


def token_split(prepared: PreparedData, split: Split) -> TokenDataset:
    """Open a split that has to be one of tokens."""
    opened = open_split(prepared, split)
    assert isinstance(opened, TokenDataset)
    return opened
