"""Code that asks for no device by name, and layers and state that run on one that is no CPU."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elaswave_spmd.runtime.devices import Island, device_of
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "elaswave_spmd"
NAME = "cuda"
ITS_MODULE = PACKAGE / "runtime" / "devices" / "kinds" / f"{NAME}.py"
SETTINGS = {PACKAGE / "conf" / "schema.py": 2}  # the values of runtime.device and of the devices of schedule.frequency


def mentions(path: Path) -> Iterator[int]:
    """Lines that name the device in code: in a string that is no docstring, an attribute, a variable or an import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        named = (
            (isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts and node.value)
            or (isinstance(node, ast.Attribute) and node.attr)
            or (isinstance(node, ast.Name) and node.id)
            or (isinstance(node, ast.alias) and node.name)
            or ""
        )
        if NAME in named:
            yield getattr(node, "lineno", 0)


def test_no_file_but_its_own_names_cuda() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path != ITS_MODULE]
    found = {path: lines for path in files if (lines := list(mentions(path)))}
    assert {path: len(lines) for path, lines in found.items()} == SETTINGS, found
    assert list(mentions(ITS_MODULE))  # it would be found


def test_the_cpu_gives_fresh_tensors_and_the_same_tensors() -> None:
    cpu = device_of("cpu").open(0, Island())
    frame = torch.arange(6.0)
    received = cpu.from_host(frame)
    assert torch.equal(received, frame) and received.data_ptr() != frame.data_ptr()
    assert cpu.to_host(received).data_ptr() == received.data_ptr()
    copy = cpu.copy_to_host(received.view(2, 3).T)
    received.zero_()
    assert copy.done() and torch.equal(copy.wait(), frame.view(2, 3).T) and copy.wait().is_contiguous()
    assert cpu.memory() is None


def on_a_made_up_device(code: str) -> str:
    """Runs code in a process of its own, in which the device is registered; its output."""
    prelude = "from tests.unit.devices.on_made_up_device import *\n"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, '.')\n{prelude}{code}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.compiler
def test_the_made_up_device() -> None:
    """Layer programs give the bits of the CPU; but for attention, which has another kernel where no fused one is."""
    models = "differences('mlp', 0), differences('gpt', 1e-6), differences('llama', 1e-6)"
    code = f"print(mixed(), copies(), {models}, sep='\\n')"
    told, *found = on_a_made_up_device(code).splitlines()
    assert "expected all tensors on madeup" in told
    assert found == ["ok", "[]", "[]", "[]"]
