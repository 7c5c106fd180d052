"""The facts in a wheel of torch_npu about the calls that the device layer makes: read, never imported.

`python -m tests.unit.devices.torch_npu_wheel WHEEL` writes torch_npu_calls.json beside this file. Get the wheel
by `pip download --no-deps --dest DIR torch_npu==VERSION`; it needs neither CANN nor a device.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("torch_npu_calls.json")

FUNCTIONS = (
    "torch_npu.npu.stop_device",
    "torch_npu.npu.check_uce_in_memory",
    "torch_npu.npu.restart_device",
    "torch_npu.npu._recovery.check_npu_tensor_is_safe",
    "torch_npu.npu._recovery.update_npu_tensor_to_safe",
    "torch_npu.distributed.reinit_process_group",
)
"""Called by their dotted names."""

COMPILED = ("abort_hccl_comm", "resume_hccl_comm", "_npu_stopDevice", "_npu_restart_device")
"""Names that only the compiled libraries define."""

TEXTS = (
    *("UCE ERROR", "HBM MULTI BIT ECC ERROR", "SUSPECT MEM ERROR", "HCCS LINK ERROR"),
    *("HCCL OP RETRY FAILED", "SUSPECT REMOTE ERROR", "FORCE STOP"),
)
"""Texts in errors."""


def read(wheel: Path) -> dict[str, Any]:
    """The record of a wheel: version, arguments of functions, and which names and texts its libraries contain."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        version = wheel.name.split("-")[1]
        functions = {name: _arguments(archive, names, name) for name in FUNCTIONS}
        missing = {text.encode() for text in (*COMPILED, *TEXTS)}
        for name in sorted(n for n in names if n.endswith(".so") or ".so." in n):
            content = archive.read(name)
            missing = {text for text in missing if text not in content}
    found = [text for text in (*COMPILED, *TEXTS) if text.encode() not in missing]
    return {"torch_npu": version, "functions": functions, "in_libraries": found}


def _arguments(archive: zipfile.ZipFile, names: set[str], dotted: str) -> list[str]:
    """Arguments of a function, as written: "name" or "name=default"."""
    module, _, function = dotted.rpartition(".")
    definition = _find(archive, names, module, function, seen=set())
    args = definition.args
    assert not (args.posonlyargs or args.vararg or args.kwonlyargs or args.kwarg), dotted
    plain = [arg.arg for arg in args.args]
    defaults = [f"={ast.unparse(value)}" for value in args.defaults]
    return [name + default for name, default in zip(plain, [""] * (len(plain) - len(defaults)) + defaults, strict=True)]


def _find(archive: zipfile.ZipFile, names: set[str], module: str, wanted: str, seen: set[str]) -> ast.FunctionDef:
    """The definition of a module's name, through the modules that it is imported from."""
    assert module not in seen, f"{wanted}: imported in a circle"
    base = module.replace(".", "/")
    path = f"{base}/__init__.py" if f"{base}/__init__.py" in names else f"{base}.py"
    assert path in names, f"no module {module} in the wheel"
    tree = ast.parse(archive.read(path).decode())
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == wanted and node in tree.body:
            return node
        if isinstance(node, ast.ImportFrom) and any(alias.name == wanted for alias in node.names):
            above = package.split(".")[: len(package.split(".")) - max(0, node.level - 1)] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            if source.startswith("torch_npu"):
                return _find(archive, names, source, wanted, seen | {module})
    raise AssertionError(f"{module} neither defines nor imports {wanted}")


def main() -> None:
    record = read(Path(sys.argv[1]))
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {RECORD} of torch_npu {record['torch_npu']}")


if __name__ == "__main__":
    main()
