"""The scripts of examples/slurm, with stand-ins for Slurm's programs and real controllers, agents and workers."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_metrics
from tests.multiprocess.engine_stand_ins import (
    DRAIN,
    ROOT,
    Engine,
    Script,
    alone,
    assert_same_bits,
    holds,
    patient,
    steps,
)
from tests.multiprocess.real_runs import write_text
from tests.ports import free_port

SCRIPTS = ROOT / "examples" / "slurm"


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the same run on one worker."""
    return alone(tmp_path_factory.mktemp("single"))


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    write_text(tmp_path)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_PER_TASK": "1"}
    nodes = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2"}
    return Engine(tmp_path, slurm | nodes | {"PORT": str(free_port())})


def time_limit(script: Script) -> None:
    """`--signal=B:USR1@120` sends it to the shell alone."""
    script.signal_shell(signal.SIGUSR1)


def cancelled(script: Script) -> None:
    """scancel and a preemption send it to all processes of the job."""
    script.signal_all(signal.SIGTERM)


@pytest.mark.parametrize(("event", "requeued"), [(time_limit, ["7"]), (cancelled, [])])
def test_a_job_that_has_to_end_goes_on_when_it_is_started_again(
    engine: Engine, wanted: Path, event: Callable[[Script], None], requeued: list[str]
) -> None:
    run_dir, command = engine.folder / "runs" / "7", ["bash", str(SCRIPTS / "one_job.sh"), "mesh=dp2"]
    words = patient(engine)
    with engine.start([*command, *words], {}) as job:
        holds(job, lambda: steps(run_dir) >= 2)
        event(job)
        end = job.end()
        engine.nothing_is_left()
    assert end.code == 143 and engine.requeued == requeued, end.out
    done = steps(run_dir)
    assert 2 <= done < 100 and (engine.folder / "runs" / "7.token").exists()
    (engine.folder / "go").touch()
    with engine.start([*command, *words], {}) as job:
        end = job.end()
        engine.nothing_is_left()
    assert end.code == 0, end.out
    assert f"resume: step {done}, from " in end.out and "places for 1 worker of the run" in end.out
    assert_same_bits(run_dir, wanted)
    assert engine.requeued == requeued and not (engine.folder / "runs" / "7.token").exists()


def test_a_job_that_was_lost_before_its_first_checkpoint_begins_again(engine: Engine, wanted: Path) -> None:
    left = engine.folder / "runs" / "7"
    left.mkdir(parents=True)
    (left / "config.yaml").touch()
    (engine.folder / "go").touch()
    with engine.start(["bash", str(SCRIPTS / "one_job.sh"), "mesh=dp2", *patient(engine)], {}) as job:
        end = job.end()
        engine.nothing_is_left()
    assert end.code == 0, end.out
    assert_same_bits(left, wanted)
    assert [path.name for path in (engine.folder / "runs").glob("7.without_checkpoint.*")]


def test_what_is_refused_ends_the_job_and_is_not_queued_again(engine: Engine) -> None:
    with engine.start(["bash", str(SCRIPTS / "one_job.sh"), "mesh=dp2", "train.steps=0"], {}) as job:
        end = job.end()
        engine.nothing_is_left()
    assert end.code == 2 and "error: train.steps=0" in end.out and not engine.requeued, end.out


def test_a_run_goes_on_without_an_agent_that_is_preempted(engine: Engine, wanted: Path) -> None:
    shared = {"SHARED": str(engine.folder / "shared"), "PAUSE": "0.1", "AGENTS": "1", "DRAIN": DRAIN}
    run_dir = engine.folder / "shared" / "run"
    words = ["mesh=dp2", "runtime.local_workers=1", *patient(engine)]
    with engine.start(["bash", str(SCRIPTS / "controller.sh"), *words], shared) as controller:
        with engine.start(["bash", str(SCRIPTS / "agents.sh")], shared | {"SLURM_JOB_ID": "8"}) as agents:
            holds(controller, lambda: steps(run_dir) >= 2)
            agents.signal_all(signal.SIGTERM)
            assert agents.end().code == 0, agents.log.read_text()
        holds(controller, lambda: read_metrics(run_dir)[-1].workers == 1)
        (engine.folder / "go").touch()
        end = controller.end()
        engine.nothing_is_left()
    assert end.code == 0, end.out
    assert (engine.folder / "shared" / "ended").read_text() == "0\n" and not engine.requeued
    assert_same_bits(run_dir, wanted)


def test_agents_that_are_preempted_join_the_run_again(engine: Engine, wanted: Path) -> None:
    shared = {"SHARED": str(engine.folder / "shared"), "PAUSE": "0.1", "DRAIN": DRAIN}
    run_dir = engine.folder / "shared" / "run"
    agents = ["bash", str(SCRIPTS / "agents.sh")]
    words = ["mesh=dp1", "elastic.max_workers=2", *patient(engine)]

    def has(workers: int) -> bool:
        return steps(run_dir) > 0 and read_metrics(run_dir)[-1].workers == workers

    with engine.start(["bash", str(SCRIPTS / "controller.sh"), *words], shared) as controller:
        with engine.start(agents, shared | {"SLURM_JOB_ID": "8"}) as first:
            holds(controller, lambda: has(2))
            first.signal_all(signal.SIGTERM)
            assert first.end().code == 0, first.log.read_text()
            holds(controller, lambda: has(1))
        with engine.start(agents, shared | {"SLURM_JOB_ID": "9"}) as second:
            holds(controller, lambda: has(2))
            second.signal_shell(signal.SIGUSR1)
            assert second.end().code == 0, second.log.read_text()
            holds(controller, lambda: has(1))
        with engine.start(agents, shared | {"SLURM_JOB_ID": "8"}) as third:
            holds(controller, lambda: has(2))  # one that comes when the run is ending is refused
            (engine.folder / "go").touch()
            end = controller.end()
            assert third.end().code == 0, third.log.read_text()
        engine.nothing_is_left()
    assert end.code == 0, end.out
    assert (engine.folder / "shared" / "ended").read_text() == "0\n" and engine.requeued == ["9"]
    assert_same_bits(run_dir, wanted)


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda script: script.name)
def test_scripts_ask_slurm_for_what_they_answer(script: Path) -> None:
    text = script.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert options["signal"] == "B:USR1@120" and "requeue" in options and options["open-mode"] == "append"
    assert re.search(r"^trap '[^']*kill -TERM[^']*' USR1$", text, re.MULTILINE)
    (of_term,) = re.findall(r"^trap '([^']*)' TERM$", text, re.MULTILINE)
    assert "kill" not in of_term, "a second signal would end the run at once"
