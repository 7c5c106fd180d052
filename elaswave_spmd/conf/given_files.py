"""Reads files that a setting names, text and YAML, as a whole. Refuses those that would not end or fit in memory.

Aliases in YAML are refused: each repeats the content of its anchor, so a few nested lines of them expand to more than
any memory holds. Pipes and devices are refused by `regular_files`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.regular_files import read_regular


def text_of(path: str | Path) -> str:
    """The text of a file, whose path may begin with `~`.

    Raises:
        OSError: the file cannot be read, or is a pipe or a device.
        UnicodeError: the file is not UTF-8.
    """
    return read_regular(os.path.expanduser(path)).decode("utf-8")


def path_given(keyword: str, path: object) -> str:
    """The path that a call from Python names, as text.

    Args:
        keyword: the name of the argument, for errors.

    Raises:
        ConfigError: the value is neither a text nor a path.
    """
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if isinstance(path, str) and "\0" not in path:
        return path
    raise ConfigError(
        f"{keyword} is {path!r}, which is no path",
        rule=f"{keyword} is a text or a pathlib.Path",
        where=keyword,
        fix=f'{keyword}="runs/a"',
    )


def yaml_of(path: str | Path) -> Any:
    """The value in a YAML file without aliases; this package writes none.

    Raises:
        OSError: as for `text_of`.
        ValueError: the file is not UTF-8 or not YAML, has an alias, or is nested too deeply.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it has an alias")
            return super().compose_node(parent, index)

    try:
        return yaml.load(text_of(path), Loader)
    except (yaml.YAMLError, RecursionError) as error:  # lists nested thousands deep
        raise ValueError(str(error) or "it is nested without an end") from None
