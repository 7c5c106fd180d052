from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import GPT, MLP, LayeredModel, Llama, build_model
from elaswave_spmd.sharding import P, Shardings
from tests.mistaken_model import RIGHT, Mistaken

SIZES: dict[str, Any] = {
    "vocab_size": 17, "seq_len": 8, "layers": 1, "d_model": 8, "heads": 2, "dropout": 0.0,
}  # fmt: skip

OWN_MODEL = """
import torch
from torch import nn
from elaswave_spmd.models import LayeredModel

class Layer(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))
    def forward(self, x, keys):
        return self.weight[x] if not x.is_floating_point() else x @ self.weight

class MyModel(LayeredModel):
    def __init__(self, vocab_size, d_model, depth):
        middle = {f"m{i}": Layer(d_model, d_model) for i in range(depth)}
        super().__init__({"embed": Layer(vocab_size, d_model), **middle, "head": Layer(d_model, vocab_size)})

class Open(MyModel):
    def __init__(self, **everything):
        self_sizes = {k: everything[k] for k in ("vocab_size", "d_model")}
        super().__init__(depth=everything.get("depth", 0), **self_sizes)

not_a_model = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of its own; modules imported from it are removed again afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("target", "cls"),
    [("gpt", GPT), ("llama", Llama), ("mlp", MLP), ("elaswave_spmd.models.GPT", GPT), (MLP, MLP)],
)
def test_own_models_get_the_sizes_that_they_name(target: Any, cls: type) -> None:
    with torch.device("meta"):
        assert type(build_model(target, SIZES)) is cls


def test_extra_arguments_reach_the_constructor() -> None:
    assert build_model("gpt", SIZES, {"tied": True}).ties
    with pytest.raises(ModelError, match=r"model.args.mlp_ration(.|\n)*mlp_ratio"):
        build_model("gpt", SIZES, {"mlp_ration": 2})


@pytest.mark.parametrize(
    ("target", "args", "told"),
    [
        ("gpt", {"tied": "false"}, "model.args.tied='false' is not true or false"),  # it had counted as true
        ("gpt", {"tied": 1}, "model.args.tied=1 is not true or false"),
        ("gpt", {"mlp_ratio": 2.5}, "model.args.mlp_ratio=2.5 is not a whole number"),
        ("mlp", {"window": "four"}, "model.args.window='four' is not a whole number"),
        ("llama", {"hidden": -64}, "model.args.hidden=-64 is not a whole number"),
        ("llama", {"kv_heads": True}, "model.args.kv_heads=True is not a whole number"),
        ("llama", {"theta": "1e4"}, "model.args.theta='1e4' is not a number"),
        ("llama", {"theta": 0}, "theta=0 is not above 0"),
    ],
)
def test_arguments_of_own_models_are_of_their_kinds(target: str, args: dict[str, Any], told: str) -> None:
    with torch.device("meta"), pytest.raises(ModelError) as caught:
        build_model(target, SIZES, args)
    assert caught.value.what.startswith(told)


def test_arguments_of_own_models_may_be_none_or_whole_numbers_in_place_of_others() -> None:
    with torch.device("meta"):
        assert build_model("llama", SIZES, {"theta": 10000, "hidden": None, "kv_heads": 1, "rope_scaling": None})


def test_a_users_model_in_the_working_directory(here: Path) -> None:
    (here / "km_own_model.py").write_text(OWN_MODEL)
    model = build_model("km_own_model.MyModel", SIZES, {"depth": 3})
    assert model.layer_names == ("embed", "m0", "m1", "m2", "head")
    assert build_model("km_own_model.Open", SIZES).layer_names == ("embed", "head")
    with pytest.raises(ModelError, match=r"\+model.args.depth=VALUE"):
        build_model("km_own_model.MyModel", SIZES)
    with pytest.raises(ModelError, match="MyModel"):
        build_model("km_own_model.MyModle", SIZES)
    with pytest.raises(ModelError, match="LayeredModel"):
        build_model("km_own_model.not_a_model", SIZES)
    with pytest.raises(ModelError, match="LayeredModel") as caught:
        build_model("km_own_model.Layer", SIZES)
    assert caught.value.fix.startswith("class MyModel(LayeredModel)")


def test_of_many_models_those_like_the_one_that_was_named_are_shown(here: Path) -> None:
    (here / "km_many.py").write_text(OWN_MODEL + "".join(f"class Net{i}(MyModel): pass\n" for i in range(30)))
    with pytest.raises(ModelError, match="no such model") as caught:
        build_model("km_many.MyModle", SIZES)
    assert caught.value.exists.startswith("models in km_many: MyModel, ")
    assert caught.value.exists.endswith(", and 27 others") and "LayeredModel" not in caught.value.exists
    assert caught.value.fix == "model.target=km_many.MyModel"
    with pytest.raises(ModelError, match="no such model") as caught:
        build_model("gtp", SIZES)
    assert caught.value.fix == "model.target=gpt"


@pytest.mark.parametrize("target", ["gtp", "no_such_file.Model", "elaswave_spmd.modles.GPT", ""])
def test_an_unknown_model_lists_what_exists(here: Path, target: str) -> None:
    (here / "km_some_file.py").write_text("")
    with pytest.raises(ModelError, match="no such model") as caught:
        build_model(target, SIZES)
    assert "gpt, llama, mlp" in str(caught.value) and "km_some_file" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown", "line"),
    [
        ("x = 1\nimport no_such_package_at_all\n", "no_such_package_at_all", 2),
        ("x = (\n", "SyntaxError", 1),
        ("def f():\n    return y\n\nf()\n", "NameError", 2),
    ],
)
def test_a_file_that_fails_is_shown_with_its_line(here: Path, text: str, shown: str, line: int) -> None:
    (here / "km_broken.py").write_text(text)
    with pytest.raises(ModelError, match=shown) as caught:
        build_model("km_broken.MyModel", SIZES)
    assert f"km_broken.py:{line}" in str(caught.value)


def test_a_target_that_ends_the_process_is_told_of_as_one_that_fails(here: Path) -> None:
    (here / "km_ends.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ModelError, match=r"km_ends\.py:2 .SystemExit: 3"):
        build_model("km_ends.MyModel", SIZES)
    with pytest.raises(ModelError, match=r"builtins\.exit failed .SystemExit") as caught:
        build_model("builtins.exit", SIZES)
    assert caught.value.where == "model.target"


def test_sizes_that_torch_has_no_tensors_for_are_refused(here: Path) -> None:
    for target in ("gpt", "llama", "mlp"):
        with pytest.raises(ModelError, match=f"model.target={target} cannot be made"), torch.device("meta"):
            build_model(target, SIZES | {"d_model": 2**62, "heads": 1})


@pytest.mark.parametrize("right", RIGHT)
def test_models_that_only_look_like_mistakes_are_built_without_memory(right: str) -> None:
    """Recurrent modules of torch keep their parameters in a list, and a container may contain itself."""
    with torch.device("meta"):
        build_model(Mistaken, {"vocab_size": 11, "d_model": 8}, {"mistake": right})


def test_a_size_that_was_named_and_has_no_parameter_is_refused(here: Path) -> None:
    """A default is silent, and so is a size that no constructor gets by name but that it takes with all others."""
    (here / "km_sizes.py").write_text(OWN_MODEL)
    build_model("km_sizes.MyModel", SIZES, {"depth": 1}, named={"d_model"})
    build_model("km_sizes.Open", SIZES, {"depth": 1}, named={"heads"})
    with pytest.raises(ModelError) as caught:
        build_model("km_sizes.MyModel", SIZES, {"depth": 1}, named={"d_model", "heads", "dropout"})
    assert "model.heads=2 and model.dropout=0.0 would change nothing: MyModel does not take" in caught.value.what
    assert caught.value.exists == "vocab_size, d_model, depth" and "+model.args.NAME=VALUE" in caught.value.fix


class Rates(MLP):
    def __init__(self, vocab_size: int, layers: int, d_model: int) -> None:
        super().__init__(vocab_size, layers, d_model)
        self.rates = [float(rate) for rate in torch.linspace(0, 0.1, 3)]


def test_a_constructor_that_reads_values_is_told_that_there_are_none() -> None:
    with pytest.raises(ModelError) as caught, torch.device("meta"):
        build_model(Rates, {"vocab_size": 11, "layers": 1, "d_model": 8})
    assert "the constructor of Rates failed" in caught.value.what and 'device="cpu"' in caught.value.fix


class Orthogonal(MLP):
    def __init__(self, vocab_size: int, layers: int, d_model: int, by_cpu: bool) -> None:
        super().__init__(vocab_size, layers, d_model)
        with torch.device("cpu" if by_cpu else "meta"):
            self.get_submodule("block0").add_module("mixed", orthogonal(nn.Linear(d_model, d_model)))


def test_a_module_that_reads_its_own_values_is_made_on_the_cpu() -> None:
    sizes = {"vocab_size": 11, "layers": 1, "d_model": 8}
    with pytest.raises(ModelError) as caught, torch.device("meta"):
        build_model(Orthogonal, sizes, {"by_cpu": False})
    assert 'orthogonal(...), inside `with torch.device("cpu"):`' in caught.value.fix
    with torch.device("meta"):
        build_model(Orthogonal, sizes, {"by_cpu": True})


class Thawed(LayeredModel):
    def __init__(self) -> None:
        super().__init__({"first": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), "last": nn.Linear(4, 4)})
        self.train()


def test_a_norm_that_the_constructor_puts_back_into_training_mode_is_refused() -> None:
    with pytest.raises(ModelError, match=r"first.1 is BatchNorm1d(.|\n)*running statistics do"):
        build_model(Thawed, {})


class Declared(LayeredModel):
    """A model whose declaration is an attribute of a name."""

    def __init__(self) -> None:
        super().__init__({"only": nn.Linear(4, 4)})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"sharding": Shardings(optim=P("dp"))}, "Declared has sharding, and no shardings"),
        ({"shardings": {"optim": P("dp")}}, "Declared.shardings is {'optim'"),
        ({"shardings": Shardings}, "Declared.shardings is <class"),
    ],
)
def test_a_declaration_that_nothing_would_read_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError) as caught:
        build_model(type("Declared", (Declared,), fields), {})
    assert caught.value.what.startswith(told) and caught.value.fix.startswith("shardings = Shardings(")


def test_a_model_may_keep_other_declarations_beside_its_own() -> None:
    fast = Shardings(optim=P("dp"))
    build_model(type("Declared", (Declared,), {"fast": fast, "shardings": fast}), {})
    build_model(Declared, {})


class Scaled(MLP):
    def __init__(self, vocab_size: int, layers: int, d_model: int, is_trained: bool) -> None:
        super().__init__(vocab_size, layers, d_model)
        vars(self.get_submodule("block0"))["scale"] = torch.ones(d_model, requires_grad=is_trained)


def test_a_tensor_that_wants_a_gradient_and_is_no_parameter_is_refused() -> None:
    sizes = {"vocab_size": 11, "layers": 1, "d_model": 8}
    with torch.device("meta"):
        build_model(Scaled, sizes, {"is_trained": False})
        with pytest.raises(ModelError, match=r"block0.scale is a tensor with requires_grad=True(.|\n)*nn.Parameter\("):
            build_model(Scaled, sizes, {"is_trained": True})


class OldNorm(MLP):
    def __init__(self, vocab_size: int, layers: int, d_model: int) -> None:
        super().__init__(vocab_size, layers, d_model)
        self.get_submodule("block0").add_module("mixed", nn.utils.weight_norm(nn.Linear(d_model, d_model)))


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_tensor_that_was_computed_of_parameters_is_none_of_its_own() -> None:
    build_model(OldNorm, {"vocab_size": 11, "layers": 1, "d_model": 8})


class Classes(MLP):
    def __init__(self, num_classes: int, image_shape: list[int], layers: int = 2, d_model: int = 8) -> None:
        super().__init__(num_classes, layers, d_model)
        self.sizes = num_classes, tuple(image_shape), layers


def test_what_settings_do_not_give_is_the_datasets() -> None:
    """A parameter with a default keeps that; what nobody gives is named, with what the dataset has."""
    of_data = {"num_classes": 3, "image_shape": [1, 6], "layers": 9}
    with torch.device("meta"):
        assert build_model(Classes, {}, {"num_classes": 5}, of_data).sizes == (5, (1, 6), 2)
        with pytest.raises(ModelError) as caught:
            build_model(Classes, {"seq_len": 4}, {}, {"num_classes": 3})
        assert "needs image_shape" in caught.value.what and "of the dataset num_classes" in caught.value.exists
        assert "a property is not read" in caught.value.rule
        with pytest.raises(ModelError) as caught:
            build_model("gpt", {"seq_len": 4, "layers": 1, "d_model": 8, "heads": 2, "dropout": 0.0}, {}, of_data)
    assert caught.value.fix.startswith("vocab_size on the dataset, if its samples are tokens")


def test_a_declaration_that_raises_is_refused_with_its_line() -> None:
    class Raising(LayeredModel):
        def __init__(self) -> None:
            super().__init__({"one": nn.Linear(2, 2)})

        @property
        def shardings(self) -> Shardings:  # pyright: ignore[reportIncompatibleVariableOverride]
            raise KeyError("dp")

    with pytest.raises(
        ModelError, match=r"Raising\.shardings failed \(KeyError: 'dp'\)(.|\n)*test_models_build\.py:\d+"
    ):
        build_model(Raising, {})
