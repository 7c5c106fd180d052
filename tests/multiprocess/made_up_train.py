"""`python train.py runtime.device=cpu`, with workers on the made-up device instead: for test_made_up_train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SEEN = "on the made-up device"


def work(spec: dict[str, Any]) -> int:
    """Entry of a worker process."""
    from unittest.mock import patch

    from elaswave_spmd.worker import process as worker
    from tests.cluster.made_up_device import MadeUp, register

    library = register()
    with patch.object(worker, "kind_of", lambda settings: MadeUp()):
        print(f"worker {spec['rank']} {SEEN}", flush=True)
        code = worker.main(spec)
    del library
    return code


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from elaswave_spmd import cli
    from elaswave_spmd.controller import launching

    launching.TARGET = "tests.multiprocess.made_up_train:work"
    sys.exit(cli.train())
