"""The code that docs and READMEs name exists: a reader who follows a name finds it."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "elaswave_spmd"
READMES = sorted(PACKAGE.rglob("README.md"))
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/design").glob("*.md"))]
FILE = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")


def names_of(path: Path) -> set[str]:
    """The functions, classes and methods that a module defines: `Class`, `Class.method`, `function`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("page", READMES, ids=lambda page: str(page.relative_to(PACKAGE)))
def test_files_that_a_rooms_readme_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = [
        name
        for name, _ in FILE.findall(text)
        if not any(page.parent.rglob(name)) and not any((folder / name).is_file() for folder in (PACKAGE, ROOT))
    ]
    assert not wrong


@pytest.mark.parametrize("page", READMES, ids=lambda page: str(page.relative_to(PACKAGE)))
def test_a_rooms_readme_names_all_of_its_files(page: Path) -> None:
    named = set(re.findall(r"`(\w+\.py)`", page.read_text(encoding="utf-8"))) | {"__init__.py"}
    named |= set(re.findall(r"\((\w+\.py)\)", page.read_text(encoding="utf-8")))
    assert not {path.name for path in page.parent.glob("*.py")} - named


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_code_that_the_docs_name_exists(page: Path) -> None:
    wrong = []
    for file, name in FILE.findall(page.read_text(encoding="utf-8")):
        found = next((folder / file for folder in (PACKAGE, ROOT) if (folder / file).is_file()), None)
        if found is None and "/" in file:
            wrong.append(file)
        elif found is not None and name and name not in names_of(found):
            wrong.append(f"{file}:{name}")
    assert not wrong


def test_classes_that_prose_names_are_in_the_module_that_it_names() -> None:
    """`module.Class` in a page, a README, a docstring or a comment; a room is what its `__init__.py` hands on."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    words: dict[str, set[str]] = {}
    for path, text in sources.items():
        module = path.parent.name if path.name == "__init__.py" else path.stem
        words.setdefault(module, set()).update(re.findall(r"\w+", text))
    pages = {path: path.read_text(encoding="utf-8") for path in (*DOCS, *READMES)}
    wrong = [
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for path, text in (*sources.items(), *pages.items())
        for before, module, name in re.findall(r"`((?:\w+\.)*)(\w+)\.([A-Z]\w+)`", text)
        if not before.startswith("tests.") and module in words and name not in words[module]
    ]
    assert not wrong


def test_the_picture_of_the_rooms_is_that_of_the_imports() -> None:
    """Sizes of boxes may be older: they follow the lines of the rooms. Rooms, floors and arrows may not."""
    program = runpy.run_path(str(ROOT / "docs/rooms/draw.py"))
    drawn = program["draw"](*program["read"](None))
    kept = (ROOT / "docs/rooms/after.svg").read_text(encoding="utf-8")
    what_to_do = "python docs/rooms/draw.py > docs/rooms/after.svg, and the numbers in docs/design.md"
    assert _counts_of(kept) == _counts_of(drawn), what_to_do
    assert _rooms_of(kept) == _rooms_of(drawn), what_to_do
    rooms, floors, arrows, upward = _counts_of(drawn)
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    assert f"(rooms/after.svg), {rooms} rooms on {floors} floors with {arrows} arrows." in page, what_to_do
    assert upward == "0"


def _counts_of(picture: str) -> tuple[str, ...]:
    """Rooms, floors, arrows, and arrows that point up, as the title of the picture has them."""
    found = re.search(r">(\d+) rooms on (\d+) floors, (\d+) arrows, (\d+) upward<", picture)
    assert found is not None
    return found.groups()


def _rooms_of(picture: str) -> set[str]:
    """The names of the rooms in the picture."""
    return set(re.findall(r'text-anchor="middle" fill="black">(\w+)</text>', picture))
