"""The skeleton of a PJRT plugin in examples/, with torch_xla itself: installed, registered, asked for its library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elaswave_spmd.cli import FIRST_LINE
from tests.multiprocess.real_runs import train, write_text
from tests.waiting import PATIENCE_S
from tests.xla.xla_runs import NEEDS_XLA, SMALL

pytestmark = NEEDS_XLA
SKELETON = Path(__file__).parents[2] / "examples" / "pjrt_npu_plugin"
LOOK = """
import torch_xla
from torch_xla.experimental import plugins
print(type(plugins._plugin_registry["NPU"]).__name__)
try:
    print(torch_xla.device())
except RuntimeError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the plugin in it."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(SKELETON, folder / "source")  # a build writes into its folder
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*pip, "--target", folder / "target", folder / "source"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    if done.returncode:
        pytest.skip(f"setuptools of this environment cannot build it: {done.stderr.strip().splitlines()[-1]}")
    return folder / "target"


def look(installed: Path, device: str, library: str) -> list[str]:
    paths = os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "PJRT_DEVICE": device, "NPU_PJRT_LIBRARY": library}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_torch_xla_registers_it_and_asks_it_for_its_library(installed: Path) -> None:
    name, error = look(installed, "NPU", "/no/such/library.so")
    assert name == "NpuPlugin"
    assert error.startswith("PJRT_DEVICE=NPU needs a PJRT library") and "/no/such/library.so is no file" in error


def test_other_clients_are_not_disturbed_by_it(installed: Path) -> None:
    assert look(installed, "CPU", "") == ["NpuPlugin", "xla:0"]


def test_without_the_plugin_a_run_is_refused_before_any_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "NPU")
    write_text(tmp_path)
    done = train(tmp_path, *SMALL, "mesh=dp2")
    assert (done.code, done.out) == (2, f"{FIRST_LINE}\n") and "a PJRT plugin for PJRT_DEVICE=NPU" in done.err
    assert not (tmp_path / "run").exists()
