"""Rewrites the tables of docs/results.md from the JSON files of a directory.

    python -m benchmarks.report DIR [--into docs/results.md]

A file NAME.json, written by `python -m benchmarks.NAME --json`, fills the section between `<!-- results: NAME -->` and
`<!-- end -->`; text outside of these marks is kept. A section without a file stays as it is; a file without a section
is an error, so that no result gets lost.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SECTION = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. Columns of numbers are aligned to the right."""
    left = [any(row[i][:1].isalpha() for row in rows) for i in range(len(columns))]
    lines = [_line(columns), _line(["---" if words else "---:" for words in left]), *map(_line, rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def render(found: Mapping[str, Any]) -> str:
    """The text of a section: its tables, then the machine and the time of the measurement."""
    if "tables" not in found:
        return _render_rows(found)
    parts = [f"{t['title']}\n\n{markdown(t['columns'], t['rows'])}" for t in found["tables"]]
    where, loads = found["machine"], found["load_average_1_5_15_min"]
    versions = f"Python {where['python']}, torch {where['versions']['torch']}"
    gpus = f", {where['accelerators']}" if "accelerators" in where else ""
    parts.append(
        f"{where['processor']}, {where['cores']} cores{gpus}, {where['memory_gib']:g} GiB, {where['system']}; "
        f"{versions}; {found['began']}, {found['seconds']:g} s; "
        f"load average {loads['before'][0]} before, {loads['after'][0]} after; "
        f"settings {json.dumps(found['settings'])}."
    )
    return "\n\n".join(parts)


def _render_rows(found: Mapping[str, Any]) -> str:
    """The text for a file of the form {..., "rows": [{column: value}]}, without columns of lists and dicts."""
    rows = found["rows"]
    columns = [name for name, value in rows[0].items() if not isinstance(value, (list, dict))]
    cells = [[_shown(row.get(name)) for name in columns] for row in rows]
    rest = {name: value for name, value in found.items() if name != "rows"}
    return f"{markdown(columns, cells)}\n\n{json.dumps(rest)}"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


def fill(text: str, results: Mapping[str, str]) -> str:
    """Returns the document with its sections replaced.

    Raises:
        ValueError: a result has no section.
    """
    sections = {name for _, name, _ in _SECTION.findall(text)}
    if without_section := sorted(set(results) - sections):
        raise ValueError(
            f"no section for {', '.join(without_section)}; there are sections for {', '.join(sorted(sections))}"
        )

    def replaced(found: re.Match[str]) -> str:
        name = found[2]
        return f"{found[1]}\n{results[name]}\n\n{found[3]}" if name in results else found[0]

    return _SECTION.sub(replaced, text)


def main() -> int:
    """Command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--into", type=Path, default=Path("docs/results.md"))
    args = parser.parse_args()
    results = {path.stem: render(json.loads(path.read_text())) for path in sorted(args.directory.glob("*.json"))}
    if not results:
        print(f"no .json file in {args.directory}", file=sys.stderr)
        return 2
    try:
        args.into.write_text(fill(args.into.read_text(), results))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.into}: {', '.join(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
