"""How long a run that is resumed waits for the workers of its last life."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller.orphaned_run import adoption_record
from elaswave_spmd.controller.resume import orphan_grace
from elaswave_spmd.run_dir.journal import EPOCHS


def with_adopt(seconds: float | None) -> Settings:
    return replace(Settings(), timeouts=replace(Settings().timeouts, adopt=seconds))


def write_lives(run_dir: Path, *lives: Settings) -> None:
    lines = []
    for number, settings in enumerate(lives, start=1):
        about = {} if settings.timeouts.adopt is None else adoption_record(settings, "/sockets", 0)
        lines += [{"incarnation": number, "epoch": epoch, "reason": "begin", **about} for epoch in (0, 1)]
        lines[-1] = {"incarnation": number, "epoch": 1, "reason": "prepare"}
    (run_dir / EPOCHS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_workers_that_wait_to_be_adopted_are_waited_for_as_long_as_they_do(tmp_path: Path) -> None:
    off, on = with_adopt(None), with_adopt(500.0)
    write_lives(tmp_path, off, on)
    assert orphan_grace(tmp_path, off) == on.timeouts.orphan_grace > off.timeouts.orphan_grace


def test_those_of_other_lives_and_settings_make_no_difference(tmp_path: Path) -> None:
    off, on = with_adopt(None), with_adopt(500.0)
    assert orphan_grace(tmp_path, off) == off.timeouts.orphan_grace, "there is no journal"
    write_lives(tmp_path, on, off)
    assert orphan_grace(tmp_path, off) == off.timeouts.orphan_grace
    assert orphan_grace(tmp_path, on) == on.timeouts.orphan_grace
