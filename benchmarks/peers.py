"""A separate Python environment for the systems that benchmarks compare with: they are no dependency of ours.

It is in the cache directory, sees the packages of this environment (the same torch and numpy), and adds torchft.
torchft 0.2.0 does not run on torch 2.13; its nightly builds do.
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


def directory() -> Path:
    """The directory of the environment: one for each environment that it sees, and for each torch in that."""
    seen = (sys.version, sysconfig.get_path("purelib"), importlib.metadata.version("torch"), TORCHFT)
    return default_cache() / f"peers-{hashlib.sha256(repr(seen).encode()).hexdigest()[:12]}"


def program_of(name: str) -> str:
    """The path of one of its programs: `python` or `torchft_lighthouse`."""
    return str(directory() / "bin" / name)


def make() -> str:
    """Makes the environment unless it exists. Returns "", or the reason why there is none, in words."""
    path = directory()
    if (path / _COMPLETE).exists():
        return ""
    shutil.rmtree(path, ignore_errors=True)  # an environment whose making was interrupted
    say(f"making an environment with {TORCHFT} in {path}")
    try:
        venv.create(path, with_pip=True, symlinks=True)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(path), "platbase": str(path)}))
        ours = sysconfig.get_path("purelib")
        (packages / "benchmarked.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        command = [program_of("python"), "-m", "pip", "install", "--quiet", TORCHFT]
        subprocess.run(command, check=True, capture_output=True, text=True)
        subprocess.run([program_of("python"), "-c", "import torchft"], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout or "").strip().splitlines()
        return f"{TORCHFT} cannot be installed: {lines[-1] if lines else error}"
    except OSError as error:
        return f"{path} cannot be made: {error}"
    (path / _COMPLETE).touch()
    return ""
