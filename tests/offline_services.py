"""Tracking services without a network: an environment in which nothing is sent, and what wandb has written offline."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import eventually


def set_offline(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have wandb write offline, and MLflow into a store of files, both below `folder`."""
    for name in [*os.environ]:
        if name.startswith(("WANDB_", "MLFLOW_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(folder / "wandb_config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(folder / "wandb_cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{folder}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@dataclasses.dataclass
class Offline:
    """What an offline run of wandb has in its file."""

    id: str = ""
    project: str = ""
    name: str = ""
    exit_code: int | None = None
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    summary: dict[str, Any] = dataclasses.field(default_factory=dict)


def read_offline(folder: Path) -> Offline:
    """Read an offline run's file when wandb's process has written all of it."""
    eventually(lambda: read_so_far(folder).exit_code is not None)
    return read_so_far(folder)


def read_so_far(folder: Path) -> Offline:
    """Read an offline run's file, a log as of LevelDB, with wandb's own messages."""
    from wandb.proto import wandb_internal_pb2 as messages

    found = Offline()
    (file,) = folder.glob("run-*.wandb")
    for data in records(file.read_bytes()):
        record: Any = messages.Record.FromString(data)  # type: ignore[attr-defined]
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.id, found.project, found.name = record.run.run_id, record.run.project, record.run.display_name
            found.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            items = record.history.item
            found.history.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
        elif kind == "summary":
            found.summary |= {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.summary.update}
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, which has blocks of 32 KiB, after wandb's 7 bytes of header."""
    place, part = 7, b""
    while place + 7 <= len(data):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield part
            part = b""
