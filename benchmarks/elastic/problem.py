"""What is trained: a small GPT in plain torch, its samples, its optimizer, and the order of the samples.

Every system imports this file, so all have the same initial values, samples and updates. It needs torch and numpy only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

VOCAB_SIZE, SEQ_LEN = 32, 64
NUM_SAMPLES = 65_536
_WIDTH, _LAYERS, _HEADS = 128, 4, 4
LEARNING_RATE, BETAS, EPS, CLIP = 1e-3, (0.9, 0.95), 1e-8, 1.0


@dataclass(frozen=True)
class Job:
    """What a system is asked to do: job.json in its directory."""

    directory: str
    steps: int
    workers: int
    global_batch: int
    seed: int

    @classmethod
    def read(cls, directory: str) -> Job:
        return cls(**json.loads((Path(directory) / "job.json").read_text()))

    def write(self, order: Sequence[Sequence[int]]) -> None:
        """Writes job.json, and order.json with the sample ids of each step."""
        folder = Path(self.directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.json").write_text(json.dumps(asdict(self)))
        (folder / "order.json").write_text(json.dumps(order))

    def order(self) -> list[list[int]]:
        """The sample ids of step 1, 2, ...; with some steps more than the job has."""
        return json.loads((Path(self.directory) / "order.json").read_text())


def sample(index: int) -> np.ndarray:
    """Tokens [SEQ_LEN + 1]: each is the sum of the two before it, with a mistake now and then."""
    draw = np.random.default_rng([11, index])
    row = draw.integers(0, VOCAB_SIZE, SEQ_LEN + 1)
    exact = draw.random(SEQ_LEN + 1) < 0.9
    for i in range(2, SEQ_LEN + 1):
        if exact[i]:
            row[i] = (row[i - 1] + row[i - 2]) % VOCAB_SIZE
    return row


def batch(ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Tokens and targets of some samples, both int64 [B, SEQ_LEN]."""
    rows = torch.from_numpy(np.stack([sample(i) for i in ids]))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Embed(nn.Module):
    """Token and position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB_SIZE, _WIDTH), nn.Embedding(SEQ_LEN, _WIDTH)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.token(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (z.view(B, T, _HEADS, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(B, T, D))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def layers() -> dict[str, nn.Module]:
    """The layers by name, with their initial values, which depend on nothing but this file."""
    made: dict[str, nn.Module] = {"embed": Embed()}
    made |= {f"block{i}": Block() for i in range(_LAYERS)}
    made["head"] = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, VOCAB_SIZE, bias=False))
    source = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for layer in made.values():
            for name, parameter in layer.named_parameters():
                if parameter.dim() >= 2:  # the weights of norms stay 1
                    parameter.normal_(0.0, 0.02, generator=source)
                elif name.endswith("bias"):
                    parameter.zero_()
    return made


def model() -> nn.Sequential:
    """The model as a plain module: tokens [B, T] -> logits [B, T, VOCAB_SIZE]."""
    return nn.Sequential(*layers().values())


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy, mean over all tokens."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def adamw(parameters: nn.Module) -> torch.optim.AdamW:
    """AdamW without weight decay, at a constant rate."""
    rate, betas = LEARNING_RATE, BETAS
    return torch.optim.AdamW(parameters.parameters(), lr=rate, betas=betas, eps=EPS, weight_decay=0.0, fused=True)


def share(ids: Sequence[int], place: int, workers: int) -> Sequence[int]:
    """The part of a step's samples that one of some workers has: parts are even, to a sample."""
    return ids[len(ids) * place // workers : len(ids) * (place + 1) // workers]
