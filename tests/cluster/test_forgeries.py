"""Messages of a process with the run's keys that cannot be right: all are refused and counted, no bit changes.

First the decisions alone, on 10,000 mutations of a message of every kind. Then runs in the simulated cluster, in which
forged messages come between the right ones.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args
from unittest import mock

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from elaswave_spmd.recovery import admission
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.admission import (
    ControllerPosition,
    MessageBounds,
    WorkerPosition,
    refused_by_controller,
    refused_by_worker,
)
from elaswave_spmd.recovery.vote_exchange import WIDEST
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.worker.optimizers import Averaged
from elaswave_spmd.worker.spec import message_bounds
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.forgeries import ForgingCluster, Fuzzed, forgeries
from tests.cluster.schedules import Outcome, Schedule, cluster_of, judge, undisturbed
from tests.cluster.tiny import TinyRun

RUN = TinyRun(steps=8, microbatches=5)
JOB = replace(RUN.job(), verify_rate=0.5)
BOUNDS: MessageBounds = replace(message_bounds(JOB, RUN.description.layout, spawns=True, pairs=True), averages=True)
DIGESTS = ((1, bytes(512), b"", bytes(512)), (2, bytes(512), bytes(512), bytes(512)))
SENDER, PAGES = 1, (1, 0, 1)
RESULT = (bytes(512), b"1234")
CHECKED = m.Checked(
    SENDER,
    0.5,
    ((0, 1, 10, 20, 0, bytes(16)), (1, len(BOUNDS.layout.layers) - 1, 10, 20, 30, bytes(16))),
    (0, *(1,) * (len(BOUNDS.layout.layers) - 1)),
)
ELEMENTS = BOUNDS.num_elements(PAGES, "state") or 0
FRAMES = 10_000
AT_CONTROLLER = ControllerPosition(version=3, last_epoch=2, num_ranks=3, ready={0, 2})
AT_WORKER = WorkerPosition(version=3, epoch=2, promised=3, voters=({1, 2}, {2}))
PART = m.PartialStep(
    4, (0, 1), (0,), (1,), ((1, 0),), ((1, 0),), {1: ((0, 1), (0, 2))}, ((*PAGES, 1, ((0, 1),)),), (PAGES,), (1,)
)
FORMS = (m.TensorForm("float32", (2, 3), True), m.TensorForm("bool", (2,), False))
TO_WORKER: Mapping[m.AnyMessage, int | None] = {
    m.Activation(4, 2, 1, (2, 3, 8)): 48,
    m.ActivationGradient(4, 2, 1, (2, 3, 8)): 48,
    m.Activation(4, 2, 1, (128,), forms=FORMS, names=("hidden", "mask")): 128,
    m.ActivationGradient(4, 2, 1, (64,), forms=FORMS[:1]): 64,
    m.PartialSum(4, *PAGES, 0, 2): ELEMENTS,
    m.ReducedGradient(4, *PAGES, b"1234"): ELEMENTS,
    m.Publish(4, *PAGES): ELEMENTS,
    m.PageState(3, *PAGES, b"1234"): 3 * ELEMENTS,
    m.Need(3, *PAGES): None,
    m.PartialSum(4, *PAGES, 0, 2, attempt=2): ELEMENTS,
    m.CheckDigests(4, 2, DIGESTS, attempt=1): None,
    m.Addend(4, *PAGES, 2): ELEMENTS,
    m.Addend(4, *PAGES, 2, again=True, attempt=1): ELEMENTS,
    m.Vote(4, 2, SENDER, (1.5, 1e-9), 2.5): None,
    m.GroupLost(2, SENDER, "timeout"): None,
    m.PairSent(2, 17, 48, m.encode(m.Activation(4, 2, 1, (2, 3, 8)))): None,
    m.PairSent(2, 17, 48, m.encode(m.Activation(4, 2, 1, (2, 3, 8))), True): 48,
    m.PairReceived(17): None,
    m.PairLost(2, SENDER, 0, "timeout"): None,
}
ADOPTED = m.Adopted(SENDER, 2, 4, 2, b"columns", (m.Applied(4, 2, SENDER, 2.5, 1.5, True),), checked=CHECKED)
REPORTS: tuple[m.AnyMessage, ...] = (
    m.Ready(SENDER, "tcp://127.0.0.1:1234", True, 3),
    m.StepReport(2, SENDER, 3, (PART,)),
    m.StepReport(2, SENDER, 3, (PART,), layers=(0, 1)),
    m.Heartbeat(SENDER, 17, False, "forward"),
    m.CaughtUp(SENDER, 2),
    m.Fingerprints(SENDER, 2, 3, ((*PAGES, b"8 bytes!"),)),
    m.Damaged(SENDER, 2, 3, (PAGES,), "lost"),
    m.LinkClosed(SENDER, 2),
    m.LinkClosed(SENDER, 2, was_linked=False),
    m.LinksClosed(SENDER, (0, 2)),
    m.Leaving(SENDER),
    m.SpawnRequest(SENDER, 1),
    m.Applied(4, 2, SENDER, 2.5, 1.5, True),
    m.Measured(SENDER, 3, ((1, 0.1, 0.2, 2, 2),), ((1, 10, 20),), 0, (1e-5, 1e9)),
    m.ValidationLoss(3, 2, SENDER, (0, 2), (1.5, 2.5)),
    m.ValidationLoss(3, 2, SENDER, (), ()),
    m.Finished(SENDER, 2, {"optim": 10}, {"rss": 20}),
    m.Failed(SENDER, "Traceback", 4),
    m.ShardWritten(3, SENDER, 2, "shard_1_1-2.safetensors", 100, "0" * 64, (PAGES,), 1.0, 2.0),
    m.GroupLost(2, SENDER, "timeout"),
    m.PairLost(2, SENDER, 0, "timeout"),
    m.FinalPages(*PAGES),
    m.FinalPages(*PAGES, average=True),
    m.ChecksDiffer(SENDER, 2, 4, 2, 0, DIGESTS, DIGESTS),
    m.CheckedAgain(SENDER, 2, 4, 2, DIGESTS),
    m.SumsDiffer(SENDER, 2, 4, *PAGES, 0, RESULT, RESULT),
    m.AddedUp(SENDER, 2, 4, *PAGES, False, ((1, 0, 2, bytes(512)),)),
    m.AddedUp(SENDER, 2, 4, *PAGES, True, ((1, 0, 2, bytes(512)), (1, 2, 4, bytes(512))), (RESULT,)),
    CHECKED,
    m.Constructed(SENDER, (("block0.weight", False, bytes(16)), ("block0.table", True, bytes(range(16))))),
    m.Refused(SENDER, {"what": "a layer draws", "rule": "keyed", "fix": "KeyedDropout"}),
    ADOPTED,
)


def by_worker(message: m.AnyMessage, sender: int, num_elements: int | None) -> str:
    if why := admission.not_for_workers(message, sender, me=0, controller=CONTROLLER):
        return why
    return refused_by_worker(BOUNDS, message, sender, num_elements, AT_WORKER) if sender != CONTROLLER else ""


def by_controller(message: m.AnyMessage, sender: int, num_elements: int | None) -> str:
    return refused_by_controller(BOUNDS, message, sender, num_elements, AT_CONTROLLER)


def test_every_message_of_a_worker_has_an_example() -> None:
    kinds = {type(message) for message in (*TO_WORKER, *REPORTS)}
    others = {
        m.Prepare,
        m.Reconfigure,
        m.PackedReconfigure,
        m.PeerAddresses,
        m.Validated,
        m.Stop,
        m.CheckAgain,
        m.CheckAccepted,
        m.ReplicasAgree,
        m.AddAgain,
        m.SumAccepted,
        m.Pace,
        m.Limits,
        m.Adopt,
        m.OfGeneration,
        m.Written,
    }  # of the controller, which is trusted
    assert kinds | others == set(get_args(m.AnyMessage))


def test_a_vote_comes_from_whom_it_is_expected_of() -> None:
    """A sum of votes as well; of an epoch that is not entered yet nobody knows who votes to whom."""
    for epoch, level, why in (
        (2, 0, ""),
        (2, 1, admission.RANK),
        (2, 2, admission.VALUE),
        (2, -1, admission.VALUE),
        (3, 15, ""),
        (3, 16, admission.VALUE),
        (3, -1, admission.VALUE),
    ):
        assert by_worker(m.Vote(4, epoch, SENDER, (1.5,), level=level), SENDER, None) == why, (epoch, level)


@pytest.mark.parametrize(
    ("message", "num_elements"),
    [
        (m.Vote(4, 5_000, SENDER, (1.5,)), None),
        (m.PartialSum(4, *PAGES, 0, 2, attempt=5_000), ELEMENTS),
        (m.PairSent(5_000, 1, 0, b"", True), None),
    ],
    ids=lambda it: type(it).__name__,
)
def test_an_epoch_may_be_as_far_ahead_as_the_last_prepare_that_was_answered(
    message: m.AnyMessage, num_elements: int | None
) -> None:
    """Each loss takes a number, so that thousands may be left out between two epochs. A vote that is refused is not
    sent again, and the run would stand still. In an epoch beyond that nobody can be: all answer before it begins."""
    for promised, why in ((4_999, admission.EPOCH), (5_000, ""), (7_000, "")):
        at = replace(AT_WORKER, promised=promised)
        assert refused_by_worker(BOUNDS, message, SENDER, num_elements, at) == why


def test_an_average_is_refused_where_the_run_has_none() -> None:
    message, without = m.FinalPages(*PAGES, average=True), message_bounds(JOB, RUN.description.layout)
    assert message_bounds(replace(JOB, optimizer=Averaged(JOB.optimizer, 0.9)), RUN.description.layout).averages
    assert by_controller(message, SENDER, ELEMENTS) == ""
    assert refused_by_controller(without, message, SENDER, ELEMENTS, AT_CONTROLLER) == admission.DIRECTION
    assert m.encode(m.FinalPages(*PAGES)) == msgspec.msgpack.encode(["FinalPages", *PAGES]), "nothing of it is sent"


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda x: type(x).__name__)
def test_workers_act_on_right_messages(message: m.AnyMessage) -> None:
    assert by_worker(message, SENDER, TO_WORKER[message]) == ""


@pytest.mark.parametrize("message", REPORTS, ids=lambda x: type(x).__name__)
def test_the_controller_acts_on_right_messages(message: m.AnyMessage) -> None:
    assert by_controller(message, SENDER, ELEMENTS if isinstance(message, m.FinalPages) else None) == ""


@pytest.mark.parametrize("message", [*TO_WORKER, *REPORTS], ids=lambda x: type(x).__name__)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_any_frame_is_acted_upon_or_refused_and_nothing_fails(message: m.AnyMessage, seed: int) -> None:
    for frame in Fuzzed(seed).frames(message, FRAMES // 20):
        try:
            found = m.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        for num_elements in (None, ELEMENTS):
            assert isinstance(by_worker(found, SENDER, num_elements), str)
            assert isinstance(by_controller(found, SENDER, num_elements), str)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (m.CheckDigests(4, 2, ()), admission.PLACE),
        (m.CheckDigests(4, 99, DIGESTS), admission.PLACE),
        (m.CheckDigests(4, 2, DIGESTS[::-1]), admission.PLACE),
        (m.CheckDigests(4, 2, ((9, b"", b"", b""),)), admission.PLACE),
        (m.CheckDigests(4, 2, ((1, b"short", b"", b""),)), admission.SIZE),
        (m.CheckDigests(99, 2, DIGESTS), admission.STEP),
        (m.CheckDigests(4, 2, DIGESTS, attempt=-1), admission.EPOCH),
        (m.Activation(4, 2, 1, (2, 3, 8), attempt=10**6), admission.EPOCH),
    ],
)
def test_results_that_cannot_be_right_are_refused(message: m.AnyMessage, why: str) -> None:
    assert by_worker(message, SENDER, 48 if isinstance(message, m.Activation) else None) == why


@pytest.mark.parametrize(
    "changed",
    [
        {"shape": (64,)},
        {"forms": FORMS[:1]},
        {"forms": (FORMS[0], m.TensorForm("bool", (65,), False))},
        {"forms": (FORMS[0], m.TensorForm("complex64", (2,), False))},
        {"forms": (FORMS[0], m.TensorForm("bool", (-2, -1), False))},
        {"forms": (FORMS[0], m.TensorForm("bool", (1,) * 17, False))},
        {"forms": (FORMS[0], m.TensorForm("bool", (2**62,) * 3, False))},
        {"forms": (FORMS[1],) * 1001, "names": (), "shape": (64 * 1001,)},
        {"forms": ()},
        {"names": ("hidden",)},
        {"names": ("hidden", "hidden")},
        {"names": ("hidden", "_mask")},
        {"names": ("hidden", "class")},
        {"names": ("hidden", "a b")},
    ],
)
def test_tuples_of_a_form_that_cannot_be_are_refused(changed: dict[str, Any]) -> None:
    right = m.Activation(4, 2, 1, (128,), forms=FORMS, names=("hidden", "mask"))
    assert by_worker(right, SENDER, 128) == ""
    wrong = msgspec.structs.replace(right, **changed)
    assert by_worker(wrong, SENDER, wrong.shape[0]) == admission.SIZE


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (m.Addend(4, *PAGES, 99), admission.PLACE),
        (m.Addend(4, 99, 0, 1, 2), admission.PLACE),
        (m.Addend(4, 1, 0, 99, 2), admission.PLACE),
        (m.Addend(4, *PAGES, 2, attempt=10**6), admission.EPOCH),
        (m.Addend(99, *PAGES, 2), admission.STEP),
    ],
)
def test_gradients_that_cannot_be_right_are_refused(message: m.AnyMessage, why: str) -> None:
    assert by_worker(message, SENDER, ELEMENTS) == why
    assert by_worker(m.Addend(4, *PAGES, 2), SENDER, ELEMENTS + 1) == admission.SIZE


@pytest.mark.parametrize(
    ("sums", "results", "why"),
    [
        (((1, 0, 2, bytes(511)),), (), admission.SIZE),
        (((1, 0, 2, bytes(512)),) * 2, (), admission.SIZE),
        (((1, 1, 3, bytes(512)),), (), admission.PLACE),
        (((99, 0, 2, bytes(512)),), (), admission.PLACE),
        ((), (RESULT,) * 3, admission.SIZE),
        ((), ((bytes(512), b"12345678"),), admission.SIZE),
        ((), ((bytes(8), b"1234"),), admission.SIZE),
    ],
)
def test_sums_that_cannot_be_right_are_refused(sums: tuple, results: tuple, why: str) -> None:
    assert by_controller(m.AddedUp(SENDER, 2, 4, *PAGES, True, sums, results), SENDER, None) == why


@pytest.mark.parametrize(
    "put_off", [(99,), (-1,), (1, 1), (2,), (0,)], ids=["no", "negative", "twice", "not its own", "done"]
)
def test_reports_of_weight_gradients_that_nobody_can_have_put_off_are_refused(put_off: tuple[int, ...]) -> None:
    report = m.StepReport(2, SENDER, 3, (msgspec.structs.replace(PART, put_off=put_off),))
    assert by_controller(report, SENDER, None) == admission.PLACE


def test_what_a_report_of_an_older_epoch_says_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The protocol ignores it, and it may be large: all members send one when a change has overtaken another one."""
    asked: list[m.PartialStep] = []
    monkeypatch.setattr(admission, "_exists", lambda bounds, part: asked.append(part) or True)
    report = m.StepReport(1, SENDER, 3, (PART,))
    assert by_controller(report, SENDER, None) == "" and not asked
    assert by_controller(msgspec.structs.replace(report, epoch=2), SENDER, None) == "" and asked == [PART]


