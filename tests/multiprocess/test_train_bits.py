"""Real runs, `python train.py`, have the bits of the one-process reference: a pairwise covering selection."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from elaswave_spmd.data import DataSpec, PreparedData, open_split, prepare_data
from elaswave_spmd.models import GPT, LayeredModel, Llama
from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from elaswave_spmd.worker.learning_rate import LearningRate
from tests import reference
from tests.multiprocess.real_runs import SMALL, TOKENS, train, write_text
from tests.simulated.bits_cases import one_thread, validation_loss

STEPS, MICROBATCH, VALIDATION_MICROBATCHES = 6, 2, 2


@dataclass(frozen=True)
class Arithmetic:
    """The settings that the bits may depend on."""

    model: str
    dtype: str
    microbatches: int

    def make(self) -> LayeredModel:
        if self.model == "gpt":
            return GPT(vocab_size=256, seq_len=TOKENS, layers=2, d_model=16, heads=2, dropout=0.1)
        return Llama(vocab_size=256, layers=2, d_model=16, heads=2, kv_heads=2, tied=True)

    @property
    def overrides(self) -> list[str]:
        model = ["model=gpt_tiny", "model.dropout=0.1"] if self.model == "gpt" else ["model=llama_tiny"]
        return [*model, f"runtime.dtype={self.dtype}", f"train.global_batch={self.microbatches * MICROBATCH}"]


GPT_16, LLAMA_32 = Arithmetic("gpt", "bf16", 5), Arithmetic("llama", "fp32", 4)
RUNS = [  # mesh, ZeRO level, arithmetic, transport, checkpointing
    ("mesh=single", 2, GPT_16, "ipc", True),
    ("mesh=dp2", 1, GPT_16, "ipc", False),
    ("mesh=dp3", 1, LLAMA_32, "tcp", True),
    ("mesh=dp4", 2, LLAMA_32, "tcp", False),
    ("mesh=pp2", 3, Arithmetic("gpt", "fp32", 4), "ipc", False),
    ("mesh=pp3", 0, Arithmetic("gpt", "fp32", 4), "ipc", True),
    ("mesh=dp2_pp2", 0, Arithmetic("llama", "fp32", 5), "ipc", False),
    ("mesh=dp3_pp2", 3, Arithmetic("llama", "bf16", 5), "ipc", True),
    ("mesh.stages=[3,2]", 0, Arithmetic("gpt", "bf16", 4), "tcp", True),
    ("mesh.stages=[1,3]", 3, Arithmetic("llama", "fp32", 5), "tcp", False),
]


@cache
def data(folder: Path) -> PreparedData:
    write_text(folder)
    return prepare_data(DataSpec("text", str(folder / "text.txt"), cache=str(folder / "cache"), seq_len=TOKENS))


@cache
@one_thread()
def wanted(arithmetic: Arithmetic, folder: Path) -> tuple[reference.Result, float]:
    """The reference's result, and the loss on the validation split with its weights."""
    rate = LearningRate(2e-3, "cosine", warmup_steps=2, num_steps=STEPS)
    dtype = torch.float32 if arithmetic.dtype == "fp32" else torch.bfloat16
    settings = reference.Settings(
        rate.at, 0, STEPS, arithmetic.microbatches * MICROBATCH, MICROBATCH, dtype=dtype, page_size=256, clip=1.0
    )
    result = reference.train(arithmetic.make(), open_split(data(folder), "train"), settings)
    split = open_split(data(folder), "validation")
    sizes = {"microbatches": VALIDATION_MICROBATCHES, "microbatch_size": MICROBATCH}
    total = validation_loss(arithmetic.make(), result.weights, split, dtype=arithmetic.dtype, **sizes)
    return result, total / (VALIDATION_MICROBATCHES * MICROBATCH * TOKENS)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the corpus, its tokens and all runs."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("mesh, zero, arithmetic, transport, checkpointing", RUNS, ids=[run[0] for run in RUNS])
def test_a_real_run_has_the_bits_of_the_reference(
    shared: Path, mesh: str, zero: int, arithmetic: Arithmetic, transport: str, checkpointing: bool
) -> None:
    result, validation = wanted(arithmetic, shared)
    run_dir = "_".join(re.findall(r"\w+", mesh))
    done = train(
        shared,
        *SMALL,
        *arithmetic.overrides,
        mesh,
        f"sharding=zero{zero}",
        f"runtime.transport={transport}",
        f"runtime.activation_checkpointing={str(checkpointing).lower()}",
        f"run.dir={run_dir}",
    )
    assert done.code == 0, done.err
    lines, summary = read_metrics(shared / run_dir), read_summary(shared / run_dir)
    assert [line.loss_hex for line in lines] == result.loss_hex
    assert [line.grad_norm_hex for line in lines] == result.grad_norm_hex
    assert summary["weights_sha256"] == result.weights_sha256
    assert summary["final_loss_hex"] == result.loss_hex[-1]
    validations = [event["loss_hex"] for event in read_events(shared / run_dir) if event["event"] == "validation"]
    assert len(validations) == 2 and validations[-1] == validation.hex()


def test_the_selection_covers_every_pair_of_values() -> None:
    rows = [(zero, a.model, a.dtype, a.microbatches, transport, kept) for _, zero, a, transport, kept in RUNS]
    columns = list(zip(*rows, strict=True))
    for first, second in itertools.combinations(range(len(columns)), 2):
        pairs = {(row[first], row[second]) for row in rows}
        assert pairs == set(itertools.product(set(columns[first]), set(columns[second])))
    assert len({mesh for mesh, *_ in RUNS}) == len(RUNS)
