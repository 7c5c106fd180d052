"""Runs on a Ray cluster of real raylets: bits, lost nodes, new ones, drains, a controller's actor that is killed."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_metrics, read_summary
from elaswave_spmd.run_dir.lock import LOCK
from tests.faults.fault_runs import Bits
from tests.faults.test_controller_comes_back import assert_nothing_was_done_again
from tests.multiprocess import patient_model
from tests.multiprocess.real_runs import SMALL, write_text
from tests.multiprocess.test_agents import PATIENT, alone, assert_same_bits
from tests.multiprocess.test_agents import undisturbed as undisturbed
from tests.on_ray.raylets import AUTH, ROOT, Command, Site, site_in
from tests.pages import DOCS, Reader, blocks_of
from tests.ports import free_port
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here (make ray-environment)")

THREADS = "3"
MODEL = f"""
import os

from elaswave_spmd.models import GPT


class UndisturbedGPT(GPT):
    def __init__(self, **sizes):
        assert os.environ.get("OMP_NUM_THREADS") == "{THREADS}", "as it was where the command was typed"
        assert not [name for name in os.environ if name.startswith("RAY_")], "Ray's token is not for workers"
        super().__init__(**sizes)
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A cluster without nodes for agents."""
    write_text(tmp_path)
    with site_in(tmp_path) as made:
        yield made
        eventually(lambda: not made.raylets.ask(actors=None) and not made.raylets.ask(groups=None))


def words(site: Site, *more: str) -> list[str]:
    return [*SMALL[:-1], "mesh=dp2", f"run.dir={site.run_dir}", "runtime.launcher=ray", *more]


def patient(site: Site, *more: str) -> tuple[Path, list[str]]:
    go = site.folder / "go"
    model = patient_model.write(site.folder, go)
    kept = [word for word in PATIENT if not word.startswith("run.dir=")]
    # Nobody is stopped: whoever is lost is killed, and not one whom a busy machine keeps waiting.
    timeouts = ["timeouts.suspect=10", "timeouts.status=12", "timeouts.leave=14"]
    return go, [*kept, f"run.dir={site.run_dir}", "runtime.launcher=ray", *timeouts, *model, *more]


def homes(command: Command) -> list[str]:
    """The nodes of the controller, one after the other: the first 8 digits of their ids."""
    return re.findall(r"ray: the controller is on node \S+-([0-9a-f]{8}), ", command.log)


def kill_supervisor(site: Site) -> None:
    os.kill(site.raylets.ask(supervisor=str(site.run_dir)), signal.SIGKILL)


def test_two_nodes_have_the_bits_of_one_worker(site: Site, tmp_path: Path) -> None:
    (site.folder / "undisturbed.py").write_text(MODEL)
    for _ in range(2):
        site.raylets.add(1)
    site.environment["OMP_NUM_THREADS"] = THREADS
    with site.train(words(site, "model.target=undisturbed.UndisturbedGPT")) as command:
        end = command.end()
    assert (end.code, end.err) == (0, ""), end
    assert f"OMP_NUM_THREADS {THREADS} (Ray: 1)" in end.out
    assert "memory monitor off, token authentication on" in end.out
    assert "ray: the run has 2 nodes, on each an agent with places for 1 worker (1 CPU)\n" in end.out
    assert_same_bits(site.run_dir, alone(tmp_path / "alone", *SMALL, "mesh=single"))
    files = Path(f"{site.run_dir}.ray")
    secret = (files / "token").read_text()
    assert len(secret) == 64 and all(path.stat().st_mode & 0o077 == 0 for path in [files, *files.iterdir()])
    logs = [path.read_text() for path in files.glob("agent-*.log")]
    assert len(logs) == 2 and secret not in end.out + (files / "job.json").read_text() + "".join(logs)
    of_ray = [path for path in site.raylets.temporary.rglob("*") if path.is_file() and not path.is_symlink()]
    assert {"gcs_server", "raylet"} <= {path.name.partition(".")[0] for path in of_ray}, "Ray's own logs are there"
    assert not [path for path in of_ray if secret.encode() in path.read_bytes()]


def test_nodes_come_are_lost_and_are_drained(site: Site, undisturbed: Path) -> None:
    nodes = [site.raylets.add(1) for _ in range(2)]
    go, given = patient(site, "elastic.max_workers=3")
    with site.train(given) as command:
        command.wait_for_steps(2)
        (home,) = homes(command)
        other = next(node for node in nodes if node[:8] != home)
        came = site.raylets.add(1)
        command.until(f"-{came[:8]} has room: it gets an agent")
        command.wait_for("join")
        site.raylets.ask(kill=other)
        command.wait_for("fail")
        command.until(f"-{other[:8]} is lost: ")
        again = site.raylets.add(1)
        command.wait_for("join", 2)
        assert site.raylets.ask(drain=came, within=600) is True
        command.wait_for("leave")
        command.until("nothing was lost: worker ")
        go.touch()
        end = command.end()
    assert (end.code, end.err) == (0, ""), end
    assert re.search(rf"ray: an agent is on node \S+-{again[:8]}: ", end.out), "Ray has placed the lost one again"
    (notice,) = command.events("notice")
    assert notice["from"] == "ctl" and notice["host"].endswith(f"-{came[:8]}") and 400 < notice["deadline"] <= 600
    assert f"-{came[:8]} is to leave within " in end.out
    assert [len(event["ranks"]) for kind in ("fail", "leave") for event in command.events(kind)] == [1, 1]
    assert_same_bits(site.run_dir, undisturbed)
    workers = [line.workers for line in read_metrics(site.run_dir)]
    assert max(workers) == 3 and workers[-1] == 2


def test_an_agent_that_cannot_be_started_is_told_with_the_cause_and_another_node_is_used(site: Site) -> None:
    (node, *_) = [site.raylets.add(1) for _ in range(2)]
    name = f"{socket.gethostname()}-{node[:8]}"
    Path(f"{site.run_dir}.ray", f"agent-{name}.log").mkdir(parents=True)  # where its log would be
    with site.train(words(site)) as command:
        command.until("that has failed 3 times, and is not tried again")
        site.raylets.add(1)
        end = command.end()
    assert end.code == 0, end
    assert end.out.count(f"the agent on node {name} could not be started: IsADirectoryError: ") == 3, end.out
    assert read_summary(site.run_dir)["steps"] == 6


WAITS = ["timeouts.adopt=1000", "timeouts.progress=60"]  # where this machine is slow


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    """Those of a patient run of one worker."""
    folder, go = tmp_path_factory.mktemp("single") / "run", tmp_path_factory.getbasetemp()
    folder.mkdir()
    kept = [word for word in PATIENT if not word.startswith("mesh=")]
    return Bits.of(alone(folder, *kept, "mesh=single", *patient_model.write(folder, go)))


def kill_controller(site: Site) -> None:
    os.kill(int((site.run_dir / LOCK).read_text()), signal.SIGKILL)


def test_a_controller_that_is_killed_twice_has_its_workers_again(site: Site, single: Bits) -> None:
    for _ in range(2):
        site.raylets.add(1)
    go, given = patient(site)
    with site.train(given) as command:
        for killed in range(2):
            command.wait_for_steps(len(read_metrics(site.run_dir)) + 2 if killed else 2)
            kill_controller(site)
            command.wait_for("controller", killed + 1)
        go.touch()
        end = command.end()
    assert (end.code, end.err) == (0, ""), end
    assert end.out.count("ray: the controller has ended by signal 9: it is started again") == 2
    assert end.out.count("ray: workers wait for the next controller, which adopts them") == 2
    assert [(event["generation"], event["workers"]) for event in command.events("controller")] == [(2, 2), (3, 2)]
    assert_nothing_was_done_again(site.folder, single, 3)
    assert not command.events("fail") and {line.workers for line in read_metrics(site.run_dir)} == {2}
    assert "told that the controller is at" not in end.out, "it was at the same place"
    assert "adopt: 120.0" in (site.run_dir / "config.yaml").read_text(), "as nobody has said something else"


def test_a_controllers_actor_that_is_killed_has_its_workers_again(site: Site, single: Bits) -> None:
    """Ray starts it on any node, at another address if that is another one."""
    for _ in range(2):
        site.raylets.add(1)
    go, given = patient(site, *WAITS)
    with site.train(given) as command:
        command.wait_for_steps(2)
        kill_supervisor(site)
        command.wait_for("controller")
        go.touch()
        end = command.end()
    assert (end.code, end.err) == (0, ""), end
    assert len(homes(command)) == 2
    assert_nothing_was_done_again(site.folder, single, 2)
    assert {line.workers for line in read_metrics(site.run_dir)} == {2}


def test_without_adoption_it_goes_on_from_what_the_workers_have_saved(site: Site, single: Bits) -> None:
    command = goes_on_without_adoption(site, single, "timeouts.adopt=null", kill_supervisor)
    assert command.events("resume")


def test_workers_that_have_waited_long_enough_save_their_state_and_the_run_goes_on_from_it(
    site: Site, single: Bits
) -> None:
    """It has no other checkpoint. Whether they have ended when the next controller begins is not certain."""
    command = goes_on_without_adoption(site, single, "timeouts.adopt=0.01", kill_controller)
    assert command.events("resume") or command.events("restart")


def goes_on_without_adoption(site: Site, single: Bits, adopt: str, kill: Callable[[Site], object]) -> Command:
    """A run on two nodes whose controller is lost, and which goes on to its end from what its workers have saved."""
    for _ in range(2):
        site.raylets.add(1)
    go, given = patient(site, adopt)
    with site.train(given) as command:
        command.wait_for_steps(2)
        kill(site)
        eventually(lambda: len(homes(command)) >= 2)
        go.touch()
        end = command.end()
    assert (end.code, end.err) == (0, ""), end
    assert not command.events("controller") and Bits.of(site.run_dir) == single
    assert not [*site.folder.glob("run.without_checkpoint.*")]
    return command


def test_the_workers_of_other_nodes_are_adopted_when_that_of_the_controller_is_lost(site: Site, single: Bits) -> None:
    """It is at another address then. There is no checkpoint, and every page has a mirror on another node."""
    nodes = [site.raylets.add(1) for _ in range(2)]
    go, given = patient(site, *WAITS)
    with site.train(given) as command:
        command.wait_for_steps(2)
        home = on_a_node_of_agents(site, command, nodes)
        comebacks = len(command.events("controller"))
        losses = len(command.events("fail"))
        site.raylets.ask(kill=home)
        command.wait_for("controller", comebacks + 1)
        assert homes(command)[-1] != home[:8]
        site.raylets.add(1)
        command.wait_for("join")
        go.touch()
        end = command.end()
    assert (end.code, end.err) == (0, ""), end
    assert "told that the controller is at" in end.out
    *_, last = command.events("controller")
    # The controller may have lived long enough to declare the worker of its node lost.
    declared = [event for event in command.events("fail")[losses:] if event["time"] < last["time"]]
    assert last["workers"] == 1 and ("did not come back" in last["message"]) is not bool(declared)
    assert Bits.of(site.run_dir) == single
    assert not command.events("resume") and not command.events("restart")
    assert read_metrics(site.run_dir)[-1].workers == 2


def on_a_node_of_agents(site: Site, command: Command, nodes: list[str]) -> str:
    """Kill the controller's actor until Ray has put it on one of these nodes; the node.

    None of them is killed before it has its workers again, in whichever way.
    """

    def comebacks() -> int:
        return len(command.events("controller")) + len(command.events("resume"))

    while not (here := [node for node in nodes if node[:8] == homes(command)[-1]]):
        lives, before = len(homes(command)), comebacks()
        kill_supervisor(site)
        eventually(lambda lives=lives, before=before: len(homes(command)) > lives and comebacks() > before)
    return here[0]


@pytest.mark.parametrize("way", ["lost", "drained"])
def test_a_controller_goes_on_on_another_node(site: Site, undisturbed: Path, way: str) -> None:
    nodes = [site.raylets.add(1) for _ in range(2)]
    go, given = patient(site, "checkpoint.every=2")
    with site.train([*given, *WAITS]) as command:
        command.wait_for("checkpoint")
        home = on_a_node_of_agents(site, command, nodes)
        lives = len(homes(command))
        site.raylets.ask(**({"kill": home} if way == "lost" else {"drain": home, "within": 600}))
        site.raylets.add(1)
        eventually(lambda: len(homes(command)) > lives)
        assert homes(command)[-1] != home[:8]
        go.touch()
        end = command.end()
    assert (end.code, end.err) == (0, ""), end
    assert ("the controller is there: it saves its state, and moves" in end.out) is (way == "drained")
    assert_same_bits(site.run_dir, undisturbed)


def test_ctrl_c_ends_the_run_with_its_state_and_the_command_goes_on(site: Site, undisturbed: Path) -> None:
    for _ in range(2):
        site.raylets.add(1)
    go, given = patient(site)
    with site.train(given) as command:
        command.wait_for_steps(2)
        command.process.kill()
    with site.train(given) as again:
        again.until("is going on; this is its log from the begin", "ray: the run has 2 nodes")
        steps = len(read_metrics(site.run_dir))
        again.wait_for_steps(steps + 1)
        again.process.send_signal(signal.SIGINT)
        end = again.end()
    assert end.code == 143 and "is going on; this is its log from the begin" in end.out, end
    assert "resume with: " in end.out and "SIGINT: the run saves its state and ends" in end.out
    go.touch()
    with site.train([f"train.resume={site.run_dir}", "runtime.launcher=ray"]) as resumed:
        end = resumed.end()
    assert (end.code, end.err) == (0, ""), end
    assert_same_bits(site.run_dir, undisturbed)


def test_nodes_that_may_kill_workers_are_refused(tmp_path: Path) -> None:
    write_text(tmp_path)
    with site_in(tmp_path, RAY_memory_monitor_refresh_ms=None) as site:
        site.raylets.add(1)
        with site.train(words(site, "mesh=single")) as command:
            end = command.end()
        assert end.code == 2 and "Ray's memory monitor is on there" in end.err and not [*site.folder.glob("run*")], end
        del site.environment[AUTH]
        with site.train(words(site, "mesh=single")) as command:
            end = command.end()
        assert end.code == 2 and f"{AUTH}=not set: the Ray cluster is asked for without a token" in end.err, end


def test_a_directory_that_nodes_do_not_share_is_refused(tmp_path: Path) -> None:
    """The cluster has a file system of its own where the command has the run's directory."""
    hidden = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*hidden, "true"], capture_output=True).returncode:
        pytest.skip("this machine gives no mount namespace (unshare --map-root-user --mount)")
    write_text(tmp_path)
    program = [*hidden, "sh", "-c", f'mount -t tmpfs none "{tmp_path}" && exec "$0" "$@"']
    with site_in(tmp_path, program) as site:
        site.raylets.add(1)
        with site.train(words(site)) as command:
            end = command.end()
        assert end.code == 2 and "the directory of the run is not shared: " in end.err, end
        assert not [*site.folder.glob("run*")], "nothing is left"


def test_the_page_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `ray stop`, which would end all clusters of the machine: all that the page has started is killed."""
    programs = Path(sys.executable).parent
    assert (programs / "ray").exists()
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (block,) = [block for block in blocks_of((DOCS / "engines.md").read_text()) if "ray stop\n" in block.text]
    temporary = Path(tempfile.mkdtemp(prefix="ewr", dir="/tmp"))
    start, port = "ray start --head", "6399"
    assert start in block.text and block.text.count(port) == 2
    text = block.text.replace("ray stop\n", "").replace(start, f"{start} --temp-dir={temporary}")
    block = dataclasses.replace(block, order="", text=text.replace(port, str(free_port())))
    reader = Reader(tmp_path, tmp_path / "cache")
    try:
        reader.follow(block)
        summary = read_summary(tmp_path / "runs" / "ray")
        assert (summary["steps"], summary["mesh"]) == (6, "dp2")
    finally:
        reader.close()
        shutil.rmtree(temporary, ignore_errors=True)
