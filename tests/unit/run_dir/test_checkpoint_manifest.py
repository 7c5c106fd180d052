"""Manifests: complete or refused; and a run that would not have the same bits is refused."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

from elaswave_spmd.conf.format_version import FORMAT_VERSION
from elaswave_spmd.errors import CheckpointError, ConfigError
from elaswave_spmd.run_dir.checkpoint_shard import ShardInfo, checkpoint_path, write_shard
from elaswave_spmd.run_dir.checkpoints import open_checkpoint, write_manifest
from elaswave_spmd.run_dir.journal import Ballot
from elaswave_spmd.run_dir.manifest import (
    MANIFEST,
    Manifest,
    _hash,  # pyright: ignore[reportPrivateUsage]
    layout_fingerprint,
)
from elaswave_spmd.run_dir.run_identity import check_identity
from elaswave_spmd.sharding.replicas import PageRange
from tests.unit.run_dir.checkpoint_cases import BALLOT, manifest_of, save, small_layout, state_of, write_shards


def _info(*runs: PageRange, rank: int = 0, ballot: Ballot = BALLOT, step: int = 4, run: str = "r1") -> ShardInfo:
    return ShardInfo(f"shard_{rank}", run, step, ballot, rank, 100, "0" * 64, runs)


def test_a_manifest_is_plain_json_and_comes_back(tmp_path: Path) -> None:
    directory, _ = save(tmp_path, 10)
    fields = json.loads((directory / MANIFEST).read_text())
    assert list(fields) == [
        *("format", "run", "step", "incarnation", "epoch", "last_committed", "identity", "layout", "kinds", "shards"),
        *("validation", "sha256"),
    ]
    assert (fields["step"], fields["incarnation"], fields["epoch"], fields["last_committed"]) == (10, 1, 3, 11)
    assert fields["identity"] == {"seed": 7, "optim": {"betas": [0.9, 0.95]}}
    assert fields["shards"][1]["pages"] == [[0, 2, 5], [2, 0, 1]]
    manifest = open_checkpoint(directory, verify=True).manifest
    again = dataclasses.replace(manifest, validation={"step": 8, "loss_hex": "0x1p+0"})
    assert Manifest.from_json(again.to_json()) == again != manifest


def test_a_fingerprint_contains_where_and_how_parameters_are_stored() -> None:
    embed, act, head = layout_fingerprint(small_layout())["layers"]
    assert embed["blocks"] == [[0, 3, 0, 320], [3, 2, 320, 512]]
    assert [(p["name"], p["start"], p["decay"]) for p in embed["parameters"]] == [
        ("embed.weight", 0, True),
        ("embed.scale", 320, False),
    ]
    assert act == {"name": "act", "blocks": [], "parameters": [], "reads": []}
    assert head["reads"] == ["head.weight"]
    assert head["parameters"] == [{"name": "head.bias", "shape": [150], "start": 0, "decay": True, "lr_scale": 0.5}]


WHOLE = ((0, 0, 5), (2, 0, 2))


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ((), r"layer 0: pages \[0, 5\) are missing; layer 2: pages \[0, 2\) are missing"),
        (((0, 0, 5),), r"layer 2: pages \[0, 2\) are missing"),
        (((0, 1, 5), (2, 0, 2)), r"layer 0: pages \[0, 1\) are missing"),
        (((0, 0, 2), (0, 3, 5), (2, 0, 2)), r"layer 0: pages \[2, 3\) are missing"),
        (((0, 0, 4), (2, 0, 2)), r"layer 0: pages \[4, 5\) are missing"),
        (((0, 0, 3), (0, 2, 5), (2, 0, 2)), r"layer 0: pages \[2, 3\) are in two different page ranges"),
        (((0, 0, 5), (0, 1, 2), (2, 0, 2)), r"layer 0: pages \[1, 2\) are in two different page ranges"),
        (((0, 0, 6), (2, 0, 2)), r"layer 0 has no pages \[0, 6\); layer 0: pages \[0, 5\) are missing"),
        (((0, 0, 5), (0, 3, 3), (2, 0, 2)), r"layer 0 has no pages \[3, 3\)"),
        (((0, -1, 5), (2, 0, 2)), r"layer 0 has no pages \[-1, 5\); layer 0: pages \[0, 5\) are missing"),
        (((0, 0, 5), (1, 0, 1), (2, 0, 2)), r"layer 1 has no pages \[0, 1\)"),
        (((0, 0, 5), (2, 0, 2), (3, 0, 1)), r"layer 3 has no pages \[0, 1\)"),
    ],
)
def test_every_page_once_or_no_manifest(runs: tuple[PageRange, ...], why: str) -> None:
    shards = [_info(*runs[::2], rank=0), _info(*runs[1::2], rank=1)]
    with pytest.raises(CheckpointError, match=f"^the shards of step 4 do not hold every page once: {why}\n"):
        manifest_of(small_layout(), shards, 4)


def test_the_same_run_twice_is_read_from_the_first() -> None:
    shards = [_info((2, 0, 2), rank=7), _info(*WHOLE, rank=1)]
    sources = manifest_of(small_layout(), shards, 4).sources
    assert {run: shard.rank for run, shard in sources.items()} == {(2, 0, 2): 7, (0, 0, 5): 1}


@pytest.mark.parametrize(
    "other",
    [
        {"run": "r2"},
        {"step": 3},
        {"step": 5},
        {"ballot": Ballot(1, 4)},
        {"ballot": Ballot(2, 3)},
        {"ballot": Ballot(0, 3)},
    ],
)
def test_shards_of_something_else_are_refused(other) -> None:
    manifest_of(small_layout(), [_info(*WHOLE), _info(*WHOLE, rank=1, ballot=Ballot(1, 2))], 4)
    with pytest.raises(CheckpointError, match=r"belongs to run r.*, and its checkpoint to run r1, step 4") as caught:
        manifest_of(small_layout(), [_info(*WHOLE), _info(*WHOLE, rank=1, **other)], 4)
    assert "no later epoch" in caught.value.rule


def test_values_that_are_not_json_are_refused() -> None:
    for bad in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises((ValueError, TypeError)):
            manifest_of(small_layout(), [_info(*WHOLE)], 4, identity=bad)


def test_another_format_version_is_refused() -> None:
    text = manifest_of(small_layout(), [_info(*WHOLE)], 4).to_json()
    for other, named in (
        (f'"format": {FORMAT_VERSION + 1}', f"format version {FORMAT_VERSION + 1},"),
        ('"version": 1', "no format version,"),
    ):
        with pytest.raises(CheckpointError) as caught:
            Manifest.from_json(text.replace(f'"format": {FORMAT_VERSION}', other))
        assert named in caught.value.what and caught.value.what.endswith(f"format version {FORMAT_VERSION}")
    for none in ("", "[]", "3", '"sha256"', "{}", b"\xff", "[" * 200_000, '{"sha256": 1' + "0" * 400 + "}"):
        with pytest.raises(CheckpointError, match="torn, or is not a manifest"):
            Manifest.from_json(none)


@pytest.mark.parametrize("odd", [{"step": None}, {"layout": {}}, {"kinds": 3}, {"shards": [{}]}, {"identity": "x"}])
def test_a_manifest_of_other_fields_is_damaged_whatever_its_hash_says(odd: dict[str, object]) -> None:
    fields = json.loads(manifest_of(small_layout(), [_info(*WHOLE)], 4).to_json()) | odd
    del fields["sha256"]
    with pytest.raises(CheckpointError, match="has other fields"):
        Manifest.from_json(json.dumps({**fields, "sha256": _hash(fields)}))


def test_a_manifest_waits_for_its_shards(tmp_path: Path) -> None:
    layout, directory = small_layout(), checkpoint_path(tmp_path, 4)
    shards = write_shards(directory, layout, state_of(layout, 0), {0: WHOLE[:1], 1: WHOLE[1:]}, step=4)
    manifest = manifest_of(layout, shards, 4)
    path = directory / shards[1].name
    content = path.read_bytes()
    for harm, why in ((path.unlink, "missing"), (lambda: path.write_bytes(content[:-4]), "incomplete metadata")):
        harm()
        with pytest.raises(CheckpointError, match=why):
            write_manifest(directory, manifest)
    path.write_bytes(content)
    wrong = dataclasses.replace(shards[1], sha256="1" * 64)
    with pytest.raises(CheckpointError, match="is not the shard that the manifest names"):
        write_manifest(directory, manifest_of(layout, [shards[0], wrong], 4))
    with pytest.raises(CheckpointError, match="does not hold all state of its pages"):
        write_manifest(directory, dataclasses.replace(manifest, kinds=("master", "momentum")))
    assert not (directory / MANIFEST).exists()
    write_manifest(directory, manifest)
    assert open_checkpoint(directory, verify=True).manifest == manifest


def test_nothing_counts_before_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, directory = small_layout(), checkpoint_path(tmp_path, 4)
    shards = write_shards(directory, layout, state_of(layout, 0), {0: WHOLE}, step=4)
    flushed: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        assert not (directory / MANIFEST).exists() or flushed[-1] == ".manifest.json.tmp"
        flushed.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    write_manifest(directory, manifest_of(layout, shards, 4))
    assert flushed == ["checkpoints", tmp_path.name, ".manifest.json.tmp", "step_00000004"]


def test_a_shard_with_another_page_size_is_refused(tmp_path: Path) -> None:
    directory = checkpoint_path(tmp_path, 4)
    arrays = {run: {"master": np.zeros(192, np.float32), "exp_avg": np.zeros(192, np.float32)} for run in WHOLE}
    shard = write_shard(directory, 4, BALLOT, 0, arrays, run="r1")
    with pytest.raises(CheckpointError, match="does not hold all state of its pages"):
        write_manifest(directory, manifest_of(small_layout(), [shard], 4))


# ---- identity


def test_equal_identities_in_other_types() -> None:
    saved = json.loads(json.dumps({"seed": 1, "optim": {"betas": (0.9, 0.95)}, "empty": {}, "args": [{"a": 1}]}))
    check_identity(saved, {"args": ({"a": 1},), "empty": {}, "seed": 1, "optim": {"betas": (0.9, 0.95)}})


@pytest.mark.parametrize(
    ("saved", "present", "line"),
    [
        ({"seed": 1}, {"seed": 2}, "seed: saved 1, now 2"),
        ({"train": {"microbatch_size": 4}}, {"train": {"microbatch_size": 8}}, "train.microbatch_size: saved 4, now 8"),
        ({"a": {"b": "x"}}, {"a": {}}, 'a.b: saved "x", now nothing'),
        ({}, {"versions": {"torch": "2.9"}}, 'versions.torch: saved nothing, now "2.9"'),
        ({"x": 1}, {"x": True}, "x: saved 1, now true"),
        ({"x": 1}, {"x": 1.0}, "x: saved 1, now 1.0"),
        ({"x": None}, {}, "x: saved null, now nothing"),
        ({"x": [1, 2]}, {"x": [2, 1]}, "x: saved [1,2], now [2,1]"),
        ({"p": [{"n": 1}, {"n": 2}]}, {"p": [{"n": 1}, {"n": 3}]}, "p[1].n: saved 2, now 3"),
        ({"lr": 0.1}, {"lr": 0.1 + 2**-56}, "lr: saved 0.1, now 0.10000000000000002"),
    ],
)
def test_a_difference_is_named_with_both_values(saved, present, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_identity({"same": 0, **saved}, {"same": 0, **present}, where="train.resume=runs/a")
    assert caught.value.what == f"the run was saved with other values:\n  {line}"
    assert "from:   train.resume=runs/a" in str(caught.value) and "same:" not in str(caught.value)


def test_all_differences_are_listed_up_to_a_screen() -> None:
    with pytest.raises(ConfigError) as caught:
        check_identity({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "d": 4})
    lines = [line.strip() for line in caught.value.what.splitlines()[1:]]
    assert lines == ["b: saved 2, now 3", "c: saved 3, now nothing", "d: saved nothing, now 4"]
    with pytest.raises(ConfigError) as caught:
        check_identity({str(i): i for i in range(100)}, {})
    assert len(caught.value.what.splitlines()) == 42 and caught.value.what.endswith("and 60 more")


def test_another_layout_is_found() -> None:
    saved = layout_fingerprint(small_layout())
    present = json.loads(json.dumps(saved))
    check_identity(saved, present)
    present["layers"][2]["parameters"][0]["lr_scale"] = 1.0
    with pytest.raises(ConfigError, match=r"layers\[2\].parameters\[0\].lr_scale: saved 0.5, now 1.0"):
        check_identity(saved, present)
