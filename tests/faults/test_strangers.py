"""Strangers at the real ports of a run, as another user: the same bits, nobody evicted, memory flat."""

from __future__ import annotations

import os
import resource
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from tests.faults import attacks
from tests.multiprocess import patient_model
from tests.multiprocess.real_runs import SMALL, Launched, eventually, launch, processes_with, write_text
from tests.ports import free_port
from tests.waiting import PATIENCE_S

# So many steps take ten minutes while the model waits: longer than all attacks.
RUN = [*SMALL, "mesh=dp2", "train.steps=80", "train.validate_every=0", "runtime.transport=tcp"]
# Nobody is stopped here: whoever is not heard for a moment is one that attacks and a busy machine keep waiting.
RUN += ["timeouts.suspect=20", "timeouts.status=22", "timeouts.leave=24"]
FLAT_BYTES = 96 << 20
"""More than a process of a run grows by itself in some steps, and far less than what the attacks send."""


def listening_ports(pids: list[int]) -> list[int]:
    """The TCP ports at which processes listen."""
    inodes = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # it has been closed since; one that listens is not
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return sorted({int(row[1].split(":")[1], 16) for row in fields if row[3] == "0A" and row[9] in inodes})


def resident_bytes(pids: list[int]) -> dict[int, int]:
    pages = {pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids}
    return {pid: number * resource.getpagesize() for pid, number in pages.items()}


def num_rejected(run_dir: Path) -> int:
    """As the last event says."""
    found = [event for event in read_events(run_dir) if event["event"] == "rejected"]
    return sum(found[-1]["totals"].values()) if found else 0


def attack(name: str, ports: list[int]) -> None:
    """Carry out an attack on all ports, in a process of another user if this one may become one."""
    command = [sys.executable, attacks.__file__, name, *map(str, ports)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"user {attacks.NOBODY if os.geteuid() == 0 else os.geteuid()}\n"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    write_text(folder)
    (folder / "go").touch()
    with launch(folder, *RUN, *patient_model.write(folder, folder / "go")) as run:
        done = run.finish()
    assert done.code == 0, done.err
    assert "rejected" not in read_summary(folder / "run"), "nobody of the run is taken for a stranger"
    return folder / "run"


@contextmanager
def run_with(
    folder: Path, overrides: list[str], num_agents: int
) -> Iterator[tuple[Launched, list[subprocess.Popen[str]]]]:
    """A run that waits for the file `go`, and its agents."""
    write_text(folder)
    model = patient_model.write(folder, folder / "go")
    token = folder / "token"
    where = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        if num_agents:
            token.touch(0o600)
            token.write_text(secrets.token_hex(16))
            overrides = [
                *(*overrides, f"runtime.rendezvous={where}", f"runtime.agents={num_agents}"),
                *(f"runtime.token_file={token}", "runtime.local_workers=0"),
            ]
        run = stack.enter_context(launch(folder, *RUN, *model, *overrides))
        agents = []
        for number in range(num_agents):
            name, _, value = run.mark.partition("=")
            sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="ew", dir="/tmp"))
            command = [sys.executable, "-m", "elaswave_spmd", "agent", where, "--token-file", str(token)]
            agents.append(
                subprocess.Popen(
                    [*command, "--name", f"host{number}"],
                    cwd=folder,
                    env={**os.environ, name: value, "XDG_RUNTIME_DIR": sockets},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
            stack.callback(agents[-1].communicate)
            stack.callback(agents[-1].kill)
        yield run, agents


@pytest.mark.parametrize(
    ("overrides", "num_agents"),
    [([], 0), (["runtime.encryption=false"], 0), ([], 2)],
    ids=["encrypted", "plain", "two agents"],
)
@pytest.mark.mends("rejected")
def test_strangers_at_all_ports_of_a_run_have_no_effect(
    tmp_path: Path, undisturbed: Path, overrides: list[str], num_agents: int
) -> None:
    with run_with(tmp_path, overrides, num_agents) as (run, agents):
        run.wait_for_steps(patient_model.FAST_STEPS)
        pids = list(processes_with(run.mark))
        ports = listening_ports(pids)
        # The controller and two workers; with agents its other links, those of the agents, and the rendezvous.
        assert len(ports) == 3 + (2 + num_agents if num_agents else 0)
        before = resident_bytes(pids)
        for name in attacks.ATTACKS:
            attack(name, ports)
        grown = {pid: size - before[pid] for pid, size in resident_bytes(pids).items()}
        assert max(grown.values()) < FLAT_BYTES, grown
        # 200 silent connections at each port, and those of the other attacks that libzmq reports.
        eventually(lambda: num_rejected(tmp_path / "run") >= 200 * len(ports), run.process)
        (tmp_path / "go").touch()
        if agents:
            assert [agent.communicate(timeout=PATIENCE_S)[1] for agent in agents] == ["", ""]
        done = run.finish()
    assert done.code == 0, done.err
    of_run, wanted = read_metrics(tmp_path / "run"), read_metrics(undisturbed)
    assert [(line.step, line.loss_hex) for line in of_run] == [(line.step, line.loss_hex) for line in wanted]
    summary = read_summary(tmp_path / "run")
    assert summary["weights_sha256"] == read_summary(undisturbed)["weights_sha256"]
    assert sum(summary["rejected"].values()) >= 200 * len(ports)
    kinds = {event["event"] for event in read_events(tmp_path / "run")}
    assert not kinds & {"fail", "leave", "join", "link", "restart", "stop"}, kinds


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_reach_the_sockets_of_one_host(tmp_path: Path) -> None:
    write_text(tmp_path)
    model = patient_model.write(tmp_path, tmp_path / "go")
    ipc = [word for word in RUN if word != "runtime.transport=tcp"]
    with launch(tmp_path, *ipc, *model) as run:
        run.wait_for_steps(1)
        run.sockets.chmod(0o755)  # as a shared /tmp
        assert listening_ports(list(run.processes())) == []
        found = [path for path in run.sockets.rglob("*") if path.is_socket()]
        assert len(found) == 3, "the controller and two workers"
        code = (
            "import os, socket, sys\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "for path in sys.argv[1:]:\n"
            "    try: socket.socket(socket.AF_UNIX).connect(path)\n"
            "    except PermissionError: print('refused')\n"
        )
        command = [sys.executable, "-c", code, *map(str, found)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.stdout == "refused\n" * 3, done
        (tmp_path / "go").touch()
        assert run.finish().code == 0
