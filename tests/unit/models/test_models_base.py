from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from elaswave_spmd.determinism import Constant, KeyedDropout, Keys, Normal
from elaswave_spmd.errors import LayoutError, ModelError, SpecError
from elaswave_spmd.models import Batch, LayeredModel, takes_keys
from elaswave_spmd.sharding import P, Shardings, Tie, shard, specs_of, tie
from elaswave_spmd.worker.model_layout import describe


class Plain(nn.Module):
    """A layer around whatever module is to be tried."""

    def __init__(self, *inner: nn.Module, sizes: tuple[int, ...] = (4, 4)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(sizes))
        self.inner = nn.ModuleList(inner)

    def forward(self, x: Tensor, keys: Keys) -> Tensor:
        return x


def stack(*layers: nn.Module, ties: tuple[Tie, ...] = ()) -> LayeredModel:
    return LayeredModel({f"layer{i}": layer for i, layer in enumerate(layers)}, ties)


def test_names_layers_and_rules() -> None:
    model = stack(Plain(nn.LayerNorm(4)), Plain())
    assert model.layer_names == ("layer0", "layer1")
    assert [type(layer) for layer in model.layers] == [Plain, Plain]
    names = [name for name, _ in model.named_parameters()]
    assert names == ["layer0.weight", "layer0.inner.0.weight", "layer0.inner.0.bias", "layer1.weight"]
    assert model.init("layer0.weight", (4, 4)) == Normal(0.02)
    assert model.init("layer0.inner.0.bias", (4,)) == Constant(0.0)
    assert model.init("layer0.inner.0.weight", (4,)) == Constant(1.0)
    assert model.decays("layer0.weight", (4, 4)) and not model.decays("layer0.inner.0.weight", (4,))
    assert model.shardings == Shardings()


def test_loss_is_the_token_sum_of_the_cross_entropy_in_fp32() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.bfloat16)
    targets = torch.randint(0, 5, (2, 3))
    loss = stack(Plain()).loss(logits, Batch(targets, targets))
    expected = -torch.log_softmax(logits.float(), -1).gather(-1, targets[..., None]).sum()
    assert loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss, expected)


def test_dropout_sites_count_within_each_layer() -> None:
    model = stack(Plain(KeyedDropout(0.1), nn.Sequential(KeyedDropout(0.2))), Plain(KeyedDropout(0.3)))
    sites = {name: m.site for name, m in model.named_modules() if isinstance(m, KeyedDropout)}
    assert sites == {"layer0.inner.0": 0, "layer0.inner.1.0": 1, "layer1.inner.0": 0}


def test_share_ties_binds_the_reader_to_the_owner() -> None:
    model = stack(Plain(), Plain(), ties=(tie("layer1.weight", "layer0.weight"),))
    assert len(list(model.parameters())) == 2
    model.share_ties()
    assert model.get_parameter("layer1.weight") is model.get_parameter("layer0.weight")


class NoArgument(nn.Module):
    def forward(self) -> Tensor:
        return torch.zeros(1)


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, keys: Keys, other: Tensor) -> Tensor:
        return x


class LateKeys(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, keys: Keys | None = None) -> Tensor:
        return x


class OptionalKeys(nn.Module):
    def forward(self, x: Tensor, keys: Keys | None = None) -> Tensor:
        return x if keys is None else x + 1


class Anything(nn.Module):
    def forward(self, *given: Any) -> Tensor:
        return given[0] + len(given)


@pytest.mark.parametrize(
    "layer, keyed",
    [
        (nn.Linear(4, 4), False),
        (nn.Sequential(nn.Linear(4, 4), nn.GELU()), False),
        (nn.TransformerEncoderLayer(4, 2, dropout=0.0), False),  # what comes second is a mask
        (Plain(), True),
        (OptionalKeys(), True),
        (Anything(), True),
    ],
)
def test_keys_go_to_layers_that_have_a_place_for_them(layer: nn.Module, keyed: bool) -> None:
    assert takes_keys(layer) is keyed
    stack(layer)(torch.zeros(2, 3, 4), Keys.make(0, 1, [0, 1], 0))


def test_modules_of_torch_are_layers() -> None:
    layers = {"embed": nn.Embedding(7, 4), "middle": nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "head": nn.Linear(4, 7)}
    model = LayeredModel(layers)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(tokens), nn.Sequential(*layers.values())(tokens))


