"""Runs on several machines, here in two folders: `python train.py` and `python -m elaswave_spmd agent` beside it."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq.utils.z85

from elaswave_spmd.controller.admin_client import ask
from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from elaswave_spmd.run_dir.checkpoints import find_checkpoints, step_of
from elaswave_spmd.runtime.processes.rendezvous import Rendezvous, find_controller
from elaswave_spmd.runtime.processes.stop_signals import SAME_SIGNAL_S
from elaswave_spmd.runtime.transport.credentials import RunKeys
from tests import mistaken_model
from tests.multiprocess import held_model, patient_model
from tests.multiprocess.real_runs import (
    SMALL,
    Done,
    Launched,
    eventually,
    exec_command,
    launch,
    train,
    train_server,
    write_text,
)
from tests.multiprocess.train_server import Command, new_mark
from tests.ports import free_port
from tests.unit.runtime.test_rendezvous import Tap, serve_again
from tests.waiting import PATIENCE_S

HOST = socket.gethostname()
SHORT = [*SMALL, "mesh=dp2", "train.steps=3"]
PATIENT = [*SMALL, "mesh=dp2", "train.steps=60", "train.validate_every=0"]
ENDLESS = [*SMALL, "mesh=dp2", "train.steps=1000000", "train.validate_every=0"]
Sides = tuple[Launched, Command]


@dataclass(frozen=True)
class Site:
    """Two folders with the same corpus, a port, a secret."""

    here: Path
    there: Path
    port: int
    token_file: Path
    mark: str

    @property
    def several(self) -> list[str]:
        """The overrides of a run with one agent."""
        address = f"runtime.rendezvous=127.0.0.1:{self.port}"
        return [address, "runtime.agents=1", "runtime.transport=tcp", f"runtime.token_file={self.token_file}"]

    @contextmanager
    def agent(
        self, *options: str, token_file: Path | None = None, in_new_interpreter: bool = False
    ) -> Iterator[Command]:
        """An agent in the folder `there`; its sockets' directory must be empty at the end.

        Args:
            in_new_interpreter: see `launch`.
        """
        name, _, value = self.mark.partition("=")
        with tempfile.TemporaryDirectory(prefix="ew", dir="/tmp") as sockets:
            words = ["-m", "elaswave_spmd", "agent", f"127.0.0.1:{self.port}"]
            words += ["--token-file", str(token_file or self.token_file), *options]
            start = exec_command if in_new_interpreter else train_server().start
            process = start(words, self.there, {**os.environ, name: value, "XDG_RUNTIME_DIR": sockets})
            try:
                yield process
                assert not list(Path(sockets).iterdir()), "sockets left behind"
            finally:
                process.kill()
                process.communicate()

    @contextmanager
    def run(self, *arguments: str, options: tuple[str, ...] = (), in_new_interpreters: bool = False) -> Iterator[Sides]:
        """`python train.py` in the folder `here`, and an agent with these options."""
        own = in_new_interpreters
        with ExitStack() as stack:
            run = launch(self.here, *arguments, *self.several, mark=self.mark, in_new_interpreter=own)
            run = stack.enter_context(run)
            yield run, stack.enter_context(self.agent(*options, in_new_interpreter=own))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        write_text(folder)
    token_file = tmp_path / "token"
    token_file.touch(0o600)
    token_file.write_text(secrets.token_hex(16))
    return Site(here, there, free_port(), token_file, new_mark())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a patient run on one machine."""
    folder, go = tmp_path_factory.mktemp("undisturbed") / "run", tmp_path_factory.getbasetemp()
    folder.mkdir()
    return alone(folder, *PATIENT, *patient_model.write(folder, go))


def end_of(process: Command) -> Done:
    out, err = process.communicate(timeout=PATIENCE_S)
    return Done(process.returncode, out, err)


def alone(folder: Path, *arguments: str) -> Path:
    """The directory of the same run on one machine."""
    folder.mkdir(exist_ok=True)
    write_text(folder)
    done = train(folder, *arguments)
    assert done.code == 0, done.err
    return folder / "run"


