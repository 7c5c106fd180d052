"""The demonstration's comparison: equal bits are said to be equal, and one other bit anywhere is found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from elaswave_spmd.conf.compose import settings_from
from elaswave_spmd.demo import demo_command
from elaswave_spmd.demo.comparison import Comparison, compare
from elaswave_spmd.demo.demo_command import main
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.run_dir import MetricsLine, RunDir

LOSSES = (5.5, 4.25, 3.125)
SHA = "73835c" + "0" * 58


def run(
    folder: Path, *, losses: Sequence[float] = LOSSES, norm: float = 1.5, sha: str = SHA, lost: bool = False
) -> Path:
    """The files of a finished run."""
    with closing(RunDir.create(folder, "", model="m", mesh="dp2_pp2")) as run_dir:
        for step, loss in enumerate(losses, 1):
            workers = 3 if lost and step > 1 else 4
            line = MetricsLine.of(
                step=step, mesh_epoch=0, loss=loss, grad_norm=norm, lr=1e-3, tokens=64, seconds=0.1, workers=workers
            )
            run_dir.write_metrics(line)
        if lost:
            run_dir.write_event("fail", 1.0, {"ranks": [2], "after_step": 1, "phase": "run"})
        run_dir.write_summary({"weights_sha256": sha})
    return folder


def found(tmp_path: Path, **other: object) -> Comparison:
    disturbed = run(tmp_path / "killed", **{"lost": True, **other})  # type: ignore[arg-type]
    return compare(run(tmp_path / "quiet"), disturbed)


def test_equal_runs_are_equal_in_plain_words(tmp_path: Path) -> None:
    result = found(tmp_path)
    assert result.differences == () and result.lines() == [
        "worker 2 was killed after step 1 was done and before step 2 was",
        "3 workers finished the run",
        "all 3 losses are equal, bit for bit, and all 3 gradient norms; weights 73835c000000... in both runs",
    ]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"losses": (5.5, 4.25, math.nextafter(3.125, 4))}, "the loss of step 3 is 0x1.9000000000000p+1 undisturbed"),
        ({"norm": math.nextafter(1.5, 2)}, "the gradient norm of step 1 is"),
        ({"losses": LOSSES[:2]}, "step 3 is in one of the runs only"),
        ({"losses": (*LOSSES, 1.0)}, "step 4 is in one of the runs only"),
        ({"sha": "0" * 64}, "the weights are 73835c"),
        ({"lost": False}, "no worker was lost in the second run"),
    ],
)
def test_one_bit_is_found_wherever_it_is(tmp_path: Path, other: dict[str, object], what: str) -> None:
    result = found(tmp_path, **other)
    assert any(difference.startswith(what) for difference in result.differences)
    assert result.lines()[-1] == "the two runs differ" and "equal" not in "\n".join(result.lines())


def test_a_directory_that_exists_and_too_few_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists"):
        main(["--out", str(tmp_path)], "elaswave-spmd")
    with pytest.raises(ConfigError, match="--steps 2 is too few"):
        main(["--steps", "2"], "elaswave-spmd")


@pytest.mark.parametrize("name", ["a,b", "d\u00e9mo", "a=b", "a (1)", "it's", "${x}", "plain"])
def test_the_runs_are_in_the_folder_that_is_named_whatever_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(demo_command, "_run", lambda *words: commands.append(words) or 1)
    for out in (str(tmp_path / name), name):
        assert main(["--out", out], "demo") == 1
        assert settings_from(commands.pop()[1:]).run.dir == f"{out}/undisturbed"


def test_a_folder_in_the_home_directory_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both runs were made in it, and then the comparison looked for them in a folder `~`."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(demo_command, "_run", lambda *words: commands.append(words) or 1)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["--out=~/d"], "demo") == 1
    assert settings_from(commands.pop()[1:]).run.dir == str(tmp_path / "d" / "undisturbed")
    (tmp_path / "d").mkdir()
    with pytest.raises(ConfigError, match="d exists"):
        main(["--out=~/d"], "demo")
