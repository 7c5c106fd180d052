"""Train a model: `python train.py mesh=dp2_pp2`. `python train.py --help` shows the settings."""

from __future__ import annotations

import sys

from elaswave_spmd.cli import train

# Worker processes may import this file again: nothing may start without the guard.
if __name__ == "__main__":
    sys.exit(train())
