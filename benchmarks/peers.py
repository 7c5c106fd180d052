"""A separate Python environment for the systems that benchmarks compare with: they are no dependency of ours.

It is in the cache directory, sees the packages of this environment (the same torch and numpy), and adds one package,
torchft unless another one is named. torchft 0.2.0 does not run on torch 2.13; its nightly builds do.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from benchmarks.harness import say
from elaswave_spmd.data.cache import default_cache

TORCHFT = "torchft-nightly==2026.10.26"
_COMPLETE = "complete"


def directory(package: str = TORCHFT) -> Path:
    """The directory of the environment: one for each package, environment that it sees, and torch in that."""
    seen = (sys.version, sysconfig.get_path("purelib"), importlib.metadata.version("torch"), package)
    return default_cache() / f"peers-{hashlib.sha256(repr(seen).encode()).hexdigest()[:12]}"


def program_of(name: str, package: str = TORCHFT) -> str:
    """The path of one of its programs: `python` or `torchft_lighthouse`."""
    return str(directory(package) / "bin" / name)


def make(package: str = TORCHFT, module: str = "torchft") -> str:
    """Makes the environment unless it exists. Returns "", or the reason why there is none, in words.

    Args:
        package: as pip names it, with its version.
        module: what must be imported in the new environment.
    """
    path = directory(package)
    if (path / _COMPLETE).exists():
        return ""
    shutil.rmtree(path, ignore_errors=True)  # an environment whose making was interrupted
    say(f"making an environment with {package} in {path}")
    try:
        venv.create(path, with_pip=True, symlinks=True)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(path), "platbase": str(path)}))
        ours = sysconfig.get_path("purelib")
        (packages / "benchmarked.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        command = [program_of("python", package), "-m", "pip", "install", "--quiet", package]
        subprocess.run(command, check=True, capture_output=True, text=True)
        subprocess.run(
            [program_of("python", package), "-c", f"import {module}"], check=True, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout or "").strip().splitlines()
        return f"{package} cannot be installed: {lines[-1] if lines else error}"
    except OSError as error:
        return f"{path} cannot be made: {error}"
    (path / _COMPLETE).touch()
    return ""
