"""Several threads of a worker on the CPU: the same bits, however fast each thread is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_S

_SCRIPT = """
import sys
import torch
from elaswave_spmd.models.construction import constructing
from elaswave_spmd.runtime.devices import Island, device_of

threads = int(sys.argv[1])
device_of("cpu").open(0, Island(1, threads))
assert torch.get_num_threads() == threads
assert torch.get_deterministic_debug_mode() == (2 if threads > 1 else 0)
assert threads == 1 or not torch.empty(100_000).isnan().all(), "no new tensor is filled"
with constructing(0):
    assert torch.empty(100_000).isnan().all(), "which shows what a constructor leaves as it found it"
draw = torch.Generator().manual_seed(1)
weight = torch.randn(7, 64, generator=draw).requires_grad_()
tokens, dy = torch.randint(7, (64, 128), generator=draw), torch.randn(64, 128, 64, generator=draw)
sums = set()
for _ in range(int(sys.argv[2])):
    (gradient,) = torch.autograd.grad(weight[tokens], weight, dy)
    sums.add(gradient.numpy().tobytes().hex())
print(*sums)
"""


def _gradients(threads: int, times: int) -> list[str]:
    words = [sys.executable, "-c", _SCRIPT, str(threads), str(times)]
    root = Path(__file__).parents[3]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, cwd=root, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.split()


def test_the_gradient_of_an_indexing_does_not_depend_on_the_times_of_threads() -> None:
    assert _gradients(4, 30) == _gradients(1, 1)
