"""The README's model file, as a user has it: in the working directory, trained by real workers, equal on two meshes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_S

README = Path(__file__).parents[2] / "README.md"
SMALL = (
    "model.layers=3 model.d_model=16 model.dropout=0.1 +model.args.window=4 train.steps=3 train.global_batch=8 "
    "train.seq_len=16 train.microbatch_size=2 train.validate_every=0 run.tensorboard=false "
    "data=text data.path=text.txt data.cache=cache"
)


def test_the_readmes_model_trains_with_equal_bits_on_two_meshes(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_file.py").write_text(code, encoding="utf-8")
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question: " * 200, encoding="utf-8")
    sums = []
    for mesh in ("single", "dp2_pp2"):
        command = [sys.executable, "-m", "elaswave_spmd", "train", "model.target=my_file.MyModel", f"mesh={mesh}"]
        command += [f"run.dir=run_{mesh}", *SMALL.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        sums.append(json.loads((tmp_path / f"run_{mesh}" / "summary.json").read_text())["weights_sha256"])
    assert sums[0] == sums[1]
