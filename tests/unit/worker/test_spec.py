"""The specification of a worker: one typed value that survives the pipe, and refuses what no worker can have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.data import PreparedData
from elaswave_spmd.runtime.transport.credentials import Credentials, RunKeys, RunToken
from elaswave_spmd.worker.checkpoint_orders import CheckpointOrders
from elaswave_spmd.worker.spec import LinkSpec, OptionSpec, RunSpec, WorkerSpec

FIELDS: dict[str, Any] = {
    "corpus": "tiny",
    "directory": "/data",
    "vocab_size": 29,
    "seq_len": 6,
}


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> PreparedData:
    """Prepared data without files: what is in it does not matter here."""

    class Prepared:
        def to_dict(self) -> dict[str, Any]:
            return FIELDS

    found: Any = Prepared()
    monkeypatch.setattr(PreparedData, "from_dict", lambda fields: found if fields == FIELDS else None)
    return found


def spec_of(
    data: PreparedData, options: OptionSpec | None = None, credentials: Credentials | None = None
) -> WorkerSpec:
    links = LinkSpec("tcp://127.0.0.1:1", "/tmp/run", credentials, "127.0.0.1", {"Publish": 8})
    orders = CheckpointOrders("/runs/1", "1", 2, 10, 100)
    run = RunSpec(Settings(), data, links, orders, "2 layers", options or OptionSpec())
    return WorkerSpec(3, run, ("/tmp/run/mutexes", 5))


@pytest.mark.parametrize("credentials", [None, RunKeys.make(), RunToken.make()], ids=["none", "keys", "token"])
def test_a_specification_survives_the_pipe(data: PreparedData, credentials: Credentials | None) -> None:
    spec = spec_of(data, OptionSpec(profile="{}", groups="127.0.0.1:1"), credentials)
    fields = json.loads(json.dumps(spec.to_dict())) | {"life_fd": 7}
    found = WorkerSpec.from_dict(fields)
    assert (found.rank, found.run, found.death_watch, found.life_fd) == (3, spec.run, spec.death_watch, 7)


def test_nothing_of_an_option_that_is_off_is_sent(data: PreparedData) -> None:
    assert spec_of(data).to_dict()["options"] == {}
    assert spec_of(data, OptionSpec(trace="/runs/1")).to_dict()["options"] == {"trace": "/runs/1"}


@pytest.mark.parametrize("change", [{"hots": "127.0.0.1"}, {"host": None}])
def test_keys_that_are_unknown_or_missing_are_refused(data: PreparedData, change: dict[str, Any]) -> None:
    fields = spec_of(data).to_dict() | change
    if change.get("host", "") is None:
        del fields["host"]
    with pytest.raises(ValueError, match="specification of a worker lacks"):
        WorkerSpec.from_dict(fields)


def test_values_that_no_worker_can_have_are_refused(data: PreparedData) -> None:
    with pytest.raises(ValueError, match="rank -1"):
        WorkerSpec(-1, spec_of(data).run)
    fields = spec_of(data, credentials=RunToken.make()).to_dict()
    for wrong in ({"token": "abc"}, {"key": "abc"}, {"server": "x" * 40, "client": "y" * 39}):
        with pytest.raises(ValueError):
            WorkerSpec.from_dict(fields | {"credentials": wrong})
