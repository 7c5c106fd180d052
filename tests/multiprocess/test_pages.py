"""Every block of code in the tutorials and guides of docs/ does what the page says; tests/pages.py has the rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import TUTORIALS, Reader, blocks_of


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for all pages."""
    return tmp_path_factory.mktemp("cache")


MENDS = {"when_workers_die": ("corrupt", "mismatch")}
"""Page -> events that its runs are to have: a device of this one computes wrongly."""


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem, marks=pytest.mark.mends(*MENDS.get(page.stem, ()))) for page in TUTORIALS]
)
def test_the_blocks_of_the_page_do_what_it_says(page: Path, tmp_path: Path, cache: Path) -> None:
    reader = Reader(tmp_path, cache)
    try:
        for block in blocks_of(page.read_text(encoding="utf-8")):
            reader.follow(block)
        reader.finish()
    finally:
        reader.close()
