"""A run that was killed goes on from its newest good checkpoint, on any mesh, with the bits of an undisturbed one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.conf.format_version import FORMAT_VERSION
from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from elaswave_spmd.run_dir.checkpoints import open_checkpoint, write_manifest
from tests import waiting
from tests.multiprocess import patient_model, still_model
from tests.multiprocess.real_runs import SMALL, Launched, eventually, kill_at_once, launch, train, write_text

SETTINGS = [*SMALL, "train.steps=30", "model.dropout=0.1"]


def checkpoints(run_dir: Path) -> list[int]:
    """Steps of those that were finished, ascending."""
    return sorted(int(path.parent.name.removeprefix("step_")) for path in run_dir.glob("checkpoints/*/manifest.json"))


def unfinished(run_dir: Path) -> list[Path]:
    """Directories of checkpoints that are newer than the newest whole one, newest first."""
    newest = f"step_{checkpoints(run_dir)[-1]:08d}"
    return sorted((path for path in (run_dir / "checkpoints").iterdir() if path.name > newest), reverse=True)


def kill_after_checkpoint(run: Launched, run_dir: str, step: int) -> int:
    """Kills the run when it has a checkpoint of this step or a later one; returns the newest one's."""
    eventually(lambda: max(checkpoints(run.folder / run_dir), default=0) >= step, run.process)
    kill_at_once(run.processes())
    run.process.wait()
    return checkpoints(run.folder / run_dir)[-1]


def standing_still(folder: Path, step: int) -> list[str]:
    """The run stands still in this step, and cannot end before it is killed. `no_longer_still` lets others go on.

    Meanwhile checkpoints become whole. The first three that are due do so for certain: a worker skips none of them,
    however slow the disk is.
    """
    still_model.stand_still_in(folder / "still", step)
    return still_model.write(folder, folder / "still")


def no_longer_still(folder: Path) -> None:
    """Runs in this folder go on."""
    still_model.go_on(folder / "still")


def bits(run_dir: Path) -> list[tuple[int, str, str]]:
    return [(line.step, line.loss_hex, line.grad_norm_hex) for line in read_metrics(run_dir)]


def event(run_dir: Path, kind: str) -> dict[str, Any]:
    """The last one of its kind."""
    return [e for e in read_events(run_dir) if e["event"] == kind][-1]


