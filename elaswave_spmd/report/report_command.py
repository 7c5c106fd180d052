"""`python -m elaswave_spmd report RUN`: makes one HTML page of a run's files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from elaswave_spmd.errors import ConfigError, FilesError
from elaswave_spmd.report.page import page_of
from elaswave_spmd.report.recorded import RunReader
from elaswave_spmd.run_dir.atomic_write import replacing

REPORT = "report.html"


def main(arguments: Sequence[str], program: str) -> int:
    """Makes the page, and prints its path. Returns the exit code.

    Raises:
        DataError: there is no run, or its files are malformed.
        ConfigError: Bokeh is missing, or the file cannot be written.
    """
    options = _parse(arguments, program)
    folder = Path(os.path.expanduser(options.run))
    page = page_of(RunReader(folder).read())
    out = Path(os.path.expanduser(options.out)) if options.out else folder / REPORT
    if os.path.isdir(out):  # not out.is_dir(), which may raise
        raise ConfigError(f"--out {out} is a directory", rule="--out names a file", fix=f"--out {out / REPORT}")
    # The user's own link, such as /dev/stdout, is not replaced, but the file that it points to. A run's directory may
    # come from elsewhere: a link in it is replaced, as it could point to any file of the user.
    target = Path(os.path.realpath(out)) if options.out else out
    if os.path.exists(target) and not os.path.isfile(target):
        raise ConfigError(
            f"--out {out} is no regular file",
            rule="the page is written beside it and takes its name: root would put a file in the place of a device",
            fix="--out FILE",
        )
    try:
        with replacing(target, durable=False) as scratch:
            scratch.write_text(page, encoding="utf-8")
    except FilesError as error:
        raise ConfigError(
            f"the report cannot be written to {out} ({error.why})",
            rule="it is a file in a directory that is there",
            where=f"--out {options.out}" if options.out else str(folder),
            fix="--out FILE, in a directory that you may write to",
        ) from error
    print(out)
    return 0


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        f"{program} report",
        description="Makes one HTML page of a run, which needs no network: loss, throughput, incidents, plans.",
    )
    parser.add_argument("run", metavar="RUN", help="the run's directory; the run may still go on")
    parser.add_argument("--out", metavar="FILE", help=f"where the page is written (default: RUN/{REPORT})")
    return parser.parse_args(arguments)
