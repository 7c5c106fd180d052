"""Writes published_logits.json: `python -m tests.record_published_logits`, with transformers installed."""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path

import torch

from tests.published_models import LOGITS, MODELS, tokens


def main() -> None:
    transformers = importlib.import_module("transformers")  # an extra, which type checkers may lack
    found = {}
    for name, published in MODELS.items():
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            path = published.write(Path(folder))
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
            assert not any(loading.values()), loading
            found[name] = [
                [[round(v, 7) for v in row] for row in one] for one in model.eval()(tokens()).logits.tolist()
            ]
    LOGITS.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()) + "\n}\n")


if __name__ == "__main__":
    main()
