"""`generate` and `export` of a run's directory that somebody else has made: no code that it names is called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.weights import export_command, generate_command


@pytest.mark.parametrize(
    "command",
    [
        lambda run, out: generate_command.main([run, "x"], "program"),
        lambda run, out: export_command.main([run, "--to", "hf", out], "program"),
    ],
    ids=["generate", "export"],
)
def test_no_code_is_called_that_the_settings_name(tmp_path: Path, command: Callable[[str, str], int]) -> None:
    run, called = tmp_path / "run", tmp_path / "called"
    run.mkdir()
    model = {"target": "subprocess.getoutput", "args": {"cmd": f"touch '{called}'"}}
    (run / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    (run / "summary.json").write_text("{}")
    save_file({"embed.weight": torch.zeros(256, 8)}, run / "weights.safetensors")
    with pytest.raises(ConfigError, match=r"model\.target=subprocess\.getoutput is not a built-in model") as caught:
        command(str(run), str(tmp_path / "out"))
    assert caught.value.exists == "model.target=gpt, model.target=llama, model.target=mlp"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
