"""Tools that the benchmarks share: ratios of interleaved pairs with an interval, the machine, tables, JSON.

A pair is two blocks of work of two systems, one right after the other; a launch is a fresh start of all processes.
Launches of the same code differ by more than pairs within one (memory layout, placement on cores), so the interval
comes from a bootstrap over launches first and pairs within them second. Without torch: drivers stay small.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

_RESAMPLES = 10_000
_PACKAGES = ("torch", "numpy", "pyzmq", "randomgen", "einops")


@dataclass(frozen=True)
class Estimate:
    """A median with its 95 % interval, over `num_pairs` pairs in `num_launches` launches."""

    median: float
    low: float
    high: float
    num_pairs: int
    num_launches: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate(launches: Sequence[Sequence[float]]) -> Estimate:
    """The median over all pairs, and its 95 % percentile interval from a two-stage bootstrap.

    Args:
        launches: per launch the value (a ratio, mostly) of each of its pairs; no launch is empty.
    """
    if not launches or not all(launches):
        raise ValueError(f"every launch has at least one pair, got {[len(launch) for launch in launches]}")
    samples = [np.asarray(launch, dtype=np.float64) for launch in launches]
    generator = np.random.default_rng(0)
    medians = np.empty(_RESAMPLES)
    for i in range(_RESAMPLES):
        drawn = generator.integers(len(samples), size=len(samples))
        medians[i] = np.median(np.concatenate([generator.choice(samples[k], len(samples[k])) for k in drawn]))
    low, high = np.quantile(medians, [0.025, 0.975]).tolist()
    values = np.concatenate(samples)
    return Estimate(float(np.median(values)), low, high, len(values), len(samples))


def machine() -> dict[str, Any]:
    """Processor, usable cores, memory and versions of this machine. A measured number means nothing without them."""
    return {
        "processor": _first_match("/proc/cpuinfo", r"model name\s*: (.+)") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(int(_first_match("/proc/meminfo", r"MemTotal:\s*(\d+)") or 0) / 2**20, 1),
        **_accelerators(),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _accelerators() -> dict[str, str]:
    """The NVIDIA GPUs by what their driver says of them; nothing if there are none."""
    texts = [path.read_text() for path in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    models = sorted(found[1].strip() for text in texts if (found := re.search(r"Model:\s*(.+)", text)))
    return {"accelerators": ", ".join(models)} if models else {}


def _first_match(path: str, pattern: str) -> str | None:
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        return None
    return found[1].strip() if found else None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


class Result:
    """The result of one run of a benchmark: collects tables and data, prints them and writes them.

    Args:
        name: the benchmark; its section in docs/results.md has the same name.
        settings: of this run of the benchmark, plain JSON.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self.name = name
        self.settings = dict(settings)
        self.tables: list[dict[str, Any]] = []
        self.data: dict[str, Any] = {}
        self._began = time.time()
        self._load_before = os.getloadavg()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Adds a table and prints it."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        cells = [[str(cell) for cell in row] for row in rows]
        self.tables.append({"title": title, "columns": list(columns), "rows": cells})
        shown = Table(box=box.SIMPLE)
        for number, column in enumerate(columns):
            words = any(row[number][:1].isalpha() for row in cells)
            shown.add_column(column, justify="left" if words else "right", overflow="fold")
        for row in cells:
            shown.add_row(*row)
        console = Console()
        if not console.is_terminal:
            console.width = 200
        console.print(title, highlight=False)
        console.print(shown)

    def to_dict(self) -> dict[str, Any]:
        loads = {"before": self._load_before, "after": os.getloadavg()}
        return {
            "benchmark": self.name,
            "settings": self.settings,
            "machine": machine(),
            "load_average_1_5_15_min": {when: [round(x, 2) for x in load] for when, load in loads.items()},
            "began": time.strftime("%Y-%m-%d %H:%M", time.gmtime(self._began)) + " UTC",
            "seconds": round(time.time() - self._began, 1),
            "tables": self.tables,
            "data": self.data,
        }

    def finish(self, path: Path | None, problems: Sequence[str] = ()) -> int:
        """Prints the machine and its load, and writes the JSON file if one was asked for.

        Args:
            path: of the JSON file, or None.
            problems: findings that make the benchmark fail; printed last.

        Returns:
            The exit code: 1 if there are problems.
        """
        found = self.to_dict()
        where, loads = found["machine"], found["load_average_1_5_15_min"]
        versions = f"Python {where['python']}, torch {where['versions']['torch']}"
        print(
            f"{where['processor']}, {where['cores']} cores; {versions}; "
            f"load average {loads['before'][0]} before, {loads['after'][0]} after; {found['seconds']:g} s"
        )
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found, indent=1, default=_plain) + "\n")
        for problem in problems:
            print(problem)
        return 1 if problems else 0


def _plain(value: object) -> object:
    if isinstance(value, Estimate):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"not plain data: {value!r}")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A command line with the options of every benchmark, --json and --quick. Its help is the module's docstring."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="PATH", help="also write the result there")
    made.add_argument("--quick", action="store_true", help="less of everything: shows that it works, measures little")
    return made


def say(text: str) -> None:
    """Prints a line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)
