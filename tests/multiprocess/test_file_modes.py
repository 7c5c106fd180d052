"""Everything that a run writes is its owner's alone, whatever the umask; the keys of its links lie in its journal."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from elaswave_spmd.run_dir.journal import read_journal
from elaswave_spmd.runtime.transport.credentials import RunKeys, RunToken, credentials_from_dict
from tests.multiprocess.real_runs import SMALL, launch, write_text

EVERY_FILE = ["run.tensorboard=true", "run.trace=true", "checkpoint.every=2", "run.dir=made/for/run", "mesh=dp2"]


def modes_below(folder: Path) -> dict[str, int]:
    """Path -> mode of everything in a folder, and of the folder itself."""
    paths = [folder, *folder.rglob("*")]
    return {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in paths}


@pytest.mark.parametrize("umask", [0o000, 0o177], ids=["open", "narrow"])
def test_files_are_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    """A narrow umask would take the right to enter from the directories."""
    write_text(tmp_path)
    cache = [f"data.cache={tmp_path}"] if umask else []  # the cache of tokens is made with the umask's mode
    before = os.umask(umask)
    try:
        with launch(
            tmp_path, *SMALL, *EVERY_FILE, *cache, "runtime.transport=tcp", in_new_interpreter=True
        ) as launched:
            os.umask(before)
            done = launched.finish()
    finally:
        os.umask(before)
    assert done.code == 0, done.err
    found = modes_below(tmp_path / "made")
    folders = {name for name in found if (tmp_path / "made" / name).is_dir()}
    run = tmp_path / "made" / "for" / "run"
    assert len([*run.glob("checkpoints/*/shard_*")]) and len([*run.glob("tensorboard/*")]), found
    assert {"for/run/weights.safetensors", "for/run/epochs.jsonl", "for/run/trace.json"} <= found.keys()
    assert found == {name: 0o700 if name in folders else 0o600 for name in found}


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (["runtime.transport=tcp"], RunKeys),
        (["runtime.transport=tcp", "runtime.encryption=false"], RunToken),
        ([], None),
    ],
    ids=["encrypted", "plain", "one host"],
)
def test_the_journal_has_the_credentials_of_a_run_that_has_any(
    tmp_path: Path, overrides: list[str], kind: type | None
) -> None:
    write_text(tmp_path)
    with launch(tmp_path, *SMALL, "train.steps=1", *overrides) as launched:
        done = launched.finish()
    assert done.code == 0, done.err
    lines = read_journal(tmp_path / "run")
    found = [line["credentials"] for line in lines if "credentials" in line]
    assert [type(credentials_from_dict(fields)) for fields in found] == ([kind] if kind else [])
    told = "".join(path.read_text() for path in (tmp_path / "run").glob("*.jsonl") if path.name != "epochs.jsonl")
    told += done.out + (tmp_path / "run" / "config.yaml").read_text()
    for secret in [secret for fields in found for secret in fields.values()]:
        assert secret not in told
