"""The environment with which a fresh interpreter finds this package."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path


def interpreter_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with `extra` variables, and with PYTHONPATH extended to this package if needed."""
    environment = {**os.environ, **(extra or {})}
    if (root := import_root()) is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    return environment


def import_root() -> str | None:
    """The folder of this package if a fresh interpreter might not find it, since it is not installed; else None."""
    root = str(Path(__file__).resolve().parents[3])
    return None if root in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")} else root
