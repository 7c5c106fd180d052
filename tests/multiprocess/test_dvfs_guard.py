"""The guard puts frequencies back: when told to, when the job ends or is killed, and when it is ended itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices.dvfs import Answer, FrequencyCell, GuardedFrequencies
from tests.frequency_trees import limits, make_policies
from tests.waiting import PATIENCE_S, eventually

FOUND = (1_000_000, 3_000_000)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_orders_and_answers(tmp_path: Path) -> None:
    make_policies(tmp_path, 2)
    guarded = GuardedFrequencies.start("cpufreq", str(tmp_path))
    assert {name: device.cpus for name, device in guarded.devices.items()} == {"policy0": (0, 1), "policy1": (2, 3)}
    assert guarded.devices["policy0"].nominal == 3000.0
    assert guarded.poll() is None
    guarded.set({"policy0": 0.5, "policy1": 0.7})
    assert guarded.poll(PATIENCE_S) == Answer({"policy0": 0.5, "policy1": 0.7})
    assert (limits(tmp_path, 0)[1], limits(tmp_path, 1)[1]) == (1_500_000, 2_100_000)
    guarded.reset()
    assert guarded.poll(PATIENCE_S) == Answer()
    assert limits(tmp_path, 0) == limits(tmp_path, 1) == FOUND
    guarded.set({"policy9": 0.5})
    answer = guarded.poll(PATIENCE_S)
    assert answer is not None and "policy9" in answer.error and "name one of these" in answer.error
    guarded.set({"policy1": 0.5})
    guarded.close()
    guarded.close()
    assert limits(tmp_path, 1) == FOUND and not alive(guarded.pid)


def test_a_backend_that_cannot_work_is_refused_before_the_job_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no cpufreq policy") as caught:
        GuardedFrequencies.start("cpufreq", str(tmp_path))
    assert caught.value.where == "schedule.frequency=cpufreq" and caught.value.fix


def test_sigterm_puts_back_and_ends(tmp_path: Path) -> None:
    make_policies(tmp_path, 1)
    guarded = GuardedFrequencies.start("cpufreq", str(tmp_path))
    guarded.set({"policy0": 0.5})
    assert guarded.poll(PATIENCE_S)
    for ignored in (signal.SIGINT, signal.SIGHUP):
        os.kill(guarded.pid, ignored)
    guarded.set({"policy0": 0.6})
    assert guarded.poll(PATIENCE_S) == Answer({"policy0": 0.6})
    os.kill(guarded.pid, signal.SIGTERM)
    answer = guarded.poll(PATIENCE_S)
    assert answer is not None and "has ended" in answer.error
    assert limits(tmp_path, 0) == FOUND
    guarded.close()


def test_a_guard_that_is_killed_is_told(tmp_path: Path) -> None:
    guarded = GuardedFrequencies.start("simulated", str(tmp_path))
    os.kill(guarded.pid, signal.SIGKILL)
    answer = guarded.poll(PATIENCE_S)
    assert answer is not None and "has ended" in answer.error
    guarded.reset()
    guarded.close()


PARENT = """
import sys, time
from elaswave_spmd.runtime.devices.dvfs import GuardedFrequencies
guarded = GuardedFrequencies.start(sys.argv[1], sys.argv[2])
guarded.set({sys.argv[3]: 0.5})
guarded.poll(30)
print(guarded.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("backend", ["cpufreq", "simulated"])
def test_a_killed_job_leaves_no_frequency_behind(tmp_path: Path, backend: str) -> None:
    make_policies(tmp_path, 1)
    device = "policy0" if backend == "cpufreq" else "3"
    command = [sys.executable, "-c", PARENT, backend, str(tmp_path), device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as parent:
        try:
            assert parent.stdout is not None
            guard = int(parent.stdout.readline())
            cell = FrequencyCell(tmp_path, 3)
            assert limits(tmp_path, 0)[1] == 1_500_000 if backend == "cpufreq" else cell() == 0.5
        finally:
            parent.kill()
    eventually(lambda: not alive(guard))
    assert limits(tmp_path, 0) == FOUND and cell() == 1.0
