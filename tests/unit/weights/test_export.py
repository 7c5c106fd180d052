"""Export to Hugging Face: the tensors, config.json and tokenizer that a published model of the same weights has."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from elaswave_spmd.conf.schema import ModelSettings
from elaswave_spmd.errors import ConfigError, UserError
from elaswave_spmd.weights.byte_tokenizer import byte_tokenizer
from elaswave_spmd.weights.export import export_model
from elaswave_spmd.weights.export_command import main
from elaswave_spmd.weights.given import check_weights, open_weights, owned_parameters
from elaswave_spmd.weights.sources import whole
from elaswave_spmd.weights.trained import open_trained
from tests.full_disk import room_for
from tests.published_models import MODELS, TOKENS, recorded_logits, tokens

ARGUMENTS = ("kv_heads", "hidden", "theta", "norm_eps", "tied", "rope_scaling", "mlp_ratio", "positions")


def run_of(name: str, folder: Path, **data: Any) -> Path:
    """A run's directory that has trained to exactly the weights of a published model."""
    published, model = MODELS[name], MODELS[name].model()
    settings = ModelSettings(target=published.target, init_from=str(published.write(folder / "published")))
    source = open_weights(settings, model)
    run = folder / "run"
    run.mkdir()
    save_file({n: whole(source, n).contiguous() for n, _ in owned_parameters(model)}, run / "weights.safetensors")
    arguments = {n: value for n, value in published.sizes.items() if n in ARGUMENTS and value is not None}
    sizes = {n: published.sizes[n] for n in ("layers", "d_model", "heads")}
    fields = {"model": {"name": name, "target": published.target, **sizes, "args": arguments}, "data": data}
    (run / "config.yaml").write_text(yaml.safe_dump({"format": 2, **fields, "train": {"seq_len": TOKENS}}))
    (run / "summary.json").write_text("{}")
    return run


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("most", [10**9, 2000], ids=["one file", "sharded"])
@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_are_those_of_the_published_model(tmp_path: Path, name: str, most: int) -> None:
    out = tmp_path / "out"
    files = export_model(open_trained(str(run_of(name, tmp_path))), out, max_file_bytes=most)
    found, wanted = tensors_in(out), MODELS[name].tensors()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[tensor], wanted[tensor]) for tensor in wanted)
    assert ("model.safetensors.index.json" in files) == (most == 2000) == (len(files) > 6)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == MODELS[name].config["architectures"]
    check_weights(ModelSettings(target=MODELS[name].target, init_from=str(out)), MODELS[name].model())


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_logits(tmp_path: Path, name: str) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="needs the extra hf")
    out = tmp_path / "out"
    export_model(open_trained(str(run_of(name, tmp_path))), out)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values()), loading
    with torch.no_grad():
        assert (model.eval()(tokens()).logits - recorded_logits(name)).abs().max() < 1e-5
    text = "naïve — text\n\t\x00 with 😀 bytes"
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer(text)["input_ids"] == list(text.encode()) and tokenizer.decode(list(text.encode())) == text


def test_the_byte_tokenizer_is_one_of_the_tokenizers_package() -> None:
    tokenizers: Any = pytest.importorskip("tokenizers")
    found = tokenizers.Tokenizer.from_str(json.dumps(byte_tokenizer()["tokenizer.json"]))
    text = "".join(map(chr, range(1, 0x250))) + "😀 \r\n  end "
    assert found.encode(text).ids == list(text.encode()) and found.decode(list(text.encode())) == text
    assert found.get_vocab_size() == 256