@pytest.mark.parametrize("layers", [(0,), (1, 1), (2, 1), (-1, 2), (0, 99), (0, 1, 2)])
def test_reports_of_layers_that_no_stage_can_have_are_refused(layers: tuple[int, ...]) -> None:
    report = m.StepReport(2, SENDER, 3, (PART,), layers=layers)
    assert by_controller(report, SENDER, None) == admission.PLACE


@pytest.mark.parametrize(("began", "why"), [(3, ""), (None, ""), (0, admission.SIZE), (2, admission.SIZE)])
def test_state_without_norms_is_of_the_version_that_the_run_began_with(began: int | None, why: str) -> None:
    """A worker of the first mesh knows which that is. One that came later does not, and neither does a controller."""
    at = replace(AT_WORKER, began=began)
    assert refused_by_worker(BOUNDS, m.PageState(3, *PAGES, b""), SENDER, 3 * ELEMENTS, at) == why
    assert refused_by_worker(BOUNDS, m.PageState(3, *PAGES, b"1234"), SENDER, 3 * ELEMENTS, at) == ""


def test_without_pairs_nobody_takes_their_messages() -> None:
    bounds = message_bounds(RUN.job(), RUN.description.layout)
    for message in (m.PairSent(2, 1, 0, b"", True), m.PairReceived(1), m.PairLost(2, SENDER, 0)):
        assert refused_by_worker(bounds, message, SENDER, None, AT_WORKER) == admission.DIRECTION
    lost = m.PairLost(2, SENDER, 0)
    assert refused_by_controller(bounds, lost, SENDER, None, AT_CONTROLLER) == admission.DIRECTION


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (m.PairSent(2, 0, 48, b""), admission.VALUE),
        (m.PairSent(2, 1, -1, b""), admission.VALUE),
        (m.PairSent(3, 1, 48, b""), admission.EPOCH),  # its sender has met this worker in the epoch
        (m.PairSent(3, 1, 0, b"", True), ""),
        (m.PairSent(3, 1, 48, b"", True), admission.SIZE),  # it is to come with that payload
        (m.PairReceived(0), admission.VALUE),
        (m.PairLost(2, SENDER + 1, 0), admission.SENDER),
        (m.PairLost(2, SENDER, 0, "x" * 3000), admission.SIZE),
    ],
)
def test_messages_about_pairs_that_cannot_be_right_are_refused(message: m.AnyMessage, why: str) -> None:
    assert by_worker(message, SENDER, None) == why


