"""The documentation as a site: built without a warning, and read offline in a browser, on a desk and on a phone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.browser import browser
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/design").glob("*.md"))]
WIDEST = ("index", "start", "port_your_model", "api", "settings", "run_files", "results")
"""Pages with the longest lines of code, names and tables, one of each kind."""
_TOLD = {"bullet_list_open": "ul", "ordered_list_open": "ol", "table_open": "table", "image": "img"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. A warning ends the build (--strict): a link or anchor that leads to nothing, ..."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: make docs, or pip install -e '.[docs]'")
    pytest.importorskip("material", reason="mkdocs-material is not installed: make docs")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def article(page: Path) -> str:
    """What a page says, without navigation and search."""
    found = re.search(r"<article.*?</article>", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, page
    return found[0]


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    loads = re.compile(r"""<((script|img|iframe|source)[^>]*\bsrc|link[^>]*\bhref)=["']?(https?:)?//""")
    for page in site.glob("*.html"):
        assert not loads.search(page.read_text(encoding="utf-8")), page
    styles = [*site.rglob("*.css"), *site.rglob("*.svg")]
    assert styles and not [file for file in styles if re.search(r"url\(.?(https?:)?//", file.read_text("utf-8"))]


@pytest.mark.parametrize("source", PAGES, ids=lambda source: f"{source.parent.name}-{source.stem}")
def test_a_page_has_the_lists_tables_and_pictures_that_other_readers_of_markdown_see(site: Path, source: Path) -> None:
    if source.stem == "api":
        pytest.skip("this page is made of docstrings")
    tokens = MarkdownIt("commonmark").enable("table").parse(source.read_text(encoding="utf-8"))
    all_tokens = [inner for token in tokens for inner in (token, *(token.children or []))]
    wanted = Counter(_TOLD[token.type] for token in all_tokens if token.type in _TOLD)
    html = article(site / source.relative_to(ROOT / "docs").with_suffix(".html"))
    assert {tag: len(re.findall(f"<{tag}[ >]", html)) for tag in wanted} == dict(wanted)


def test_the_pages_of_reference_have_the_commands_settings_and_docstrings(site: Path) -> None:
    commands = article(site / "commands.html")
    for command in ("agent", "ctl", "report", "watch", "export", "generate", "plan", "simulate"):
        assert f"usage: elaswave-spmd {command}" in commands
    assert str(ROOT) not in commands
    assert "train.microbatch_size" in article(site / "settings.html")
    assert "An ordered stack of layers" in article(site / "api.html")


def test_the_site_is_read_and_searched_from_its_files(site: Path) -> None:
    with browser() as page:
        for name in WIDEST:
            file = site / f"{name}.html"
            page.open(file.as_uri(), width=375, height=800, dark=True)
            assert page.evaluate("document.documentElement.scrollWidth") <= 375, file
            assert page.evaluate("document.body.dataset.mdColorScheme") == "slate", file
        page.open((site / "start.html").as_uri())
        page.evaluate("document.querySelector('.md-search__input').focus()")
        page.call("Input.insertText", text="mirror.verify_every")
        page.wait_for("document.querySelectorAll('.md-search-result__item').length > 0")
        assert "verify_every" in page.evaluate("document.querySelector('.md-search-result__list').textContent")
        assert not page.problems
        assert {address.partition(":")[0] for address in page.requests} <= {"file", "data", "blob"}
