"""The command line: exit codes, one clear screen, nothing left behind, the first lines of --help, the README."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from elaswave_spmd import cli
from elaswave_spmd.conf.compose import settings_from
from elaswave_spmd.conf.help import help_text
from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller.on_ray import command as on_ray
from elaswave_spmd.errors import MeshError, RunError, WorkerError
from elaswave_spmd.runtime.devices import ThisMachine, device_of
from elaswave_spmd.runtime.processes.supervisor import with_adoption
from tests.pages import TUTORIALS, blocks_of

PREPARING = f"{cli.FIRST_LINE}\n"  # all that is printed before an error

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


class Ran:
    """Stands in for the controller: keeps the settings, ends with the given code."""

    def __init__(self) -> None:
        self.settings: list[Settings] = []
        self.ends: BaseException | int = 0

    def __call__(self, settings: Settings, signals: object, run_dir_fd: int | None = None) -> int:
        self.settings.append(settings)
        if isinstance(self.ends, BaseException):
            raise self.ends
        return self.ends


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ran:
    made = Ran()
    monkeypatch.setattr(cli, "_run", made)
    monkeypatch.setattr(cli, "supervise", lambda words: command(monkeypatch, *with_adoption(words)))
    monkeypatch.setattr(on_ray, "run_on_ray", lambda job: 0)
    monkeypatch.chdir(tmp_path)
    return made


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """`python train.py ARGUMENTS` in this process."""
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    return cli.train()


def test_settings_reach_the_controller(monkeypatch: pytest.MonkeyPatch, ran: Ran, tmp_path: Path) -> None:
    assert command(monkeypatch, "mesh=dp2_pp2", "train.steps=7", "sharding=zero3") == 0
    (settings,) = ran.settings
    assert (settings.mesh.shape.name, settings.train.steps, settings.sharding.zero_level) == ("dp2_pp2", 7, 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ends", "code", "shown"),
    [
        (0, 0, ""),
        (
            MeshError("mesh=pp9 has 9 stages", where="mesh=pp9", fix="mesh=pp6"),
            2,
            "error: mesh=pp9 has 9 stages\n  fix:",
        ),
        (RunError("the disk is full"), 1, "error: the disk is full"),
        (WorkerError(3, "Traceback: ZeroDivisionError"), 1, "error: worker 3 failed:\nTraceback: ZeroDivisionError"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_exit_codes(
    ends: BaseException | int,
    code: int,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    ran: Ran,
    capfd: pytest.CaptureFixture[str],
) -> None:
    ran.ends = ends
    assert command(monkeypatch) == code
    out, err = capfd.readouterr()
    assert out == PREPARING and err.startswith(shown) and err.count("Traceback") == shown.count("Traceback")


@pytest.mark.parametrize(
    "arguments",
    [
        "mesh=dpp3",
        "mesh=3",
        "model=null",
        "mesh=dp2_tp0",
        "runtime.device=tpu",
        "mesh.dp=abc",
        "mesh.dp=",
        "mesh=dp2 mesh.stages=[3,2]",
        "train.steps=0",
        "train.steps=",
        "optim.lr=-1",
        "train.global_batch=0",
        "train.microbatch_size=5",
        "model.dropout=-0.1",
        "data=text",
        "train.resume=runs/a",
        "run.dir=",
        "run.dir=runs/lr=0.1",
        "train.resume=runs/(a)",
        "-m seed=1,2",
        "--multirun",
        "--multi",
        "hydra.mode=MULTIRUN",
    ],
)
def test_bad_input(
    arguments: str, monkeypatch: pytest.MonkeyPatch, ran: Ran, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, *arguments.split()) == 2
    out, err = capfd.readouterr()
    assert out == PREPARING and err.startswith("error: ") and len(err.splitlines()) <= 5 and "fix: " in err
    assert ran.settings == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("train.stpes=3", "train.steps=3"),
        ("trian.steps=3", "train.steps=3"),
        ("stpes=3", "train.steps=3"),
        ("model.layer=3", "model.layers=3"),
        ("model=gpt_tny", "model=gpt_tiny"),
        ("sharding=zero9", "sharding=zero"),
        ("mesh=dp2_p2", "mesh=dp2_pp2"),
        ("chaos=randon", "chaos=random"),
        ("runtime.device=cp", "runtime.device=cpu"),
        ("optim.schedule=cosin", "optim.schedule=cosine"),
        ("train.step", "train.steps=VALUE"),
        ("seed", "seed=VALUE"),
    ],
)
def test_a_typo_ends_with_the_closest_name(
    argument: str, advice: str, monkeypatch: pytest.MonkeyPatch, ran: Ran, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, argument) == 2
    out, err = capfd.readouterr()
    assert out == PREPARING and argument.partition("=")[0] in err.splitlines()[0] and f"fix:    {advice}" in err
    assert "+" not in err and ran.settings == []


def test_a_command_that_is_unknown_ends_with_the_closest_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for words, advice in ((["trian"], "elaswave-spmd train"), (["mesh=dp3"], "elaswave-spmd train mesh=dp3")):
        monkeypatch.setattr(sys, "argv", ["elaswave-spmd", *words])
        assert cli.main() == 2
        out, err = capfd.readouterr()
        assert out == "" and err.startswith(f"error: {words[0]} is not a command") and f"fix:    {advice}\n" in err


def test_a_reader_of_help_may_leave_early(tmp_path: Path) -> None:
    for start in ([str(ROOT / "train.py")], ["-m", "elaswave_spmd", "plan"], ["-m", "elaswave_spmd"]):
        process = subprocess.Popen(
            [sys.executable, *start, "--help"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # before anything can have been printed
        assert (process.stderr.read(), process.wait(100)) == (b"", 0), start
        process.stderr.close()


@pytest.mark.parametrize(
    "words",
    [
        [str(ROOT / "train.py"), "mesh=single"],
        [str(ROOT / "train.py"), "--supervise", "mesh=single"],
        ["-m", "elaswave_spmd", "agent", "127.0.0.1:9", "--token-file", "token"],
    ],
    ids=["train", "supervised", "agent"],
)
def test_a_working_directory_that_was_removed_is_bad_input(tmp_path: Path, words: list[str]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    program = ["sh", "-c", 'rmdir "$0" && exec "$@"', str(gone), sys.executable, *words]
    done = subprocess.run(
        program, cwd=gone, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 2, done
    assert done.stderr.startswith("error: the working directory cannot be found (No such file or directory)\n"), done
    assert "fix:" in done.stderr and "Traceback" not in done.stderr


def test_cfg_job_prints_the_settings_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, ran: Ran, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "mesh=dp2", "--cfg", "job", "train.steps=7") == 0
    assert Settings.from_dict(yaml.safe_load(capfd.readouterr().out)).train.steps == 7 and ran.settings == []
    assert command(monkeypatch, "--cfg", "job", "train.steps=0") == 2


def test_on_a_terminal_the_screen_is_a_panel_without_markup(
    monkeypatch: pytest.MonkeyPatch, ran: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert command(monkeypatch, "mesh=dp2", "mesh.stages=[3,2]") == 2
    assert "mesh.stages=[3,2] contradicts mesh.dp=2" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("kind", [MeshError, RunError])
def test_names_in_errors_do_not_steer_the_terminal(
    kind: type[Exception],
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    ran: Ran,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    ran.ends = kind("no tensor a\x1b]0;b\x07\x9b2J\nnext\tline")
    assert command(monkeypatch) in (1, 2)
    shown = capsys.readouterr().err
    assert r"no tensor a\x1b]0;b\x07\x9b2J" in shown and not {"\x07", "\x9b"} & {*shown} and "\x1b]" not in shown
    assert "next" in shown


def test_help_starts_with_examples(
    monkeypatch: pytest.MonkeyPatch, ran: Ran, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "--help") == 0
    out = capfd.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "Examples:" and lines[1].startswith("  python train.py ") and "mesh=dp2_pp2" in lines[2]
    assert "mesh: dpN, dpN_ppM, ppM, single" in out and "sharding: model, zero0, zero1, zero2, zero3" in out
    assert ran.settings == [] and list(tmp_path.iterdir()) == []


def examples(text: str) -> list[str]:
    """Overrides of each `python train.py ...` line, without the remark behind it."""
    found = re.findall(r"^ +(?:\S*/)?python train\.py(.*?)(?: {4}.*)?$", text, re.MULTILINE)
    return [line for line in found if "$" not in line]


def test_the_examples_of_help_and_readme_are_good(monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    lines = examples(help_text()) + examples(README)
    assert len(lines) >= 8
    for line in lines:
        assert command(monkeypatch, *shlex.split(line)) == 0, line
    assert len(ran.settings) == len(lines)


def test_the_overrides_in_the_readmes_table_are_good(monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    section = README.partition("\n## The command line\n")[2].partition("\n## ")[0]
    rows = [row[1] for row in re.finditer(r"^\| `([^`]*[^`=])` +\|", section, re.MULTILINE)]
    assert len(rows) >= 6
    for row in rows:
        assert command(monkeypatch, *shlex.split(row)) == 0, row


def test_the_commands_of_pages_that_no_test_executes_are_good(monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    blocks = [block for page in TUTORIALS for block in blocks_of(page.read_text(encoding="utf-8"))]
    text = "".join(block.text for block in blocks if block.order_of("not executed: ") is not None)
    found = re.findall(r"^elaswave-spmd train (.*)$", text.replace("\\\n", ""), re.MULTILINE)
    lines = [line.replace("$HOME", "/home/me") for line in found]
    assert len(lines) >= 6
    for line in lines:
        assert command(monkeypatch, *shlex.split(line)) == 0, line


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_overrides_in_the_tables_of_pages_are_good(monkeypatch: pytest.MonkeyPatch, ran: Ran, page: Path) -> None:
    for row in re.finditer(r"^\| `([^`(]*=[^`]+)` +\|", page.read_text(encoding="utf-8"), re.MULTILINE):
        assert "P(" in row[1] or command(monkeypatch, *shlex.split(row[1])) == 0, row[1]


@pytest.mark.parametrize("page", ["README.md", "docs/port_your_model.md"])
def test_pages_show_the_example_file(page: str) -> None:
    blocks = re.findall(r"```python[^\n]*\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    (shown,) = [block for block in blocks if "class MyModel" in block]
    assert shown == (ROOT / "examples/my_file.py").read_text(encoding="utf-8")
    assert len([line for line in shown.splitlines() if line.strip()]) <= 30


def test_the_command_comes_first(monkeypatch: pytest.MonkeyPatch, ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["elaswave-spmd", "train", "mesh=dp3"])
    assert cli.main() == 0 and ran.settings[0].mesh.shape.name == "dp3"
    monkeypatch.setattr(sys, "argv", ["elaswave-spmd", "mesh=dp3"])
    assert cli.main() == 2 and "a command comes first" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["elaswave-spmd", "--help"])
    assert cli.main() == 0 and "elaswave-spmd train" in capsys.readouterr().out


def outside(*arguments: str, where: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command and says on the last line of its output whether torch was imported."""
    report = "import atexit, runpy, sys; atexit.register(lambda: print('torch' in sys.modules)); "
    start, *rest = arguments
    how = (
        f"run_path({start!r}, run_name='__main__')"
        if start.endswith(".py")
        else f"run_module({start!r}, run_name='__main__')"
    )
    code = report + f"sys.argv = {[start, *rest]!r}; runpy.{how}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=where, timeout=100)


