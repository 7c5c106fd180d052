"""Makes the Python environment of the XLA tests, once for each set of pins; prints the path of its Python.

    python tests/xla/environment.py

It lies in the user's cache directory, under a hash of what is in it: 7 GB, about five minutes. torch_xla fits one
version of torch only, so it cannot live in .venv. Needs nothing but Python and pip.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PINS = ("torch==2.9.0", "torch_xla==2.9.0")
_DONE = ".complete"


def pins() -> str:
    """The constraints of .venv, but for torch."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.startswith(("#", "torch=="))]
    return "\n".join([*kept, *PINS]) + "\n"


def folder() -> Path:
    """The folder of the environment for these pins and this Python."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # The interpreter itself, not a link to it: each checkout's .venv has its own, and would get 7 GB of its own.
    interpreter = os.path.realpath(sys.executable)
    digest = hashlib.sha256(f"{sys.version}\n{interpreter}\n{pins()}".encode()).hexdigest()[:16]
    return cache / "elaswave_spmd" / f"xla-{digest}"


def main() -> int:
    """Makes it where it is missing. Returns pip's exit code; the last line of the output is the path."""
    home = folder()
    home.parent.mkdir(parents=True, exist_ok=True)
    python = home / "bin" / "python"
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two checkouts may ask at the same time
        if not (home / _DONE).exists():
            shutil.rmtree(home, ignore_errors=True)  # what an interrupted try has left
            print(f"making {home}: 7 GB, about five minutes", file=sys.stderr, flush=True)
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
            constraints = home / "constraints.txt"
            constraints.write_text(pins(), encoding="utf-8")
            command = [str(python), "-m", "pip", "install", "-q", "-c", str(constraints), "-e", f"{ROOT}[dev,xla]"]
            if code := subprocess.run(command, stdout=sys.stderr).returncode:
                shutil.rmtree(home, ignore_errors=True)
                return code
            (home / _DONE).touch()
        else:  # of another checkout, perhaps
            command = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", str(ROOT)]
            subprocess.run(command, stdout=sys.stderr, check=True)
    print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
