"""Kernels of notebooks that tests start."""

from __future__ import annotations

from pathlib import Path

import pytest


def kernel_environment(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have the kernels that this process starts keep their files in `folder`, and show warnings as a user's do."""
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(folder / name.lower()))
