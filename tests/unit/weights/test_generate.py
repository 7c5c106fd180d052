"""Generated text: greedy and drawn tokens, as functions of weights, prompt, seed and position."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from elaswave_spmd.errors import ModelError, RunError, UserError
from elaswave_spmd.models import MLP, Llama
from elaswave_spmd.weights.generate import Sampling, generate, load_model, next_token, tokenizer_of
from elaswave_spmd.weights.generate_command import main
from elaswave_spmd.weights.given import owned_parameters
from elaswave_spmd.weights.trained import open_trained
from tests.published_models import MODELS, VOCABULARY, recorded_logits, tokens
from tests.unit.weights.test_export import run_of


def run_on_bytes(folder: Path) -> Path:
    """A run of a small model on bytes, with drawn weights and dropout."""
    torch.manual_seed(1)
    model = MLP(256, 2, 16, window=3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    run = folder / "run"
    run.mkdir()
    save_file(
        {name: model.get_parameter(name).detach() for name, _ in owned_parameters(model)}, run / "weights.safetensors"
    )
    model_fields = {"target": "mlp", "layers": 2, "d_model": 16, "heads": 1, "dropout": 0.5, "args": {"window": 3}}
    (run / "config.yaml").write_text(yaml.safe_dump({"model": model_fields, "train": {"seq_len": 8}}))
    (run / "summary.json").write_text("{}")
    return run


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_the_recorded_logits(tmp_path: Path, name: str) -> None:
    model = load_model(open_trained(str(run_of(name, tmp_path))))
    prompt = tokens()[0].tolist()
    found = generate(model, prompt, Sampling(3), VOCABULARY)
    assert found[0] == int(recorded_logits(name)[0, -1].argmax())
    with torch.no_grad():
        for number, token in enumerate(found):
            assert token == int(model(torch.tensor([[*prompt, *found[:number]]]))[0, -1].argmax())


def test_a_longer_text_than_there_are_positions(tmp_path: Path) -> None:
    model = load_model(open_trained(str(run_of("gpt2", tmp_path))))
    found = generate(model, tokens()[0].tolist(), Sampling(30), VOCABULARY)  # 20 positions
    assert len(found) == 30


def test_text_that_goes_on_is_the_text_at_once(tmp_path: Path) -> None:
    """A draw is keyed by position: generating in two commands gives what one gives."""
    model = load_model(open_trained(str(run_on_bytes(tmp_path))))
    sampling, prompt = Sampling(20, temperature=1.0, seed=3), [65, 66]
    whole = generate(model, prompt, sampling, 256)
    first = generate(model, prompt, replace(sampling, tokens=8), 256)
    assert first + generate(model, [*prompt, *first], replace(sampling, tokens=12), 256) == whole
    assert generate(model, prompt, replace(sampling, seed=4), 256) != whole
    assert generate(model, prompt, replace(sampling, temperature=1e-6), 256) == generate(
        model, prompt, Sampling(20), 256
    )


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.04, 0.01]))
    number = 5_000
    found = np.bincount([next_token(logits, Sampling(1, 1.0, 5), at) for at in range(number)], minlength=5) / number
    wanted = np.exp(logits)
    assert (np.abs(found - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / number)).all(), found


def test_tokens_without_text_are_not_chosen() -> None:
    model = Llama(300, 1, 16, 2).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    drawn = generate(model, [1], Sampling(60, temperature=50.0), 256)
    assert max(drawn) < 256 and len(set(drawn)) > 20


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(run_on_bytes(tmp_path))
    words = [run, "naïve ", "--tokens", "12", "--temperature", "0.7"]
    assert main(words, "program") == 0
    first = capsys.readouterr().out
    assert main(words, "program") == 0
    assert capsys.readouterr().out == first and first.startswith("naïve ")
    for wrong, told in (
        (["", "--tokens", "1"], "the text is empty"),
        (["a", "--tokens", "0"], "--tokens=0"),
        (["a", "--temperature", "-1"], "--temperature=-1"),
        (["a", "--temperature", "nan"], "--temperature=nan"),
    ):
        with pytest.raises(UserError) as caught:
            main([run, *wrong], "program")
        assert told in str(caught.value)


def test_a_text_that_is_no_utf8_is_refused_where_the_tokenizer_needs_text(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    words.save(str(tmp_path / "tokenizer.json"))
    run = run_of("llama2", tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"the text is not UTF-8: .* at byte 1, b'\\xe9'") as caught:
        main([str(run), "a\udce9 b", "--tokens", "1"], "program")  # as Python reads such bytes of a command line
    assert caught.value.rule and caught.value.fix
    assert main([str(run), "a", "--tokens", "1"], "program") == 0


def test_a_run_whose_settings_make_another_model_is_refused(tmp_path: Path) -> None:
    """Values of one shape would be spread over parameters of another one, or end with a traceback."""
    run = run_on_bytes(tmp_path)
    fields = yaml.safe_load((run / "config.yaml").read_text())
    fields["model"]["layers"] = 3
    (run / "config.yaml").write_text(yaml.safe_dump(fields))
    with pytest.raises(ModelError, match="has other parameters than") as caught:
        load_model(open_trained(str(run)))
    assert "in the model, not there in the run" in caught.value.what


def test_what_cannot_be_generated_is_refused(tmp_path: Path) -> None:
    trained = open_trained(str(run_on_bytes(tmp_path)))
    with pytest.raises(UserError, match="has no tokenizer here"):
        tokenizer_of(replace(trained, data=replace(trained.data, target="my_file.MyData")))
    on_tokens = trained.path.with_name("summary.json")
    on_tokens.write_text('{"corpus": {"tokenizer": "uint16"}}')
    with pytest.raises(UserError, match="which has tokens and no tokenizer"):
        tokenizer_of(trained)
    with pytest.raises(RunError, match="position 7 is not finite"):
        next_token(np.array([0.0, np.nan]), Sampling(1), 7)
