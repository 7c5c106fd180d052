"""Garbage is collected between the controller's events, not in the middle of one.

A decision about the loss of one of 10,000 workers makes a few hundred thousand objects, and the collector would look at
all the others of the run several times meanwhile: a third of the decision's time, for which all workers would wait.
"""

from __future__ import annotations

import gc


class CollectorPaused:
    """A context in which the cyclic collector of this process does not run by itself, if it does outside."""

    def __init__(self) -> None:
        self._ran = False

    def __enter__(self) -> None:
        self._ran = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._ran:
            gc.enable()
