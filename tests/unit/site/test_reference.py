"""The pages and links that the build of the site makes: docs/site/."""

from __future__ import annotations

import re
from pathlib import Path

import elaswave_spmd
from docs.site.links import Links
from docs.site.reference import settings_page
from elaswave_spmd.conf.schema import NAMES, ChaosEvent
from elaswave_spmd.conf.section import declarations

ROOT = Path(__file__).parents[3]


def links(text: str, *, repo_url: str = "", folder: str = "docs", here: str = "") -> tuple[str, list[str]]:
    """The rewritten text, and the targets that were missing."""
    missing: list[str] = []
    pages = {"CHANGELOG.md": "changelog.md"}
    titles = {"protocol.md": "The step protocol", "settings.md": "Settings"}
    made = Links(ROOT, folder, here, pages, titles, repo_url, missing.append)
    return made.rewrite(text), missing


def test_every_setting_is_on_the_page_of_settings_once_with_its_default_and_meaning() -> None:
    page = settings_page()
    rows = re.findall(r"^\| `([\w.]+)` \| (`.*?`|needed) \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    assert [name for name, *_ in rows if name in NAMES] == list(NAMES)
    by_name = {name: rest for name, *rest in rows}
    assert by_name["train.steps"] == ["`400`", "int", "steps of the run; at least 1"]
    assert by_name["mesh.stages"][:2] == ["`null`", "list of int or null"]
    assert by_name["model.args"][1] == "mapping" and by_name["optim.betas"][1] == "list of 2 float"
    assert {declared.field for declared in declarations(ChaosEvent)} <= set(by_name)


def test_every_public_name_is_on_the_page_of_the_python_api() -> None:
    told = re.findall(r"^::: elaswave_spmd\.(?:\w+\.)*(\w+)$", (ROOT / "docs/api.md").read_text("utf-8"), re.MULTILINE)
    public = {getattr(elaswave_spmd, name) for name in elaswave_spmd.__all__ if name != "__version__"}
    assert {each.__name__.rpartition(".")[2] for each in public} <= set(told)


def test_links_out_of_docs_are_the_names_of_the_files_where_the_repository_has_no_address() -> None:
    assert links("see [a/b.py](../train.py).") == ("see a/b.py (`train.py`).", [])
    assert links("see [train.py](../train.py).") == ("see `train.py`.", [])
    there = links("see [train.py](../train.py#L3).", repo_url="https://example.org/r/")
    assert there == ("see [train.py](https://example.org/r/blob/main/train.py#L3).", [])


def test_links_between_pages_stay_and_those_to_the_root_lead_to_pages() -> None:
    same = "[a](protocol.md#terms) [b](https://example.org) [c](#here) ![d](report_dark.png) [e](settings.md)"
    assert links(same) == (same, [])
    assert links("[log](../CHANGELOG.md)") == ("[log](changelog.md)", [])
    assert links("[a](docs/protocol.md)", folder="") == ("[a](protocol.md)", [])


def test_links_of_a_page_in_a_folder_lead_from_there() -> None:
    inside = {"folder": "docs/design", "here": "design"}
    same = "[a](../protocol.md#terms) [b](checks.md)"
    assert links(same, **inside) == (same, [])
    assert links("[log](../../CHANGELOG.md) docs/protocol.md", **inside) == (
        "[log](../changelog.md) [The step protocol](../protocol.md)",
        [],
    )


def test_pages_that_a_text_names_are_linked_by_their_titles_and_code_stays() -> None:
    assert links("[protocol.md](protocol.md#x), [docs/protocol.md](protocol.md)")[0] == (
        "[The step protocol](protocol.md#x), [The step protocol](protocol.md)"
    )
    assert links("as docs/protocol.md says") == ("as [The step protocol](protocol.md) says", [])
    same = "`docs/protocol.md` and\n```\n[a](../nothing.py) docs/protocol.md\n```\n\n    cat docs/protocol.md\n"
    assert links(same) == (same, [])


def test_a_link_to_nothing_is_told() -> None:
    assert links("[a](../nothing.py) [b](nothing.md)")[1] == ["../nothing.py", "nothing.md"]