def test_without_checks_nobody_takes_their_messages() -> None:
    bounds = message_bounds(RUN.job(), RUN.description.layout)
    assert refused_by_worker(bounds, m.Addend(4, *PAGES, 2), SENDER, ELEMENTS, AT_WORKER) == admission.DIRECTION
    reports = (
        m.ChecksDiffer(SENDER, 2, 4, 2, 0, DIGESTS, DIGESTS),
        m.CheckedAgain(SENDER, 2, 4, 2, DIGESTS),
        m.SumsDiffer(SENDER, 2, 4, *PAGES, 0, RESULT, RESULT),
        m.AddedUp(SENDER, 2, 4, *PAGES, False, ()),
    )
    for message in reports:
        assert refused_by_controller(bounds, message, SENDER, None, AT_CONTROLLER) == admission.DIRECTION
    assert refused_by_worker(bounds, m.CheckDigests(4, 2, DIGESTS), SENDER, None, AT_WORKER) == admission.DIRECTION


@pytest.mark.parametrize(
    "message",
    [m.LinkClosed(SENDER, SENDER), m.LinkClosed(SENDER, SENDER, was_linked=False), m.LinksClosed(SENDER, (0, SENDER))]
    + [msgspec.structs.replace(ADOPTED, closed=closed) for closed in ((SENDER,), (0, SENDER, 2))],
)
def test_nobody_has_a_link_to_itself(message: m.AnyMessage) -> None:
    assert by_controller(message, SENDER, None) == admission.VALUE
    assert by_controller(m.LinkClosed(SENDER, 0), SENDER, None) == ""
    assert by_controller(m.LinksClosed(SENDER, (0, 2)), SENDER, None) == ""
    assert by_controller(msgspec.structs.replace(ADOPTED, closed=(0, 2)), SENDER, None) == ""


