"""Blocks of code of a page of docs/, and an executor that does with them what a reader would.

The blocks of a page are executed one after the other, in one new folder. What a fence says decides what becomes of it:

    ```bash                        run by bash; exit code 0
    ```python title="my_file.py"   written to this file
    ```python                      run as a script
    ```text title="output"         what the block before must have printed, line by line, in this order. A line `...`
                                   stands for any number of lines, and `...` within a line for any text

A comment in the line before the fence, which the site does not show, changes that:

    <!-- not executed: REASON -->  it is not run; its commands are still checked by tests/unit/conf/test_command_line.py
    <!-- needs: MODULE -->         executed only where Python finds this module
    <!-- exit code: 2 -->          the code that it ends with
    <!-- background, until: TEXT -->     left running as soon as it has printed TEXT; it has to end with exit code 0
    <!-- after the background -->  begins when what runs in the background has ended

Other fences are pictures in letters, which have no language.

A block that has nothing but plain `elaswave-spmd` commands is run without a shell, by a process that has imported torch
already: most of the time of a small run goes into that.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from benchmarks.processes import processes_with
from tests.multiprocess.real_runs import fork_command
from tests.multiprocess.train_server import new_mark
from tests.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TUTORIALS = tuple(
    DOCS / f"{name}.md"
    for name in (
        "start",
        "port_your_model",
        "your_data",
        "from_python",
        "when_workers_die",
        "several_machines",
        "engines",
        "report",
        "training",
        "resume",
        "weights",
        "callbacks",
        "speed",
        "compilers",
    )
)
_BLOCK = re.compile(r"^(?:<!-- ([^\n]*?) -->\n)?```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ORDERS = ("not executed: ", "needs: ", "exit code: ", "background, until: ", "after the background")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. `order`: the comment in the line before it, or ""."""

    line: int
    language: str
    title: str
    text: str
    order: str

    def order_of(self, kind: str) -> str | None:
        """What the comment before the block says behind these words; None: it says something else."""
        return self.order.removeprefix(kind) if self.order.startswith(kind) else None


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of the text of a page, in order."""
    found = []
    for match in _BLOCK.finditer(page):
        order, fence, text = match[1] or "", match[2], match[3]
        title = re.search(r'title="([^"]+)"', fence)
        line = page.count("\n", 0, match.start(2)) + 1
        found.append(Block(line, fence.partition(" ")[0], title[1] if title else "", text, order))
    return found


def problems_of(page: str) -> list[str]:
    """What in a page is not as the rules above say: such a block would be neither executed nor marked."""
    found = [f"{page.count('```')} fences do not pair"] if page.count("```") % 2 else []
    for block in blocks_of(page):
        if block.order and not block.order.startswith(_ORDERS):
            found.append(f"line {block.line}: the comment {block.order!r} is no order")
        is_known = block.title == "output" if block.language == "text" else block.language in ("", "bash", "python")
        if not is_known:
            found.append(f"line {block.line}: a block of {block.language} is not executed")
    outside = _BLOCK.sub("", page)
    indented = re.findall(r"^ {4}[^ -].*", outside, re.MULTILINE)
    return found + [f"an indented block is not executed: {line}" for line in indented]


@dataclass
class Reader:
    """Executes the blocks of one page in a folder. `close` ends what it has left running.

    Attributes:
        folder: where the page's files and runs are.
        cache: the user's cache folder, which pages may share: the tokens of the standard library are made once.
    """

    folder: Path
    cache: Path
    _printed: str = ""
    _background: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _mark: str = field(default_factory=new_mark)

    def __post_init__(self) -> None:
        programs = self.folder / ".programs"
        programs.mkdir()
        code = "import sys\nfrom elaswave_spmd.cli import main\nsys.exit(main())\n"
        for name, text in {"elaswave-spmd": f"#!{sys.executable}\n{code}", "python": _exec(sys.executable)}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)

    def follow(self, block: Block) -> None:
        """Do what a block says.

        Raises:
            AssertionError: it ends with another exit code, or prints something else, than the page says.
        """
        if block.order_of("not executed: ") is not None or not block.language:
            return
        if (needed := block.order_of("needs: ")) is not None and find_spec(needed) is None:
            return
        if block.order_of("after the background") is not None:
            self._wait_for_background()
        if block.language == "text":
            assert prints(block.text, self._printed), f"line {block.line}: it has printed\n{self._printed}"
        elif block.title:
            (self.folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            script = self.folder / f"block_of_line_{block.line}.py"
            script.write_text(block.text, encoding="utf-8")
            self._run(block, [sys.executable, script.name])
        elif block.order.startswith("background") or (commands := plain_commands(block.text)) is None:
            self._run(block, ["bash", "-euo", "pipefail", "-c", block.text])
        else:
            self._fork(block, commands)

    def finish(self) -> None:
        """Wait for what runs in the background; all processes of the page have ended then."""
        self._wait_for_background()
        eventually(lambda: not processes_with(self._mark))

    def close(self) -> None:
        """Kill what is left."""
        for pid in processes_with(self._mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._background:
            process.wait()

    def _run(self, block: Block, command: list[str]) -> None:
        log = self.folder / f".output_of_line_{block.line}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if (until := block.order_of("background, until: ")) is not None:
            self._background.append(process)
            eventually(lambda: until in log.read_text() or process.poll() is not None)
            assert until in log.read_text(), f"line {block.line}: it has ended\n{log.read_text()}"
            return
        try:
            code = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"line {block.line}: it does not end\n{log.read_text()}") from None
        self._printed = log.read_text()
        expected = int(block.order_of("exit code: ") or 0)
        assert code == expected, f"line {block.line}: it has ended with exit code {code}\n{self._printed}"

    def _fork(self, block: Block, commands: list[list[str]]) -> None:
        """As `_run`, without a shell. The last command has the exit code; those before it have 0, as with `set -e`."""
        self._printed = ""
        expected = int(block.order_of("exit code: ") or 0)
        for number, (program, *arguments) in enumerate(commands, 1):
            script = self.folder / ".programs" / program
            done = fork_command(script, self.folder, *arguments, environment=self._environment(), merged=True)
            self._printed += done.out
            wanted = expected if number == len(commands) else 0
            assert done.code == wanted, f"line {block.line}: it has ended with exit code {done.code}\n{self._printed}"

    def _wait_for_background(self) -> None:
        while self._background:
            assert self._background[0].wait(PATIENCE_S) == 0
            self._background.pop(0)

    def _environment(self) -> dict[str, str]:
        name, _, value = self._mark.partition("=")
        mine = {name: value, "XDG_CACHE_HOME": str(self.cache), "COLUMNS": "200"}
        # Where Python finds a module, its commands are to be found too: an environment need not be active.
        own, others = Path(sys.executable).parent, os.environ.get("PATH", os.defpath)
        path = f"{self.folder / '.programs'}:{own}:{others}"
        return {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"} | mine | {"PATH": path}


def plain_commands(text: str) -> list[list[str]] | None:
    """The words of each line of a shell block; None: it has other commands, or needs a shell."""
    lines = [shlex.split(line) for line in text.replace("\\\n", "").splitlines()]
    unquoted = re.sub(r"'[^']*'|\"[^\"$`\\]*\"", "", text.replace("\\\n", ""))
    is_plain = all(words and words[0] == "elaswave-spmd" for words in lines) and not set(unquoted) & set(
        "$`|&;<>*?~#(){}"
    )
    return lines if is_plain else None


def prints(expected: str, printed: str) -> bool:
    """True if a program has printed what a page shows. Spaces at the ends of lines do not count."""
    pattern = ""
    for line in expected.splitlines():
        if line.strip() == "...":
            pattern += r"(?:[^\n]*\n)*"
        else:
            pattern += ".*".join(re.escape(part) for part in line.rstrip().split("...")) + r" *\n"
    return re.fullmatch(pattern, printed if printed.endswith("\n") else printed + "\n") is not None


def _exec(program: str) -> str:
    return f'#!/bin/sh\nexec {program} "$@"\n'
