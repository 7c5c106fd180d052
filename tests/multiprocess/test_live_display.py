"""The live view of real runs in a terminal: a grid, events that stay above it, and an end that leaves all in order.

What is asserted is what a terminal emulator shows, not what is written to it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from elaswave_spmd.run_dir import read_events, read_metrics
from tests.multiprocess.real_runs import SMALL, TRAIN, train, write_text
from tests.terminal import Terminal, in_terminal

PRINTS = """
import sys
from torch import nn
from elaswave_spmd.models import LayeredModel

class Head(nn.Module):
    def __init__(self, vocab_size, d_model):
        super().__init__()
        self.linear = nn.Linear(d_model, vocab_size)
    def forward(self, x, keys):
        if int(keys.step) in (3, 30):
            print(f"a worker prints in step {int(keys.step)}", file=sys.stderr, flush=True)
        return self.linear(x)

class Prints(LayeredModel):
    def __init__(self, vocab_size, d_model, **others):
        super().__init__({"embed": nn.Embedding(vocab_size, d_model), "head": Head(vocab_size, d_model)})
"""
KILL = "chaos.events=[{step: 20, kind: kill, rank: 2, point: backward}]"
COMMAND = [sys.executable, str(TRAIN), *SMALL]


def rows(terminal: Terminal, begin: str) -> list[int]:
    """The rows of the screen that begin with a text."""
    return [row for row, line in enumerate(terminal.lines) if line.startswith(begin)]


def test_a_run_in_a_terminal_with_a_kill_a_resize_prints_of_workers_and_ctrl_c(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "prints.py").write_text(PRINTS)
    words = ["mesh=dp2_pp2", "model.target=prints.Prints", "train.steps=1000000", "train.validate_every=0", KILL]
    with in_terminal([*COMMAND, *words], tmp_path, rows=24) as terminal:
        terminal.wait_for(lambda: "elaswave_spmd: preparing ..." in terminal.text)
        terminal.wait_for(lambda: len(rows(terminal, "stage 0  ")) == 1 and len(rows(terminal, "stage 1  ")) == 1)
        terminal.wait_for(lambda: "2 lost" in terminal.text and "a worker prints in step 30" in terminal.text)
        terminal.wait_for(lambda: any("3 training 4 mb" in line for line in terminal.lines))
        begins = "stage 0", "stage 1", "step ", "──"  # in the midst of a redrawing one of them may be missing
        terminal.wait_for(lambda: [len(rows(terminal, begin)) for begin in begins] == [1, 1, 1, 1])
        event = next(row for row, line in enumerate(terminal.lines) if "fail: worker 2 lost" in line)
        assert event < rows(terminal, "──")[0], "it stays above the view"
        terminal.resize(50, 16)
        terminal.wait_for(lambda: any(line.startswith("step ") and len(line) < 50 for line in terminal.lines[-8:]))
        terminal.type(b"\x03")
        assert terminal.wait() == 130
        text = terminal.text.replace("\n", "")
        assert "the run stops: it was asked to by SIGINT. Its state after step " in text
        assert "resume with: " in terminal.text
        assert rows(terminal, "resume with: ")[0] > rows(terminal, "step ")[-1], "the last lines come after the view"
        assert not terminal.screen.cursor.hidden and terminal.screen.cursor.x == 0
    assert "fail" in [event["event"] for event in read_events(tmp_path / "run")]


def test_a_run_that_finishes_ends_with_its_table_below_the_view(tmp_path: Path) -> None:
    write_text(tmp_path)
    with in_terminal([*COMMAND, "mesh=dp2", "run.display=live"], tmp_path, columns=110) as terminal:
        assert terminal.wait() == 0
        assert terminal.screen.cursor.x == 0 and not terminal.screen.cursor.hidden
        assert "validation loss" in terminal.text and "weights sha256" in terminal.text
        assert rows(terminal, "finished")[0] > rows(terminal, "step 6/6")[0]
        assert not rows(terminal, "stage 0"), "its workers are gone"


def test_an_error_in_a_worker_comes_whole_after_the_view(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "prints.py").write_text(
        PRINTS.replace('print(f"', 'raise RuntimeError(f"').replace(", file=sys.stderr, flush=True", "")
    )
    words = ["model.target=prints.Prints", "mesh=single"]
    with in_terminal([*COMMAND, *words], tmp_path, columns=200, rows=60) as terminal:
        assert terminal.wait() == 1
        last = "\n".join(terminal.lines).rpartition("step 2/6")[2]
        assert "error: worker 0 failed" in last and "RuntimeError: a worker prints in step 3" in last


def test_lines_are_printed_in_a_terminal_where_they_are_wanted(tmp_path: Path) -> None:
    write_text(tmp_path)
    with in_terminal([*COMMAND, "mesh=single", "run.display=plain"], tmp_path, columns=150) as terminal:
        assert terminal.wait() == 0
        assert b"\x1b" not in terminal.output.partition(b"run directory")[2], "no cursor is moved, nothing coloured"
        assert rows(terminal, "step 1/6  loss ") and rows(terminal, "step 6/6  loss ")
    assert len(read_metrics(tmp_path / "run")) == 6


def test_the_view_is_refused_where_there_is_no_terminal(tmp_path: Path) -> None:
    write_text(tmp_path)
    done = train(tmp_path, *SMALL, "run.display=live")
    assert done.code == 2 and "error: run.display=live cannot be shown: the output is no terminal" in done.err
    assert "run.display=auto" in done.err and not (tmp_path / "run").exists()


def test_errors_that_go_to_a_file_stay_out_of_the_terminal(tmp_path: Path) -> None:
    write_text(tmp_path)
    (tmp_path / "prints.py").write_text(PRINTS)
    words = " ".join(f"'{word}'" for word in [*COMMAND, "model.target=prints.Prints", "mesh=single"])
    with in_terminal(["sh", "-c", f"exec {words} 2>errors.txt"], tmp_path) as terminal:
        assert terminal.wait() == 0
        assert "a worker prints" not in terminal.text
    assert "a worker prints in step 3\n" in (tmp_path / "errors.txt").read_text()
