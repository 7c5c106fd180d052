"""Train a model: `python train.py mesh=dp2_pp2`. `python train.py --help` shows the settings."""

from __future__ import annotations

import sys

# Worker processes may import this file again: nothing may start without the guard.
if __name__ == "__main__":
    try:
        from elaswave_spmd.cli import train

        sys.exit(train())
    except KeyboardInterrupt:  # during the import: later the command line answers it itself
        sys.exit(130)
