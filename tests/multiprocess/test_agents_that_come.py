"""Machines that come while a run goes on: a new one, one that was lost and is back, and some that do not get in."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.controller.admin_client import ask
from elaswave_spmd.errors import ControlError
from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from tests.multiprocess import patient_model
from tests.multiprocess.real_runs import eventually, launch
from tests.multiprocess.test_agents import ENDLESS, PATIENT, Site, assert_same_bits, end_of
from tests.multiprocess.test_agents import site as site
from tests.multiprocess.test_agents import undisturbed as undisturbed

HELD_DATA = '''
import os
import time

class Held:
    """Samples; where a folder has the file `hold`, they are prepared when it is gone."""

    vocab_size = 16

    def __init__(self, seq_len=12, **_):
        self.seq_len = seq_len
        if os.path.exists("hold"):
            open("preparing", "w").close()
        while os.path.exists("hold"):
            time.sleep(0.01)

    def __len__(self):
        return 400

    def __getitem__(self, index):
        return [(index * 7 + place) % 16 for place in range(self.seq_len + 1)]
'''


def events_of(site: Site, kind: str) -> list[dict[str, Any]]:
    path = site.here / "run"  # a directory comes before its files
    return [event for event in read_events(path) if event["event"] == kind] if (path / "events.jsonl").exists() else []


def told(site: Site, state: str) -> list[dict[str, Any]]:
    """The events about agents with this state."""
    return [event for event in events_of(site, "agent") if event["state"] == state]


def patient(site: Site) -> tuple[Path, list[str]]:
    go = site.here / "go"
    for folder in (site.here, site.there):
        model = patient_model.write(folder, go)
    return go, [*PATIENT, *model]


def status(site: Site) -> dict[str, Any]:
    return ask(str(site.here / "run"), {"command": "status"})


@pytest.mark.parametrize("name", ["elsewhere", "another"])
def test_a_machine_that_was_lost_and_comes_back_gives_the_run_its_size_again(
    site: Site, undisturbed: Path, name: str
) -> None:
    go, words = patient(site)
    with site.run(*words, options=("--name", "elsewhere")) as (run, agent):
        run.wait_for_steps(2)
        os.kill(agent.pid, signal.SIGKILL)
        eventually(lambda: events_of(site, "fail"), run.process)
        with site.agent("--name", name) as again:
            eventually(lambda: events_of(site, "join"), run.process)
            go.touch()
            of_again = end_of(again)
            end_of(agent)  # the last of its descendants closes its pipes: they wait for a controller for some seconds
            of_run = run.finish()
    assert (of_run.code, of_run.err, of_again.code, of_again.err) == (0, "", 0, "")
    assert_same_bits(site.here / "run", undisturbed)
    assert [event["ranks"] for kind in ("fail", "join") for event in events_of(site, kind)] == [[1], [2]]
    assert read_metrics(site.here / "run")[-1].workers == 2
    states = [(event["host"], event["state"]) for event in events_of(site, "agent")]
    assert states == [("elsewhere", "lost"), (name, "joined"), (name, "used")]


def test_where_nothing_runs_beside_the_controller_replacements_wait_for_an_agent(site: Site, undisturbed: Path) -> None:
    go, words = patient(site)
    with ExitStack() as stack:
        several = [*site.several, "runtime.agents=2", "runtime.local_workers=0", "elastic.replace=true"]
        run = stack.enter_context(launch(site.here, *words, *several, mark=site.mark))
        first, second = (stack.enter_context(site.agent("--name", name)) for name in ("first", "second"))
        run.wait_for_steps(2)
        os.kill(second.pid, signal.SIGKILL)
        eventually(lambda: events_of(site, "no_place"), run.process)
        with pytest.raises(ControlError, match="the agents have 0 free places for 1 more workers"):
            ask(str(site.here / "run"), {"command": "add", "count": 1})
        assert not events_of(site, "join") and not run.workers(), "nor beside the controller"
        third = stack.enter_context(site.agent("--name", "third"))
        eventually(lambda: events_of(site, "join"), run.process)
        hosts = {row["host"]: row["ranks"] for row in status(site)["hosts"]}
        assert hosts["third"] == [2] and hosts.keys() > {"first", "third"} and sum(map(len, hosts.values())) == 2
        go.touch()
        ends = [end_of(agent) for agent in (first, third)]
        end_of(second)  # as above
        of_run = run.finish()
    assert (of_run.code, of_run.err, [end.code for end in ends]) == (0, "", [0, 0]), (of_run, ends)
    assert_same_bits(site.here / "run", undisturbed)
    assert len(events_of(site, "no_place")) == len(events_of(site, "fail")) == 1, "and none was started in vain"


def test_agents_that_a_run_never_had_serve_it_or_are_refused(site: Site, undisturbed: Path) -> None:
    """One with other data is refused. One more is not needed, until an administrator adds a worker on it."""
    go, words = patient(site)
    with ExitStack() as stack:
        several = [*site.several, "runtime.agents=0"]
        run = stack.enter_context(launch(site.here, *words, *several, mark=site.mark))
        run.wait_for_steps(2)
        text = (site.there / "text.txt").read_text()
        (site.there / "text.txt").write_text(text + "another line\n")
        with site.agent("--name", "wrong") as wrong:
            of_wrong = end_of(wrong)
        assert of_wrong.code == 2 and "all machines have the same data" in of_wrong.err, of_wrong
        eventually(lambda: told(site, "refused"), run.process)
        (site.there / "text.txt").write_text(text)
        agent = stack.enter_context(site.agent("--name", "third", "--workers", "2"))
        eventually(lambda: told(site, "joined"), run.process)
        assert not told(site, "used"), "the run has the workers that it was started with"
        for asked, why in (({"count": 1, "host": "nowhere"}, "no machine"), ({"count": 3, "host": "third"}, "2 free")):
            with pytest.raises(ControlError, match=why):
                ask(str(site.here / "run"), {"command": "add"} | asked)
        assert ask(str(site.here / "run"), {"command": "add", "count": 1, "host": "third"}) == {"added": [2]}
        eventually(lambda: events_of(site, "join"), run.process)
        third = status(site)["hosts"][-1]
        assert (third["host"], third["places"], third["ranks"], third["state"]) == ("third", 2, [2], "ready")
        go.touch()
        of_agent, of_run = end_of(agent), run.finish()
    assert (of_run.code, of_run.err, of_agent.code, of_agent.err) == (0, "", 0, "")
    assert_same_bits(site.here / "run", undisturbed)
    assert "this machine's data differ: sha256" in told(site, "refused")[0]["reason"]
    assert read_metrics(site.here / "run")[-1].workers == 3 and not events_of(site, "fail")


def test_a_machine_that_comes_makes_a_run_larger_up_to_max_workers(site: Site, undisturbed: Path) -> None:
    go, words = patient(site)
    with site.run(*words, "elastic.max_workers=3", options=("--name", "elsewhere")) as (run, agent):
        run.wait_for_steps(2)
        with site.agent("--name", "another", "--workers", "4") as more:
            eventually(lambda: events_of(site, "join"), run.process)
            with pytest.raises(ControlError, match=r"exceed elastic.max_workers=3"):
                ask(str(site.here / "run"), {"command": "add", "count": 1})
            go.touch()
            ends = [end_of(agent).code, end_of(more).code]
            of_run = run.finish()
    assert (of_run.code, of_run.err, ends) == (0, "", [0, 0])
    assert_same_bits(site.here / "run", undisturbed)
    assert [event["ranks"] for event in told(site, "used")] == [[2]]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM])
def test_an_agent_that_hangs_or_dies_while_it_prepares_holds_up_nobody(site: Site, number: signal.Signals) -> None:
    for folder in (site.here, site.there):
        (folder / "held_data.py").write_text(HELD_DATA)
    words = ["data.target=held_data.Held", "train.steps=40"]
    words = [word for word in PATIENT if not word.startswith(("data", "train.steps"))] + words
    go, _ = patient(site)
    model = ["model.target=patient_model.PatientGPT", f"+model.args.go={go}"]
    with ExitStack() as stack:
        run = stack.enter_context(launch(site.here, *words, *model, *site.several, "runtime.agents=0", mark=site.mark))
        run.wait_for_steps(2)
        (site.there / "hold").touch()
        agent = stack.enter_context(site.agent("--name", "third", "--timeout", "10"))
        eventually((site.there / "preparing").exists, run.process)
        # Of an agent that ends by the signal the controller may have heard before it is asked.
        assert status(site)["hosts"][-1]["state"] == "preparing"
        agent.send_signal(number)
        if number == signal.SIGSTOP:
            assert status(site)["hosts"][-1]["state"] == "preparing", "and the controller answers"
        else:
            eventually(lambda: told(site, "refused"), run.process)
        go.touch()
        run.process.wait()
        assert run.process.returncode == 0 and read_summary(site.here / "run")["steps"] == 40
        (site.there / "hold").unlink()
        agent.send_signal(signal.SIGCONT)
        of_agent = end_of(agent)
        assert "Traceback" not in of_agent.err, of_agent
        if number == signal.SIGSTOP:
            # Nobody waits for it, so the controller gives its order to end a tenth of a second, and the order may not
            # get out on a busy machine. With the order it ends in order, without it looks for a controller in vain.
            ways = {
                0: "looking for it" not in of_agent.out,
                1: "nobody answered there again within 10 s" in of_agent.err,
            }
            assert ways.get(of_agent.code), of_agent
        else:
            assert of_agent.code == {signal.SIGKILL: -number, signal.SIGTERM: 0}[number], of_agent
        assert run.finish().err == ""
    assert not events_of(site, "fail") and not told(site, "joined")


def test_an_agent_whose_controller_is_killed_joins_the_run_when_it_is_resumed(site: Site, undisturbed: Path) -> None:
    go, words = patient(site)
    with ExitStack() as stack:
        agent = stack.enter_context(site.agent("--name", "elsewhere"))
        with launch(site.here, *words, *site.several, "checkpoint.every=2") as run:
            eventually(lambda: events_of(site, "checkpoint"), run.process)
            run.process.kill()
            run.process.wait()
        go.touch()
        with launch(site.here, "train.resume=run") as resumed:
            of_agent, of_run = end_of(agent), resumed.finish()
    assert (of_run.code, of_agent.code) == (0, 0), (of_run, of_agent)
    assert "the connection to the controller was lost: looking for it" in of_agent.out
    assert_same_bits(site.here / "run", undisturbed)
    assert {line.workers for line in read_metrics(site.here / "run")} == {2}


def test_nobody_joins_a_run_that_is_not_elastic(site: Site) -> None:
    with site.run(*ENDLESS, "elastic.enabled=false") as (run, agent):
        run.wait_for_steps(2)
        with site.agent("--name", "late") as late:
            of_late = end_of(late)
        eventually(lambda: told(site, "refused"), run.process)
        run.process.send_signal(signal.SIGINT)
        of_agent, of_run = end_of(agent), run.finish()
    assert of_late.code == 2 and "elastic.enabled=false" in of_late.err and "Traceback" not in of_late.err
    assert of_run.code == 130 and of_agent.code == 0
