"""Draws the rooms of the package and the imports between them as SVG.

    python docs/rooms/draw.py [REVISION] > FILE.svg

A room is a folder or a module directly in `elaswave_spmd/`. A room stands one floor above the highest room that it
imports, so every arrow points down; an import from a lower floor to a higher one exists only in a circle, and is drawn
in red. Without a revision the files of the working tree are drawn. Only the standard library is needed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "elaswave_spmd"
WIDTH, FLOOR, HEIGHT, GAP = 1500, 92, 40, 10


def sources(revision: str | None) -> Iterator[tuple[str, str]]:
    """(path below the package, text) of every Python file of the package."""
    if revision is None:
        for path in sorted((ROOT / PACKAGE).rglob("*.py")):
            yield str(path.relative_to(ROOT / PACKAGE)), path.read_text(encoding="utf-8")
        return
    names = git("ls-tree", "-r", "--name-only", revision, f"{PACKAGE}/").splitlines()
    for name in names:
        if name.endswith(".py"):
            yield name.removeprefix(f"{PACKAGE}/"), git("show", f"{revision}:{name}")


def git(*arguments: str) -> str:
    """The output of a git command in this repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def room_of(path: str) -> str:
    """The room of a file: its folder directly in the package, or the module itself."""
    return path.split("/")[0].removesuffix(".py")


def read(revision: str | None) -> tuple[dict[str, int], dict[str, set[str]]]:
    """Lines of each room, and the rooms that each imports."""
    lines: dict[str, int] = defaultdict(int)
    imports: dict[str, set[str]] = defaultdict(set)
    for path, text in sources(revision):
        room = room_of(path)
        lines[room] += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
                imports[room].update(f"{node.module}.{alias.name}".split(".")[1] for alias in node.names)
            elif isinstance(node, ast.Import):
                imports[room].update(a.name.split(".")[1] for a in node.names if a.name.startswith(f"{PACKAGE}."))
    rooms = set(lines)
    # Names that a package hands on, such as `from elaswave_spmd import P`, are no rooms.
    return dict(lines), {room: (imports[room] & rooms) - {room} for room in rooms}


def floors_of(imports: Mapping[str, set[str]]) -> dict[str, int]:
    """The floor of each room, from 1: one above the highest room that it imports.

    An arrow that closes a circle is not followed.
    """
    found: dict[str, int] = {}

    def floor(room: str, below: tuple[str, ...]) -> int:
        if room not in found:
            above = (*below, room)
            ground = [floor(other, above) for other in sorted(imports[room]) if other not in above]
            found[room] = 1 + max(ground, default=0)
        return found[room]

    for room in sorted(imports):
        floor(room, ())
    return found


def draw(lines: Mapping[str, int], imports: Mapping[str, set[str]]) -> str:
    """The picture: a box for each room, as wide as the root of its lines; a curve for each import between rooms."""
    floors = floors_of(imports)
    top = max(floors.values())
    place: dict[str, tuple[float, float, float]] = {}
    for number in range(1, top + 1):
        rooms = sorted((room for room in floors if floors[room] == number), key=lambda r: -lines[r])
        widths = [max(7.5 * len(room) + 16, 2.2 * lines[room] ** 0.5) for room in rooms]
        scale = min(1.0, (WIDTH - 40 - GAP * (len(rooms) - 1)) / max(1.0, sum(widths)))
        x = (WIDTH - scale * sum(widths) - GAP * (len(rooms) - 1)) / 2
        for room, width in zip(rooms, widths, strict=True):
            place[room] = (x, 40 + (top - number) * FLOOR, width * scale)
            x += width * scale + GAP
    arrows = sum(map(len, imports.values()))
    upward = sum(floors[a] <= floors[b] for a in imports for b in imports[a])
    height, title = 60 + top * FLOOR, f"{len(floors)} rooms on {top} floors, {arrows} arrows, {upward} upward"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="20" y="24" font-size="15">{title}</text>',
    ]
    for a in sorted(imports):
        for b in sorted(imports[a]):
            (ax, ay, aw), (bx, by, bw) = place[a], place[b]
            x0, y0, x1, y1 = ax + aw / 2, ay + HEIGHT, bx + bw / 2, by
            middle = (y0 + y1) / 2
            color = "#c33" if floors[a] <= floors[b] else "#567"
            curve = f"M{x0:.0f} {y0:.0f} C{x0:.0f} {middle:.0f} {x1:.0f} {middle:.0f} {x1:.0f} {y1:.0f}"
            out.append(f'<path d="{curve}" fill="none" stroke="{color}" stroke-width="1" opacity="0.45"/>')
    for room, (x, y, width) in place.items():
        size, middle = min(13.0, 1.75 * width / len(room)), x + width / 2
        box = f'x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HEIGHT}" rx="5"'
        out.append(f'<rect {box} fill="#eef3f8" stroke="#345"/>')
        for text, below, font, color in ((room, 17, size, "black"), (str(lines[room]), 33, 10, "#567")):
            at = f'x="{middle:.0f}" y="{y + below}" font-size="{font:.1f}" text-anchor="middle" fill="{color}"'
            out.append(f"<text {at}>{text}</text>")
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    print(draw(*read(sys.argv[1] if len(sys.argv) > 1 else None)), end="")