def whole_number() -> nn.Module:
    layer = Plain()
    layer.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int64), requires_grad=False)
    return layer


def complex_numbers() -> Plain:
    module = Plain()
    module.filter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return module


def shared_parameter() -> LayeredModel:
    first, second = Plain(), Plain()
    second.weight = first.weight
    return stack(first, second)


def shared_dropout() -> LayeredModel:
    drop = KeyedDropout(0.1)
    return stack(Plain(drop), Plain(drop))


class Own(LayeredModel):
    """Gets something of its own after its layers."""

    def __init__(self, name: str, own: object) -> None:
        super().__init__({"first": Plain(), "second": Plain()})
        if isinstance(own, nn.Parameter):
            self.register_parameter(name, own)  # as setting an attribute does
        else:
            setattr(self, name, own)


REFUSED: list[tuple[str, Callable[[], object], str]] = [
    ("no layers", lambda: LayeredModel({}), "at least one layer"),
    ("a list", lambda: LayeredModel([Plain()]), "(?s)type list.*given as a dict"),  # type: ignore[arg-type]
    ("forward()", lambda: stack(NoArgument()), r"layer\(x, keys\), or layer\(x\)"),
    ("two inputs", lambda: stack(TwoInputs()), r"layer\(x, keys\), or layer\(x\)"),
    ("keys behind another", lambda: stack(LateKeys()), r"def forward\(self, x, keys\)"),
    ("dropout without keys", lambda: stack(nn.Sequential(KeyedDropout(0.1))), "(?s)layer0.0 is KeyedDropout.*no keys"),
    ("no module", lambda: stack(3), "nn.Module"),  # type: ignore[arg-type]
    ("name in use", lambda: LayeredModel({"loss": Plain()}), "loss_layer"),
    ("name with a dot", lambda: LayeredModel({"a.b": Plain()}), "identifier"),
    ("global dropout", lambda: stack(Plain(nn.Dropout(0.1))), "KeyedDropout"),
    ("global dropout, deep", lambda: stack(Plain(nn.TransformerEncoderLayer(4, 2))), "layer0.inner.0"),
    ("attention dropout", lambda: stack(Plain(nn.MultiheadAttention(4, 2, dropout=0.1))), "KeyedDropout"),
    ("recurrent dropout", lambda: stack(Plain(nn.LSTM(4, 4, 2, dropout=0.1))), "KeyedDropout"),
    ("random slope", lambda: stack(Plain(nn.RReLU())), "global generator"),
    ("batch norm", lambda: stack(Plain(nn.BatchNorm1d(4))), "LayerNorm"),
    (
        "batch norm without statistics",
        lambda: stack(Plain(nn.BatchNorm1d(4, track_running_stats=False).eval())),
        "(?s)a sample is normalized alone.*RMSNorm or nn.GroupNorm$",
    ),
    ("running statistics", lambda: stack(Plain(nn.InstanceNorm1d(4, track_running_stats=True))), "statistics"),
    ("lazy", lambda: stack(Plain(nn.LazyLinear(4))), "(?s)layer0.inner.0 is LazyLinear.*give Linear all its sizes"),
    (
        "spectral",
        lambda: stack(Plain(parametrizations.spectral_norm(nn.Linear(4, 4)))),
        "(?s)power iteration.*weight_n",
    ),
    ("spectral, by a hook", lambda: stack(Plain(nn.utils.spectral_norm(nn.Linear(4, 4)))), "power iteration"),
    ("sparse gradients", lambda: stack(Plain(nn.Embedding(4, 4, sparse=True))), "(?s)dense.*sparse=False"),
    ("sparse bag", lambda: stack(Plain(nn.EmbeddingBag(4, 4, sparse=True))), "(?s)dense.*sparse=False"),
    ("complex numbers", lambda: stack(complex_numbers()), "(?s)complex64.*view_as_complex"),
    ("whole number", lambda: stack(whole_number()), "register_buffer"),
    ("shared parameter", shared_parameter, 'tie\\("layer1.weight", "layer0.weight"\\)'),
    ("shared dropout", shared_dropout, "make two"),
    ("own parameter", lambda: Own("temperature", nn.Parameter(torch.ones(()))), "(?s)temperature.*first, second"),
    ("own attribute", lambda: setattr(stack(Plain()), "temperature", nn.Parameter(torch.ones(()))), "temperature"),
    ("own module added", lambda: stack(Plain()).add_module("scale", nn.Linear(4, 4)), r"scale\.weight"),
    ("own module", lambda: Own("scale", nn.Linear(4, 4)), r"scale\.weight of Own belongs to no layer"),
]


