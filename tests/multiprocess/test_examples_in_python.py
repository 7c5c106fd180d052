"""The examples that train from Python: scripts as they stand, and the notebook in a kernel."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd import load_run
from tests.multiprocess.kernels import kernel_environment
from tests.multiprocess.real_runs import train_in_new_interpreter
from tests.waiting import PATIENCE_S

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_model", "of the last 12 tokens 12 are as the model expects"),
        ("regression", "workers [[1]] were lost; both runs ended after step "),
    ],
)
def test_a_script_trains_and_shows_what_it_says(tmp_path: Path, name: str, said: str) -> None:
    shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    done = train_in_new_interpreter(tmp_path, script=tmp_path / f"{name}.py")
    assert done.code == 0, done.err
    assert said in done.out
    for folder in (tmp_path / "runs").iterdir():
        run = load_run(folder)
        assert run.history.loss[-1] < run.history.loss[0] / 2


def test_the_notebook_trains_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbclient and ipykernel are not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel are not installed")
    pytest.importorskip("ipykernel", reason="nbclient and ipykernel are not installed")
    kernel_environment(monkeypatch, tmp_path)
    notebook: Any = nbformat.read(EXAMPLES / "notebook.ipynb", 4)
    client = nbclient.NotebookClient(
        notebook, timeout=int(PATIENCE_S), kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises what a cell raises
    run, again = (load_run(tmp_path / "runs" / name) for name in ("notebook", "notebook_again"))
    assert run.finished and again.finished and run.history.loss[-1] < run.history.loss[0] / 2
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in shown)
    assert "early_stop: the run ends after step" in text and "\x1b" not in text  # plain lines
    assert {output["output_type"] for output in shown} == {"stream", "execute_result"}, shown