def assert_same_bits(found: Path, wanted: Path) -> None:
    lines, expected = read_metrics(found), read_metrics(wanted)
    assert [(line.step, line.loss_hex, line.grad_norm_hex) for line in lines] == [
        (line.step, line.loss_hex, line.grad_norm_hex) for line in expected
    ]
    for key in ("weights_sha256", "final_loss_hex"):
        assert read_summary(found)[key] == read_summary(wanted)[key]


def killed_agent(run: Launched, agent: Command) -> int:
    return agent.pid


def remote_worker(run: Launched, agent: Command) -> int:
    """The process id of the agent's only worker."""
    processes = run.processes()
    (fork_server,) = [pid for pid, parent in processes.items() if parent == agent.pid]
    (worker,) = [pid for pid, parent in processes.items() if parent == fork_server]
    return worker


@pytest.mark.parametrize("encryption", ["true", "false"])
def test_workers_on_two_machines_have_the_bits_of_one(site: Site, tmp_path: Path, encryption: str) -> None:
    wanted = alone(tmp_path / "alone", *SHORT)
    encrypted = encryption == "true"
    with site.run(*SHORT, f"runtime.encryption={encryption}", in_new_interpreters=encrypted) as (run, agent):
        of_agent, of_run = end_of(agent), run.finish()
    assert (of_run.code, of_run.err) == (0, "") and (of_agent.code, of_agent.err) == (0, "")
    assert f"waiting for 1 agent at 127.0.0.1:{site.port}\nworkers: 2 on {HOST}\n" in of_run.out
    assert f"agent on {HOST}: places for 1 worker" in of_agent.out
    assert_same_bits(site.here / "run", wanted)
    assert "rejected" not in read_summary(site.here / "run"), "nobody of the run is taken for a stranger"
    assert sorted(path.name for path in site.there.iterdir()) == ["cache", "text.txt"], "data prepared there, no run"


