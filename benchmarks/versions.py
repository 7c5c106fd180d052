"""Two versions of this repository against each other: seconds and processor time of a step of models of tokens.

    python -m benchmarks.versions --before COMMIT [--rows TEXT] [--launches 5] [--pairs 6] [--quick] [--json PATH]

What a change costs those who do not use it. The other version is checked out beside this one, with git; both run with
the installed packages of this one. Both sides are the whole product, alive at the same time; a gate lets one train
while the other one's workers wait, every other pair with the other side first. This version over the other: above 1 it
is slower. A launch gives the ratio of the sums over its blocks. Both sides must have the same loss, bit for bit.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import Result, parser, say
from benchmarks.steady_launch import ENDLESS, OURS, Case, SideSpec, Used, in_turns, ratio_cells, settings_of, started

_HERE = Path(__file__).parents[1]
_NOW, _BEFORE = "now", "before"
_MICROBATCHES, _STEPS = 8, 5
_CASES = (
    Case("1M", "single", {}, "zero0", OURS),
    Case("1M", "dp2 zero1", {"dp": 2}, "zero1", OURS),
    Case("1M", "dp2 zero2", {"dp": 2}, "zero2", OURS),
    Case("1M", "dp2 zero3", {"dp": 2}, "zero3", OURS),
    Case("1M", "pp2", {"pp": 2}, "zero0", OURS),
)
_COLUMNS = (
    "model",
    "mesh",
    "seconds of a step, now / before [95 %]",
    "processor time of a step, now / before [95 %]",
    "processor seconds of a step, now",
    "before",
)


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit.

    Raises:
        subprocess.CalledProcessError: this is no clone with that commit.
    """
    with tempfile.TemporaryDirectory(prefix="version-") as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=_HERE, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def launch(case: Case, before: Path, pairs: int, steps: int) -> dict[str, Used]:
    """One launch of both versions."""

    def side_of(name: str, directory: Path) -> SideSpec:
        settings = settings_of(case, _MICROBATCHES, ENDLESS, directory)
        # In versions without the setting backwards are always in two parts.
        backward = {"split_backward": case.backward} if name == _NOW else {}
        settings["schedule"] = {"microbatches": False, "layers": False, **backward}
        return SideSpec(OURS, settings, case.workers, source=before if name == _BEFORE else None)

    with started(case.title, (_NOW, _BEFORE), side_of) as sides:
        return in_turns(sides, pairs, steps)


def main() -> int:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--before", required=True, metavar="COMMIT", help="of the other version")
    options.add_argument("--rows", default="", help="only rows whose mesh contains this")
    options.add_argument("--launches", type=int)
    options.add_argument("--pairs", type=int, help="per launch")
    given = options.parse_args()
    launches, pairs = given.launches or (1 if given.quick else 5), given.pairs or (2 if given.quick else 6)
    result = Result("versions", {"before": given.before, "launches": launches, "pairs": pairs, "steps": _STEPS})
    rows = []
    with checked_out(given.before) as before:
        for case in (case for case in _CASES if given.rows in case.title):
            found = []
            for number in range(launches):
                found.append(launch(case, before, pairs, _STEPS))
                say(f"{case.title}, launch {number + 1}: {found[-1]}")
            rows.append([case.model, case.title, *ratio_cells(found, _NOW, _BEFORE)])
            result.data[case.title] = [{name: asdict(used) for name, used in one.items()} for one in found]
    result.table("This version against the one before", _COLUMNS, rows)
    return result.finish(given.json)


if __name__ == "__main__":
    sys.exit(main())
