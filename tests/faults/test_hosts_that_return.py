"""Hosts that are cut off until the run has given them up: network namespaces; their agents join again by themselves."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from pathlib import Path

import pytest

from benchmarks.processes import new_directory, processes_with, program
from benchmarks.soak_hosts import Network, why_not
from benchmarks.soak_runs import Watch
from tests.multiprocess import patient_model
from tests.multiprocess.real_runs import SMALL, TRAIN, train, write_text
from tests.multiprocess.test_agents import assert_same_bits
from tests.waiting import PATIENCE_S, eventually

STEPS = [*SMALL, "train.steps=60", "train.validate_every=0"]
LOST = "the connection to the controller was lost"
MEETING = "10.77.0.1:29400"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the same run on one worker."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("alone")
    write_text(folder)
    (folder / "go").touch()
    done = train(folder, *STEPS, "mesh=single", *patient_model.write(folder, folder / "go"))
    assert done.code == 0, done.err
    return folder / "run"


@pytest.mark.parametrize("outlives", [True, False], ids=["the link outlives the cut", "the link is lost"])
def test_a_host_that_is_cut_off_joins_again_when_the_network_is_back(undisturbed: Path, outlives: bool) -> None:
    """Its workers are given up when they have been silent for timeouts.suspect; TCP has half a minute."""
    with new_directory("h-") as folder, contextlib.ExitStack() as stack:
        network = Network()
        stack.callback(network.close)
        network.open()
        token, go = folder / "token", folder / "go"
        token.touch(0o600)
        token.write_text(secrets.token_hex(16))
        places = folder / "here", folder / "there"
        for place in places:
            place.mkdir()
            write_text(place)
            patient_model.write(place, go)
        model = ["model.target=patient_model.PatientGPT", f"+model.args.go={go}"]
        several = [f"runtime.rendezvous={MEETING}", "runtime.agents=1", "runtime.local_workers=2"]
        several += ["runtime.transport=tcp", f"runtime.token_file={token}"]
        words = [sys.executable, str(TRAIN), *STEPS, "mesh=dp4", *model, *several]
        ours = ["env", "-C", str(places[0]), *words]
        run = stack.enter_context(program(network.command(0, *ours), folder / "r"))
        theirs = ["env", "-C", str(places[1]), sys.executable, "-m", "elaswave_spmd", "agent", MEETING]
        theirs += ["--token-file", str(token), "--workers", "2", "--name", "host1"]
        agent = stack.enter_context(program(network.command(1, *theirs), folder / "a"))
        watch = Watch(places[0] / "run")

        def ranks(kind: str) -> set[int]:
            return {rank for event in watch.events if event["event"] == kind for rank in event["ranks"]}

        run.wait(lambda: watch.step >= 2, PATIENCE_S)
        network.cut(1)
        run.wait(lambda: ranks("fail") == {2, 3}, PATIENCE_S)
        if not outlives:
            agent.wait(lambda: LOST in agent.log.read_text(errors="replace"), PATIENCE_S)
        network.mend(1)
        run.wait(lambda: ranks("join") == {4, 5}, PATIENCE_S)
        go.touch()
        run.finish(PATIENCE_S)
        assert agent.process.wait(PATIENCE_S) == 0, agent.log.read_text(errors="replace")
        eventually(lambda: not any(processes_with(each.mark) for each in (run, agent)))
        assert_same_bits(places[0] / "run", undisturbed)
        assert ranks("fail") == {2, 3}
        states = [event["state"] for event in watch.events if event["event"] == "agent"]
        assert states == ["lost", "joined", "used"], watch.events
        assert not [path for path in folder.rglob("elaswave-*") if path.is_dir()], os.listdir(folder)