@pytest.mark.parametrize(("make", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_layers_against_the_contract_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make()


def test_attributes_of_a_model_beside_its_layers() -> None:
    """Modules without parameters, and other names for its layers."""
    Own("entropy", nn.CrossEntropyLoss())
    layers = nn.ModuleList([Plain(), Plain()])

    class Listed(LayeredModel):
        def __init__(self) -> None:
            super().__init__({"first": layers[0], "second": layers[1]})
            self.blocks = layers

    Listed()


def test_dropout_of_probability_zero_and_layer_norms_are_fine() -> None:
    stack(Plain(nn.Dropout(0.0), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4)))


def test_running_statistics_of_evaluation_mode_are_constants() -> None:
    stack(Plain(nn.BatchNorm1d(4).eval(), nn.InstanceNorm1d(4, track_running_stats=True).eval()))


def test_norms_of_weights_that_keep_nothing_are_fine() -> None:
    """A spectral norm in evaluation mode is one of them."""
    linears = [nn.Linear(4, 4) for _ in range(3)]
    weight, orthogonal = parametrizations.weight_norm(linears[0]), parametrizations.orthogonal(linears[1])
    stack(Plain(weight, orthogonal, parametrizations.spectral_norm(linears[2]).eval()))


TIES = [
    (("layer1.wieght", "layer0.weight"), "wieght"),
    (("layer1.weight", "layer0.wight"), "layer0.weight"),
    (("layer2.weight", "layer0.weight"), "one shape"),
    (("layer0.inner.0.weight", "layer0.weight"), "two layers"),
]


@pytest.mark.parametrize(("names", "message"), TIES)
def test_a_tie_must_fit(names: tuple[str, str], message: str) -> None:
    inner = nn.Linear(4, 4)
    with pytest.raises(ModelError, match=message):
        stack(Plain(inner), Plain(), Plain(sizes=(4, 5)), ties=(tie(*names),))


def test_ties_neither_chain_nor_repeat() -> None:
    first = tie("layer1.weight", "layer0.weight")
    for second in (tie("layer2.weight", "layer1.weight"), tie("layer1.weight", "layer2.weight")):
        with pytest.raises(ModelError, match="one owner"):
            stack(Plain(), Plain(), Plain(), ties=(first, second))
    stack(Plain(), Plain(), Plain(), ties=(first, tie("layer2.weight", "layer0.weight")))


def test_a_layer_reads_an_owner_through_one_tie() -> None:
    """It has one gradient of the owner: that of the second reader would be left out of the sum, without a word."""
    ties = (tie("layer1.weight", "layer0.weight"), tie("layer1.inner.0.weight", "layer0.weight"))
    told = r"(?s)layer1.weight = layer0.weight and layer1.inner.0.weight = .* leave out layer1.inner.0.weight, and use"
    with pytest.raises(ModelError, match=told):
        stack(Plain(), Plain(nn.Linear(4, 4, bias=False)), ties=ties)
    model = stack(Plain(), Plain(nn.Linear(4, 4, bias=False)), ties=ties[:1])
    model.ties = ties  # after the constructor
    with pytest.raises(LayoutError, match=r"(?s)both tied to layer0.weight.*leave out layer1.inner.0.weight, and use"):
        describe(model)


def test_a_tie_to_itself_or_to_no_layer_is_refused() -> None:
    with pytest.raises(SpecError):
        tie("head.weight", "head.weight")
    with pytest.raises(SpecError):
        tie("weight", "embed.weight")


def test_shard_takes_parameters_and_nothing_else_that_a_module_has() -> None:
    module = nn.Linear(4, 4)
    module.register_buffer("mask", torch.ones(4, 4))
    with pytest.raises(SpecError, match=r"(?s)Linear has no parameter 'mask'.*exists: weight, bias"):
        shard(module, mask=P("tp", None))
    computed = parametrizations.weight_norm(nn.Linear(4, 4))
    with pytest.raises(SpecError, match=r"(?s)has no parameter 'weight'.*exists: bias"):
        shard(computed, weight=P("tp", None))
    assert specs_of(module) == specs_of(computed) == {}
    twice = nn.Linear(4, 4)
    twice.other = twice.weight  # one parameter under two names
    assert specs_of(shard(twice, other=P("tp", None))) == {"other": P("tp", None)}