@pytest.mark.parametrize("start", [(str(ROOT / "train.py"),), ("elaswave_spmd", "train")], ids=["train.py", "-m"])
def test_help_and_bad_input_come_before_torch_and_leave_nothing(start: tuple[str, ...], tmp_path: Path) -> None:
    shown = outside(*start, "--help", where=tmp_path)
    assert (shown.returncode, shown.stdout.splitlines()[0]) == (0, "Examples:")
    assert shown.stdout.splitlines()[-1] == "False"
    refused = outside(*start, "mesh.dp=abc", where=tmp_path)
    assert (refused.returncode, refused.stdout) == (
        2,
        f"{PREPARING}False\n",
    ) and "mesh.dp=abc is not a whole number" in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        (["runtime.device=npu"], "CANN"),
        (["runtime.device=cuda"], "the NVIDIA driver"),
        (["mesh=dp2_tp2"], "ask for 2 devices for each worker, and a worker on runtime.device=cpu has one device"),
        (["runtime.device=emulated", "mesh.fsdp=2"], "ask for 2 devices for each worker"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, list) else "",
)
def test_devices_that_cannot_be_used_are_refused_before_torch(
    arguments: list[str], telling: str, tmp_path: Path
) -> None:
    if device_of("cuda").missing(ThisMachine()) == () and "cuda" in arguments[0]:
        pytest.skip("this machine has a GPU")
    refused = outside(str(ROOT / "train.py"), *arguments, where=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, f"{PREPARING}False\n"), refused.stderr
    assert telling in refused.stderr and "Traceback" not in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_entry_is_short() -> None:
    assert len((ROOT / "train.py").read_text(encoding="utf-8").splitlines()) < 40


def test_sizes_that_are_named_are_known_and_neither_written_nor_compared() -> None:
    settings = settings_from(["model=llama_tiny", "++model.heads=2", "model.dropout=0.1", "~optim.clip", "seed=3"])
    assert settings.model.named == {"heads", "dropout"}
    assert Settings.from_dict(settings.to_dict()) == settings and "named" not in settings.to_dict()["model"]
    assert not settings_from(["model=llama_tiny", "+model.args.window=4"]).model.named
