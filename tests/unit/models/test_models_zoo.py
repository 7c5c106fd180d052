from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import KeyedDropout, Keys, Normal, materialize
from elaswave_spmd.errors import ModelError, UserError
from elaswave_spmd.models import GPT, MLP, Batch, LayeredModel, Llama
from elaswave_spmd.models.llama import RMSNorm, RopeScaling, rotary_tables, rotate
from elaswave_spmd.sharding import P, specs_of

B, T, V, D = 2, 16, 37, 32
SIZES: dict[str, Any] = {"vocab_size": V, "layers": 2, "d_model": D, "dropout": 0.1}
MODELS = {
    "gpt": lambda **kw: GPT(seq_len=T, heads=4, **(SIZES | kw)),
    "gpt tied": lambda **kw: GPT(seq_len=T, heads=4, tied=True, **(SIZES | kw)),
    "llama": lambda **kw: Llama(heads=4, **(SIZES | kw)),
    "llama grouped, tied": lambda **kw: Llama(heads=4, kv_heads=2, tied=True, **(SIZES | kw)),
    "mlp": lambda **kw: MLP(**(SIZES | kw)),
}
every_model = pytest.mark.parametrize("name", MODELS)


def initialised(name: str, **kw: Any) -> LayeredModel:
    model = MODELS[name](**kw)
    with torch.no_grad():
        for path, p in model.named_parameters():
            values = materialize(model.init(path, tuple(p.shape)), 1, path, 0, p.numel())
            p.copy_(torch.from_numpy(values).view(p.shape))
    return model


def tokens() -> Tensor:
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(0))


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layer_keeps_shape_dtype_and_layout(name: str, dtype: torch.dtype) -> None:
    model = initialised(name).to(dtype)
    x = tokens()
    keys = Keys.make(1, 1, [5, 6], 0)
    for number, layer in enumerate(model.layers):
        if number:
            x = x.detach().requires_grad_()
        y = layer(x, keys.at(number))
        assert y.dtype == dtype and y.is_contiguous()
        assert y.shape == ((B, T, V) if number == len(model.layers) - 1 else (B, T, D))
        y.backward(torch.ones_like(y))
        assert number == 0 or (x.grad is not None and x.grad.dtype == dtype and x.grad.is_contiguous())
        for p in layer.parameters():
            assert p.grad is not None and p.grad.dtype == dtype and torch.isfinite(p.grad).all()
        x = y
    loss = model.loss(x, Batch(tokens(), tokens()))
    assert loss.dtype == torch.float32 and 0.8 < loss.item() / (B * T * torch.log(torch.tensor(float(V)))) < 1.2


@every_model
def test_nothing_is_allocated_on_the_meta_device_and_there_are_no_buffers(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    assert all(p.is_meta for p in model.parameters()) and not list(model.buffers())
    assert model.layer_names == ("embed", "block0", "block1", "head")


@every_model
def test_no_token_sees_a_later_one(name: str) -> None:
    model = initialised(name).eval()
    x = tokens()
    changed = x.clone()
    changed[:, 9] = (x[:, 9] + 1) % V
    with torch.no_grad():
        before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9], after[:, 9])
    assert not torch.allclose(before[:, 10], after[:, 10]), "the past is seen"


