"""Ray's modules, imported when they are needed: Ray is an extra, and takes a second to import."""

from __future__ import annotations

import importlib
from typing import Any

from elaswave_spmd.errors import ConfigError


def ray_module(name: str = "") -> Any:
    """The module `ray`, or `ray.NAME`.

    Raises:
        ConfigError: Ray cannot be imported.
    """
    try:
        return importlib.import_module(f"ray.{name}" if name else "ray")
    except ImportError as error:
        raise ConfigError(
            f"runtime.launcher=ray needs Ray, which cannot be imported ({error})",
            rule="Ray is an extra",
            where="runtime.launcher=ray",
            fix="pip install 'elaswave-spmd[ray]' (in a checkout: pip install -e '.[ray]'), on all nodes",
        ) from error
