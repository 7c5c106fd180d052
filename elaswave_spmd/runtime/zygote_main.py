"""Entry of a zygote that is an interpreter of its own: `-m elaswave_spmd.runtime.zygote_main ORDERS_FD NOTICES_FD`.

SIGINT, SIGTERM and SIGHUP are blocked when it starts.
"""

from __future__ import annotations

import sys

from elaswave_spmd.runtime.processes.fork_server import run

if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
