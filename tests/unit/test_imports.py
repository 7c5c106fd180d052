"""Which room may import which, what stays free of torch, and that the links at the root are never imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "elaswave_spmd"
LINKS = ("mesh", "sharding", "recovery", "conf")

# Each room may import the rooms of its line. What stands above them (controller, worker, cli, ...) may import any.
ALLOWED = {
    "errors": "",
    "checks": "errors",
    "keyed": "errors",
    "mesh": "errors keyed",
    "sharding": "errors keyed mesh",
    "scheduling": "errors keyed mesh sharding",
    "recovery": "checks errors keyed mesh sharding scheduling",
    "models": "errors keyed sharding",
    "data": "errors keyed",
    "observe": "errors",
    "conf": "errors mesh",
    "elastic_settings": "checks errors",
    "emulated_settings": "checks errors",
    "mesh_settings": "checks errors mesh",
    "runtime_settings": "checks errors",
    "schedule_settings": "checks errors sharding",
    "settings": "checks elastic_settings emulated_settings errors mesh mesh_settings recovery runtime_settings "
    "schedule_settings",
    "runtime": "errors keyed mesh sharding scheduling recovery models",
    "testing": "errors keyed mesh sharding scheduling recovery models data runtime",
    "ctl": "errors mesh observe",
    "simulator": "errors keyed mesh observe sharding scheduling recovery",
    "named_arguments": "errors",
    "planning": "errors mesh named_arguments scheduling simulator",
    "simulating": "errors named_arguments simulator",
}
TOP = (
    *("agent", "assembly", "chaos", "compilations", "control", "controller", "corruption", "device", "epoch_events"),
    *("frequencies", "group_watch", "skipped"),
    *("launching", "losses", "summary", "supervision", "tracing", "worker"),
    *("durability", "emergency", "identity", "rescheduling", "restart", "resuming", "start", "stopping"),
)
OUTSIDE = ("cli", "__main__", "__init__")
WITHOUT_TORCH = (
    *("mesh", "sharding", "scheduling", "recovery", "keyed", "observe", "settings"),
    *("cli", "ctl", "device", "simulator", "planning", "simulating"),
)


def imports(path: Path) -> Iterator[str]:
    """Dotted names of everything that a file imports, at any depth of it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def test_every_room_has_a_place_in_the_order() -> None:
    assert {room_of(path) for path in FILES} <= {*ALLOWED, *TOP, *OUTSIDE}


def test_rooms_import_only_what_lies_below() -> None:
    wrong = []
    for path in FILES:
        room = room_of(path)
        allowed = {*ALLOWED, *TOP, *OUTSIDE} if room in OUTSIDE else {*ALLOWED, *TOP}
        if room in ALLOWED:
            allowed = {room, *ALLOWED[room].split()}
        for name in imports(path):
            if name.startswith("elaswave_spmd.") and name.split(".")[1] not in allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_only_runtime_talks_to_a_communication_library() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in FILES
        for name in imports(path)
        if name.startswith(("torch.distributed", "torch_xla", "zmq")) and room_of(path) != "runtime"
    ]
    assert not wrong, "\n".join(wrong)


def test_links_at_the_root_are_links_and_never_imported() -> None:
    for name in LINKS:
        assert (ROOT / name).is_symlink() and (ROOT / name).readlink() == Path("elaswave_spmd", name)
    ours = [*FILES, ROOT / "train.py", *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    wrong = [f"{path} imports {name}" for path in ours for name in imports(path) if name.split(".")[0] in LINKS]
    assert not wrong, "\n".join(wrong)


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_imports_without_torch(room: str) -> None:
    assert python(f"import sys, elaswave_spmd.{room}; print('torch' in sys.modules)") == "False\n"


def test_bare_names_never_enter_sys_modules() -> None:
    code = (
        "import sys, elaswave_spmd.controller.loop, elaswave_spmd.worker.loop, elaswave_spmd.models, elaswave_spmd.conf\n"
        f"print(sorted(set(sys.modules) & set({LINKS})))"
    )
    assert python(code) == "[]\n"


def test_files_stay_short() -> None:
    limits = {path: 400 for path in FILES} | {path: 600 for path in (ROOT / "tests").rglob("*.py")}
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in limits}
    assert not [f"{path}: {lengths[path]} lines" for path in limits if lengths[path] > limits[path]]
