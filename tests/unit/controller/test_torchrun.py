"""What a process of torchrun's does, by its variables and its words; and what is refused on every node alike."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from elaswave_spmd import cli, train
from elaswave_spmd.conf.format_version import FORMAT_FIELD, FORMAT_VERSION
from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller import agent_command
from elaswave_spmd.controller.torchrun import PORT, VARIABLES, End, Run, Serve, start_of, take_out
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.devices import Island
from elaswave_spmd.runtime.devices.kinds.xla import KIND as XLA

TWO = ["mesh=dp4", "runtime.token_file=/home/me/token", "run.dir=runs/two"]


def variables(rank: int, size: int, local_size: int = 1, **others: str) -> dict[str, str]:
    """What torchrun sets for a process."""
    found = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank % local_size,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": rank // local_size,
        "GROUP_WORLD_SIZE": size // local_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": 41234,
        "TORCHELASTIC_RUN_ID": "job 7",
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    return {name: str(value) for name, value in found.items()} | others


def settings_of(start: object) -> Settings:
    assert isinstance(start, Run), start
    return start.settings


def test_rank_0_is_the_controller_and_other_nodes_are_its_agents() -> None:
    first = start_of(TWO, variables(0, 2))
    runtime = settings_of(first).runtime
    assert (runtime.rendezvous, runtime.agents, runtime.transport) == (f"node0:{PORT}", 1, "tcp")
    assert (runtime.local_workers, runtime.agent_workers, runtime.launcher) == (2, 2, "torchrun")
    assert isinstance(first, Run) and first.notice
    second = start_of(TWO, variables(1, 2))
    assert isinstance(second, Serve)
    assert second.arguments == (
        *(f"node0:{PORT}", "--token-file", "/home/me/token", "--workers", "2", "--timeout", "300", "--drain", "25"),
    )


def test_the_arguments_of_an_agent_are_those_that_the_command_takes() -> None:
    start = start_of([*TWO, "runtime.agents_timeout=7.5"], variables(1, 2))
    assert isinstance(start, Serve)
    options = agent_command._parse(start.arguments, "elaswave-spmd")
    assert (options.rendezvous, options.token_file, options.workers, options.timeout) == (
        *(f"node0:{PORT}", "/home/me/token", 2, 7.5),
    )


@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_further_processes_of_a_node_end(rank: int) -> None:
    start = start_of(TWO, variables(rank, 8, 4))
    assert isinstance(start, End if rank % 4 else Serve)
    if isinstance(start, End):
        assert "\n" not in start.notice and f"process {rank % 4} of 4" in start.notice


@pytest.mark.parametrize(
    ("words", "nodes", "local", "places"),
    [
        (["mesh=dp4"], 2, 2, 2),
        (["mesh=dp5"], 2, 2, 3),
        (["mesh=dp4"], 3, 1, 2),
        (["mesh=dp2"], 4, None, 1),
        (["mesh=dp4", "runtime.local_workers=0"], 2, 0, 4),
        (["mesh=dp4", "runtime.local_workers=4"], 2, 4, 1),
        (["mesh=dp4", "runtime.agent_workers=1"], 2, 3, 1),
        (["mesh=dp4", "runtime.agent_workers=8"], 3, None, 8),
        (["mesh=dp4", "runtime.agent_workers=8", "runtime.local_workers=1"], 3, 1, 8),
    ],
)
def test_workers_are_shared_out_among_nodes(words: list[str], nodes: int, local: int | None, places: int) -> None:
    words = [*TWO[1:], *words]
    runtime = settings_of(start_of(words, variables(0, nodes))).runtime
    assert (runtime.local_workers, runtime.agent_workers, runtime.agents) == (local, places, nodes - 1)
    for rank in range(1, nodes):
        start = start_of(words, variables(rank, nodes))
        assert isinstance(start, Serve) and start.arguments[start.arguments.index("--workers") + 1] == str(places)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("runtime.rendezvous=10.0.0.1:5000", "10.0.0.1:5000"),
        ("runtime.agents=3", 3),
        ("runtime.local_workers=1", 1),
        ("runtime.agent_workers=5", 5),
        ("runtime.transport=tcp", "tcp"),
    ],
)
def test_an_argument_wins_over_the_variables(word: str, value: object) -> None:
    name = word.partition("=")[0].removeprefix("runtime.")
    assert getattr(settings_of(start_of([*TWO, word], variables(0, 2))).runtime, name) == value


def test_agents_go_to_the_rendezvous_that_is_given() -> None:
    start = start_of([*TWO, "runtime.rendezvous=10.0.0.1:5000"], variables(1, 2))
    assert isinstance(start, Serve) and start.arguments[0] == "10.0.0.1:5000"


def test_the_port_is_another_one_than_that_of_torchrun() -> None:
    runtime = settings_of(start_of(TWO, variables(0, 2, MASTER_PORT=str(PORT)))).runtime
    assert runtime.rendezvous == f"node0:{PORT + 1}"


@pytest.mark.parametrize("missing", VARIABLES)
def test_a_command_of_its_own_takes_no_notice_of_variables(missing: str) -> None:
    """A batch job sets RANK and WORLD_SIZE, and a shell under torchrun some others."""
    environment = variables(1, 2)
    del environment[missing]
    start = start_of(["mesh=dp2"], environment)
    assert settings_of(start) == Settings.from_dict(settings_of(start_of(["mesh=dp2"], {})).to_dict())
    assert isinstance(start, Run) and not start.notice


@pytest.mark.parametrize(
    ("word", "environment"), [("runtime.launcher=none", variables(1, 2)), ("seed=1", variables(0, 1))]
)
def test_variables_are_not_followed_if_asked_or_if_there_is_one_process(word: str, environment: dict[str, str]) -> None:
    start = start_of([word], environment)
    assert isinstance(start, Run) and not start.notice and start.settings.runtime.rendezvous is None


@pytest.mark.parametrize(("words", "size", "local_size"), [(["runtime.launcher=torchrun"], 1, 1), ([], 4, 4)])
def test_one_node_is_a_run_without_agents(words: list[str], size: int, local_size: int) -> None:
    start = start_of(["mesh=dp2", *words], variables(0, size, local_size))
    runtime = settings_of(start).runtime
    assert (runtime.rendezvous, runtime.launcher) == (None, "torchrun") and not runtime.agents
    assert isinstance(start, Run) and start.notice


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
        ({"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "contradict themselves"),
        ({"LOCAL_WORLD_SIZE": "0"}, "contradict themselves"),
        ({"RANK": "1"}, "contradict themselves"),
        ({"RANK": "2", "GROUP_RANK": "2"}, "contradict themselves"),
        ({"LOCAL_RANK": "1", "RANK": "1"}, "contradict themselves"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, "3 times more"),
    ],
    ids=str,
)
def test_variables_that_cannot_be_are_refused(change: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        start_of(TWO, variables(0, 2) | change)
    assert what in caught.value.what and caught.value.fix


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("runtime.rendezvous=null", "runtime.rendezvous=null"),
        ("runtime.token_file=null", "runtime.token_file is not given"),
        ("run.dir=null", "run.dir is not given"),
        ("runtime.transport=ipc", "runtime.transport=ipc"),
        ("runtime.launcher=mpirun", "runtime.launcher=mpirun"),
        ("train.steps=0", "train.steps=0"),
    ],
)
@pytest.mark.parametrize("node", [0, 1])
def test_words_that_cannot_be_are_refused_on_all_nodes(node: int, word: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        start_of([*TWO, word], variables(node, 2))
    assert what in caught.value.what and caught.value.fix + caught.value.exists


def test_torchrun_that_is_asked_for_must_be_there() -> None:
    with pytest.raises(ConfigError, match="TORCHELASTIC_RUN_ID is not set"):
        start_of(["runtime.launcher=torchrun"], {k: v for k, v in variables(0, 1).items() if "ELASTIC_RUN" not in k})
    with pytest.raises(ConfigError, match=r"RANK, WORLD_SIZE, .+ are not set"):
        start_of(["runtime.launcher=torchrun"], {})


def test_places_on_agents_are_for_agents_that_torchrun_starts() -> None:
    with pytest.raises(ConfigError, match="neither torchrun nor Ray has started this command"):
        start_of([*TWO, "runtime.agent_workers=2", "runtime.rendezvous=node0:1", "runtime.agents=1"], {})


def saved_run(folder: Path, **runtime: Any) -> Path:
    """A directory with the settings of a run on two nodes."""
    fields = settings_of(start_of([*TWO, "train.steps=77"], variables(0, 2))).to_dict()
    fields["runtime"] |= runtime
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({FORMAT_FIELD: FORMAT_VERSION, **fields}))
    return folder


def test_a_resumed_run_meets_where_torchrun_has_started_it_now(tmp_path: Path) -> None:
    saved = saved_run(tmp_path / "run", agent_workers=1)
    words = [f"train.resume={saved}", "mesh=dp6"]
    settings = settings_of(start_of(words, variables(0, 3, MASTER_ADDR="node7")))
    runtime = settings.runtime
    assert (runtime.rendezvous, runtime.agents, settings.train.steps) == (f"node7:{PORT}", 2, 77)
    assert (runtime.local_workers, runtime.agent_workers, runtime.token_file) == (2, 2, "/home/me/token")
    start = start_of(words, variables(2, 3))
    assert isinstance(start, Serve) and start.arguments[2:5] == ("/home/me/token", "--workers", "2")
    alone = settings_of(start_of([words[0]], {}))
    assert alone.runtime.launcher == "auto" and alone.runtime.rendezvous == f"node0:{PORT}"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_does_not_see_the_run_that_is_resumed_is_refused(tmp_path: Path, rank: int) -> None:
    with pytest.raises(ConfigError, match="elsewhere"):
        start_of([f"train.resume={tmp_path / 'elsewhere'}", *TWO[:2]], variables(rank, 2))


def test_the_variables_are_taken_out_and_no_others() -> None:
    environment = variables(0, 2) | {"HOME": "/home/me", "OMP_NUM_THREADS": "1", "MASTER": "x"}
    take_out(environment)
    assert environment == {"HOME": "/home/me", "OMP_NUM_THREADS": "1", "MASTER": "x"}


def test_torch_xla_does_not_see_them() -> None:
    environment, island = variables(0, 2), Island(1, 1)
    with pytest.raises(ConfigError, match="WORLD_SIZE=2 is set"):
        XLA.environment(environment, island)
    take_out(environment)
    assert not set(VARIABLES) & set(environment | XLA.environment(environment, island))


@pytest.mark.parametrize("words", [[], ["--cfg", "job"]])
def test_the_command_line_does_what_the_variables_say(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[list[str]] = []
    monkeypatch.setattr(cli, "_serve", lambda arguments, program: served.append(list(arguments)) or 7)
    monkeypatch.setattr(sys, "argv", ["train.py", *TWO, *words])
    for rank, code in ((1, 0), (2, 7)):
        for name, value in variables(rank, 4, 2).items():
            monkeypatch.setenv(name, value)
        assert cli.train() == (0 if words else code)
    told = capsys.readouterr().out
    if words:
        assert served == [] and told == ""
    else:
        assert [arguments[0] for arguments in served] == [f"node0:{PORT}"]
        assert "process 1 of 2 on this node has nothing to do" in told and "an agent of the run at" in told


def test_a_command_that_may_adopt_workers_has_no_variables_of_torchruns_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that torchrun has started on one node goes on before signals are looked at."""
    left: list[set[str]] = []
    monkeypatch.setattr(cli, "_run", lambda settings, signals, fd: left.append({*VARIABLES} & {*os.environ}) or 0)
    one_node = yaml.safe_dump({FORMAT_FIELD: FORMAT_VERSION, **Settings().to_dict()})
    (tmp_path / "config.yaml").write_text(one_node)
    for name, value in variables(0, 2, 2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train.py", f"train.resume={tmp_path}", "timeouts.adopt=60"])
    assert cli.train() == 0 and left == [set()]
    assert "torchrun: one node" in capsys.readouterr().out


def test_bad_variables_end_the_command_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables(0, 2, WORLD_SIZE="0").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train.py", *TWO])
    assert cli.train() == 2 and "contradict themselves" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"runtime.launcher": "torchrun"}, "runtime.launcher=torchrun is given to a call from Python"),
        (
            {
                "runtime.agent_workers": 2,
                "runtime.rendezvous": "127.0.0.1:1",
                "runtime.agents": 1,
                "runtime.transport": "tcp",
                "runtime.token_file": "/home/me/token",
            },
            "runtime.agent_workers is given, and neither torchrun nor Ray has started this command",
        ),
    ],
)
def test_a_call_from_python_is_a_run_in_its_own_process(given: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train(settings=given)
    assert caught.value.what == what and caught.value.fix
