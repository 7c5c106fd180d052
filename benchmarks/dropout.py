"""Keyed dropout against F.dropout, forward and backward, one thread.

    python -m benchmarks.dropout [--shape 8,128,256] [--rounds 200] [--json PATH]

Candidates are timed in turn within each round (interleaved), so that a busy machine slows all of them alike. The ratio
is the median over rounds of candidate / F.dropout, with its 95 % interval (bootstrap over rounds). The variants that
are not in use save one byte per element for the backward; F.dropout and keyed_dropout save one element of the dtype of
x.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Keys, keyed_dropout
from elaswave_spmd.determinism.dropout import keep_mask_numpy

P_DROP = 0.1
BASELINE = "F.dropout"


class _ByteMask(torch.autograd.Function):
    """A variant that saves a bool mask. numpy converts it to floats, in half of the time that torch takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: np.ndarray, scale: float) -> Tensor:
        ctx.mask, ctx.scale = mask, np.float32(scale)
        return torch.from_numpy(np.multiply(mask, ctx.scale)).mul_(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.from_numpy(np.multiply(ctx.mask, ctx.scale)).mul_(grads[0]), None, None


def candidates(x: Tensor, keys: Keys) -> dict[str, Callable[[], Tensor]]:
    """Name -> forward. The first is the baseline."""
    scale, shape = 1.0 / (1.0 - P_DROP), tuple(x.shape)
    found: dict[str, Callable[[], Tensor]] = {
        BASELINE: lambda: nn.functional.dropout(x, P_DROP),
        "keyed_dropout": lambda: keyed_dropout(x, P_DROP, keys.again(), 0),
        "byte mask, widened by torch": lambda: (x * torch.from_numpy(keep_mask_numpy(shape, P_DROP, keys, 0))) * scale,
    }
    if x.dtype == torch.float32:
        found["byte mask, widened by numpy"] = lambda: _ByteMask.apply(
            x, keep_mask_numpy(shape, P_DROP, keys, 0), scale
        )
    return found


def measure(shape: tuple[int, ...], dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """One row per candidate: median milliseconds of forward and backward, ratio of their sum with its interval."""
    torch.manual_seed(0)
    x, dy = torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)
    forwards = candidates(x, Keys.make(1, 2, list(range(shape[0])), 3))
    times = {name: np.empty((rounds, 2)) for name in forwards}
    for number in range(-5, rounds):  # the first five warm up
        for name, forward in forwards.items():
            start = time.perf_counter()
            y = forward()
            middle = time.perf_counter()
            torch.autograd.grad(y, x, dy)
            stop = time.perf_counter()
            if number >= 0:
                times[name][number] = (middle - start) * 1e3, (stop - middle) * 1e3
    base = times[BASELINE].sum(1)
    rows = []
    for name, both in times.items():
        ratio = both.sum(1) / base
        low, high = _interval(ratio)
        row = {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape), "candidate": name}
        forward_ms, backward_ms = np.median(both, 0).tolist()
        row |= {"forward_ms": forward_ms, "backward_ms": backward_ms, "min_ms": float(both.sum(1).min())}
        rows.append(row | {"ratio": float(np.median(ratio)), "ratio_low": low, "ratio_high": high})
    return rows


def _interval(ratio: np.ndarray) -> tuple[float, float]:
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(ratio, (1000, len(ratio))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975]).tolist()
    return low, high


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'dtype':9} {'candidate':28} {'forward':>8} {'backward':>8} {'min sum':>8}  ratio to {BASELINE} [95 %]"]
    for r in rows:
        interval = f"{r['ratio']:.2f} [{r['ratio_low']:.2f}, {r['ratio_high']:.2f}]"
        ms = f"{r['forward_ms']:8.3f} {r['backward_ms']:8.3f} {r['min_ms']:8.3f}"
        lines.append(f"{r['dtype']:9} {r['candidate']:28} {ms}  {interval}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8,128,256", help="dims of the tensor; the first is the sample")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path, help="also write the rows there")
    arguments = parser.parse_args()
    shape = tuple(int(size) for size in arguments.shape.split(","))
    torch.set_num_threads(1)
    rows = [row for dtype in (torch.float32, torch.bfloat16) for row in measure(shape, dtype, arguments.rounds)]
    print(
        f"dropout p={P_DROP} on {list(shape)} ({math.prod(shape)} elements), one thread, ms, torch {torch.__version__}"
    )
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "rounds": arguments.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
