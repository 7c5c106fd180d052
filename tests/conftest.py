"""Rules for all tests: their tiers, their order, what they draw, and which signals they ignore.

The tier of a test follows from its folder. `pytest -m units` runs one tier; CONTRIBUTING.md says what each is for.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from benchmarks.soak_checks import mended
from elaswave_spmd.errors import DataError
from elaswave_spmd.run_dir import read_events

TESTS = Path(__file__).parent
TIERS = {
    "unit": "units",
    "simulated": "simulated",
    "cluster": "simulated",
    "multiprocess": "processes",
    "faults": "faults",
    "hardware": "gpu",
    "xla": "xla",
    "on_ray": "ray",
}
"""Folder -> marker."""

# The same examples in every run, so that whoever changes something sees what the change did, and as much time for each
# as a busy machine takes. `make check` draws fewer of them; `--hypothesis-profile=explore` draws others in every run.
_ANY_TIME = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("elaswave", **_ANY_TIME, derandomize=True)
settings.register_profile("check", **_ANY_TIME, derandomize=True, max_examples=20)
settings.register_profile("explore", **_ANY_TIME)
settings.load_profile("elaswave")


def _handle_ignored_signals() -> None:
    """Lets processes that tests start react to signals, even if whoever started pytest has it ignore them.

    A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP. Unlike a handler, "ignored" survives
    exec, so that Ctrl-C would mean nothing to the runs that tests interrupt. pytest itself goes on doing nothing.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


_handle_ignored_signals()


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Makes draws without a seed the same in every run, so that a failure comes from a change and not from luck."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _mends_nothing_unasked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test of real processes one of whose runs has mended something by itself that the test does not name.

    Such a run has the right bits although a message was lost or refused: a defect that would be seen nowhere else. The
    mark `mends` names the kinds of events that a test asks for. Runs in other folders than `tmp_path` are not seen.
    """
    node = request.node
    is_real = any(node.get_closest_marker(tier) for tier in ("processes", "faults"))
    folder: Path | None = (
        request.getfixturevalue("tmp_path") if is_real and "tmp_path" in request.fixturenames else None
    )
    yield
    expected = [kind for mark in node.iter_markers("mends") for kind in mark.args]
    for path in sorted(folder.rglob("events.jsonl")) if folder is not None else ():
        with suppress(DataError):  # a file that a test has damaged
            assert not (problems := mended(read_events(path.parent), expected)), (problems, path)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks each test with the tier of its folder, unless its file names another tier."""
    if not {mark.name for mark in item.iter_markers()} & {*TIERS.values()}:
        item.add_marker(TIERS[item.path.relative_to(TESTS).parts[0]])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts slow tiers first, so that no process is left alone with a long file when the others have finished."""
    slow_first, longest = ["faults", "processes", "simulated"], "test_workers_of_agents_are_adopted.py"

    def when(item: pytest.Item) -> tuple[int, bool]:
        tiers = [number for number, tier in enumerate(slow_first) if item.get_closest_marker(tier)]
        return min(tiers, default=len(slow_first)), item.path.name != longest

    items.sort(key=when)  # stable: files stay whole, and in their order