def damage(checkpoint: Path) -> None:
    """One bit of one shard turns."""
    shard = min(checkpoint.glob("shard_*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the corpus and of all runs: `undisturbed`, and `killed` with two checkpoints."""
    folder = tmp_path_factory.mktemp("resume")
    write_text(folder)
    done = train(folder, *SETTINGS, "mesh=dp2", "run.dir=undisturbed")
    assert done.code == 0, done.err
    arguments = [*SETTINGS, "mesh=dp2_pp2", "sharding=zero2", "checkpoint.every=3", "run.dir=killed"]
    with launch(folder, *arguments, *standing_still(folder, 12)) as run:
        run.wait_for_steps(11, "killed")
        kill_after_checkpoint(run, "killed", 6)  # of the one of step 9 there may be all, a part or nothing
    no_longer_still(folder)
    for checkpoint in unfinished(folder / "killed"):
        shards = sorted(checkpoint.glob("shard_*"))
        if len(shards) == 4:
            shards[0].unlink()  # without a manifest, but with all shards: a run that resumes would complete it
    assert len(checkpoints(folder / "killed")) >= 2
    assert not (folder / "killed" / "summary.json").exists()
    return folder


@pytest.fixture
def killed(shared: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the killed run."""
    return Path(shutil.copytree(shared / "killed", shared / request.node.name, ignore=shutil.ignore_patterns("*.sock")))


def test_a_run_that_was_killed_while_it_went_back_does_so_first(shared: Path, killed: Path) -> None:
    """Its event says that what came after may be wrong, and nothing of that was removed yet."""
    step = checkpoints(killed)[-2]
    lines = [line.step for line in read_metrics(killed)]
    assert lines[-1] > checkpoints(killed)[-1] > step
    with (killed / "events.jsonl").open("a") as events:
        events.write(json.dumps({"event": "rollback", "time": 1.0, "step": step, "given_up": lines[-1]}) + "\n")
    done = train(shared, f"train.resume={killed.name}")
    assert done.code == 0, done.err
    assert f"going back to step {step}" in done.out
    resumed = event(killed, "resume")
    assert (resumed["step"], resumed["bad"], resumed["steps_again"]) == (step, [], 0)
    assert bits(killed) == bits(shared / "undisturbed")


def test_a_run_that_was_killed_while_it_went_back_to_its_begin_is_not_resumed(shared: Path, killed: Path) -> None:
    """There is nothing that could be trusted; and nothing is removed."""
    with (killed / "events.jsonl").open("a") as events:
        events.write(json.dumps({"event": "rollback", "time": 1.0, "step": 0, "given_up": 9}) + "\n")
    before, lines = checkpoints(killed), read_metrics(killed)
    done = train(shared, f"train.resume={killed.name}")
    assert done.code == 2 and "was going back to its begin" in done.err, done
    assert checkpoints(killed) == before and read_metrics(killed) == lines


def test_killed_twice_and_resumed_on_two_other_meshes(shared: Path, killed: Path) -> None:
    name, newest = killed.name, checkpoints(killed)[-1]
    # The kill may have come while they were written.
    bad = [f"{path.name}: it has no manifest: it was never finished" for path in unfinished(killed)]
    still_model.stand_still_in(shared / "still", newest + 12)
    with launch(shared, f"train.resume={name}", "mesh=dp3", "sharding=zero1") as run:
        newer = kill_after_checkpoint(run, name, newest + 3)
    no_longer_still(shared)
    first = event(killed, "resume")
    assert (first["step"], first["mesh"], first["incarnation"], first["bad"]) == (newest, "dp3", 2, bad)
    done = train(shared, f"train.resume={name}", "mesh=single")
    assert done.code == 0, done.err
    # Of those after it there may be all shards and no manifest yet, which the run that resumes then writes.
    assert event(killed, "resume")["step"] in range(newer, newest + 12, 3)
    assert event(killed, "resume")["incarnation"] == 3
    assert bits(killed) == bits(shared / "undisturbed")
    summary, wanted = read_summary(killed), read_summary(shared / "undisturbed")
    for field in ("steps", "final_loss_hex", "validation_loss", "weights_sha256"):
        assert summary[field] == wanted[field], field
    known = [(e["step"], e["loss_hex"]) for e in read_events(shared / "undisturbed") if e["event"] == "validation"]
    assert [(e["step"], e["loss_hex"]) for e in read_events(killed) if e["event"] == "validation"] == known
    assert read_events(killed)[-1]["event"] == "finish"
    # checkpoint.keep; one more where the kill came between a manifest and the removal that follows it.
    assert len(list((killed / "checkpoints").iterdir())) in (2, 3)
    again = train(shared, f"train.resume={name}")
    assert again.code == 2 and "has finished" in again.err


def test_without_a_controller_the_workers_save_what_they_have(shared: Path) -> None:
    # For timeouts.controller they wait for each other: one that this machine holds up meanwhile is to be waited for.
    patience = ["timeouts.controller=15"]
    arguments = [*SETTINGS, "mesh=dp2_pp2", "sharding=zero2", "run.dir=orphaned", *patience]
    with launch(shared, *arguments, *patient_model.write(shared, shared / "go")) as run:  # else it may end before
        run.wait_for_steps(8, "orphaned")
        run.process.kill()
        run.process.wait()
        waiting.eventually(lambda: not run.processes())
    (shared / "go").touch()
    folder = shared / "orphaned"
    assert not checkpoints(folder), "the workers write no manifest"
    known = bits(folder)
    saved = max(folder.glob("checkpoints/step_*"))
    shard = min(saved.glob("shard_*"))
    shard.rename(shared / shard.name)
    shard.mkdir()  # it cannot be read now
    done = train(shared, "train.resume=orphaned", "mesh=dp3")
    assert done.code == 2 and f"remove orphaned/checkpoints/{saved.name}" in done.err and bits(folder) == known
    shard.rmdir()
    (shared / shard.name).rename(shard)
    done = train(shared, "train.resume=orphaned", "mesh=dp3", "train.global_batch=4")
    assert done.code == 2 and "train.global_batch: saved 8, now 4" in done.err
    assert len({line.tokens for line in read_metrics(folder)}) == 1, "of a resume that was refused none came in"
    done = train(shared, "train.resume=orphaned", "mesh=dp3")
    assert done.code == 0, done.err
    assert event(folder, "resume")["step"] >= len(known)
    assert bits(folder) == bits(shared / "undisturbed")
    assert read_summary(folder)["weights_sha256"] == read_summary(shared / "undisturbed")["weights_sha256"]


def test_a_worker_without_a_controller_says_that_its_state_cannot_be_written(shared: Path) -> None:
    arguments = [*SETTINGS, "mesh=dp2", "run.dir=unsaved", "timeouts.controller=2", "train.steps=100000"]
    with launch(shared, *arguments) as run:
        run.wait_for_steps(3, "unsaved")
        checkpoints_folder = shared / "unsaved" / "checkpoints"
        shutil.rmtree(checkpoints_folder, ignore_errors=True)
        checkpoints_folder.write_text("a file where a directory is wanted")
        run.process.kill()
        run.process.wait()
        waiting.eventually(lambda: not run.processes())
        _, errors = run.process.communicate(timeout=waiting.PATIENCE_S)
    for rank in (0, 1):
        lines = [line for line in errors.splitlines() if line.startswith(f"worker {rank}, whose controller is gone")]
        assert len(lines) == 1, errors
        (line,) = lines
        assert "could not be written" in line and str(checkpoints_folder) in line and "Not a directory" in line


def test_a_damaged_checkpoint_is_said_and_the_one_before_it_used(shared: Path, killed: Path) -> None:
    before, newest = checkpoints(killed)[-2:]
    bad = f"step_{newest:08d}"
    damage(killed / "checkpoints" / bad)
    done = train(shared, f"train.resume={killed.name}", "mesh=pp2", "sharding=zero3", "run.dir=fork")
    assert done.code == 0, done.err
    found = event(shared / "fork", "resume")
    assert found["step"] == before
    assert [line.split(":")[0] for line in found["bad"] if "sha256" in line] == [bad]
    assert bad in done.out
    assert bits(shared / "fork") == bits(shared / "undisturbed")
    assert read_summary(shared / "fork")["weights_sha256"] == read_summary(shared / "undisturbed")["weights_sha256"]
    assert not (killed / "summary.json").exists(), "the run that it came from is left alone"


def test_other_settings_are_refused_before_anything_is_touched(shared: Path, killed: Path) -> None:
    before = {path: path.read_bytes() for path in killed.rglob("*.json*")}
    done = train(shared, f"train.resume={killed.name}", "seed=3", "optim.lr=0.5")
    assert done.code == 2
    assert "seed: saved 0, now 3" in done.err and "optim.lr: saved 0.002, now 0.5" in done.err
    assert {path: path.read_bytes() for path in killed.rglob("*.json*")} == before


def test_a_run_of_another_format_version_is_refused_with_both_named(shared: Path, killed: Path) -> None:
    config = killed / "config.yaml"
    config.write_text(config.read_text().replace(f"format: {FORMAT_VERSION}\n", f"format: {FORMAT_VERSION + 1}\n", 1))
    done = train(shared, f"train.resume={killed.name}")
    assert done.code == 2 and "Traceback" not in done.err
    assert f"format version {FORMAT_VERSION + 1}," in done.err and f"format version {FORMAT_VERSION}\n" in done.err


def test_a_run_without_a_good_checkpoint_is_refused(shared: Path, killed: Path) -> None:
    for step in checkpoints(killed):
        damage(killed / "checkpoints" / f"step_{step:08d}")
    done = train(shared, f"train.resume={killed.name}")
    assert done.code == 2 and "no good checkpoint" in done.err and "Traceback" not in done.err
    missing = train(shared, "train.resume=nowhere")
    assert missing.code == 2 and "nowhere/config.yaml" in missing.err


def test_lines_that_are_missing_before_the_checkpoint_are_named_with_a_way_out(shared: Path, killed: Path) -> None:
    before, newest = checkpoints(killed)[-2:]
    metrics = killed / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:before]) + lines[before][:20])  # torn, as by a copy that was cut off
    done = train(shared, f"train.resume={killed.name}")
    assert done.code == 2 and "Traceback" not in done.err
    assert f"has no line of step {before + 1}\n" in done.err and f"checkpoint, which is of step {newest}\n" in done.err
    way_out = f"train.resume_at={before} run.dir="
    assert f"{way_out}DIR" in done.err
    other = train(shared, f"train.resume={killed.name}", *f"{way_out}elsewhere-{killed.name}".split())
    assert other.code == 0, other.err
    assert bits(shared / f"elsewhere-{killed.name}") == bits(shared / "undisturbed")


def test_a_damaged_record_is_named_with_what_to_do(shared: Path, killed: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        record = killed / name
        whole = record.read_text()
        record.write_text("{" + whole[whole.index("\n") :])
        done = train(shared, f"train.resume={killed.name}")
        assert done.code == 2 and "Traceback" not in done.err
        assert f"{killed.name}/{name}, line 1 is not JSON" in done.err and "put the file back, or begin" in done.err
        record.unlink()
        done = train(shared, f"train.resume={killed.name}")
        assert done.code == 2 and f"cannot read {killed.name}/{name}" in done.err and "put the file back" in done.err
        record.write_text(whole)


def test_what_python_reads_and_no_run_writes_is_damage_as_well(shared: Path, killed: Path) -> None:
    """Lists that are nested without an end, numbers that no float holds, fields of other types."""
    deep = "[" * 200_000
    for name, wrong, told in (
        ("metrics.jsonl", deep, "line 1 is not JSON"),
        ("events.jsonl", deep, "line 1 is not JSON"),
        ("epochs.jsonl", deep, "line 1 is damaged"),
        ("metrics.jsonl", '{"step": 1, "loss_hex": "0x1p99999"}', "line 1: "),
        ("epochs.jsonl", '{"incarnation": 1, "epoch": 0, "orphan_grace": []}', "line 1 is damaged"),
    ):
        record = killed / name
        whole = record.read_text()
        record.write_text(f"{wrong}\n{whole}")
        done = train(shared, f"train.resume={killed.name}")
        assert done.code == 2 and "Traceback" not in done.err, done.err
        assert f"{killed.name}/{name}, {told}" in done.err
        record.write_text(whole)
    before, newest = checkpoints(killed)[-2:]
    (killed / "checkpoints" / f"step_{newest:08d}" / "manifest.json").write_text(deep)
    done = train(shared, f"train.resume={killed.name}", f"run.dir=deep-{killed.name}")
    assert done.code == 0 and event(shared / f"deep-{killed.name}", "resume")["step"] == before, done.err


def test_steps_that_are_computed_again_are_compared(shared: Path, killed: Path) -> None:
    before, newest = checkpoints(killed)[-2:]
    shutil.rmtree(killed / "checkpoints" / f"step_{newest:08d}")
    metrics = killed / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    lines[before] = lines[before].replace(read_metrics(killed)[before].loss_hex, (5.25).hex())
    metrics.write_text("".join(lines))
    done = train(shared, f"train.resume={killed.name}", "mesh=single")
    assert done.code == 1 and f" of step {before + 1} is " in done.err
    assert f"of step {before + 1} is " in event(killed, "stop")["message"]


def test_validations_over_other_samples_are_not_compared(shared: Path, killed: Path) -> None:
    """Validations only read: a resumed run may validate on fewer micro-batches, and then has other losses of them."""
    newest = checkpoints(killed)[-1]
    done = train(shared, f"train.resume={killed.name}", "mesh=single", "train.validate_microbatches=1")
    assert done.code == 0, done.err
    assert bits(killed) == bits(shared / "undisturbed")
    found = [(e["step"], e["microbatches"]) for e in read_events(killed) if e["event"] == "validation"]
    assert (newest, 2) in found and (30, 1) in found
    losses = {(e["step"], e["microbatches"]): e["loss_hex"] for e in read_events(killed) if e["event"] == "validation"}
    assert len(set(losses.values())) == len(found) == len(losses), "each is written once, and its samples with it"


def test_losing_all_copies_begins_again_at_the_checkpoint(shared: Path) -> None:
    arguments = [*SETTINGS, "mesh=dp4", "sharding=zero2", "checkpoint.every=2", "run.dir=again"]
    killed = "chaos.events=[{step: 19, kind: kill, rank: [0, 1, 2]}]"
    with launch(shared, *arguments, killed, *standing_still(shared, 18)) as run:
        eventually(lambda: checkpoints(shared / "again"), run.process)  # else there may be none to begin again at
        no_longer_still(shared)
        done = run.finish()
    assert done.code == 0, done.err
    found = event(shared / "again", "restart")
    # Each ends itself: the first two may be gone, with all copies of a run, before the third has got that far. Those
    # who are gone may have been the only ones that had applied step 18.
    assert found["step"] in range(2, 19) and found["lost_after"] in (17, 18) and found["workers"] in (1, 2)
    # Every loss is told, by the restart itself or before it.
    told = {rank for e in read_events(shared / "again") if e["event"] in ("fail", "restart") for rank in e["ranks"]}
    assert told <= {0, 1, 2} and len(told) + found["workers"] == 4
    assert "restart: all replicas of" in done.out
    summary = read_summary(shared / "again")
    assert summary["faults"]["restart"] == 1, "the life that has ended is counted"
    assert summary["faults"]["fail"] == summary["lost_workers"]["run"] == 4 - found["workers"]
    # One that was being written may have become whole in between.
    assert event(shared / "again", "resume")["step"] >= found["step"]
    assert bits(shared / "again") == bits(shared / "undisturbed")
    assert read_summary(shared / "again")["weights_sha256"] == read_summary(shared / "undisturbed")["weights_sha256"]


def test_too_few_workers_end_the_run_with_the_command_that_goes_on(shared: Path) -> None:
    arguments = [*SETTINGS, "mesh=dp2", "elastic.min_workers=2", "checkpoint.every=2", "run.dir=few"]
    stops = "chaos.events=[{step: 15, kind: stop, rank: 0}]"
    with launch(shared, *arguments, stops, "timeouts.suspect=4.5") as run:
        done = run.finish()
    assert done.code == 1
    assert "1 workers are left, elastic.min_workers is 2" in done.err
    newest = checkpoints(shared / "few")[-1]
    # The worker that stands still may have applied step 14 while its vote had not left its process yet. Then nobody
    # else knows that this step was decided, and nothing of it was recorded.
    committed = read_metrics(shared / "few")[-1].step
    assert newest >= committed >= 13, "of that moment, whether or not one was due"
    assert f"step_{newest:08d}\nresume with: " in done.err and f"train.py train.resume={shared / 'few'} " in done.err


def test_the_same_text_in_other_files_is_refused_if_a_tokenizer_makes_other_tokens_of_it(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    write_text(tmp_path)
    words = sorted({*(tmp_path / "text.txt").read_text().split(), "[UNK]"})
    model = {"type": "WordLevel", "vocab": {word: n for n, word in enumerate(words)}, "unk_token": "[UNK]"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (tmp_path / "tok.json").write_text(json.dumps(tokenizer))
    text = (tmp_path / "text.txt").read_text()

    def cut_inside(word: str) -> None:
        at = text.index(word) + 2
        (tmp_path / "a.md").write_text(text[:at])
        (tmp_path / "b.md").write_text(text[at:])

    cut_inside("wizards")
    data = ["data.path=*.md", "data.tokenizer=tok.json"]
    assert (done := train(tmp_path, *SMALL, *data, "checkpoint.every=3")).code == 0, done.err
    resume = ["train.resume=run", "run.dir=again"]
    assert (done := train(tmp_path, *resume)).code == 0, done.err
    shutil.rmtree(tmp_path / "again")
    cut_inside("brew")  # as many tokens as before
    done = train(tmp_path, *resume)
    assert done.code == 2 and "data.tokens_sha256: saved" in done.err, done
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000003"
    manifest = open_checkpoint(checkpoint, verify=False).manifest
    former = {name: value for name, value in manifest.identity["data"].items() if name != "tokens_sha256"}
    write_manifest(checkpoint, replace(manifest, identity={**manifest.identity, "data": former}))
    assert (done := train(tmp_path, *resume)).code == 0, "an earlier version has made it: " + done.err
