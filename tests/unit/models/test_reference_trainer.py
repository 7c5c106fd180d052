"""The reference trainer against plain PyTorch, and its own rules on small cases."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from elaswave_spmd.determinism import Keys, materialize, sample_ids
from elaswave_spmd.models import GPT, Batch, LayeredModel, Llama
from tests.reference import Settings, gradient_norm, train, tree

T, V = 12, 29


class Text:
    """Thirty samples of T + 1 tokens."""

    def __len__(self) -> int:
        return 30

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = np.stack([(np.arange(T + 1) * (i + 1) + i * i) % V for i in np.asarray(ids)])
        return rows[:, :-1], rows[:, 1:]


def gpt(dropout: float = 0.1) -> LayeredModel:
    return GPT(vocab_size=V, seq_len=T, layers=2, d_model=16, heads=2, dropout=dropout)


def llama() -> LayeredModel:
    return Llama(vocab_size=V, layers=2, d_model=16, heads=2, kv_heads=1, dropout=0.1, tied=True)


SETTINGS = Settings(lr_at=lambda step: 1e-2 / step, seed=3, steps=4, global_batch=6, microbatch_size=2)


GROUPS = ((("embed.*", "head.weight"), 0.25, None), (("*.bias", "head.*"), None, 0.3), (("block0.*.weight",), 3.0, 0.0))


@pytest.mark.parametrize("in_groups", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_one_microbatch_without_clipping_is_plain_pytorch(optimizer: str, in_groups: bool) -> None:
    s = replace(SETTINGS, microbatch_size=6, clip=0.0, optimizer=optimizer, groups=GROUPS if in_groups else ())
    ours = train(gpt(), Text(), s)
    model, losses = gpt(), []
    with torch.no_grad():
        for name, p in model.named_parameters():
            values = materialize(model.init(name, tuple(p.shape)), s.seed, name, 0, p.numel())
            p.copy_(torch.from_numpy(values).view(p.shape))
    # One group for each parameter, with the rules written out.
    scale_of, groups = {}, []
    for name, p in model.named_parameters():
        scale, decay = 1.0, 0.1 if p.ndim >= 2 else 0.0
        if in_groups:
            scale = 0.25 if name.startswith("embed.") or name == "head.weight" else scale
            decay = 0.3 if name.endswith(".bias") or name.startswith("head.") else decay
            if name.startswith("block0.") and name.endswith(".weight"):
                scale, decay = 3.0, 0.0
        scale_of[name] = scale
        groups.append({"params": [p], "weight_decay": decay, "name": name})
    plain = (
        torch.optim.AdamW(groups, lr=1.0, betas=s.betas, eps=s.eps, fused=True)
        if optimizer == "adamw"
        else torch.optim.SGD(groups, lr=1.0, momentum=s.momentum, foreach=False)
    )
    for step in range(1, s.steps + 1):
        ids = sample_ids(s.seed, step, s.global_batch, 30)
        tokens, targets = (torch.from_numpy(z) for z in Text().batch(ids))
        loss = model.loss(model(tokens, Keys.make(s.seed, step, ids, 0)), Batch(tokens, targets)) * (
            1.0 / tokens.numel()
        )
        loss.backward()
        losses.append(float(loss.detach()).hex())
        for group in plain.param_groups:
            group["lr"] = s.lr_at(step) * scale_of[group["name"]]
        plain.step()
        plain.zero_grad()
    assert ours.loss_hex == losses
    for name, p in model.named_parameters():
        assert torch.equal(p, ours.weights[name]), name


@pytest.mark.parametrize("make", [gpt, llama])
def test_the_size_of_microbatches_changes_rounding_only(make: object) -> None:
    runs = [train(make(), Text(), replace(SETTINGS, microbatch_size=size)) for size in (1, 2, 3, 6)]  # type: ignore[operator]
    curves = [[float.fromhex(x) for x in run.loss_hex] for run in runs]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-4)
    assert curves[0][0] == pytest.approx(math.log(V), rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_repeats_itself_and_depends_on_its_seed(dtype: torch.dtype) -> None:
    s = replace(SETTINGS, dtype=dtype, steps=2)
    one, same, other = train(llama(), Text(), s), train(llama(), Text(), s), train(llama(), Text(), replace(s, seed=4))
    assert one.loss_hex == same.loss_hex and one.weights_sha256 == same.weights_sha256
    assert one.grad_norm_hex == same.grad_norm_hex and one.grad_norm_hex != other.grad_norm_hex
    assert "head.weight" not in one.weights and all(w.dtype == torch.float32 for w in one.weights.values())


def test_the_tree_splits_at_the_largest_power_of_two() -> None:
    def leaf(microbatch: int) -> list[Tensor]:
        return [torch.tensor(float(microbatch), dtype=torch.float64)]

    class Sum(list):  # adds by recording what was added
        def __add__(self, other: object) -> Sum:  # type: ignore[override]
            return Sum([f"({self[0]}{other[0]})"])  # type: ignore[index]

    assert tree(leaf, 0, 10)[0] == 45
    assert tree(lambda microbatch: [Sum([str(microbatch)])], 0, 7)[0][0] == "(((01)(23))((45)6))"  # type: ignore[arg-type]


def test_the_norm_counts_each_parameter_once_in_pages() -> None:
    model = llama()
    grads = {n: torch.randn(p.shape) for n, p in model.named_parameters() if n != "head.weight"}
    exact = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads.values()))
    for page_size in (64, 192, 4096):
        assert gradient_norm(model, grads, replace(SETTINGS, page_size=page_size)) == pytest.approx(exact, rel=1e-6)
    grads["embed.weight"][3, 3] = math.inf
    assert math.isnan(gradient_norm(model, grads, replace(SETTINGS, page_size=64)))


def test_clipping_and_gradients_that_are_not_finite() -> None:
    free, tight = (train(gpt(), Text(), replace(SETTINGS, optimizer="sgd", clip=c)) for c in (0.0, 1e-3))
    assert free.loss_hex[0] == tight.loss_hex[0] and free.loss_hex[1] != tight.loss_hex[1]

    class Broken(GPT):
        def loss(self, output: Tensor, batch: Batch) -> Tensor:
            return super().loss(output, batch) * math.inf

    broken = Broken(vocab_size=V, seq_len=T, layers=1, d_model=16, heads=2)
    before = {n: materialize(broken.init(n, tuple(p.shape)), 3, n, 0, p.numel()) for n, p in broken.named_parameters()}
    run = train(broken, Text(), replace(SETTINGS, steps=2))
    assert run.grad_norm_hex == ["nan", "nan"]
    for name, w in run.weights.items():
        np.testing.assert_array_equal(w.numpy().reshape(-1), before[name])