def test_a_controller_that_comes_back_believes_that_there_were_workers_that_the_journal_does_not_name() -> None:
    """The first mesh may have a replacement, and no Prepare has told of it: its machine may be lost, and all links."""
    not_journaled = AT_CONTROLLER.num_ranks + 1
    assert by_controller(msgspec.structs.replace(ADOPTED, closed=(0, not_journaled)), SENDER, None) == ""
    assert by_controller(msgspec.structs.replace(ADOPTED, closed=(-1,)), SENDER, None) == admission.PLACE


def test_without_validations_nobody_takes_their_losses() -> None:
    """Not even of no micro-batch: all of those that there are would be here, and there is no loss among them."""
    bounds = replace(BOUNDS, num_validation_microbatches=0)
    nothing = m.ValidationLoss(3, 2, SENDER, (), ())
    assert by_controller(nothing, SENDER, None) == ""
    assert refused_by_controller(bounds, nothing, SENDER, None, AT_CONTROLLER) == admission.DIRECTION


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", ["dp3", "dp2_pp2", "stages3-2"])
def test_forged_messages_change_no_bit_and_are_counted(mesh: str, zero: int, order: int) -> None:
    schedule = Schedule(order, RUN, mesh, zero, widest=2 if order else WIDEST)
    cluster = cluster_of(schedule, kind=ForgingCluster)
    assert isinstance(cluster, ForgingCluster)
    cluster.forge(order, share=0.3, until=RUN.steps - 3)
    assert Outcome.of(cluster.run(mends=["rejected"])) == undisturbed(RUN)
    assert sum(cluster.forged.values()) > 30
    assert sum(cluster.rejected.values()) >= cluster.num_to_refuse, (cluster.forged, cluster.rejected)


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_forged_messages_between_random_faults_change_no_bit(first: int) -> None:
    for seed in range(first, first + 10):
        schedule = Schedule.draw(seed, moving=seed % 3 == 0, votes=seed % 2 == 0)
        cluster = cluster_of(schedule, kind=ForgingCluster)
        assert isinstance(cluster, ForgingCluster)
        cluster.forge(seed, share=0.15, until=schedule.run.steps - 3)
        _, failure, detail = judge(schedule, cluster, undisturbed(schedule.run.key))
        assert not failure, (seed, failure, detail)


