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

# One row per room, from the bottom up: the rooms that it may import.
ROOMS = {
    "errors": "",
    "version": "",
    "forks": "",
    "ready": "",
    "output": "",
    "user_code": "errors",
    "by_value": "errors",
    "regular_files": "",
    "determinism": "errors",
    "keyed": "determinism",
    "mesh": "errors",
    "data": "errors user_code by_value determinism regular_files",
    "sharding": "errors determinism mesh",
    "models": "errors user_code by_value determinism sharding",
    "conf": "errors mesh regular_files",
    "scheduling": "errors determinism mesh sharding",
    "recovery": "errors determinism mesh sharding conf scheduling",
    "runtime": "errors forks ready output by_value mesh sharding conf regular_files",
    "run_dir": "errors forks ready output sharding conf regular_files",
    "callbacks": "errors output user_code conf run_dir regular_files",
    "weights": "errors determinism data sharding models conf run_dir regular_files",
    "worker": (
        "errors determinism mesh data sharding models conf scheduling recovery runtime run_dir weights regular_files"
    ),
    "simulator": "errors determinism mesh sharding conf scheduling recovery run_dir",
    "controller": (
        "errors version forks ready output by_value determinism mesh data sharding conf scheduling recovery runtime "
        "run_dir callbacks weights worker"
    ),
    "report": "errors mesh conf run_dir regular_files",
    "demo": "errors conf run_dir",
    "api": "errors user_code by_value models conf runtime run_dir callbacks weights simulator controller",
    "cli": "errors output conf runtime weights simulator controller report demo",
    "__main__": "cli",
    "__init__": "errors version determinism sharding models callbacks weights api",
}
WITHOUT_TORCH = (
    *(
        "mesh",
        "sharding",
        "scheduling",
        "recovery",
        "determinism",
        "keyed",
        "run_dir",
        "conf.schema",
        "simulator",
        "callbacks",
    ),
    *("cli", "controller.admin_client", "controller.torchrun", "runtime.devices.selection"),
    *("controller.on_ray.job", "controller.on_ray.command", "controller.on_ray.supervisor"),
    *("weights.resolve", "weights.export_command", "weights.generate_command"),
    *("report.report_command", "demo.demo_command", "simulator.plan_command", "simulator.simulate_command"),
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


def test_every_room_has_a_row_and_every_row_a_room() -> None:
    assert {room_of(path) for path in FILES} == set(ROOMS)


def test_rows_only_name_rooms_above_them() -> None:
    """The table is an order: no room may import one that stands below it, so no two rooms import each other."""
    names = list(ROOMS)
    for position, (room, allowed) in enumerate(ROOMS.items()):
        assert set(allowed.split()) <= set(names[:position]), room


def test_rooms_import_only_what_their_row_names() -> None:
    wrong = []
    for path in FILES:
        room = room_of(path)
        allowed = {room, *ROOMS[room].split()}
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
        "import sys, elaswave_spmd.controller.loop, elaswave_spmd.worker.process\n"
        "import elaswave_spmd.models, elaswave_spmd.conf\n"
        f"print(sorted(set(sys.modules) & set({LINKS})))"
    )
    assert python(code) == "[]\n"


def test_the_public_names_are_loaded_when_they_are_used() -> None:
    code = "import sys, elaswave_spmd as e; print({'torch', 'numpy', 'hydra'} & set(sys.modules)); e.P('dp')\n"
    code += "print('torch' in sys.modules); print([n for n in e.__all__ if n not in dir(e) or getattr(e, n) is None])\n"
    code += "from elaswave_spmd.models import LayeredModel; print(e.LayeredModel is LayeredModel)"
    assert python(code).split("\n") == ["set()", "False", "[]", "True", ""]


def test_no_compiler_is_imported_for_a_model_that_is_not_compiled() -> None:
    """It takes seconds, in every worker."""
    code = "import sys, elaswave_spmd.worker.process; from elaswave_spmd.models import constructing\n"
    code += "with constructing(0): pass\n"
    code += "print({'torch._inductor', 'torch._dynamo'} & set(sys.modules))"
    assert python(code) == "set()\n"
