"""A command that starts a fork server `here`, and says what it and its workers were; for test_fork_server.

python forks_itself.py STATEMENT    which comes before the fork server
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path

from elaswave_spmd.runtime.processes.fork_server_client import Exited, ForkServerClient, ForkServerSpec


def exits(fork_server: ForkServerClient, count: int) -> list[Exited]:
    """Wait for `count` exits, by rank."""
    seen: list[Exited] = []
    while len(seen) < count:
        assert select.select([fork_server], [], [], 300)[0], f"only {seen} were reported"
        seen += fork_server.poll()
    return sorted(seen, key=lambda it: it.rank)


def ignores(pid: int, number: int) -> bool:
    """True if a process ignores a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigIgn:")[2].split()[0], 16) >> (number - 1) & 1)


def main() -> None:
    exec(sys.argv[1])
    other = os.open("/dev/zero", os.O_RDONLY)  # one that the fork server has no use for
    os.set_inheritable(other, True)
    sys.path.insert(0, str(Path(__file__).parent))
    fork_server = ForkServerClient.start("runtime_targets:act", ForkServerSpec(preload=("numpy",), here=True))
    fork_server.ready()
    where = Path(f"/proc/{fork_server.pid}")
    links = {entry.name: os.readlink(entry) for entry in (where / "fd").iterdir()}
    kept = [name for name, link in links.items() if int(name) > 2 and ("socket:" in link or "pipe:" in link)]
    said = {
        "command": (where / "cmdline").read_text(),
        "own_command": Path("/proc/self/cmdline").read_text(),
        "descriptors": sorted(links, key=int),
        "kept": kept,
    }
    fork_server.spawn(0, {"return": 7})
    ended = exits(fork_server, 1)
    pid = fork_server.spawn(1, {"sleep": 60})
    deadline = time.monotonic() + 300
    while not ignores(pid, signal.SIGHUP) and time.monotonic() < deadline:  # until the worker has set itself up
        time.sleep(0.01)
    said["ignores_hup"] = [ignores(pid, signal.SIGHUP) for pid in (fork_server.pid, pid)]
    fork_server.signal(1, 9)
    ended += exits(fork_server, 1)
    fork_server.stop()
    said["exits"] = [[exited.code, exited.signal] for exited in ended]
    said["left"] = [
        pid for pid in (fork_server.pid, *(exited.pid for exited in ended)) if Path(f"/proc/{pid}").exists()
    ]
    print(json.dumps(said))


if __name__ == "__main__":
    main()
