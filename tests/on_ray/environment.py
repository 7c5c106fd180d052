"""Makes the Python environment of the tests on Ray, .venv-ray; prints the path of its Python.

    .venv/bin/python tests/on_ray/environment.py

It has Ray, and sees all packages of the environment of the Python that runs this: 300 MB, half a minute. Ray is in an
environment of its own since nothing else may come to need it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".venv-ray"
_DONE = ".complete"


def digest() -> str:
    """Identifies what the environment is made of."""
    pins = [(ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256("\n".join([sys.version, sys.prefix, *pins]).encode()).hexdigest()


def of_extra() -> list[str]:
    """What the extra `ray` asks for. The package itself is that of the other environment.

    Read from pyproject.toml, as its installed form is missing for a moment while pip installs another extra.
    """
    found = re.search(r"^ray = (\[.*\])$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, "pyproject.toml has the extra in one line"
    return json.loads(found[1])


def main() -> int:
    """Makes it where it is missing. Returns pip's exit code; the last line of the output is the path."""
    python, done = HOME / "bin" / "python", HOME / _DONE
    with HOME.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two commands may ask at the same time
        if not done.exists() or done.read_text(encoding="utf-8") != digest():
            shutil.rmtree(HOME, ignore_errors=True)
            print(f"making {HOME}: 300 MB, half a minute", file=sys.stderr, flush=True)
            subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
            ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
            own = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
            # No bare path: the .pth files of the other environment are followed, too, as its editable install is one.
            seen = sysconfig.get_path("purelib")
            (own / "beside.pth").write_text(f"import site; site.addsitedir({seen!r})\n", encoding="utf-8")
            command = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
            if code := subprocess.run([*command, *of_extra()], stdout=sys.stderr).returncode:
                shutil.rmtree(HOME, ignore_errors=True)
                return code
            done.write_text(digest(), encoding="utf-8")
    print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
