"""Files that a setting names and that are read whole: text and YAML. What has no end, or has another one, is not read.

A pipe and a device such as /dev/zero would be waited for, or read, for ever, before the first step. An alias of YAML
stands for as much again as its anchor: a few lines of them in each other are more than any memory holds.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

NO_FILE = "it is no regular file"


def text_of(path: str | Path) -> str:
    """The text of a file, whose path may begin with `~`.

    Raises:
        OSError: it cannot be read, or is a pipe or a device.
        UnicodeError: it is not UTF-8.
    """
    file = os.path.expanduser(path)
    mode = os.stat(file).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a directory reading tells
        raise OSError(errno.EINVAL, NO_FILE)
    return Path(file).read_text(encoding="utf-8")


def yaml_of(path: Path) -> Any:
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