@every_model
def test_training_draws_by_key_and_evaluation_draws_nothing(name: str) -> None:
    model = initialised(name)
    state = torch.get_rng_state()
    one, same, other = (model(tokens(), Keys.make(1, step, [5, 6], 0)) for step in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    model.eval()
    assert torch.equal(model(tokens()), model(tokens(), Keys.make(1, 9, [0, 0], 0)))
    assert torch.equal(state, torch.get_rng_state())


@every_model
def test_a_sample_has_one_result_beside_any_other(name: str) -> None:
    model, x = initialised(name), tokens()
    both = model(x, Keys.make(1, 1, [5, 6], 0))
    turned = model(x.flip(0), Keys.make(1, 1, [6, 5], 0))
    torch.testing.assert_close(both, turned.flip(0))


@every_model
def test_annotations_name_real_parameters(name: str) -> None:
    model = MODELS[name]()
    names = {path for path, _ in model.named_parameters()}
    specs = specs_of(model)
    assert specs and specs.keys() <= names
    path, spec = ("up", P("tp", None)) if name == "mlp" else ("mlp.up", P("tp", "fsdp"))
    assert specs[f"block0.{path}.weight"] == spec
    assert model.shardings.name == "zero2"


@pytest.mark.compiler
@every_model
def test_layers_are_compiled_whole_and_once_for_all_blocks(name: str) -> None:
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    model, counter = initialised(name), CompileCounter()
    programs = [torch.compile(layer, backend=counter, fullgraph=True) for layer in model.layers]
    for step in (1, 2):
        x = tokens()
        for number, program in enumerate(programs):
            x = program(x, Keys.make(1, step, [step, 2**40], number)).detach().requires_grad_(number == 0)
            x = x.detach().requires_grad_()
    assert counter.frame_count <= len(programs)
    torch.compiler.reset()


def test_ties_are_declared() -> None:
    assert MODELS["gpt"]().ties == () and str(MODELS["gpt tied"]().ties[0]) == "head.weight = embed.weight"
    assert str(MODELS["llama grouped, tied"]().ties[0]) == "head.weight = embed.weight"


def test_layers_that_feed_the_residual_stream_begin_smaller() -> None:
    for model in (MODELS["gpt"](), MODELS["llama"]()):
        assert model.init("block1.mlp.down.weight", (D, 4 * D)) == Normal(0.01)
        assert model.init("block1.attn.out.weight", (D, D)) == Normal(0.01)
        assert model.init("block1.mlp.up.weight", (4 * D, D)) == Normal(0.02)


def test_dropout_is_in_every_place_that_the_size_asks_for() -> None:
    for name, make in MODELS.items():
        drops = [m for m in make().modules() if isinstance(m, KeyedDropout)]
        assert len(drops) == (3 if name == "mlp" else 5) and {d.p for d in drops} == {0.1}


def test_rms_norm_equals_torch() -> None:
    x, norm, reference = torch.randn(2, 3, 8), RMSNorm(8), nn.RMSNorm(8, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(8.0))
        reference.weight.copy_(torch.arange(8.0))
    torch.testing.assert_close(norm(x), reference(x))


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    cos, sin = rotary_tables(12, 8, 10000.0, torch.device("cpu"))
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (12, 8)
    q, k = torch.randn(8), torch.randn(8)
    q_turned, k_turned = rotate(q.expand(1, 1, 12, 8), cos, sin)[0, 0], rotate(k.expand(1, 1, 12, 8), cos, sin)[0, 0]
    torch.testing.assert_close(q_turned.norm(dim=-1), q.norm().expand(12))
    scores = q_turned @ k_turned.T
    for distance in (0, 3, 7):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert rotate(q.bfloat16().expand(1, 1, 12, 8), cos, sin).dtype == torch.bfloat16


def test_parameters_of_the_known_sizes() -> None:
    def count(model: LayeredModel) -> int:
        readers = {t.reader for t in model.ties}
        return sum(p.numel() for name, p in model.named_parameters() if name not in readers)

    with torch.device("meta"):
        gpt2 = GPT(vocab_size=50257, seq_len=1024, layers=12, d_model=768, heads=12, tied=True)
        llama = Llama(vocab_size=32000, layers=32, d_model=4096, heads=32, hidden=11008)
    assert count(gpt2) == 124_439_808
    assert count(llama) == 6_738_415_616


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MODELS["gpt"](d_model=30), "heads in 1, 2, 3, 5, 6, 10, 15, 30"),
        (lambda: Llama(heads=4, kv_heads=3, **SIZES), "kv_heads in 1, 2, 4"),
        (lambda: Llama(heads=32, **SIZES), "even"),
        (lambda: MLP(window=0, **SIZES), "window"),
        (lambda: MODELS["gpt"](dropout=1.0), r"\[0, 1\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        make()
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("norm_eps", [0.0, -1e-5, float("nan"), float("inf"), "1e-5", True])
def test_norm_eps_is_a_number_above_0(name: str, norm_eps: Any) -> None:
    with pytest.raises(ModelError, match=r"norm_eps=.* is not a number above 0"):
        MODELS[name](norm_eps=norm_eps)


def test_the_eps_of_all_norms_is_the_given_one() -> None:
    for name in ("gpt", "llama"):
        found = [m.eps for m in MODELS[name](norm_eps=3e-4).modules() if isinstance(m, nn.LayerNorm | RMSNorm)]
        assert found == [3e-4] * 5


SCALING = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({**SCALING, "factor": 0}, "rope_scaling.factor=0 is not a number above 0"),
        ({**SCALING, "high_freq_factor": 1}, "high_freq_factor=1 and low_freq_factor=1"),
        ({"factor": 8}, "is not a mapping with these fields"),
        ({**SCALING, "rope_type": "llama3"}, "is not a mapping with these fields"),
        ("llama3", "is not a mapping with these fields"),
    ],
)
def test_a_scaling_of_rotary_positions_that_is_none_is_refused(given: Any, told: str) -> None:
    with pytest.raises(ModelError) as caught:
        MODELS["llama"](rope_scaling=given)
    assert told in str(caught.value) and caught.value.fix


def test_slow_frequencies_are_divided_and_fast_ones_stay() -> None:
    scaling = RopeScaling.of(SCALING)
    assert scaling is not None
    turns = torch.tensor([0.1, 1.0, 2.5, 4.0, 9.0])
    frequency = turns * 2 * torch.pi / 64
    share = scaling.scaled(frequency) / frequency
    assert torch.allclose(share, torch.tensor([1 / 8, 1 / 8, (1 / 8 + 1) / 2, 1.0, 1.0]))


def test_positions_beyond_the_sequence() -> None:
    assert MODELS["gpt"](positions=T + 3).get_parameter("embed.positions").shape == (T + 3, D)
    with pytest.raises(ModelError, match=f"positions={T - 1} is below seq_len={T}"):
        MODELS["gpt"](positions=T - 1)