TO_CONTROLLER: Mapping[int, int | None] = {
    i: ELEMENTS if isinstance(message, m.FinalPages) else None for i, message in enumerate(REPORTS)
}
RIGHT: list[tuple[int, m.AnyMessage, int | None]] = [
    *((0, message, num_elements) for message, num_elements in TO_WORKER.items()),
    *((CONTROLLER, REPORTS[i], num_elements) for i, num_elements in TO_CONTROLLER.items()),
]


@pytest.mark.parametrize(("to", "message", "num_elements"), RIGHT, ids=[type(row[1]).__name__ for row in RIGHT])
def test_each_forgery_of_a_right_message_is_refused(to: int, message: m.AnyMessage, num_elements: int | None) -> None:
    """There are forgeries of each, and none that is to be refused gets through."""
    payload = None if num_elements is None else torch.zeros(num_elements)
    found = [f for f in forgeries((SENDER, to, message, payload), random.Random(0)) if f.refused]
    assert len(found) >= 2
    for forgery in found:
        sender, receiver, forged, content = forgery.sent
        decide = by_controller if receiver == CONTROLLER else by_worker
        assert decide(forged, sender, None if content is None else content.numel()), forgery


@pytest.mark.parametrize(
    "check", ["elaswave_spmd.worker.loop.refused_by_worker", "elaswave_spmd.controller.loop.refused_by_controller"]
)
def test_without_either_check_a_forged_message_ends_a_run_or_changes_it(check: str) -> None:
    """So the tests above can fail."""
    failures = []
    for order in range(3):
        cluster = cluster_of(Schedule(order, RUN, "dp2_pp2", 1), kind=ForgingCluster)
        assert isinstance(cluster, ForgingCluster)
        cluster.forge(order, share=0.3, until=RUN.steps - 3)
        wanted = undisturbed(RUN)
        with mock.patch(check, lambda *_: ""):
            try:
                failures.append(Outcome.of(cluster.run(mends=["rejected"])) != wanted)
            except Exception:
                failures.append(True)
    assert any(failures)


