"""What the build of the site does beyond mkdocs: pages made of the code and of files at the root; links out of docs/.

mkdocs calls the functions named `on_...`. A warning of this file ends a build with `--strict`, as those of mkdocs do.
The build starts by `python -m mkdocs` in the root of the repository, which this file is imported from.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig  # pyright: ignore[reportMissingImports]
from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]
from mkdocs.structure.pages import Page  # pyright: ignore[reportMissingImports]

from docs.site.links import Links
from docs.site.reference import commands_page, settings_page

ROOT = Path(__file__).parents[2]
OUTSIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
"""Files at the root of the repository -> the pages that have their content."""

log = logging.getLogger("mkdocs.hooks.elaswave")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files in docs/."""
    made = {"settings.md": settings_page(), "commands.md": commands_page(ROOT)}
    made |= {OUTSIDE[name]: (ROOT / name).read_text("utf-8") for name in ("CHANGELOG.md", "CONTRIBUTING.md")}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The links of a page as they are on the site."""
    source = page.file.src_uri
    is_outside = source in ("changelog.md", "contributing.md")
    here = posixpath.dirname(source)
    links = Links(
        root=ROOT,
        folder="" if is_outside else posixpath.join("docs", here).rstrip("/"),
        here=here,
        pages=OUTSIDE,
        titles={file.src_uri: _title(file) for file in files.documentation_pages()},
        repo_url=config.repo_url or "",
        missing=lambda target: log.warning("%s links to %s, which does not exist", source, target),
    )
    return links.rewrite(markdown)


def _title(file: File) -> str:
    found = re.search(r"^# (.+)$", file.content_string, re.MULTILINE)
    return found[1] if found else file.src_uri
