"""Links of pages that lead out of docs/: to sources, tests, and the files at the root of the repository.

On the site such a file is named in place of the link, or linked in the repository where mkdocs.yml has a `repo_url`. A
link to a file that does not exist is an error, as it is for links between pages. A page that a text calls by its file
has its title there.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_FENCED, _CODE, _LINK = r"^```[\s\S]*?^```[^\n]*$", r"`[^`\n]+`", r"\[([^\]]+)\]\(([^)\s]+)\)"
_PARTS = re.compile(rf"({_FENCED}|{_CODE}(?!\]\())|(?<!!){_LINK}", re.MULTILINE)
_NAMED = re.compile(rf"({_FENCED}|{_CODE}|\[[^\]]+\]\([^)]+\)|^ {{4}}.*$)|\bdocs/((?:\w+/)?\w+\.md)\b", re.MULTILINE)


@dataclass(frozen=True)
class Links:
    """The rule for the links of one page.

    Attributes:
        root: the repository.
        folder: the folder of the page's source, relative to the root: "docs", or "" for CHANGELOG.md.
        here: the folder of the page on the site: "", or "design" for docs/design/*.md.
        pages: pages of the site made of files outside docs/: path from the root -> page.
        titles: page -> its title, for pages that a text names as `docs/NAME.md`.
        repo_url: address of the repository, or "".
        missing: is told of each link that leads to no file.
    """

    root: Path
    folder: str
    here: str
    pages: Mapping[str, str]
    titles: Mapping[str, str]
    repo_url: str
    missing: Callable[[str], object] = field(repr=False)

    def rewrite(self, text: str) -> str:
        """The text of the page with all its links as they are on the site."""
        linked = _PARTS.sub(lambda found: found[1] or self._link(found[0], found[2], found[3]), text)
        return _NAMED.sub(lambda found: found[1] or self._named(found[0], found[2]), linked)

    def _link(self, whole: str, words: str, target: str) -> str:
        if re.match(r"[a-z]+:|#", target):
            return whole
        target, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(self.folder, target))
        anchor = f"#{anchor}" if anchor else ""
        if not (self.root / path).exists():
            if path.startswith("docs/") and path.removeprefix("docs/") in self.titles:  # a page that the build makes
                return whole
            self.missing(target)
        if path in self.pages:
            return f"[{words}]({self._from_here(self.pages[path])}{anchor})"
        if path.startswith("docs/") and not path.endswith(".py"):
            page = path.removeprefix("docs/")
            is_its_name = words.strip("`").endswith(page)
            return f"[{self.titles.get(page, words) if is_its_name else words}]({self._from_here(page)}{anchor})"
        if self.repo_url:
            return f"[{words}]({self.repo_url.rstrip('/')}/blob/main/{path}{anchor})"
        return f"`{path}`" if words.strip("`") in path else f"{words} (`{path}`)"

    def _named(self, whole: str, page: str) -> str:
        return f"[{self.titles[page]}]({self._from_here(page)})" if page in self.titles else whole

    def _from_here(self, page: str) -> str:
        """The way to a page of the site from the folder of this one."""
        return posixpath.relpath(page, self.here or ".")
