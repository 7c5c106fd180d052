"""`python -m elaswave_spmd train ...`"""

from __future__ import annotations

import sys

from elaswave_spmd.cli import main

if __name__ == "__main__":
    sys.exit(main())
