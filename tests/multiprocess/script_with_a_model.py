"""A script that trains a model and data of its own from Python: interrupted once, and resumed on another mesh.

Run by test_python_api.py, which sends SIGINT, and imported by the command that it is compared with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import numpy as np
import torch
from torch import Tensor, nn

import elaswave_spmd as ew

SCALE = 0.5  # of the script, and so of the functions that use it
SETTINGS = {
    "model.layers": 2,
    "model.d_model": 16,
    "model.dropout": 0.1,
    "train.steps": 60,
    "train.seq_len": 8,
    "train.global_batch": 8,
    "train.microbatch_size": 2,
    "train.validate_every": 20,
    "train.validate_microbatches": 2,
    "page.size": 256,
    "run.tensorboard": False,
    "timeouts.suspect": 4,  # whom a busy machine holds up is not to be evicted for it
}
LONGEST_S = 0.5  # that a sample takes
KILL = [{"step": 3, "kind": "kill", "rank": 1, "point": "backward"}]


class Block(nn.Module):
    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_model)
        self.drop = ew.KeyedDropout(dropout)

    def forward(self, x: Tensor, keys: ew.Keys) -> Tensor:
        return x + SCALE * self.drop(self.inner(x).relu(), keys)


class Net(ew.LayeredModel):
    shardings = ew.Shardings(grads=ew.P("dp"), optim=ew.P("dp"))

    def __init__(self, vocab_size: int, layers: int, d_model: int, dropout: float) -> None:
        embed = nn.Embedding(vocab_size, d_model)
        blocks = {f"block{i}": Block(d_model, dropout) for i in range(layers)}
        super().__init__({"embed": embed, **blocks, "head": nn.Linear(d_model, vocab_size)})


class Rows:
    """Samples that take `pause_s` each, and longer the more were read, until there is a file `go`.

    The file is in the working directory. On a busy machine the run waits for what a test waits for, in few steps.
    """

    vocab_size = 11

    def __init__(self, pause_s: float = 0.0) -> None:
        self.tokens = np.random.default_rng(5).integers(0, self.vocab_size, (200, 9))
        self.pause_s = pause_s

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> np.ndarray:
        if self.pause_s and not os.path.exists("go"):
            time.sleep(self.pause_s)
            self.pause_s = min(1.05 * self.pause_s, LONGEST_S)
        return self.tokens[index]


class Steps(ew.Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step(self, step: ew.StepRecord, /) -> None:
        self.seen.append(step.step)


def of_the_process() -> list[object]:
    """What a run must leave as it was."""
    handlers = [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    return [threading.active_count(), len(os.listdir("/proc/self/fd")), handlers, sys.path, "by_value" in sys.modules]


def main() -> None:
    rows, elastic = Rows(pause_s=0.05), {"elastic.replace": True, "chaos.events": KILL}
    before = of_the_process()
    try:
        ew.train(Net, rows, "dp2_pp2", run_dir="run", settings={**SETTINGS, **elastic})
        raise AssertionError("it was not interrupted")
    except ew.errors.RunInterrupted as error:
        stopped, stopped_in = str(error), str(error.run_dir)
    steps = Steps()
    run = ew.train(Net, rows, "single", resume="run", callbacks=[steps])
    after = of_the_process()
    model, tokens = ew.load_model("run", Net), torch.arange(8)[None]
    mine = Net(11, 2, 16, 0.1).eval()
    mine.load_state_dict(dict(run.weights), strict=True)
    told = {
        "before": before,
        "after": after,
        "stopped": stopped,
        "stopped_in": stopped_in,
        "same_logits": torch.equal(model(tokens), mine(tokens)),
        "finished": run.finished,
        "called": steps.seen,
        "steps": run.history.step.tolist(),
        "validated": run.validation.step.tolist(),
        "lost": [event["ranks"] for event in run.events if event["event"] == "fail"],
        "joined": [event["ranks"] for event in run.events if event["event"] == "join"],
    }
    with open("told.json", "w") as file:
        json.dump(told, file)


if __name__ == "__main__":
    main()