@pytest.mark.parametrize(
    "message",
    [
        m.Damaged(SENDER, 2, 3, (PAGES,), "x" * 5000),
        m.Applied(4, 2, SENDER, 2.5, 1.5, True, "x" * 5000),
        m.Heartbeat(SENDER, 1, False, "x" * 5000),
        m.Finished(SENDER, 2, {"x" * 5000: 1}, {}),
        m.Finished(SENDER, 2, {}, {str(i): i for i in range(500)}),
    ],
)
def test_texts_that_reach_events_have_a_limit(message: m.AnyMessage) -> None:
    assert by_controller(message, SENDER, None) == admission.SIZE


def test_a_worker_is_ready_once() -> None:
    known = AT_CONTROLLER._replace(ready={SENDER})
    assert refused_by_controller(BOUNDS, m.Ready(SENDER, "tcp://127.0.0.1:1"), SENDER, None, known)


def test_the_time_to_refuse_a_shape_does_not_grow_with_its_square() -> None:
    """The product of 10 million numbers takes days."""
    long = m.Activation(4, 2, 1, (2**62,) * 10_000_000)
    assert by_worker(long, SENDER, 48) == admission.SIZE


@pytest.mark.parametrize(
    "report",
    [
        m.Heartbeat(SENDER, 17, False, "", tuple((f"reason {i}", 1) for i in range(1000))),
        m.Heartbeat(SENDER, 17, False, "", (("x" * 1000, 1),)),
        m.Heartbeat(SENDER, 17, False, "", (("malformed message", -1),)),
        m.Measured(SENDER, 3, (), ((1, 10, 20),) * 1000),
        m.Measured(SENDER, 3, ((1, 0.1, 0.2, 2, 2),) * 2, ((1, 10, 20),)),
        m.Measured(SENDER, 3, (), weights=((1, 0.1, 2),) * 2),
        m.Measured(SENDER, 3, (), weights=((1, -0.1, 2),)),
        m.Measured(SENDER, 3, (), weights=((10_000, 0.1, 2),)),
    ],
    ids=[
        "many reasons",
        "a long reason",
        "a negative count",
        "a layer's memory often",
        "a layer's times twice",
        "a layer's weight gradients twice",
        "a negative time",
        "a layer that there is not",
    ],
)
def test_reports_without_end_are_refused(report: m.AnyMessage) -> None:
    assert by_controller(report, SENDER, None)