@pytest.mark.parametrize("loses", [False, True])
def test_machines_add_up_sums_of_their_own_workers_first(site: Site, undisturbed: Path, loses: bool) -> None:
    """Two workers on each of two machines, with process groups; one of them is lost while these serve."""
    go, several = site.here / "go", ("runtime.collectives=group", "runtime.encryption=false", "runtime.local_workers=2")

    def events(kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(site.here / "run") if event["event"] == kind]

    for folder in (site.here, site.there):
        model = patient_model.write(folder, go)
    what = ("mesh=dp4", "sharding=zero2", "run.trace=true")
    with site.run(*PATIENT, *several, *model, *what, options=("--name", "elsewhere", "--workers", "2")) as (run, agent):
        run.wait_for_steps(2)
        eventually(lambda: [event["serves"] for event in events("group")] == [True], run.process)
        run.wait_for_steps(events("group")[0]["step"] + 2)  # sums go through it from its second step on
        if loses:
            os.kill(run.workers()[1], signal.SIGKILL)
            eventually(lambda: events("fail"), run.process)
            # The first step of an epoch goes by links, with an event that says so, or a group serves it already.
            run.wait_for_steps(events("fail")[0]["after_step"] + 2)
            eventually(lambda: events("group")[-1]["serves"], run.process)
        go.touch()
        of_agent, of_run = end_of(agent), run.finish()
    assert (of_run.code, of_agent.code) == (0, 0), (of_run, of_agent)
    assert f"workers: 2 on {HOST}, 2 on elsewhere\n" in of_run.out
    assert_same_bits(site.here / "run", undisturbed)
    trace = json.loads((site.here / "run" / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in trace}
    assert {f"PartialSum {way} hosts to the group" for way in ("within", "between")} <= names


@pytest.mark.mends("corrupt", "mismatch")
def test_a_device_on_another_machine_that_computes_wrongly_is_named_with_its_host(site: Site, tmp_path: Path) -> None:
    wanted = alone(tmp_path / "alone", *SHORT, "verify.rate=0")
    wrong = "chaos.events=[{step: 2, kind: miscompute, rank: 1, point: reduce}]"
    with site.run(*SHORT, "verify.rate=1", wrong, options=("--name", "elsewhere")) as (run, agent):
        of_agent, of_run = end_of(agent), run.finish()
    assert of_run.code == 0 and of_agent.code == 0, (of_run, of_agent)
    assert_same_bits(site.here / "run", wanted)
    (found,) = [event for event in read_events(site.here / "run") if event["event"] == "corrupt"]
    assert (found["ranks"], found["host"], found["step"], found["tensor"]) == ([1], "elsewhere", 2, "weight gradient")


@pytest.mark.parametrize(
    ("victim", "message"),
    [
        (killed_agent, rf"error: worker 1 was lost with the agent on {HOST}: its connection closed"),
        (remote_worker, rf"error: worker 1 \(pid \d+\) was ended by signal 9 \(SIGKILL\), on {HOST}"),
    ],
    ids=["agent", "worker"],
)
def test_a_death_on_another_machine_ends_a_run_that_is_not_elastic(
    site: Site, victim: Callable[..., int], message: str
) -> None:
    with site.run(*ENDLESS, "elastic.enabled=false") as (run, agent):
        run.wait_for_steps(2)
        os.kill(victim(run, agent), signal.SIGKILL)
        of_run = end_of(run.process)
        agent.communicate(timeout=PATIENCE_S)  # its pipes are closed by the last of its descendants
        run.finish()
    what, *advice = of_run.err.strip().splitlines()
    assert of_run.code == 1 and re.fullmatch(message, what), of_run
    # The worker that lives has not all of the state. If its agent alone is killed, the other one may live on for long
    # enough to complete the step that both have begun, and to save it with the first.
    may_be_saved = victim is killed_agent and find_checkpoints(site.here / "run")
    starts = [line.partition(": ")[0] for line in advice]
    assert starts == ["nothing to resume"] or (may_be_saved and starts == ["newest checkpoint", "resume with"]), of_run


@pytest.mark.parametrize(("victim", "num_agents"), [(killed_agent, 0), (remote_worker, 1)], ids=["agent", "worker"])
def test_a_run_goes_on_without_what_died_on_another_machine(
    site: Site, undisturbed: Path, victim: Callable[..., int], num_agents: int
) -> None:
    """A newcomer takes the place of the dead worker: on the other machine, if its agent still lives."""
    options, go = ("--name", "elsewhere"), site.here / "go"
    for folder in (site.here, site.there):
        model = patient_model.write(folder, go)
    with site.run(*PATIENT, *model, "elastic.replace=true", options=options) as (run, agent):
        run.wait_for_steps(2)
        os.kill(victim(run, agent), signal.SIGKILL)
        eventually(lambda: "join" in [event["event"] for event in read_events(site.here / "run")], run.process)
        go.touch()
        of_agent, of_run = end_of(agent), run.finish()
    assert of_run.code == 0, of_run.err
    assert f"workers: 1 on {HOST}, 1 on elsewhere\n" in of_run.out
    assert of_agent.code == (0 if num_agents else -signal.SIGKILL)
    assert_same_bits(site.here / "run", undisturbed)
    assert read_metrics(site.here / "run")[-1].workers == 2


@pytest.mark.parametrize(("victim", "num_agents"), [(killed_agent, 0), (remote_worker, 1)], ids=["agent", "worker"])
def test_what_dies_on_another_machine_while_workers_start_is_replaced(
    site: Site, undisturbed: Path, victim: Callable[..., int], num_agents: int
) -> None:
    hold = site.here / "hold"
    for folder in (site.here, site.there):
        model = held_model.write(folder, hold)
    with site.run(*PATIENT, *model, "elastic.replace=true", options=("--name", "elsewhere")) as (run, agent):
        eventually(lambda: len(list(hold.glob("at-*"))) == 2, run.process)
        os.kill(victim(run, agent), signal.SIGKILL)
        eventually(lambda: "fail" in [event["event"] for event in read_events(site.here / "run")], run.process)
        for name in ("go", "end"):
            (hold / name).touch()
        of_agent, of_run = end_of(agent), run.finish()
    assert of_run.code == 0, of_run.err
    assert of_agent.code == (0 if num_agents else -signal.SIGKILL)
    assert_same_bits(site.here / "run", undisturbed)
    (fail,) = [event for event in read_events(site.here / "run") if event["event"] == "fail"]
    assert fail["phase"] == "start" and {line.workers for line in read_metrics(site.here / "run")} == {2}


def test_spares_are_spread_over_machines(site: Site, undisturbed: Path) -> None:
    """The agent has one place: the first spare is here, and the next one there, in the place that is free then."""

    def spares() -> list[dict[str, Any]]:
        return [spare for spare in ask(str(site.here / "run"), {"command": "status"})["spares"] if spare["ready"]]

    go = site.here / "go"
    for folder in (site.here, site.there):
        model = patient_model.write(folder, go)
    with site.run(*PATIENT, *model, "elastic.spares=1", options=("--name", "elsewhere")) as (run, agent):
        run.wait_for_steps(2)
        eventually(spares, run.process)
        assert spares()[0]["pid"] is not None
        os.kill(remote_worker(run, agent), signal.SIGKILL)
        eventually(lambda: [spare["rank"] for spare in spares()] == [3], run.process)
        assert spares()[0]["pid"] is None
        go.touch()
        of_agent, of_run = end_of(agent), run.finish()
    assert (of_run.code, of_run.err, of_agent.code) == (0, "", 0)
    assert_same_bits(site.here / "run", undisturbed)
    kinds = [(event["event"], event["ranks"]) for event in read_events(site.here / "run") if "ranks" in event]
    assert [kind for kind in kinds if kind[0] in ("fail", "join")] == [("fail", [1]), ("join", [2])]


def test_the_death_of_the_controller_ends_agents_and_their_workers(site: Site) -> None:
    # Longer than the test waits: fork servers kill no worker, so all of them end by themselves.
    patient = f"timeouts.shutdown={10 * PATIENCE_S}"
    with launch(site.here, *ENDLESS, *site.several, patient, mark=site.mark) as run:
        assert run.process.stdout is not None
        while not run.process.stdout.readline().startswith("waiting for 1 agent"):
            assert run.process.poll() is None
        with site.agent("--timeout", "10") as agent:  # so long it looks for the controller, at first and again
            run.wait_for_steps(2)
            run.process.kill()
            of_agent = end_of(agent)
            run.finish()
    lost = f"error: the connection to the controller of the run at 127.0.0.1:{site.port} was lost: "
    assert of_agent.code == 1 and of_agent.err.startswith(lost) and "No worker is left here" in of_agent.err


@pytest.mark.parametrize("local", [0, 1])
def test_the_death_of_the_controllers_fork_server_lets_workers_of_agents_save_their_state(
    site: Site, local: int
) -> None:
    """Workers on its machine end with it. The others have copies of all that they had."""
    words = [*ENDLESS, "checkpoint.every=0", f"runtime.local_workers={local}"]
    with site.run(*words, options=("--workers", str(2 - local))) as (run, agent):
        run.wait_for_steps(2)
        os.kill(run.fork_server(), signal.SIGKILL)
        of_agent, of_run = end_of(agent), run.finish()
    assert of_run.code == 1 and "Traceback" not in of_run.err + of_agent.err, (of_run, of_agent)
    told, *advice = of_run.err.splitlines()
    assert re.fullmatch(
        r"error: the fork server \(pid \d+\), parent of all workers on this machine, ended by signal 9.*", told
    )
    who = "the workers on other machines save" if local else "the workers save"
    assert f"\n{who} their state, within " in of_run.out
    (saved,) = find_checkpoints(site.here / "run")
    assert (saved / "manifest.json").exists()
    assert step_of(saved) >= read_metrics(site.here / "run")[-1].step, "nothing that was committed is lost"
    assert [line.partition(": ")[0] for line in advice] == ["newest checkpoint", "resume with"], advice


def test_ctrl_c_in_the_terminal_of_both_saves_the_run_and_the_agent_ends_with_it(site: Site) -> None:
    with site.run(*ENDLESS) as (run, agent):
        run.wait_for_steps(2)
        os.killpg(agent.pid, signal.SIGINT)
        steps = len(read_metrics(site.here / "run"))
        run.wait_for_steps(steps + 3)  # alone it goes on
        run.process.send_signal(signal.SIGINT)
        of_agent, of_run = end_of(agent), run.finish()
    steps = len(read_metrics(site.here / "run"))
    assert of_run.code == 130 and f"Its state after step {steps} is in " in of_run.err
    assert of_run.err.splitlines()[-1].endswith("run.tensorboard=false, and its agents again")
    assert "fail" not in [event["event"] for event in read_events(site.here / "run")]
    assert of_agent.code == 0 and of_agent.err.startswith("SIGINT: the agent serves until the run ends")


def test_a_second_ctrl_c_ends_an_agent(site: Site) -> None:
    with site.run(*ENDLESS, "elastic.enabled=false") as (run, agent):
        run.wait_for_steps(2)
        os.killpg(agent.pid, signal.SIGINT)
        assert agent.stderr is not None and agent.stderr.readline().startswith("SIGINT: the agent serves")
        time.sleep(SAME_SIGNAL_S)
        os.killpg(agent.pid, signal.SIGINT)
        of_agent, of_run = end_of(agent), run.finish()
    assert (of_agent.code, of_agent.err) == (130, "interrupted by SIGINT\n")
    assert of_run.code == 1 and "worker 1 was lost with the agent" in of_run.err


def test_other_data_on_an_agents_machine_is_refused(site: Site) -> None:
    with (site.there / "text.txt").open("a") as file:
        file.write("another line\n")
    with site.run(*SHORT) as (run, agent):
        of_agent, of_run = end_of(agent), run.finish()
    assert of_run.code == of_agent.code == 2
    for done in (of_run, of_agent):
        assert "all machines have the same data" in done.err and done.err.count("sha256") == 2, done.err
    assert f"the agent on {HOST}" in of_run.err and "Traceback" not in of_run.err + of_agent.err
    assert not (site.here / "run").exists()


def test_too_little_room_is_refused_before_any_worker_starts(site: Site) -> None:
    with site.run(*SHORT, "runtime.local_workers=0") as (run, agent):
        of_agent, of_run = end_of(agent), run.finish()
    assert of_run.code == 2 and f"room for 1 workers on agents: {HOST} 1" in of_run.err
    assert of_agent.code == 0 and not (site.here / "run").exists()


@pytest.mark.parametrize("mistake", ["order_of_a_set", "running_mean"])
def test_a_model_that_breaks_the_promise_is_refused_on_several_machines(
    site: Site, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of a set of texts is the same in all processes of a machine, and other on the next one."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)  # pytest's own workers share one
    for folder in (site.here, site.there):
        model = mistaken_model.write(folder, mistake)
    words, own = [*SHORT, *model, "elastic.replace=true"], mistake == "order_of_a_set"  # forks would have one order
    with site.run(*words, options=("--name", "elsewhere"), in_new_interpreters=own) as (run, agent):
        of_agent, of_run = end_of(agent), run.finish()
    assert of_run.code == 2 and "Traceback" not in of_run.err and "lost" not in of_run.out, of_run
    told = of_run.err.splitlines()[0]
    if mistake == "order_of_a_set":
        named = {f"worker 0 on {HOST}", "worker 1 on elsewhere"}
        assert told.startswith("error: layer block0 computes other bits on ")
        assert set(told.removeprefix("error: layer block0 computes other bits on ").split(" than on ")) == named
    else:
        assert told == f"error: {mistaken_model.REFUSED[mistake]}"
    assert not (site.here / "run").exists()
    assert of_agent.code in (0, 1) and "Traceback" not in of_agent.err, of_agent


def test_agents_that_do_not_come_are_missed_at_the_deadline(site: Site) -> None:
    done = train(site.here, *SHORT, *site.several, "runtime.agents_timeout=0.5")
    assert done.code == 1
    missed, resume = done.err.splitlines()
    assert missed == f"error: 0 of 1 agents came to 127.0.0.1:{site.port} within 0.5 s"
    assert resume == "nothing to resume: no step was done, and nothing is left of the run"
    assert not (site.here / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "telling"),
    [
        (["runtime.transport=ipc"], "runtime.transport=tcp"),
        (["runtime.collectives=group"], "neither encrypt nor authenticate"),
        (["runtime.local_workers=3"], "runtime.local_workers=3 is more than the mesh's 2 workers"),
        (["runtime.host=203.0.113.1"], "an address of this machine"),
        (["runtime.token_file=none"], "cannot read the token file none"),
    ],
    ids=str,
)
def test_settings_of_machines_that_cannot_be(site: Site, overrides: list[str], telling: str) -> None:
    done = train(site.here, *SHORT, *site.several, *overrides)
    assert done.code == 2 and telling in done.err and "Traceback" not in done.err, done.err
    assert not (site.here / "run").exists()


def test_an_agent_with_another_secret_is_refused(site: Site, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.touch(0o600)
    other.write_text(secrets.token_hex(16))
    controller = Rendezvous("127.0.0.1", site.port, site.token_file.read_bytes())
    controller.announce("tcp://127.0.0.1:1", RunKeys.make())
    with site.agent(token_file=other) as agent:
        done = end_of(agent)
    controller.close()
    assert done.code == 2 and done.err.startswith("error: ") and "the same secret" in done.err, done.err


def test_the_record_of_a_run_that_has_ended_is_served_again_to_an_agent(site: Site) -> None:
    """It has the right secret, and is answered by what a run of that secret has answered before."""
    recorded: list[bytes] = []
    heard: list[bytes] = []
    secret, keys = site.token_file.read_bytes(), RunKeys.make()
    controller = Rendezvous("127.0.0.1", site.port, secret)
    controller.announce("tcp://127.0.0.1:1", keys)
    with Tap(site.port, recorded) as tap:
        assert find_controller("127.0.0.1", tap.port, secret, PATIENCE_S).credentials == keys
    controller.close()
    with socket.create_server(("127.0.0.1", site.port)) as server:
        threading.Thread(target=serve_again, args=[server, recorded, heard], daemon=True).start()
        with site.agent() as agent:
            done = end_of(agent)
    assert done.code == 2 and "has another secret, or is no controller" in done.err, done.err
    assert "Traceback" not in done.err and "places for" not in done.out, "it has offered nothing"
    own = RunKeys.derive(secret, "rendezvous")
    told = b"".join(heard)
    assert told, "it has asked"
    for key in (keys.client, keys.server, own.client, own.server):
        assert key.encode() not in told and zmq.utils.z85.decode(key) not in told
    assert secret.strip() not in told


@pytest.mark.parametrize(
    ("options", "code", "telling"),
    [
        (["--timeout", "0.2"], 1, "error: no controller at 127.0.0.1:"),
        (["--workers", "0"], 2, "--workers 0"),
        (["--host", "203.0.113.1"], 2, "an address of this machine"),
    ],
    ids=str,
)
def test_agents_that_cannot_be(site: Site, options: list[str], code: int, telling: str) -> None:
    with site.agent(*options) as agent:
        done = end_of(agent)
    assert done.code == code and telling in done.err and "Traceback" not in done.err
