"""What docs/several_machines.md does on three machines, with the commands that stand there, on hosts in namespaces.

A program `elaswave-spmd` is found before the installed one: it gives `train` a small model and its data, which waits
until the test lets it go on. Everything else of the commands is the page's.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest

from benchmarks.namespaces import why_not
from tests.faults import runs_on_hosts
from tests.faults.runs_on_hosts import STEPS, RunOnHosts, run_on_hosts
from tests.pages import DOCS, Block, blocks_of
from tests.waiting import PATIENCE_S

PAGE = DOCS / "several_machines.md"
SECTION = "## Three machines, step by step"
NUM_STEPS = "train.steps=400"
SHORT_WAITS = ["+model.args.growth=1.05", "+model.args.longest_s=1"]
"""Of the model: a machine that drains waits for two steps, and has 20 seconds."""
PATIENCE = ["timeouts.suspect=10", "timeouts.status=12", "timeouts.leave=14"]
"""With workers that are not heard for a moment: whoever is lost here is killed, which closes its connections."""


def section_of_the_page() -> list[Block]:
    """The blocks of the section: commands, and what machines print, without a language."""
    text = PAGE.read_text(encoding="utf-8")
    return blocks_of(re.split(r"^## ", text.split(SECTION)[1], flags=re.MULTILINE)[0])


def commands_of(blocks: list[Block]) -> list[tuple[int, str]]:
    """(number of the host, command) in the order of the page."""
    hosts = [(re.match(r"not executed: on node(\d), ", block.order), block.text) for block in blocks if block.order]
    assert all(host is not None for host, _ in hosts), hosts
    return [(int(host[1]), text) for host, text in hosts if host is not None]


def shown(blocks: list[Block], printed: str) -> None:
    """Every line that the page shows stands in what machines have printed; `...` for any text.

    On a busy machine two workers may join, or be seen to be lost, one after another: then each has a line.
    """
    for line in (line for block in blocks if not block.language for line in block.text.splitlines()):
        patterns = [".*".join(re.escape(part) for part in line.split("..."))]
        if together := re.match(r"(fail|join): workers (\d+), (\d+) ", line):
            kind, *ranks = together.groups()
            patterns = [rf"{kind}: workers? (\d+, )*{rank}\b.*" for rank in ranks]
        for pattern in patterns:
            assert re.search(rf"^{pattern}$", printed, re.MULTILINE), f"not printed: {line}\n{printed}"


def small_runs(ours: RunOnHosts) -> dict[str, str]:
    """The environment of the commands: where `train` is given the test's model and data."""
    programs = ours.folder / "programs"
    programs.mkdir()
    others = [word for word in STEPS if not word.startswith(("run.dir=", "train.steps="))]
    words = [*others, NUM_STEPS, *ours.model, *SHORT_WAITS, *PATIENCE]
    code = f"""\
#!{sys.executable}
import sys
from elaswave_spmd.cli import main
if sys.argv[1] == "train":
    sys.argv[2:2] = {words!r}
sys.exit(main())
"""
    (programs / "elaswave-spmd").write_text(code)
    (programs / "elaswave-spmd").chmod(0o755)
    return {"PATH": f"{programs}:{os.environ.get('PATH', os.defpath)}"}


def test_three_machines_as_the_page_has_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Start, kill one machine, bring it back, drain the other one within 20 seconds, end."""
    if reason := why_not():
        pytest.skip(reason)
    wanted = runs_on_hosts.undisturbed(tmp_path_factory.mktemp("alone"), NUM_STEPS)
    blocks = section_of_the_page()
    (_, train), (there, agent), (_, drain) = commands_of(blocks)
    other = 2
    seconds: dict[str, float] = {}
    with run_on_hosts("runs/machines") as ours:
        environment = small_runs(ours)

        def start_agent(number: int) -> None:
            ours.adopt_agent(number, ours.start_shell(number, agent, environment))

        began = time.monotonic()
        ours.run = ours.start_shell(0, train, environment)
        start_agent(there)
        start_agent(other)
        ours.wait(lambda: ours.watch.step >= 2)
        seconds["from the commands until six workers have trained two steps"] = time.monotonic() - began

        began = time.monotonic()
        step = ours.watch.step
        ours.signal(there, signal.SIGKILL)
        ours.wait(lambda: ours.ranks("fail") == {2, 3} and ours.watch.step > step)
        seconds["from the kill until the next step"] = time.monotonic() - began
        printed = ours.output_of(there)

        began = time.monotonic()
        start_agent(there)
        ours.wait(lambda: ours.ranks("join") == {6, 7})
        seconds["from the agent's command until six workers train"] = time.monotonic() - began

        began = time.monotonic()
        drains = ours.start_shell(0, drain, environment)
        drains.finish(PATIENCE_S)
        assert ours.agents[other].process.wait(PATIENCE_S) == 0, ours.output_of(other)
        seconds["from the command to drain until the agent has ended"] = time.monotonic() - began
        assert ours.run.process.poll() is None, "the run goes on"

        ours.finish(wanted, {there: 0, other: 0})
        printed += ours.run.log.read_text(errors="replace") + ours.output_of(there) + ours.output_of(other)
        assert ours.ranks("fail") == {2, 3} and ours.ranks("leave") == {4, 5}
    shown(blocks, printed)
    for what, took in seconds.items():
        print(f"{what}: {took:.1f} s")  # shown by pytest -s
