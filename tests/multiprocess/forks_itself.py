"""A command that starts a zygote `here`, and says what it and its workers were; for test_zygote.

python forks_itself.py STATEMENT    which comes before the zygote
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from elaswave_spmd.runtime.zygote import Exited, Zygote


def until(zygote: Zygote, count: int) -> list[Exited]:
    found: list[Exited] = []
    while len(found) < count:
        found += zygote.poll()
        time.sleep(0.01)
    return found


def main() -> None:
    exec(sys.argv[1])
    other = os.open("/dev/zero", os.O_RDONLY)  # one that the zygote has no use for
    os.set_inheritable(other, True)
    sys.path.insert(0, str(Path(__file__).parent))
    zygote = Zygote.start("runtime_targets:act", preload=("numpy",), here=True)
    zygote.ready()
    where = Path(f"/proc/{zygote.pid}")
    links = {entry.name: os.readlink(entry) for entry in (where / "fd").iterdir()}
    kept = [name for name, link in links.items() if int(name) > 2 and ("socket:" in link or "pipe:" in link)]
    said = {
        "command": (where / "cmdline").read_text(),
        "own_command": Path("/proc/self/cmdline").read_text(),
        "descriptors": sorted(links, key=int),
        "kept": kept,
    }
    zygote.spawn(0, {"return": 7})
    exits = until(zygote, 1)
    zygote.spawn(1, {"sleep": 60})
    zygote.signal(1, 9)
    exits += until(zygote, 1)
    zygote.stop()
    said["exits"] = [[exited.code, exited.signal] for exited in exits]
    said["left"] = [pid for pid in (zygote.pid, *(exited.pid for exited in exits)) if Path(f"/proc/{pid}").exists()]
    print(json.dumps(said))


if __name__ == "__main__":
    main()
