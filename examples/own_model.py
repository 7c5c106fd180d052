"""A model and a dataset that are defined in the script itself: `python own_model.py`.

Samples repeat a pattern of four tokens, so what comes next is known once the pattern was seen.
"""

import numpy as np
import torch
from torch import nn

import elaswave_spmd as ew


class Block(nn.Module):
    def __init__(self, d_model, window):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.past = nn.ConstantPad1d((window - 1, 0), 0.0)
        self.conv = nn.Conv1d(d_model, d_model, window)

    def forward(self, x):
        return x + self.conv(self.past(self.norm(x).mT)).mT.relu()


class Net(ew.LayeredModel):
    shardings = ew.Shardings(grads=ew.P("dp"), optim=ew.P("dp"))

    def __init__(self, vocab_size, layers, d_model, window=4):
        embed = nn.Embedding(vocab_size, d_model)
        blocks = {f"block{i}": Block(d_model, window) for i in range(layers)}
        super().__init__({"embed": embed, **blocks, "head": nn.Linear(d_model, vocab_size)})


class Patterns:
    """Samples of 17 tokens: the first 16 are the input, and each has the next one as its target."""

    vocab_size = 12

    def __init__(self, number):
        self.patterns = np.random.default_rng(0).integers(0, self.vocab_size, (number, 4))

    def __len__(self):
        return len(self.patterns)

    def __getitem__(self, index):
        return np.tile(self.patterns[index], 5)[:17]


settings = {
    "model.layers": 2,
    "model.d_model": 32,
    "train.seq_len": 16,
    "train.global_batch": 32,
    "train.microbatch_size": 8,
    "train.validate_every": 20,
    "optim.lr": 1e-2,
    "optim.warmup_steps": 5,
}
run = ew.train(Net, Patterns(2000), "dp2_pp2", steps=60, settings=settings)
print(run)

model = ew.load_model(run.run_dir, Net)
sample = torch.from_numpy(np.tile([3, 1, 4, 1], 5)[:17])
guesses = model(sample[None, :-1])[0].argmax(-1)
print(f"of the last 12 tokens {int((guesses == sample[1:])[4:].sum())} are as the model expects them")
