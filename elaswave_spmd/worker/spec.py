"""What a worker needs to know of a run, besides its placement: plain values, the same on every worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elaswave_spmd.worker.learning_rate import LearningRate
from elaswave_spmd.worker.optimizers import PageOptimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Job:
    """The arithmetic of a run. Everything here is part of its identity: change it and bits change.

    Args:
        seed: of every random number.
        steps: steps to train.
        global_batch: sequences per step; a multiple of `microbatch_size`.
        microbatch_size: sequences per micro-batch.
        seq_len: tokens per sequence.
        dtype: "fp32" or "bf16": of parameters and activations in layer programs; master state is fp32.
        optimizer, learning_rate: the update.
        clip: largest gradient norm; 0 for none.
        checkpointing: keep only layer inputs, run each layer again for its backward.
        validate_every: steps between validations; 0 for none. The last step validates too.
        validation_microbatches: micro-batches of a validation.
        verify_every: steps between two comparisons of the copies of state by their hashes; 0 for none.
    """

    seed: int
    steps: int
    global_batch: int
    microbatch_size: int
    seq_len: int
    dtype: str
    optimizer: PageOptimizer
    learning_rate: LearningRate
    clip: float = 0.0
    checkpointing: bool = False
    validate_every: int = 0
    validation_microbatches: int = 0
    verify_every: int = 0

    def __post_init__(self) -> None:
        assert self.global_batch % self.microbatch_size == 0 and self.dtype in DTYPES, self

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // self.microbatch_size

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def validates(self) -> bool:
        """Whether there is any validation in the run."""
        return self.validate_every > 0 and self.validation_microbatches > 0

    def validates_at(self, step: int) -> bool:
        return self.validates and (step % self.validate_every == 0 or step == self.steps)
