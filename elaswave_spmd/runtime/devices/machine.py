"""The facts about a machine that kinds of devices ask for, found out without importing or loading anything."""

from __future__ import annotations

import ctypes.util
import glob
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Machine(Protocol):
    """The facts that a check may use. Tests pass a made-up machine."""

    @property
    def environment(self) -> Mapping[str, str]: ...

    def version(self, distribution: str) -> str | None:
        """The version of an installed distribution, or None if it is not installed."""
        ...

    def has_package_file(self, package: str, path: str) -> bool:
        """True if the folder of an installed package contains this file."""
        ...

    def has_library(self, name: str) -> bool:
        """True if the dynamic loader would find lib<name>.so, of any version."""
        ...

    def has_path(self, pattern: str) -> bool:
        """True if a file matches a glob pattern."""
        ...

    def texts(self, pattern: str) -> tuple[str, ...]:
        """The contents of the files that match a glob pattern."""
        ...

    def has_program(self, name: str) -> bool:
        """True if there is an executable program with this name, or at this path."""
        ...

    def entry_points(self, group: str) -> tuple[str, ...]:
        """The names that installed packages have registered in a group of entry points."""
        ...


class ThisMachine:
    """The machine and the Python environment that this process runs in."""

    @property
    def environment(self) -> Mapping[str, str]:
        return os.environ

    def version(self, distribution: str) -> str | None:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def has_package_file(self, package: str, path: str) -> bool:
        spec = importlib.util.find_spec(package)  # finds a top-level package without importing it
        folders = spec.submodule_search_locations if spec is not None else None
        return any(Path(folder, path).exists() for folder in folders or ())

    def has_library(self, name: str) -> bool:
        folders = self.environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
        if any(glob.glob(f"{glob.escape(folder)}/lib{name}.so*") for folder in folders if folder):
            return True
        return ctypes.util.find_library(name) is not None

    def has_path(self, pattern: str) -> bool:
        return bool(glob.glob(pattern))

    def texts(self, pattern: str) -> tuple[str, ...]:
        return tuple(Path(path).read_text(errors="replace") for path in sorted(glob.glob(pattern)))

    def has_program(self, name: str) -> bool:
        return shutil.which(name) is not None

    def entry_points(self, group: str) -> tuple[str, ...]:
        return tuple(entry.name for entry in importlib.metadata.entry_points(group=group))


def same_release(one: str, other: str) -> bool:
    """True if two versions agree in their first two numbers, as "2.9.0+cpu" and "2.9.1" do."""
    return one.split("+")[0].split(".")[:2] == other.split("+")[0].split(".")[:2]
