"""Weights given by `model.init_from`: values read by ranges, logits of published models, and refusals."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from elaswave_spmd.conf.schema import ModelSettings, Settings
from elaswave_spmd.errors import CheckpointError, UserError
from elaswave_spmd.models import LayeredModel
from elaswave_spmd.run_dir.weights import save_weights, weights_sha256
from elaswave_spmd.sharding import tie
from elaswave_spmd.weights.given import GivenWeights, check_weights, open_weights, owned_parameters
from elaswave_spmd.weights.resolve import resolved
from elaswave_spmd.weights.sources import WeightSource, qkv_runs, whole
from tests.published_models import MODELS, Published, recorded_logits, tokens


def settings_for(published: Published, path: Path) -> ModelSettings:
    return ModelSettings(target=published.target, init_from=str(path))


def filled(published: Published, path: Path) -> LayeredModel:
    """Our model with the given weights, after the check that a run makes."""
    model, settings = published.model(), settings_for(published, path)
    check_weights(settings, model)
    source = open_weights(settings, model)
    with torch.no_grad():
        for name, _ in owned_parameters(model):
            model.get_parameter(name).copy_(whole(source, name))
    model.share_ties()
    return model


def sharded(path: Path) -> None:
    """Split model.safetensors into three files with an index."""
    tensors = load_file(path / "model.safetensors")
    files = [f"model-{n}-of-3.safetensors" for n in range(3)]
    of = {name: files[number % 3] for number, name in enumerate(tensors)}
    for file in files:
        save_file({name: value.clone() for name, value in tensors.items() if of[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of}))
    (path / "model.safetensors").unlink()


@pytest.mark.parametrize("is_sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("name", MODELS)
def test_published_weights_give_published_logits(tmp_path: Path, name: str, is_sharded: bool) -> None:
    path = MODELS[name].write(tmp_path)
    if is_sharded:
        sharded(path)
    with torch.no_grad():
        found = filled(MODELS[name], path)(tokens())
    assert (found - recorded_logits(name)).abs().max() < 1e-5
    assert recorded_logits(name).std() > 0.1, "the logits depend on the weights"


@pytest.mark.parametrize(
    ("name", "changed"),
    [("gpt2", "norm_eps"), ("llama3", "norm_eps"), ("llama3", "rope_scaling"), ("llama3", "theta")],
)
def test_each_setting_is_in_the_logits(tmp_path: Path, name: str, changed: str) -> None:
    model, other = (filled(MODELS[name], MODELS[name].write(tmp_path)) for _ in range(2))
    value = {"norm_eps": 1e-6, "rope_scaling": None, "theta": 1e4}[changed]
    plain = MODELS[name].model(**{changed: value})
    plain.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert (model(tokens()) - plain(tokens())).abs().max() > 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_any_range_is_that_slice_of_the_whole(tmp_path: Path, name: str) -> None:
    published, draw = MODELS[name], random.Random(2)
    model = published.model()
    source = open_weights(settings_for(published, published.write(tmp_path)), model)
    for parameter, number in owned_parameters(model):
        values = whole(source, parameter).reshape(-1)
        assert values.dtype == torch.float32 and values.numel() == number
        for _ in range(20):
            first, stop = sorted(draw.sample(range(number + 1), 2))
            assert torch.equal(source.read(parameter, first, stop), values[first:stop]), (parameter, first, stop)


def test_runs_of_qkv_are_the_rearranged_rows() -> None:
    heads, width = 3, 4
    theirs = torch.arange(3 * heads * width).reshape(3, heads, width)
    ours = theirs.transpose(0, 1).reshape(-1)
    for first in range(36):
        for stop in range(first + 1, 37):
            rows = [row for low, high in qkv_runs(36, heads, first, stop) for row in range(low, high)]
            assert rows == ours[first:stop].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_read_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    published = MODELS["gpt2"]
    path = published.write(tmp_path)
    tensors = {name: value.to(dtype) for name, value in published.tensors().items()}
    save_file(tensors, path / "model.safetensors")
    found = filled(published, path)
    wanted = tensors["transformer.h.1.mlp.c_fc.weight"].float().T
    assert torch.equal(found.get_parameter("block1.mlp.up.weight"), wanted)


def test_a_file_with_our_own_names(tmp_path: Path) -> None:
    published = MODELS["llama3"]
    model = filled(published, published.write(tmp_path / "hf"))
    file = tmp_path / "own.safetensors"
    own = {name: model.get_parameter(name).detach() for name, _ in owned_parameters(model)}
    save_file(own, file)
    again = filled(published, file)
    for name, value in own.items():
        assert torch.equal(again.get_parameter(name), value)


def test_old_files_without_a_prefix_and_with_masks(tmp_path: Path) -> None:
    published = MODELS["gpt2"]
    path = published.write(tmp_path)
    tensors = {name.removeprefix("transformer."): value for name, value in published.tensors().items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 20, 20), "lm_head.weight": tensors["wte.weight"].clone()}
    save_file(tensors, path / "model.safetensors")
    with torch.no_grad():
        assert (filled(published, path)(tokens()) - recorded_logits("gpt2")).abs().max() < 1e-5


def test_digests_are_those_of_the_values(tmp_path: Path) -> None:
    published = MODELS["gpt2"]
    path = published.write(tmp_path)
    given = GivenWeights(settings_for(published, path), published.model())
    before = dict((name, digest) for name, _, digest in given.digests(["block0", "head"]))
    given.close()
    assert {name.partition(".")[0] for name in before} == {"block0", "head"}
    tensors = published.tensors()
    tensors["transformer.h.0.mlp.c_fc.bias"][3] += 1
    save_file(tensors, path / "model.safetensors")
    after = dict((name, digest) for name, _, digest in given.digests(["block0", "head"]))
    assert [name for name in before if before[name] != after[name]] == ["block0.mlp.up.bias"]


# ---- refusals: what, where, and a fix


@dataclass(frozen=True)
class Refusal:
    """A change of a directory, and what is told."""

    change: Callable[[Path], object]
    told: str
    name: str = "llama3"


def config(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        fields = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**fields, **changes}))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(path: Path) -> None:
        found = load_file(path / "model.safetensors")
        change(found)
        save_file(found, path / "model.safetensors")

    return changed


def only_bin(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def torn(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def lost_shard(path: Path) -> None:
    sharded(path)
    (path / "model-1-of-3.safetensors").unlink()


def swapped_shard(path: Path) -> None:
    sharded(path)
    (path / "model-0-of-3.safetensors").write_bytes((path / "model-1-of-3.safetensors").read_bytes())


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500000.0}
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
REFUSALS = {
    "missing": Refusal(tensors(lambda t: t.pop(NORM)), "lacks head.norm.weight of the model's 20 parameters"),
    "extra": Refusal(tensors(lambda t: t.update({"model.layers.2.x": t[NORM].clone()})), "holds model.layers.2.x"),
    "shape": Refusal(tensors(lambda t: t.update({UP: t[UP][:, :8].clone()})), "has the shape (24, 8)"),
    "integers": Refusal(tensors(lambda t: t.update({UP: t[UP].to(torch.int8)})), "is of type I8"),
    "doubles": Refusal(tensors(lambda t: t.update({UP: t[UP].double()})), "is of type F64"),
    "family": Refusal(config(model_type="mamba"), "is of model_type 'mamba'"),
    "other family": Refusal(config(model_type="llama"), "has num_attention_heads=None", "gpt2"),
    "layers": Refusal(config(num_hidden_layers=3), "model.layers: 3 there, 2 here"),
    "heads": Refusal(config(num_attention_heads=8, head_dim=2), "model.heads: 8 there, 4 here"),
    "kv heads": Refusal(config(num_key_value_heads=4), "model.args.kv_heads: 4 there, 2 here"),
    "eps": Refusal(config(rms_norm_eps=1e-5), "model.args.norm_eps: 1e-05 there, 0.001 here"),
    "theta": Refusal(config(rope_theta=1e4), "model.args.theta: 10000.0 there"),
    "scaling": Refusal(config(rope_scaling=None), "model.args.rope_scaling: null there"),
    "yarn": Refusal(config(rope_scaling=YARN), "which the built-in model cannot express"),
    "scaling by name": Refusal(config(rope_scaling="linear"), "has rope_scaling='linear'"),
    "rotary list": Refusal(config(rope_parameters=["default"]), "has rope_parameters=['default']"),
    "bias": Refusal(config(attention_bias=True), "has attention_bias=True"),
    "activation": Refusal(config(hidden_act="gelu"), "has hidden_act='gelu'"),
    "head width": Refusal(config(head_dim=8), "has head_dim=8"),
    "untied": Refusal(config(tie_word_embeddings=False), "model.args.tied: false there, true here"),
    "vocabulary": Refusal(config(vocab_size=41), "model.args.vocab_size: 41 there, 40 here"),
    "relu": Refusal(config(activation_function="relu"), "has activation_function='relu'", "gpt2"),
    "by layer": Refusal(config(scale_attn_by_inverse_layer_idx=True), "has scale_attn_by_inverse_layer", "gpt2"),
    "inner": Refusal(config(n_inner=40), "has n_inner=40", "gpt2"),
    "inner text": Refusal(config(n_inner="x"), "has n_inner='x'", "gpt2"),
    "inner nested": Refusal(config(n_inner=[16]), "has n_inner=[16]", "gpt2"),
    "positions": Refusal(config(n_positions=21), "model.args.positions: 21 there, 20 here", "gpt2"),
    "torn": Refusal(torn, "is torn, or is no safetensors file"),
    "only bin": Refusal(only_bin, "holds neither model.safetensors nor model.safetensors.index.json"),
    "lost shard": Refusal(lost_shard, "model-1-of-3.safetensors"),
    "swapped shard": Refusal(swapped_shard, "model-1-of-3.safetensors"),
    "no config": Refusal(lambda path: (path / "config.json").unlink(), "holds no weights"),
    "torn json": Refusal(lambda path: (path / "config.json").write_text("{"), "is not a JSON object"),
    "nested json": Refusal(lambda path: (path / "config.json").write_text("[" * 100_000), "is not a JSON object"),
    "no object": Refusal(lambda path: (path / "config.json").write_text("[1]"), "is not a JSON object"),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_what_does_not_fit_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    published = MODELS[refusal.name]
    path = published.write(tmp_path / "model")
    refusal.change(path)
    with pytest.raises(UserError) as caught:
        check_weights(settings_for(published, path), published.model())
    assert refusal.told in str(caught.value) and caught.value.fix, caught.value


def test_a_device_holds_no_weights() -> None:
    published = MODELS["llama3"]
    with pytest.raises(UserError, match="/dev/zero holds no weights"):
        check_weights(settings_for(published, Path("/dev/zero")), published.model())


def test_weights_of_another_kind_of_model(tmp_path: Path) -> None:
    path = MODELS["gpt2"].write(tmp_path)
    with pytest.raises(UserError, match=r"model_type gpt2, and model\.target=llama") as caught:
        check_weights(settings_for(MODELS["llama3"], path), MODELS["llama3"].model())
    assert caught.value.fix.startswith("model.target=gpt ")


def test_the_words_that_are_advised_are_those_of_a_command_line(tmp_path: Path) -> None:
    import shlex

    from elaswave_spmd.conf.compose import settings_from

    published = MODELS["llama3"]
    path = published.write(tmp_path)
    small = Published(published.config, published.shapes, "llama", {"layers": 1, "d_model": 8, "heads": 2})
    with pytest.raises(UserError) as caught:
        check_weights(settings_for(published, path), small.model(vocab_size=40))
    model = settings_from(["model=llama_tiny", *shlex.split(caught.value.fix)]).model
    sizes = {"layers": model.layers, "d_model": model.d_model, "heads": model.heads, **model.args}
    again = Published(published.config, published.shapes, "llama", sizes)
    check_weights(settings_for(published, path), again.model())


def test_the_rows_of_a_padded_vocabulary_are_advised_where_its_tokenizer_is_given(tmp_path: Path) -> None:
    published = MODELS["llama3"]
    path = published.write(tmp_path / "model")
    (path / "tokenizer.json").write_text("{}")
    (tmp_path / "copy.json").write_text("{}")
    model = published.model(vocab_size=37)  # as many tokens as the tokenizer has

    def fix(tokenizer: str) -> str:
        with pytest.raises(UserError, match="vocab_size: 40 there, 37 here") as caught:
            check_weights(settings_for(published, path), model, tokenizer=tokenizer)
        return caught.value.fix

    assert fix("bytes") == fix(str(tmp_path / "gone.json")) == f"data.tokenizer={path / 'tokenizer.json'}"
    for given in (path / "tokenizer.json", tmp_path / "copy.json"):
        assert fix(str(given)) == "++model.args.vocab_size=40"


def test_a_path_that_is_not_there() -> None:
    with pytest.raises(UserError, match="there is no file or directory nowhere"):
        resolved(Settings(model=ModelSettings(init_from="nowhere")))


def test_a_resumed_run_needs_no_file() -> None:
    settings = Settings.from_dict({"model": {"init_from": "nowhere"}, "train": {"resume": "runs/a"}})
    assert resolved(settings) is settings


def test_sources_satisfy_the_protocol(tmp_path: Path) -> None:
    published = MODELS["llama3"]
    source: WeightSource = open_weights(settings_for(published, published.write(tmp_path)), published.model())
    assert set(source.shapes) == set(source.dtypes)
    source.close()
    assert torch.equal(source.read("embed.weight", 0, 4), source.read("embed.weight", 0, 8)[:4]), "opened again"


def test_a_tied_parameter_beside_its_owner_is_refused_with_the_name_to_leave_out(tmp_path: Path) -> None:
    model = LayeredModel({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}, ties=[tie("b.weight", "a.weight")])
    path, values = tmp_path / "begin.safetensors", {name: value.clone() for name, value in model.state_dict().items()}
    save_file(values, path)
    with pytest.raises(UserError) as caught:
        check_weights(ModelSettings(target="mine.Model", init_from=str(path)), model)
    assert caught.value.what == f"{path} holds b.weight, which the model ties: b.weight = a.weight"
    assert caught.value.fix and caught.value.fix.startswith("leave b.weight out of the file")
    del values["b.weight"]
    save_file(values, path)
    check_weights(ModelSettings(target="mine.Model", init_from=str(path)), model)


def finished_run(folder: Path, values: dict[str, np.ndarray], *, average: bool = False) -> None:
    """The weights of a run that has finished, and the hash of them in its summary."""
    name, key = ("weights_ema", "weights_ema_sha256") if average else ("weights", "weights_sha256")
    save_weights(folder / f"{name}.safetensors", values)
    (folder / "summary.json").write_text(json.dumps({key: weights_sha256(values)}))


@pytest.mark.parametrize("average", [False, True])
def test_weights_of_a_run_are_compared_with_their_hash(tmp_path: Path, average: bool) -> None:
    """They were taken as they were, though export, generate and load_model refuse them."""
    with torch.device("meta"):
        model = LayeredModel({"one": nn.Linear(2, 3)})
    values = {"one.weight": np.ones((3, 2), np.float32), "one.bias": np.zeros(3, np.float32)}
    finished_run(tmp_path, values, average=average)
    file = tmp_path / ("weights_ema.safetensors" if average else "weights.safetensors")
    settings = ModelSettings(target="my_file.One", init_from=str(file))
    check_weights(settings, model)
    values["one.bias"][1] = 1e-3
    save_weights(file, values)
    with pytest.raises(CheckpointError, match=r"does not match its sha256 in summary\.json(.|\n)*outside of the run"):
        check_weights(settings, model)
    elsewhere = file.rename(tmp_path / "mine.safetensors")
    check_weights(replace(settings, init_from=str(elsewhere)), model)