def test_files_of_the_tokenizer_are_carried_along(tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "README.md"):
        (tmp_path / "tok" / name).write_text(f"{name}\n")
    run = run_of("gpt2", tmp_path, tokenizer=str(tmp_path / "tok" / "tokenizer.json"))
    files = export_model(open_trained(str(run)), tmp_path / "out")
    assert files == ["config.json", "merges.txt", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert (tmp_path / "out" / "merges.txt").read_text() == "merges.txt\n"
    (run / "summary.json").write_text(json.dumps({"corpus": {"tokenizer": "tokenizer.json:" + 12 * "0"}}))
    with pytest.raises(UserError, match="has changed since the run was started"):
        export_model(open_trained(str(run)), tmp_path / "again")
    (tmp_path / "tok" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="is not there"):
        export_model(open_trained(str(run)), tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_run_on_token_ids_is_exported_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tokens are no bytes, whatever the default of data.tokenizer says."""
    run = run_of("llama2", tmp_path)
    for named, has_tokenizer in (("uint16", False), ("bytes", True)):
        (run / "summary.json").write_text(json.dumps({"corpus": {"tokenizer": named}}))
        out = tmp_path / named
        assert main([str(run), "--to", "hf", str(out)], "program") == 0
        assert (out / "tokenizer.json").exists() == has_tokenizer
        assert ("no tokenizer is written" in capsys.readouterr().out) != has_tokenizer


def test_what_no_training_changes_is_as_in_the_model_that_the_run_began_with(tmp_path: Path) -> None:
    run = run_of("llama2", tmp_path)
    fields = yaml.safe_load((run / "config.yaml").read_text())
    fields["model"]["init_from"] = str(tmp_path / "published")
    (run / "config.yaml").write_text(yaml.safe_dump(fields))
    file = tmp_path / "published" / "config.json"
    published = json.loads(file.read_text()) | {"max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": [2]}
    file.write_text(json.dumps(published))
    names = ("max_position_embeddings", "bos_token_id", "eos_token_id")

    def exported(folder: str) -> list[object]:
        export_model(open_trained(str(run)), tmp_path / folder)
        return [json.loads((tmp_path / folder / "config.json").read_text())[name] for name in names]

    assert exported("kept") == [512, 1, [2]]
    file.write_text(json.dumps(published | {"max_position_embeddings": 4}))
    assert exported("longer") == [TOKENS, 1, [2]]
    file.unlink()
    assert exported("gone") == [TOKENS, None, None]


def test_the_command_and_its_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = str(run_of("llama2", tmp_path)), str(tmp_path / "out")
    with pytest.raises(UserError, match="--to gguf is not a format"):
        main([run, "--to", "gguf", out], "program")
    assert main([run, "--to", "hf", out], "program") == 0
    assert out in capsys.readouterr().out
    with pytest.raises(UserError, match="exists already"):
        main([run, "--to", "hf", out], "program")
    with pytest.raises(UserError, match="cannot read"):
        main([str(tmp_path), "--to", "hf", str(tmp_path / "other")], "program")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "published", "run"], "nothing else is left"


def test_a_full_disk_is_an_error_in_words_and_leaves_nothing(tmp_path: Path) -> None:
    """The safetensors library has an error of its own for it."""
    trained = open_trained(str(run_of("llama3", tmp_path)))
    with room_for(3000), pytest.raises(ConfigError, match=r"out cannot be written \(File too large\)"):
        export_model(trained, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["published", "run"]


def test_an_export_is_on_the_disk_before_its_name_and_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, order, fsync = open_trained(str(run_of("llama3", tmp_path))), list[str](), os.fsync

    def sync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        assert (tmp_path / "out").exists() == (path == tmp_path), "the directory's name comes last"
        order.append(path.name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", sync)
    files = export_model(trained, tmp_path / "out")
    assert sorted(order[:-2]) == files and order[-2:] == [".out.exported", tmp_path.name]


def test_what_a_killed_export_has_left_is_removed_but_not_that_of_one_that_writes(tmp_path: Path) -> None:
    trained, left = open_trained(str(run_of("llama3", tmp_path))), tmp_path / ".out.exported"
    left.mkdir()
    (left / "model-00009-of-00010.safetensors").write_bytes(b"half")
    fd = os.open(left, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match=r"another export writes to .*out now"):
        export_model(trained, tmp_path / "out")
    assert list(left.iterdir())
    os.close(fd)
    assert export_model(trained, tmp_path / "out") == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert not left.exists() and not (tmp_path / "out" / "model-00009-of-00010.safetensors").exists()


def test_a_run_whose_settings_make_another_model_is_refused(tmp_path: Path) -> None:
    run = run_of("llama2", tmp_path)
    fields = yaml.safe_load((run / "config.yaml").read_text())
    fields["model"]["layers"] += 1
    (run / "config.yaml").write_text(yaml.safe_dump(fields))
    with pytest.raises(UserError, match="has other parameters than"):
        export_model(open_trained(str(run)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_form_in_transformers(tmp_path: Path) -> None:
    run = run_of("gpt2", tmp_path)
    fields = yaml.safe_load((run / "config.yaml").read_text())
    fields["model"] |= {"target": "mlp", "args": {}}
    (run / "config.yaml").write_text(yaml.safe_dump(fields))
    with pytest.raises(UserError, match=r"model\.target=mlp has no form in transformers") as caught:
        export_model(open_trained(str(run)), tmp_path / "out")
    assert caught.value.exists == "model.target=llama, model.target=gpt"
