"""Files that a setting names and that are read whole: text and YAML. What has no end is not read.

An alias of YAML stands for as much again as its anchor: a few lines of them in each other are more than any memory
holds. Pipes and devices: see `regular_files`.
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
        OSError: it cannot be read, or is a pipe or a device.
        UnicodeError: it is not UTF-8.
    """
    return read_regular(os.path.expanduser(path)).decode("utf-8")


def path_given(keyword: str, path: object) -> str:
    """The path that a call from Python names, as text.

    Args:
        keyword: the argument, for errors.

    Raises:
        ConfigError: it is neither a text nor a path.
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
    """The value in a YAML file without aliases, as this package writes it.

    Raises:
        OSError: as for `text_of`.
        ValueError: it is no such YAML.
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
