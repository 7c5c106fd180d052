"""`python -m elaswave_spmd watch RUN`: serves the page of a run, and brings it up to date while the run goes on."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.report.recorded import RunReader

_MOST_PORT = 65535


def main(arguments: Sequence[str], program: str) -> int:
    """Serves the page until it is interrupted. Returns the exit code.

    Raises:
        DataError: there is no run, or its files are malformed.
        ConfigError: Bokeh is missing, or the port cannot be had.
    """
    options = _parse(arguments, program)
    reader = RunReader(Path(os.path.expanduser(options.run)))
    from elaswave_spmd.report.server import LiveRun, LiveServer

    live = LiveRun(reader)
    live.page()  # so that malformed files, or a missing Bokeh, are reported before a browser asks
    if not 0 <= options.port <= _MOST_PORT:
        raise ConfigError(f"--port {options.port} is no port", rule=f"0 to {_MOST_PORT}; 0 is any free one")
    try:
        server = LiveServer(live, options.port)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            f"--port {options.port} cannot be had ({why})", fix="leave it out for any free one"
        ) from error
    with server:
        print(f"{server.address}\nopen it in a browser of this machine; Ctrl-C ends the page, not the run", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        f"{program} watch",
        description="Serves the page of a run on 127.0.0.1 and brings it up to date from the run's files.",
    )
    parser.add_argument("run", metavar="RUN", help="the run's directory")
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    return parser.parse_args(arguments)
