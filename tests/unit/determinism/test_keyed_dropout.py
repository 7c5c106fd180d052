from __future__ import annotations

import ast
import inspect
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elaswave_spmd.data.samples import SampleKeys
from elaswave_spmd.determinism import KeyedDropout, Keys, dropout, keyed_dropout
from elaswave_spmd.determinism.dropout import keep_mask_numpy, keep_mask_torch
from elaswave_spmd.errors import ModelError

CPU = torch.device("cpu")
sample = st.integers(0, 2**63 - 1)


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def oracle(x: Tensor, p: float, keys: Keys, word: int) -> Tensor:
    return (x * keep_mask_torch(tuple(x.shape), p, keys, word, CPU)) * (1.0 / (1.0 - p))


@given(
    sample,
    st.integers(0, 2**40),
    st.lists(sample, min_size=1, max_size=4),
    st.integers(0, 1000),
    st.integers(0, 2**20),
    st.lists(st.integers(1, 7), max_size=2),
    st.floats(1e-9, 0.999),
)
def test_torch_operators_and_randomgen_agree(
    seed: int, step: int, ids: list[int], layer: int, word: int, rest: list[int], p: float
) -> None:
    keys, shape = Keys.make(seed, step, ids, layer), (len(ids), *rest)
    fast = torch.from_numpy(keep_mask_numpy(shape, p, keys, word))
    assert torch.equal(fast, keep_mask_torch(shape, p, keys, word, CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_values_and_gradients_equal_the_oracle_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 11).to(dtype).requires_grad_()
    dy = torch.randn(3, 5, 11).to(dtype)
    keys = Keys.make(1, 2, [9, 2**50, 0], 4)
    fast, slow = keyed_dropout(x, 0.3, keys, 1), oracle(x, 0.3, keys, 1)
    assert fast.dtype == dtype and bits(fast.detach()) == bits(slow.detach())
    fast_dx, slow_dx = (torch.autograd.grad(y, x, dy)[0] for y in (fast, slow))
    assert fast_dx.dtype == dtype and bits(fast_dx) == bits(slow_dx)


def test_a_sample_has_one_mask_in_any_microbatch() -> None:
    x = torch.ones(4, 6, 10)
    ids = [5, 17, 2**40, 3]
    together = keyed_dropout(x, 0.5, Keys.make(1, 2, ids, 3), 0)
    for row, one in enumerate(ids):
        alone = keyed_dropout(x[:1], 0.5, Keys.make(1, 2, [one], 3), 0)
        assert torch.equal(alone[0], together[row])
    turned = keyed_dropout(x, 0.5, Keys.make(1, 2, ids[::-1], 3), 0)
    assert torch.equal(turned.flip(0), together)


def test_a_sample_has_one_generator_in_any_microbatch_and_each_call_begins_it_again() -> None:
    def draw(keys: Keys, row: int) -> list[float]:
        return torch.randn(8, generator=keys.generator(row)).tolist()

    keys = Keys.make(-1, 2**33, [5, 2**50], 3)
    assert draw(keys, 1) == draw(keys, 1) == draw(keys.again(), 1)
    assert draw(keys, 1) == draw(Keys.make(-1, 2**33, [2**50, 7, 5], 3), 0)
    sample = torch.randn(8, generator=SampleKeys(1, 2, 3).generator()).tolist()
    assert sample != draw(Keys.make(1, 2, [0], 3), 0), "a layer's noise is no sample's augmentation"
    others = [Keys.make(1, 2**33, [5], 3), Keys.make(-1, 1, [5], 3), keys.at(4), Keys.make(-1, 2**33, [6], 3)]
    assert len({tuple(draw(one, 0)) for one in (keys, *others)}) == 5


def test_every_part_of_the_key_counts() -> None:
    x = torch.ones(1, 64)
    variants = [
        (a, b, c, d, e) for a in (1, 2**33) for b in (1, 2**33) for c in (0, 2**33) for d in (0, 1) for e in (0, 1)
    ]
    masks = {bits(keyed_dropout(x, 0.5, Keys.make(a, b, [c], d), e)) for a, b, c, d, e in variants}
    assert len(masks) == len(variants)


def test_the_share_kept_and_the_mean() -> None:
    x = torch.ones(8, 64, 256)
    y = keyed_dropout(x, 0.1, Keys.make(1, 1, list(range(8)), 0), 0)
    assert abs((y == 0).float().mean().item() - 0.1) < 0.003
    assert abs(y.mean().item() - 1.0) < 0.004
    assert torch.equal(y[y != 0], torch.full_like(y[y != 0], 1.0 / (1.0 - 0.1)))


def test_no_dropout_is_the_identity() -> None:
    x, keys = torch.randn(2, 3), Keys.make(1, 1, [0, 1], 0)
    for p in (0.0, 0.1 * 3 - 0.3, 1e-17):  # the second is what rounding leaves of 0
        assert keyed_dropout(x, p, keys, 0) is x
    assert keyed_dropout(x, 2.0**-53, keys, 0) is not x, "a mask is drawn, which drops nothing here"
    module = KeyedDropout(0.5).eval()
    assert module(x, keys) is x and module(x, None) is x


def test_uses_of_one_module_within_a_call_differ_and_a_second_call_repeats_them() -> None:
    module, x, keys = KeyedDropout(0.5), torch.ones(2, 100), Keys.make(1, 1, [0, 1], 0)
    first, second = module(x, keys), module(x, keys)
    assert not torch.equal(first, second)
    again = keys.again()
    assert torch.equal(module(x, again), first) and torch.equal(module(x, again), second)
    assert not torch.equal(module(x, keys.at(1)), first)


def test_masks_of_one_call_do_not_repeat() -> None:
    """A use has 12 bits of the key: with one more it would be that of the first use."""
    drop, keys, x = KeyedDropout(0.5), Keys.make(1, 2, [3], 4), torch.ones(1, 256)
    masks = {bits(drop(x, keys)) for _ in range(4096)}
    assert len(masks) == 4096
    with pytest.raises(ModelError, match=r"(?s)dropout 0 .* time 4,097 .*has 4,096 masks.*several KeyedDropouts"):
        drop(x, keys)
    assert bits(drop(x, keys.again())) in masks, "another call begins anew"


class Parts(nn.Module):
    """Two modules that are called twice each, and a dropout that is used outside of them as well."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(8, 8, generator=draw))
        self.drops = nn.ModuleList([KeyedDropout(0.3), KeyedDropout(0.5)])
        for site, drop in enumerate(self.drops):
            assert isinstance(drop, KeyedDropout)
            drop.site = site

    def part(self, x: Tensor, keys: Keys) -> Tensor:
        return self.drops[0](torch.tanh(x @ self.weight), keys) + self.drops[1](x, keys)

    def forward(self, x: Tensor, keys: Keys, call: Callable[..., Tensor]) -> Tensor:
        x = self.drops[0](x, keys)
        for _ in range(2):
            x = call(keys, self.part, x)
        x = call(keys, lambda x, keys: call(keys, self.part, x) * 2, x)  # one within another
        return self.drops[0](x, keys)


def test_a_function_of_a_layer_that_is_computed_again_has_the_masks_of_a_plain_call() -> None:
    def run(call: Callable[..., Tensor]) -> tuple[list[bytes], dict[int, int], dict[int, int]]:
        layer, keys = Parts(), Keys.make(1, 2, [5, 6], 3)
        x = torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
        y = layer(x, keys, call)
        forward = dict(keys.uses)
        y.square().sum().backward()
        assert x.grad is not None and layer.weight.grad is not None
        return [bits(one.detach()) for one in (y, x.grad, layer.weight.grad)], forward, dict(keys.uses)

    found = run(lambda keys, function, x: keys.checkpoint(function, x))
    assert found == run(lambda keys, function, x: function(x, keys))
    assert found[1] == found[2] == {0: 5, 1: 3}
    other, uses, after = run(lambda keys, function, x: checkpoint(function, x, keys, use_reentrant=False))
    assert other[0] == found[0][0] and other[1:] != found[0][1:], "the gradient of other masks"
    assert uses == found[1] and after != uses, "which the keys tell"


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_a_probability_outside_its_range_is_refused(p: float) -> None:
    with pytest.raises(ModelError, match=r"\[0, 1\)"):
        KeyedDropout(p)
    with pytest.raises(ModelError, match=r"\[0, 1\)"):
        keyed_dropout(torch.ones(1, 1), p, Keys.make(1, 1, [0], 0), 0)


def test_rows_and_sample_ids_must_match() -> None:
    keys = Keys.make(1, 1, [0, 1], 0)
    with pytest.raises(ModelError, match="one row per sample id"):
        keep_mask_numpy((3, 4), 0.1, keys, 0)
    with pytest.raises(ModelError, match="one row per sample id"):
        keep_mask_torch((3, 4), 0.1, keys, 0, CPU)


@pytest.mark.compiler
def test_a_compiled_program_gives_the_same_bits_and_is_traced_once() -> None:
    from torch._dynamo.testing import CompileCounter

    module = KeyedDropout(0.3)

    def twice(x: Tensor, keys: Keys) -> Tensor:
        return module(module(x, keys), keys)

    counter = CompileCounter()
    compiled = torch.compile(twice, backend=counter, fullgraph=True)
    for step in range(3):
        x = torch.randn(2, 5, 7, requires_grad=True)
        ids, layer = [step, 2**40 + step], step
        eager = twice(x, Keys.make(1, step, ids, layer))
        traced = compiled(x, Keys.make(1, step, ids, layer))
        assert bits(eager.detach()) == bits(traced.detach())
    assert counter.frame_count == 1


def test_on_the_meta_device_only_shapes_are_made() -> None:
    x = torch.empty(2, 5, device="meta")
    assert keyed_dropout(x, 0.5, Keys.make(1, 1, [0, 1], 0), 0).shape == (2, 5)


def test_nothing_is_shifted_by_a_number() -> None:
    """XLA divides for it, and rounds negative words to zero: other masks, silently."""
    tree = ast.parse(inspect.getsource(dropout))
    shifts = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.RShift)]
    assert shifts == [] and "bitwise_right_shift" in inspect.getsource(dropout)
