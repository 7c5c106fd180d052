"""The allocator's settings, in a process of their own: they cannot be taken back."""

import platform
import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_S

_PROGRAM = """
import resource
from elaswave_spmd.runtime.processes.malloc_tuning import keep_freed_memory
import sys
if sys.argv[1] == "set":
    assert keep_freed_memory()
import torch
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        blocks = [torch.ones(1 << 18) for _ in range(32)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults())
"""


def _faults(mode: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_memory_that_comes_and_goes_costs_page_faults_once():
    assert _faults("set") * 1.5 < _faults("default")
