"""The results of the check of the model, compared between workers and with the run that is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_spmd.conf.schema import MirrorSettings, ScheduleSettings
from elaswave_spmd.controller.actions import Record
from elaswave_spmd.controller.model_checks import Constructions, ModelChecks
from elaswave_spmd.mesh import Mesh, MeshShape, Topology
from elaswave_spmd.recovery.messages import Checked, Constructed
from elaswave_spmd.scheduling.cost_model import CostModel, LayerCost
from elaswave_spmd.sharding import Shardings

NAMES = ("embed", "block0", "block1", "head")
ONE, OTHER = bytes(16), bytes(range(16))


COSTS = CostModel(tuple(LayerCost(name, 1.0, 2.0, value_bytes=7) for name in NAMES), 1e9)


def checks(
    hosts: Mapping[int, str] | None = None, known: Mapping[str, str] | None = None, memory_limit: float | None = None
) -> ModelChecks:
    topology = Topology.of({rank: (host,) for rank, host in hosts.items()}) if hosts else None
    layers = [SimpleNamespace(name=name) for name in NAMES]
    plan = SimpleNamespace(
        description=SimpleNamespace(layout=SimpleNamespace(layers=layers)),
        placement=SimpleNamespace(mesh=Mesh.initial(MeshShape.of_stages((3,)), topology)),
        bytes_of=lambda layer: (300 * layer, 100 * layer, 100 * layer),
    )
    plan.placement.shardings, plan.costs = Shardings(), COSTS
    plan.settings = SimpleNamespace(mirror=MirrorSettings(), schedule=ScheduleSettings(memory_limit=memory_limit))
    return ModelChecks(cast(Any, plan), known)


def checked(rank: int, block: bytes = ONE, put_off: int = 0) -> Checked:
    rows = ((0, 1, 5, 6, 0, ONE), (1, 2, 7, 8, put_off, block), (3, 1, 9, 4, 0, ONE))
    return Checked(rank, 0.1234, rows, (0, 1, 1, 3))


def test_the_first_worker_that_passes_is_told_of_with_the_bytes_of_each_kind() -> None:
    found = checks()
    assert found.difference(checked(2)) is None
    (record,) = found.passed(checked(2))
    assert isinstance(record, Record) and record.kind == "model_check"
    rows = cast(Any, record.fields["layers"])
    assert rows[1] == {
        "layer": "block0", "count": 2, "state_bytes": 300, "value_bytes": 100, "gradient_bytes": 100,
        "kept_bytes": 7, "output_bytes": 8, "put_off_bytes": 0, "digest": "00" * 16,
    }  # fmt: skip
    assert [row["layer"] for row in rows] == ["embed", "block0", "head"] and record.fields["seconds"] == 0.123
    assert found.difference(checked(0)) is None and found.passed(checked(0)) == []


@pytest.mark.parametrize(("chosen", "keeps_whole"), [("auto", False), ("always", False), ("never", True)])
def test_backwards_are_whole_from_the_first_step_on_where_nothing_is_to_be_put_off(
    chosen: str, keeps_whole: bool
) -> None:
    found = checks()
    found._plan.settings.schedule = ScheduleSettings(split_backward=chosen)  # type: ignore[misc]
    assert found.difference(checked(1, put_off=30)) is None
    assert found.split is not None and found.split.keeps_whole == keeps_whole


def test_a_controller_that_comes_back_knows_the_layers_by_the_workers_that_it_adopts() -> None:
    found = checks()
    found.adopted(checked(1, put_off=30))
    assert found.split is not None and found.split.layers == (1, 2)
    assert found.difference(checked(3)) is None and found.passed(checked(3)) == [], "it was recorded before"
    assert found.difference(checked(4, OTHER)) is not None, "newcomers are compared with those that are here"


def test_other_bits_are_told_with_both_workers_and_their_hosts() -> None:
    found = checks()
    assert found.difference(checked(1)) is None
    error = found.difference(checked(0, OTHER))
    assert error is not None and error.what == "layer block0 computes other bits on worker 0 than on worker 1"
    assert error.rule and error.fix
    found = checks({0: "node0", 1: "node0", 2: "node1"})
    assert found.difference(checked(0)) is None
    error = found.difference(checked(2, OTHER))
    assert error is not None
    assert error.what == "layer block0 computes other bits on worker 2 on node1 than on worker 0 on node0"
    error = found.difference(checked(9, OTHER))  # a newcomer, whose machine the first mesh does not know
    assert error is not None and "on worker 9 than" in error.what


@pytest.mark.parametrize(("layer", "told"), [(0, "embed, or inputs(batch),"), (3, "head, or loss(output, batch),")])
def test_functions_around_the_first_and_the_last_layer_may_be_what_differs(layer: int, told: str) -> None:
    found = checks()
    assert found.difference(checked(1)) is None
    rows = tuple((*row[:5], OTHER) if row[0] == layer else row for row in checked(0).layers)
    error = found.difference(Checked(0, 0.1, rows, (0, 1, 1, 3)))
    assert error is not None and error.what == f"layer {told} computes other bits on worker 0 than on worker 1"


def test_other_kinds_of_layers_are_a_difference() -> None:
    found = checks()
    assert found.difference(checked(0)) is None
    rows = ((0, 1, 5, 6, 0, ONE), (1, 1, 7, 8, 0, ONE), (2, 1, 7, 8, 0, ONE), (3, 1, 9, 4, 0, ONE))
    error = found.difference(Checked(1, 0.1, rows, (0, 1, 2, 3)))
    assert error is not None and "layer block1" in error.what


def test_a_run_goes_on_with_the_bits_that_it_began_with() -> None:
    known = {"embed": ONE.hex(), "block0": ONE.hex(), "gone": OTHER.hex()}
    assert checks(known=known).difference(checked(0)) is None
    error = checks(known=known).difference(checked(0, OTHER))
    assert error is not None and error.what.startswith("layer block0 computes other bits than it did when the run")


def test_the_first_worker_says_which_backwards_may_be_in_two_parts() -> None:
    assert checks().split is None
    found = checks(memory_limit=1000.0)
    assert found.difference(checked(1, put_off=30)) is None and found.difference(checked(0, put_off=30)) is None
    split = found.split
    assert split is not None and split is found.split
    assert split.layers == (1, 2) and split.memory_limit == 1000.0
    assert split.put_off_bytes == (0, 30, 30, 300), "a layer that is not split keeps the gradients of its parameters"
    sizes = [(layer.state_bytes, layer.gradient_bytes, layer.activation_bytes) for layer in split.costs.layers]
    assert sizes == [(0, 0, 5), (300, 100, 7), (600, 200, 7), (900, 300, 9)], "not those of a profile"
    (record,) = found.passed(checked(1, put_off=30))
    assert isinstance(record, Record)
    rows = cast(Any, record.fields["layers"])
    assert [row["put_off_bytes"] for row in rows] == [0, 30, 0]
    assert "the backward of 1 may be in two parts" in cast(str, record.fields["message"])


def test_without_a_kind_that_may_be_split_nothing_is_said_of_it() -> None:
    found = checks()
    assert found.difference(checked(1)) is None and found.split is None
    (record,) = found.passed(checked(1))
    assert isinstance(record, Record) and "two parts" not in cast(str, record.fields["message"])


def test_what_constructors_made_is_compared_by_name() -> None:
    found = Constructions()
    rows = (("block0.scale", False, ONE), ("block0.table", True, ONE))
    assert found.difference(Constructed(2, rows)) is None
    assert found.difference(Constructed(0, (*rows, ("head.weight", False, OTHER)))) is None
    error = found.difference(Constructed(1, (rows[0], ("head.weight", False, ONE))))
    assert error is not None and error.what == (
        "the constructor of layer head made other values of parameter head.weight on worker 1 than on worker 0"
    )
    error = found.difference(Constructed(1, (rows[0], ("block0.table", True, OTHER))))
    assert error is not None and "of layer block0 made other values of constant block0.table" in error.what


def test_given_weights_are_those_that_the_controller_reads() -> None:
    rows = (("embed.weight", False, b"a" * 16), ("head.weight", False, b"b" * 16))
    found = Constructions(rows)
    assert found.difference(Constructed(2, rows)) is None
    error = found.difference(Constructed(3, (("head.weight", False, b"c" * 16),)))
    assert error is not None and error.what == (
        "worker 3 reads other values of parameter head.weight from model.init_from than the controller"
    )
