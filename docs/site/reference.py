"""Pages of reference that the build makes of the code, so that they say what the code says: settings and commands."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.compose import CHOICES, choices_of
from elaswave_spmd.conf.schema import GROUPS, Settings
from elaswave_spmd.conf.section import REQUIRED, Declaration, Section, declarations

_NO_LIMIT = {"at_least": "at least {}", "above": "above {}", "at_most": "at most {}", "below": "below {}"}

_SETTINGS = """\
# Settings

Every setting of a run: `name=value` on the command line of `train`, a line of the run's `config.yaml`. This page is
made of their declarations in `elaswave_spmd/conf/schema.py`. `train --help` has a line for each in a terminal;
`--cfg job` prints the settings of a command line without running it.

Values are written as in YAML. In a shell put what has brackets, braces, spaces or `*` into quotes:
`'mesh.stages=[3,2]'`. A name or value that cannot be is refused before anything starts, with the rule and the fix, and
exit code 2.

## Choices

`group=choice` sets several settings at once; single settings beside it override them.

| group | choices |
|---|---|
"""

_COMMANDS = """\
# Command line

`elaswave-spmd COMMAND`, `python -m elaswave_spmd COMMAND`, and for `train` also `python train.py` in a checkout are the
same. Below is what each command's `--help` prints; [Settings](settings.md) has what `train --help` lists.

| exit code | the command |
|---|---|
| 0 | has done what it was asked for |
| 1 | has failed: an exception in your code, too few workers, a full disk, ... |
| 2 | was refused, with the rule and the fix, before its first step |
| 130, 143, 129 | was asked to end by SIGINT (Ctrl-C), SIGTERM, SIGHUP (a closed terminal) |

"""


def settings_page() -> str:
    """The page of all settings, in Markdown."""
    return _SETTINGS + "\n".join([*_choices(), "", *_groups()]) + "\n"


def _choices() -> Iterator[str]:
    for group, default in CHOICES.items():
        names = [f"`{name}`" for name in choices_of(group)]
        yield f"| `{group}` | {', '.join(names)}; `{default}` where none is named |"


def _groups() -> Iterator[str]:
    yield from _section("Of the whole run", Settings, "")
    for name, section in GROUPS.items():
        yield from _section(name, section, _prose(section))


def _section(title: str, section: type[Section], text: str) -> Iterator[str]:
    yield f"## {title}\n"
    if text:
        yield f"{text}\n"
    yield from _table(list(declarations(section)))
    for declared in declarations(section):
        if declared.items is not None:
            yield f"### Items of {declared.name}\n"
            yield f"{_prose(declared.items)}\n"
            yield from _table(list(declarations(declared.items)), is_item=True)


def _table(settings: list[Declaration], is_item: bool = False) -> Iterator[str]:
    yield "| setting | default | type | meaning |"
    yield "|---|---|---|---|"
    for declared in settings:
        name = declared.field if is_item else declared.name
        default = "needed" if declared.default is REQUIRED else f"`{_value(declared)}`"
        yield f"| `{name}` | {default} | {_type(declared)} | {_meaning(declared)} |"
    yield ""


def _prose(section: type[Section]) -> str:
    """The docstring of a section in Markdown, for a table's introduction."""
    paragraphs = re.split(r"\n\s*\n", (section.__doc__ or "").strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _value(declared: Declaration) -> str:
    return checks.override(declared.name, declared.default).partition("=")[2]


def _type(declared: Declaration) -> str:
    """The type as a user writes it: "int", "list of int", "text or null"."""
    if declared.items is not None:
        return "list of mappings"
    return _type_name(declared.type)


def _type_name(kind: typing.Any) -> str:
    arguments = [arg for arg in typing.get_args(kind) if arg is not type(None)]
    origin = typing.get_origin(kind)
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f" {len(arguments)}"
        return f"list of{count} {_type_name(arguments[0])}"
    if arguments and origin is not None and origin is not dict and not _is_mapping(origin):
        names = [_type_name(arg) for arg in arguments]
        return " or ".join([*names, *(["null"] if type(None) in typing.get_args(kind) else [])])
    return {int: "int", float: "float", bool: "true or false", str: "text"}.get(kind, "mapping")


def _is_mapping(origin: typing.Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, typing.Mapping)


def _meaning(declared: Declaration) -> str:
    limits = declared.limits
    parts = [_cell(limits.meaning)]
    if limits.choices:
        parts.append(", ".join(f"`{choice}`" for choice in limits.choices))
    bounds = [
        words.format(f"{bound:g}")
        for name, words in _NO_LIMIT.items()
        if abs(bound := getattr(limits, name)) != float("inf")
    ]
    bounds += [f"a multiple of {limits.multiple_of}"] if limits.multiple_of > 1 else []
    parts += [", ".join(bounds)] if bounds else []
    return "; ".join(part.rstrip(".") for part in parts)


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def commands_page(root: Path) -> str:
    """The page of all commands: what each one's `--help` prints, in Markdown."""
    (usage,) = _helps(root, [""])
    commands = re.findall(r"^  elaswave-spmd (\w+) ", usage, re.MULTILINE)[1:]  # `train` is on the page of settings
    parts = [_block("elaswave-spmd", usage), *map(_block, commands, _helps(root, commands))]
    return _COMMANDS + "\n".join(parts)


def _block(command: str, text: str) -> str:
    return f"## {command}\n\n```text\n{text.rstrip()}\n```\n"


_PRINT_HELPS = """
import contextlib, io, json, sys
from elaswave_spmd.cli import main

texts = []
for command in sys.argv[1:]:
    sys.argv = ["elaswave-spmd", *command.split(), "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            code = main()
        except SystemExit as end:
            code = end.code
    if code:
        sys.exit(f"elaswave-spmd {command} --help has ended with {code}: {printed.getvalue()}")
    texts.append(printed.getvalue())
print(json.dumps(texts))
"""


def _helps(root: Path, commands: list[str]) -> list[str]:
    """What commands print for `--help`, as they are called `elaswave-spmd`, without the places of this machine.

    One process prints them all: what commands import takes most of the time.
    """
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", _PRINT_HELPS, *commands], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"--help failed:\n{done.stdout}{done.stderr}")
    return [text.replace(f"{root}/", "") for text in json.loads(done.stdout)]