def test_counts_of_what_a_worker_refused_are_taken() -> None:
    beat = m.Heartbeat(SENDER, 17, False, "forward", (("malformed message", 3), (admission.SIZE, 1)))
    assert not by_controller(beat, SENDER, None)
    assert not by_controller(m.Heartbeat(SENDER, 17, True, "votes of step 7", (), True), SENDER, None)


def test_only_runs_with_injected_joins_take_requests_for_workers() -> None:
    without = replace(BOUNDS, spawns=False)
    assert refused_by_controller(without, m.SpawnRequest(SENDER, 1), SENDER, None, AT_CONTROLLER)


@pytest.mark.parametrize("name", ["../weights", "a/b", "", ".hidden", "x" * 200])
def test_a_shard_is_a_file_of_the_checkpoint(name: str) -> None:
    shard = m.ShardWritten(3, SENDER, 2, name, 100, "0" * 64, (PAGES,))
    assert refused_by_controller(BOUNDS, shard, SENDER, None, AT_CONTROLLER)


class Reshaping(SimulatedCluster):
    """A cluster in which each gradient of a boundary tensor follows one of its name and size that has another shape."""

    num_reshaped = 0

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        if isinstance(message, m.ActivationGradient) and payload is not None:
            other = msgspec.structs.replace(message, shape=message.shape[::-1])
            self._wires.put(sender, peer, other, payload.clone())
            self.num_reshaped += 1
        super().send(sender, peer, message, payload)


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("mesh", ["pp2", "dp2_pp2"])
def test_gradients_of_another_shape_change_no_bit_and_are_counted(mesh: str, order: int) -> None:
    """A worker knows the shape of what it has sent of the micro-batch."""
    cluster = cluster_of(Schedule(order, RUN, mesh, 1), kind=Reshaping)
    assert isinstance(cluster, Reshaping)
    assert Outcome.of(cluster.run(mends=["rejected"])) == undisturbed(RUN)
    assert cluster.num_reshaped > 20 and cluster.rejected[admission.SIZE] == cluster.num_reshaped
