"""A controller with agents dies: the next one adopts the workers of all machines; nothing is done again.

The machines are folders here, as in test_agents.py; each has an agent.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import processes_with
from elaswave_spmd.controller.address_note import AddressNote
from elaswave_spmd.controller.on_ray.job import MARK
from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from elaswave_spmd.run_dir.lock import workers_live
from tests.faults.fault_runs import TINY, Bits, go_on
from tests.faults.test_controller_comes_back import SHORT_ADOPT, assert_nothing_was_done_again, comebacks, killed_at
from tests.multiprocess import patient_model
from tests.multiprocess.real_runs import Done, Launched, eventually, launch
from tests.multiprocess.test_agents import PATIENT, Site, alone, assert_same_bits, end_of
from tests.multiprocess.test_agents import site as site
from tests.multiprocess.train_server import Command
from tests.ports import free_port
from tests.waiting import PATIENCE_S
from tests.waiting import eventually as waiting

STEPS = 60
AT = 10  # the step at which a controller is killed: the ones after it take a minute, or until `go` is there
Undisturbed = Callable[[int], Bits]
# Of a run in the folder `here`; its agents are started in the one beside it.
MODEL = ("model.target=patient_model.PatientGPT", "+model.args.go=../here/go")
SLOW = (*TINY, *MODEL, "+model.args.growth=1.1", "+model.args.longest_s=1")
WORDS = (*SLOW, "mesh=dp2_pp2", f"train.steps={STEPS}")
# Longer than a machine that does not come back is waited for, which is PROGRESS, also where this machine is slow.
ADOPT = "timeouts.adopt=1000"
PROGRESS = "timeouts.progress=60"


@pytest.fixture(autouse=True)
def _model(site: Site) -> None:
    for folder in (site.here, site.there):
        patient_model.write(folder, site.here / "go")


@dataclass(frozen=True)
class Sides:
    """A run, and its agents."""

    run: Launched
    agents: dict[str, Command]

    def worker_of(self, name: str) -> int:
        """The process id of the only worker of an agent, once the run has begun."""
        self.run.wait_for_steps(1)
        processes = self.run.processes()
        agent = self.agents[name].pid
        (fork_server,) = [pid for pid, parent in processes.items() if parent == agent]
        (worker,) = [pid for pid, parent in processes.items() if parent == fork_server]
        return worker


@contextmanager
def started(site: Site, *words: str, names: str = "bc", options: tuple[str, ...] = ()) -> Iterator[Sides]:
    """A run in the folder `here`, with an agent of each name that has a place for one worker."""
    several = [*site.several, f"runtime.agents={len(names)}"]
    with ExitStack() as stack:
        run = stack.enter_context(launch(site.here, *words, *several, mark=site.mark))
        assert run.process.stdout is not None
        while not run.process.stdout.readline().startswith("waiting for "):  # agents may have little time to find it
            assert run.process.poll() is None, run.process.communicate()
        agents = {name: stack.enter_context(site.agent("--name", name, *options)) for name in names}
        yield Sides(run, agents)


def resuming(site: Site, *words: str, names: str = "bc") -> list[str]:
    """The words of a command that goes on with the run."""
    kept = [word for word in words if not word.startswith("run.dir")]
    return [*kept, "train.resume=run", *site.several, f"runtime.agents={len(names)}"]


def resuming_alone(*words: str) -> list[str]:
    """The words of a command that goes on with the run on one machine."""
    kept = [word for word in words if not word.startswith(("run.dir", "runtime."))]
    of_several = ("rendezvous", "agents", "token_file", "local_workers")
    return [*kept, "train.resume=run", *(f"runtime.{name}=null" for name in of_several)]


def end_of_all(sides: Sides) -> tuple[Done, dict[str, Done]]:
    """The ends of the run and of its agents; no process is left."""
    run = end_of(sides.run.process)
    agents = {name: end_of(agent) for name, agent in sides.agents.items()}
    waiting(lambda: not sides.run.processes() and not sides.run.removers())
    return run, agents


def killed(sides: Sides) -> None:
    """SIGKILL to a controller without a supervisor."""
    sides.run.process.kill()
    sides.run.process.wait(PATIENCE_S)


def events_of(site: Site, kind: str) -> list[dict[str, Any]]:
    path = site.here / "run"
    return [event for event in read_events(path) if event["event"] == kind] if (path / "events.jsonl").exists() else []


@pytest.mark.parametrize("local", [2, 0], ids=["beside workers here", "all elsewhere"])
def test_a_controller_that_is_killed_twice_has_the_workers_of_all_machines_again(
    site: Site, undisturbed: Undisturbed, local: int
) -> None:
    """Without a worker of its own machine its fork server ends with it, and the next one has another."""
    names = "bc" if local else "bcde"
    with started(site, "--supervise", *WORDS, f"runtime.local_workers={local}", names=names) as sides:
        pids = [killed_at(sides.run, (number + 1) * AT, comeback=number) for number in range(2)]
        go_on(site.here)
        done, agents = end_of_all(sides)
    assert done.code == 0, done.err
    assert len(set(pids)) == 2 and done.err.count("another one takes its place") == 2
    assert [(event["generation"], event["workers"]) for event in comebacks(site.here)] == [(2, 4), (3, 4)]
    assert_nothing_was_done_again(site.here, undisturbed(STEPS), 3)
    assert not events_of(site, "fail") and not events_of(site, "agent")
    for name, agent in agents.items():
        assert (agent.code, agent.err) == (0, ""), agent
        assert agent.out.count("it keeps 1 worker for the next one") == 2, (name, agent.out)
    assert {line.workers for line in read_metrics(site.here / "run")} == {4}


def test_agents_whose_output_nobody_reads_any_more_keep_their_workers(site: Site, undisturbed: Undisturbed) -> None:
    with started(site, "--supervise", *WORDS, "runtime.local_workers=2") as sides:
        for agent in sides.agents.values():
            assert agent.stdout is not None and agent.stdout.readline()
            agent.stdout.close()
        killed_at(sides.run, AT)
        go_on(site.here)
        done, agents = end_of_all(sides)
    assert done.code == 0, done.err
    assert [(event["generation"], event["workers"]) for event in comebacks(site.here)] == [(2, 4)]
    assert_nothing_was_done_again(site.here, undisturbed(STEPS), 2)
    assert not events_of(site, "fail") and not events_of(site, "agent")
    assert [(agent.code, agent.err) for agent in agents.values()] == [(0, ""), (0, "")]


def test_an_agent_that_is_killed_while_there_is_no_controller_is_a_loss_of_its_workers(
    site: Site, undisturbed: Undisturbed
) -> None:
    words = [*WORDS, ADOPT, "checkpoint.every=1000", PROGRESS]
    with started(site, *words) as sides:
        worker = sides.worker_of("c")
        sides.run.wait_for_steps(AT)
        killed(sides)
        go_on(site.here)
        sides.agents["c"].kill()
        # It has lost its agent as well, whom nobody replaces: it saves its state, and ends, long before the others.
        waiting(lambda: worker not in sides.run.processes())
        assert list((site.here / "run").glob("checkpoints/*/shard_3_*"))
        with launch(site.here, *resuming(site, *words), mark=site.mark) as again:
            done = end_of(again.process)
            _, agents = end_of_all(sides)
    assert done.code == 0, done.err
    assert [(event["generation"], event["workers"]) for event in comebacks(site.here)] == [(2, 3)]
    assert Bits.of(site.here / "run") == undisturbed(STEPS)
    (lost,) = events_of(site, "fail")
    assert lost["ranks"] == [3] and "its machine has not come back" in lost["message"]
    assert (agents["b"].code, agents["c"].code) == (0, -signal.SIGKILL)


def test_a_worker_of_an_agent_that_dies_while_there_is_no_controller_is_lost_and_not_waited_for(
    site: Site, undisturbed: Undisturbed
) -> None:
    words = [*WORDS, ADOPT, "timeouts.progress=250"]
    with started(site, *words) as sides:
        worker = sides.worker_of("c")
        sides.run.wait_for_steps(AT)
        killed(sides)
        go_on(site.here)
        os.kill(worker, signal.SIGKILL)
        with launch(site.here, *resuming(site, *words), mark=site.mark) as again:
            done = end_of(again.process)
            _, agents = end_of_all(sides)
    assert done.code == 0, done.err
    (back,) = comebacks(site.here)
    assert back["workers"] == 3 and "worker 3 ended meanwhile" in back["message"]
    assert Bits.of(site.here / "run") == undisturbed(STEPS)
    assert [agent.code for agent in agents.values()] == [0, 0]


def test_an_agent_that_comes_back_too_late_ends_its_workers_and_joins_again(site: Site, tmp_path: Path) -> None:
    """It stands still while the next controller waits: the others go on without its worker."""
    wanted = alone(tmp_path / "alone", *PATIENT, *_written(tmp_path))
    go = site.here / "go"
    for folder in (site.here, site.there):
        model = patient_model.write(folder, go)
    words = [*PATIENT, *model, ADOPT, PROGRESS]
    with started(site, *words, names="b") as sides:
        old = sides.worker_of("b")
        sides.run.wait_for_steps(2)
        os.kill(sides.agents["b"].pid, signal.SIGSTOP)
        killed(sides)
        with launch(site.here, *resuming(site, *words, names="b"), mark=site.mark) as again:
            eventually(lambda: events_of(site, "fail"), again.process)
            assert old in again.processes(), "nobody has ended it yet"
            os.kill(sides.agents["b"].pid, signal.SIGCONT)
            eventually(lambda: events_of(site, "join"), again.process)
            assert old not in again.processes()
            go.touch()
            done = end_of(again.process)
            _, agents = end_of_all(sides)
    assert (done.code, done.err, agents["b"].code, agents["b"].err) == (0, "", 0, "")
    assert "goes on without the workers that it has kept" in agents["b"].out
    assert_same_bits(site.here / "run", wanted)
    assert [event["ranks"] for kind in ("fail", "join") for event in events_of(site, kind)] == [[1], [2]]
    assert read_summary(site.here / "run")["controller_generation"] == 2


def test_controllers_that_cannot_begin_leave_the_workers_of_agents_to_the_next_one(
    site: Site, undisturbed: Undisturbed
) -> None:
    """No worker was on the machine of the controller, so all that is known of the others is that it was killed.

    One finds no secret while it takes over; the next one takes over nothing, and fails when it has locked the run.
    """
    words = [*SLOW, "mesh=dp2", f"train.steps={STEPS}", "runtime.local_workers=0", ADOPT]
    with started(site, *words) as sides:
        sides.run.wait_for_steps(AT)
        killed(sides)
        go_on(site.here)
        token = site.token_file.read_text()
        site.token_file.write_text("short")
        with launch(site.here, *resuming(site, *words)) as failing:
            assert "a secret has at least" in end_of(failing.process).err
        site.token_file.write_text(token)
        with launch(site.here, *resuming_alone(*words)) as failing:  # it has no checkpoint to begin with
            assert end_of(failing.process).code == 2
        with launch(site.here, *resuming(site, *words), mark=site.mark) as again:
            done = end_of(again.process)
            _, agents = end_of_all(sides)
    assert done.code == 0, done.err
    assert [event["workers"] for event in comebacks(site.here)] == [2]
    assert_nothing_was_done_again(site.here, undisturbed(STEPS), 2)
    assert [agent.code for agent in agents.values()] == [0, 0]


@pytest.mark.parametrize("other", ["timeouts.adopt=null", "timeouts.start=400"], ids=["not at all", "other settings"])
def test_workers_of_agents_save_their_state_before_a_command_that_does_not_adopt_goes_on(
    site: Site, undisturbed: Undisturbed, other: str
) -> None:
    """No worker is on the machine of the controller, where all of them would be waited for, or the command refused."""
    words = [*SLOW, "mesh=dp2", f"train.steps={STEPS}", "runtime.local_workers=0", "checkpoint.every=1000"]
    with started(site, *words, ADOPT) as sides:
        sides.run.wait_for_steps(AT)
        killed(sides)
        go_on(site.here)
        waiting(lambda: not workers_live(site.here / "run"))  # nor its fork server
        kept = [] if other.startswith("timeouts.adopt") else [ADOPT]
        with launch(site.here, *resuming(site, *words), *kept, other, mark=site.mark) as again:
            done = end_of(again.process)
            _, agents = end_of_all(sides)
    assert done.code == 0, done.err
    assert ("started with other settings, and are not adopted" in done.out) == bool(kept)
    assert not comebacks(site.here)
    (resumed,) = events_of(site, "resume")
    assert resumed["step"] >= AT, "there was no checkpoint but what they had saved"
    assert Bits.of(site.here / "run") == undisturbed(STEPS)
    for agent in agents.values():
        assert agent.code == 0 and "another life, which adopts nobody: 1 worker may save" in agent.out, agent


def test_workers_whom_nobody_adopts_save_their_state_and_end_with_their_fork_servers(
    site: Site, undisturbed: Undisturbed
) -> None:
    words = [*WORDS, SHORT_ADOPT, "checkpoint.every=1000"]
    with started(site, *words, options=("--timeout", "10")) as sides:
        killed_at(sides.run, AT)
        go_on(site.here)
        _, agents = end_of_all(sides)
    for agent in agents.values():
        assert agent.code == 1 and "No worker is left here; they had time to write their state" in agent.err, agent
        assert "no controller came within 5 s (timeouts.adopt): 1 worker may save" in agent.out, agent
    with started(site, *resuming(site, *words)[: -len(site.several) - 1]) as sides:
        done, agents = end_of_all(sides)
    assert done.code == 0, done.err
    assert not comebacks(site.here), "they had ended"
    (resumed,) = events_of(site, "resume")
    assert resumed["step"] >= AT, "the newest state is what they had saved"
    assert Bits.of(site.here / "run") == undisturbed(STEPS)


def test_a_machine_that_has_lost_controller_and_workers_adopts_those_of_the_others(
    site: Site, undisturbed: Undisturbed
) -> None:
    """All pages have mirrors elsewhere."""
    words = [*SLOW, "mesh=dp4", f"train.steps={STEPS}", ADOPT, PROGRESS]
    agents = _resumed_without_its_workers(site, words)
    assert [event["workers"] for event in comebacks(site.here)] == [2]
    assert Bits.of(site.here / "run") == undisturbed(STEPS)
    assert not events_of(site, "restart") and [agent.code for agent in agents.values()] == [0, 0]


def test_where_pages_are_lost_with_that_machine_the_run_begins_again_with_its_agents(
    site: Site, undisturbed: Undisturbed
) -> None:
    words = [*WORDS, ADOPT, PROGRESS, "mirror.count=0", "sharding=zero1", "checkpoint.every=5"]
    agents = _resumed_without_its_workers(site, words, saves=True)
    (restart,) = events_of(site, "restart")
    assert restart["step"] > 0
    assert Bits.of(site.here / "run") == undisturbed(STEPS)
    assert [agent.code for agent in agents.values()] == [0, 0]


def test_an_agent_that_is_asked_to_end_while_its_workers_wait_gives_them_time_to_save(site: Site) -> None:
    words = [*WORDS, "train.steps=2000", "timeouts.controller=0.5", ADOPT, "checkpoint.every=1000"]
    with started(site, *words) as sides:
        killed_at(sides.run, 5)
        for agent in sides.agents.values():
            assert agent.stdout is not None
            while "for the next one" not in (line := agent.stdout.readline()):
                assert line, "it has ended"
            agent.send_signal(signal.SIGTERM)
        agents = {name: end_of(agent) for name, agent in sides.agents.items()}
        assert [agent.code for agent in agents.values()] == [128 + signal.SIGTERM] * 2, agents
        shards = list((site.here / "run").glob("checkpoints/*/*"))
        assert len(shards) >= 2, "each of their workers has written its part"
        for pid in processes_with(site.mark):
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, signal.SIGKILL)
        waiting(lambda: not sides.run.processes() and not sides.run.removers())


def test_on_ray_the_next_controller_is_at_another_place_of_which_agents_are_told(
    site: Site, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands are as Ray's supervisor starts them. The agent has been looking for a while when the note comes."""
    wanted, note, there = undisturbed(STEPS), tmp_path / "moved", free_port()
    monkeypatch.setenv(MARK, "[]")
    words = [*SLOW, "mesh=dp2", f"train.steps={STEPS}", "runtime.local_workers=0", "runtime.launcher=ray", ADOPT]
    with started(site, *words, names="b", options=("--workers", "2", "--moved-file", str(note))) as sides:
        sides.run.wait_for_steps(AT)
        killed(sides)
        go_on(site.here)
        stdout = sides.agents["b"].stdout
        assert stdout is not None
        while "it keeps 2 workers for the next one" not in (line := stdout.readline()):
            assert line, "it has ended"
        old, new = (f"127.0.0.1:{port}" for port in (site.port, there))
        again_at = [
            word.replace(f"rendezvous={old}", f"rendezvous={new}") for word in resuming(site, *words, names="b")
        ]
        with launch(site.here, *again_at, mark=site.mark) as again:
            AddressNote(note, old).tell(new, 0.0)
            done = end_of(again.process)
            _, agents = end_of_all(sides)
    assert done.code == 0, done.err
    assert [event["workers"] for event in comebacks(site.here)] == [2]
    assert_nothing_was_done_again(site.here, wanted, 2)
    assert (agents["b"].code, agents["b"].err) == (0, "")
    assert f"the run has moved: it is looked for at {new} " in agents["b"].out and not note.exists()


def _resumed_without_its_workers(site: Site, words: list[str], *, saves: bool = False) -> dict[str, Done]:
    """A run whose controller and its machine's workers are killed, and which is started again. Returns how agents end.

    The kernel kills the workers with their fork server.

    Args:
        saves: the run has a checkpoint then, whatever the disk takes for it.
    """
    with started(site, *words) as sides:
        sides.run.wait_for_steps(AT)
        fork_server = sides.run.fork_server()
        if saves:
            eventually(lambda: events_of(site, "checkpoint"), sides.run.process)
        killed(sides)
        go_on(site.here)
        os.kill(fork_server, signal.SIGKILL)
        with launch(site.here, *resuming(site, *words), mark=site.mark) as again:
            done = end_of(again.process)
            _, agents = end_of_all(sides)
    assert done.code == 0, done.err
    return agents


def _written(tmp_path: Path) -> list[str]:
    """The model of a run that need not wait, in a folder of its own."""
    (folder := tmp_path / "alone").mkdir()
    return patient_model.write(folder, tmp_path)
