"""Tutorials and guides have no block of code that is neither executed nor marked; how printed text is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import TUTORIALS, blocks_of, plain_commands, prints, problems_of


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_every_block_of_a_page_is_executed_or_says_why_not(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not problems_of(text) and blocks_of(text)


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("```bash\nls\n", "do not pair"),
        ("```yaml\na: 1\n```\n", "a block of yaml is not executed"),
        ("```text\nls\n```\n", "a block of text is not executed"),
        ("<!-- skipped -->\n```bash\nls\n```\n", "'skipped' is no order"),
        ("Then\n\n    python train.py\n", "an indented block is not executed"),
    ],
)
def test_what_is_neither_executed_nor_marked_is_found(page: str, problem: str) -> None:
    assert [found for found in problems_of(page) if problem in found]


def test_blocks_know_their_line_their_title_and_the_comment_before_them() -> None:
    page = '# A\n\n<!-- exit code: 2 -->\n```bash\nls\n```\n\n```python title="a.py"\nx = 1\n```\n'
    shell, file = blocks_of(page)
    assert (shell.line, shell.language, shell.text, shell.order_of("exit code: ")) == (4, "bash", "ls\n", "2")
    assert (file.language, file.title, file.order_of("exit code: ")) == ("python", "a.py", None)


@pytest.mark.parametrize(
    ("expected", "printed", "is_so"),
    [
        ("a\nb\n", "a\nb", True),
        ("a\nb\n", "a\nc\n", False),
        ("...\nb\n", "a\na\nb\n", True),
        ("...\nb\n", "b\n", True),
        ("a\n...\n", "a  \nb\n", True),
        ("loss ...\n", "loss 0.5\n", True),
        ("loss ...\n", "lost 0.5\n", False),
        ("a\n", "a\nb\n", False),
        ("worker 1 (...): x\n", "worker 1 (its process\nended): x\n", False),
    ],
)
def test_printed_text_is_compared_line_by_line(expected: str, printed: str, is_so: bool) -> None:
    assert prints(expected, printed) is is_so


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        (
            "elaswave-spmd plan mesh=dp2 \\\n    event='fail 1'\n",
            [["elaswave-spmd", "plan", "mesh=dp2", "event=fail 1"]],
        ),
        ("elaswave-spmd a\nelaswave-spmd b\n", [["elaswave-spmd", "a"], ["elaswave-spmd", "b"]]),
        ('elaswave-spmd a "x y"\n', [["elaswave-spmd", "a", "x y"]]),
        ("elaswave-spmd a file=$PWD/token\n", None),
        ('elaswave-spmd a "$HOME"\n', None),
        ("elaswave-spmd a > file\n", None),
        ("elaswave-spmd a || echo\n", None),
        ("ls\nelaswave-spmd a\n", None),
    ],
)
def test_commands_that_need_no_shell_are_found(text: str, commands: list[list[str]] | None) -> None:
    assert plain_commands(text) == commands
