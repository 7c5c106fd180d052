"""Processor time of a backward in two parts over the whole backward, of one block of a model, one thread.

    python -m benchmarks.split_backward [--launches 5] [--pairs 40] [--quick] [--json PATH]

Two copies of the programs of a worker run the same micro-batches in turn, forward and backward, into the same kind of
gradient buffer: one lets the block put off its weight products, and makes them when so many micro-batches are put off
as a stage of a pipeline of four may have; the other runs backwards whole. Only processor time of this thread counts,
so another process on the machine matters little. Reported: the ratio of a micro-batch's backwards, and of forward and
backward together, since a forward whose products are put off passes through autograd functions of ours.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Result, estimate, parser, say
from benchmarks.model_check import CPU, job_of, local
from elaswave_spmd.conf.compose import settings_from
from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.determinism import Keys
from elaswave_spmd.runtime.processes.malloc_tuning import keep_freed_memory
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.context import LocalModel
from elaswave_spmd.worker.model_check import fill_initial

BLOCKS = {  # width -> model, heads and sequences of a micro-batch, as in steady_state
    "d128": ("gpt_tiny", 128, 4, 4),
    "d384": ("gpt_tiny", 384, 6, 2),
    "llama d128": ("llama_tiny", 128, 4, 4),
    "llama d384": ("llama_tiny", 384, 6, 2),
}
SEQ_LEN = 128
_LAYER = 1  # the first block; layer 0 is the embedding
_PUT_OFF = 3  # micro-batches, on the last of four stages
_ROUND = 2 * _PUT_OFF  # micro-batches between two readings of the clock
_WARM_UP = 3  # rounds


def settings_of(name: str) -> Settings:
    model, width, heads, microbatch = BLOCKS[name]
    words = [f"model={model}", f"model.d_model={width}", f"model.heads={heads}", f"train.seq_len={SEQ_LEN}"]
    return settings_from([*words, f"train.microbatch_size={microbatch}", f"train.global_batch={microbatch * _ROUND}"])


class Block:
    """One block with the programs of a worker.

    Args:
        splits: its backward is run in two parts.
    """

    def __init__(self, settings: Settings, *, splits: bool) -> None:
        job = job_of(settings)
        self._model: LocalModel = local(settings, job)
        self._programs, self._splits = self._model.programs, splits
        module = self._model.make_modules([_LAYER])[_LAYER]
        value = ValueBuffer(self._model.layout.layers[_LAYER], module, job.torch_dtype, CPU)
        value.flat.zero_()
        fill_initial(value, self._model, job.seed)
        self._programs.bind({_LAYER: module}, {_LAYER: value})
        self._programs.set_split_layers([_LAYER] if splits else ())
        self._into = GradientBuffer(self._model.layout.layers[_LAYER], CPU)
        self._keys = Keys.make(job.seed, 1, np.arange(job.microbatch_size), 0).at(_LAYER)
        self._x = torch.randn(job.microbatch_size, SEQ_LEN, settings.model.d_model, generator=_generator(1))
        self._dy = torch.randn(self._x.shape, generator=_generator(2))

    def round(self) -> tuple[float, float]:
        """Seconds of processor time of all forwards, and of all backwards, of a round of micro-batches."""
        forward_s = backward_s = 0.0
        for first in range(0, _ROUND, _PUT_OFF):
            microbatches = range(first, first + _PUT_OFF)
            began = time.thread_time()
            for microbatch in microbatches:
                self._programs.forward(_LAYER, microbatch, self._x, self._keys, None)
            forwarded = time.thread_time()
            for microbatch in microbatches:
                self._backward(microbatch)
            for microbatch in microbatches if self._splits else ():
                self._programs.backward_weights(_LAYER, microbatch, self._into, add=microbatch > 0)
            ended = time.thread_time()
            forward_s, backward_s = forward_s + forwarded - began, backward_s + ended - forwarded
        return forward_s, backward_s

    def _backward(self, microbatch: int) -> None:
        if self._splits:
            self._programs.backward_input(_LAYER, microbatch, self._dy, batch=None)
        else:
            self._programs.backward(_LAYER, microbatch, self._dy, self._into, add=microbatch > 0, batch=None)

    @property
    def gradient(self) -> Tensor:
        """The gradient of all micro-batches of a round, added up."""
        return self._into.flat


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def once(name: str, pairs: int) -> dict[str, list[float]]:
    """Ratios of one launch: of backwards, and of forwards and backwards together, and the whole backward in ms."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as every worker does; else the memory of what is put off is mapped anew for each micro-batch
    settings = settings_of(name)
    sides = {splits: Block(settings, splits=splits) for splits in (False, True)}
    for _ in range(_WARM_UP):
        for side in sides.values():
            side.round()
    if not torch.equal(sides[True].gradient, sides[False].gradient):
        raise SystemExit(f"{name}: the two parts have other bits than the whole")
    found: dict[str, list[float]] = {"backward": [], "both": [], "whole_ms": []}
    for pair in range(pairs):
        times = {splits: sides[splits].round() for splits in ((True, False) if pair % 2 else (False, True))}
        (whole_f, whole_b), (split_f, split_b) = times[False], times[True]
        found["backward"].append(split_b / whole_b)
        found["both"].append((split_f + split_b) / (whole_f + whole_b))
        found["whole_ms"].append(1e3 * whole_b / _ROUND)
    return found


def fresh(name: str, pairs: int) -> dict[str, list[float]]:
    """`once` in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.split_backward", "--one", name, "--pairs", str(pairs)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    words = parser(__doc__)
    words.add_argument("--launches", type=int)
    words.add_argument("--pairs", type=int, default=40, help="of rounds, per launch")
    words.add_argument("--one", choices=tuple(BLOCKS), help="one launch, in this process, as JSON")
    args = words.parse_args(argv)
    if args.one:
        print(json.dumps(once(args.one, args.pairs)))
        return 0
    launches, pairs = args.launches or (1 if args.quick else 5), 10 if args.quick else args.pairs
    result = Result("split_backward", {"launches": launches, "pairs": pairs, "seq_len": SEQ_LEN, "quick": args.quick})
    rows: list[tuple[object, ...]] = []
    data: list[dict[str, Any]] = []
    for name in BLOCKS:
        found = [fresh(name, pairs) for _ in range(launches)]
        backward, both = (estimate([launch[key] for launch in found]) for key in ("backward", "both"))
        whole_ms = statistics.median(value for launch in found for value in launch["whole_ms"])
        rows.append((name, f"{whole_ms:.2f}", str(backward), str(both), f"{backward.num_pairs} / {launches}"))
        data.append({"block": name, "runs": found})
        say(f"{name}: backward {backward}, with forward {both}")
    result.data["runs"] = data
    columns = (
        "block",
        "whole backward ms",
        "two parts over whole [95 %]",
        "with the forward [95 %]",
        "pairs / launches",
    )
    result.table("Processor time of a backward in two parts", columns, rows)
    return result.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
