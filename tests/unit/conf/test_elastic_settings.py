"""Settings of elastic runs: what they refuse alone and together, chaos as it is typed, and plain data both ways."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.conf.compose import settings_from
from elaswave_spmd.conf.schema import (
    ANY,
    CHAOS_KINDS,
    CHAOS_POINTS,
    MISCOMPUTE,
    ChaosEvent,
    ChaosSettings,
    ElasticSettings,
    MirrorSettings,
    Settings,
    Timeouts,
)
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.worker.fault_points import FaultPoint

EXAMPLE = "chaos.events=[{step: 12, kind: kill, rank: 3, point: backward}]"
ranks = st.just(ANY) | st.integers(0, 2**20) | st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)
events = st.fixed_dictionaries(
    {"step": st.integers(1, 400), "kind": st.sampled_from([kind for kind in CHAOS_KINDS if kind != MISCOMPUTE])},
    optional={"rank": ranks, "point": st.sampled_from([p for p in CHAOS_POINTS if p not in ("input", "weights")])},
) | st.fixed_dictionaries(
    {"step": st.integers(1, 400), "kind": st.just(MISCOMPUTE), "point": st.sampled_from(CHAOS_POINTS[:6])},
    optional={"rank": ranks, "rate": st.floats(0, 1)},
)


def settings(*overrides: str) -> Settings:
    return settings_from(overrides)


def test_the_defaults_disturb_nothing() -> None:
    made = settings()
    assert made.chaos == ChaosSettings() and made.chaos.events == () and made.chaos.random is False
    assert (made.elastic.min_workers, made.elastic.replace) == (1, False)
    assert (made.mirror.count, made.checkpoint.every, made.timeouts) == (1, 0, Timeouts())


def test_chaos_as_it_is_typed() -> None:
    made = settings(EXAMPLE, "mesh=dp4").chaos
    assert made.events == (ChaosEvent(12, "kill", 3, "backward"),) and made.random is False
    two = "chaos.events=[{step: 2, kind: stop, rank: [1, 2], point: any}, {step: 3, kind: join}]"
    assert settings(two, "mesh=dp3").chaos.events == (ChaosEvent(2, "stop", (1, 2)), ChaosEvent(3, "join", ANY, ANY))
    drawn = settings("chaos=random", "chaos.seed=7", "chaos.rate=0.25", "chaos.events=[{step: 1, kind: raise}]").chaos
    assert (drawn.random, drawn.seed, drawn.rate, drawn.events) == (True, 7, 0.25, (ChaosEvent(1, "raise"),))


def test_the_points_of_chaos_are_those_that_a_worker_passes() -> None:
    assert set(CHAOS_POINTS) == {point.value for point in FaultPoint} | {ANY}


@pytest.mark.parametrize(
    ("event", "where"),
    [
        ({"step": 0, "kind": "kill"}, "chaos.events.step=0"),
        ({"step": "12", "kind": "kill"}, "chaos.events.step='12'"),
        ({"step": 1, "kind": "murder"}, "chaos.events.kind=murder"),
        ({"step": 1, "kind": None}, "chaos.events.kind=null"),
        ({"step": 1, "kind": "kill", "point": "middle"}, "chaos.events.point=middle"),
        ({"step": 1, "kind": "kill", "rank": -1}, "chaos.events.rank=-1"),
        ({"step": 1, "kind": "kill", "rank": "all"}, "chaos.events.rank=all"),
        ({"step": 1, "kind": "kill", "rank": True}, "chaos.events.rank=true"),
        ({"step": 1, "kind": "kill", "rank": 1.0}, "chaos.events.rank=1.0"),
        ({"step": 1, "kind": "kill", "rank": None}, "chaos.events.rank=null"),
        ({"step": 1, "kind": "kill", "rank": []}, "chaos.events.rank=[]"),
        ({"step": 1, "kind": "kill", "rank": [1, 1]}, "chaos.events.rank=[1,1]"),
        ({"step": 1, "kind": "kill", "rank": [1, "any"]}, "chaos.events.rank=[1,any]"),
    ],
)
def test_an_event_names_what_is_wrong_with_it(event: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ChaosSettings(events=(event,))  # type: ignore[arg-type]
    assert caught.value.where == where and (caught.value.fix or caught.value.exists)


@pytest.mark.parametrize("event", [{"step": 1}, {"kind": "kill"}, {}, "kill", 3, None])
def test_an_event_has_step_and_kind(event: object) -> None:
    with pytest.raises(ConfigError, match=r"has no (step|kind)|is not a list of mappings") as caught:
        ChaosSettings(events=(event,))  # type: ignore[arg-type]
    assert EXAMPLE in caught.value.fix


def test_an_unknown_word_in_an_event_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        settings("chaos.events=[{step: 1, kind: kill, worker: 3}]")
    assert (
        caught.value.what.endswith("has an unknown name, worker")
        and caught.value.exists == "step, kind, rank, point, rate"
    )


@given(st.lists(events, max_size=4))
def test_events_survive_json_and_yaml(given_events: list[dict[str, Any]]) -> None:
    made = Settings.from_dict({"chaos": {"events": given_events}})
    assert Settings.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert Settings.from_dict(yaml.safe_load(made.to_yaml())) == made
    assert hash(made) == hash(Settings.from_dict(made.to_dict()))
    for event, asked in zip(made.chaos.events, given_events, strict=True):
        assert (event.step, event.kind, event.point) == (asked["step"], asked["kind"], asked.get("point", ANY))
        rank = asked.get("rank", ANY)
        assert event.ranks == (None if rank == ANY else tuple(rank) if isinstance(rank, list) else (rank,))


@given(step=st.integers(1, 60), steps=st.integers(1, 60))
def test_an_event_after_the_last_step_is_refused(step: int, steps: int) -> None:
    fields = {"chaos": {"events": [{"step": step, "kind": "kill"}]}, "train": {"steps": steps}}
    if step <= steps:
        assert Settings.from_dict(fields).chaos.events[0].step == step
        return
    with pytest.raises(ConfigError) as caught:
        Settings.from_dict(fields)
    assert caught.value.where == f"chaos.events.step={step} train.steps={steps}"


SLOW = "emulated.slow=[{rank: 4, speed: 0.5}]"
KILL = "chaos.events=[{step: 2, kind: kill, rank: [0, 4]}]"


@pytest.mark.parametrize(
    ("words", "name"),
    [((KILL,), "chaos.events.rank"), ((SLOW, "runtime.device=emulated"), "emulated.slow.rank")],
)
def test_a_rank_that_no_worker_can_have_is_refused(words: tuple[str, ...], name: str) -> None:
    with pytest.raises(ConfigError, match="is no worker of mesh=dp2_pp2") as caught:
        settings("mesh=dp2_pp2", *words)
    assert caught.value.where == f"{name}=4 mesh=dp2_pp2" and caught.value.exists == "ranks 0 to 3"
    assert "elastic.max_workers=5" in caught.value.fix
    with pytest.raises(ConfigError, match="is no worker of mesh=dp2_pp2") as caught:
        settings("mesh=dp2_pp2", "elastic.enabled=false", *words)
    assert "elastic" not in caught.value.fix, "nobody joins such a run"
    with pytest.raises(ConfigError, match="is no worker of mesh=single"):
        settings("mesh=single", "elastic.max_workers=1", *words)


@pytest.mark.parametrize(
    "more",
    [
        ("mesh=dp5",),
        ("elastic.replace=true",),
        ("elastic.spares=1",),
        ("elastic.max_workers=5",),
        ("runtime.transport=tcp", "runtime.rendezvous=127.0.0.1:7000", "runtime.agents=0", "runtime.token_file=t"),
    ],
)
def test_a_rank_that_a_newcomer_may_have_is_taken(more: tuple[str, ...]) -> None:
    """On machines that join a run workers are started until it has as many as its mesh, or max_workers."""
    assert settings("mesh=dp2_pp2", KILL, *more).chaos.events
    assert settings("mesh=dp2_pp2", SLOW, "runtime.device=emulated", *more).emulated.slow


def test_a_rank_that_a_join_may_bring_is_taken() -> None:
    join = "chaos.events=[{step: 1, kind: join}, {step: 2, kind: kill, rank: 4}]"
    assert settings("mesh=dp2_pp2", join).chaos.events
    assert settings("mesh=dp2_pp2", KILL, "chaos=random").chaos.events
    with pytest.raises(ConfigError, match="is no worker"):
        settings("mesh=dp2_pp2", join, "elastic.enabled=false")


@pytest.mark.parametrize("point", ["input", "weights"])
@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["mesh=dp4"], "mesh=dp4"),
        (["mesh=pp2", "runtime.check_model=false"], "runtime.check_model=false"),
        (["mesh=pp2", "schedule.split_backward=never"], "schedule.split_backward=never"),
        (["mesh=pp2", "runtime.device=emulated", "emulated.weight_share=0"], "emulated.weight_share=0"),
    ],
)
def test_a_point_that_no_worker_can_pass_is_refused(point: str, words: list[str], where: str) -> None:
    """Backwards are whole on a single stage, unchecked, where nothing is put off, and emulated without second part."""
    with pytest.raises(ConfigError) as caught:
        settings(f"chaos.events=[{{step: 2, kind: kill, point: {point}}}]", *words)
    assert caught.value.where == f"chaos.events.point={point} {where}" and caught.value.fix
    settings(f"chaos.events=[{{step: 2, kind: kill, point: {point}}}]", "mesh=pp2")
    settings("chaos.events=[{step: 2, kind: kill, point: backward}]", *words)


def test_a_point_of_split_backwards_may_be_reached_when_stages_are_added() -> None:
    settings("chaos.events=[{step: 2, kind: kill, point: weights}]", "mesh=dp4", "schedule.stages=true")
    emulated = ("mesh=pp2", "runtime.device=emulated", "runtime.check_model=false")
    settings("chaos.events=[{step: 2, kind: kill, point: weights}]", *emulated)


@pytest.mark.parametrize("compiled", ["runtime.compile=true", "runtime.device=xla"])
@pytest.mark.parametrize("point", ["input", "weights"])
def test_a_point_of_split_backwards_may_be_reached_in_compiled_layers(point: str, compiled: str) -> None:
    settings(f"chaos.events=[{{step: 2, kind: kill, point: {point}}}]", "mesh=pp2", compiled)


@given(stages=st.lists(st.integers(1, 5), min_size=1, max_size=4), least=st.integers(1, 25))
def test_a_run_begins_with_min_workers(stages: list[int], least: int) -> None:
    fields = {"mesh": {"stages": stages}, "elastic": {"min_workers": least}}
    if least <= sum(stages):
        assert Settings.from_dict(fields).elastic.min_workers == least
        return
    with pytest.raises(ConfigError) as caught:
        Settings.from_dict(fields)
    assert caught.value.fix.startswith(f"elastic.min_workers={sum(stages)},")


@given(count=st.integers(0, 6), scatter=st.integers(0, 6))
def test_mirrors_fit_into_their_scatter(count: int, scatter: int) -> None:
    if scatter == 0 or scatter >= count:
        assert MirrorSettings(count, scatter).count == count
        return
    with pytest.raises(ConfigError) as caught:
        MirrorSettings(count, scatter)
    assert caught.value.where == f"mirror.scatter={scatter} mirror.count={count}"


@pytest.mark.parametrize(("name", "value"), [("replace", True), ("evict_slower_than", 0.5)])
def test_nobody_joins_a_run_that_is_not_elastic(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ElasticSettings(**{"enabled": False, name: value})  # type: ignore[arg-type]
    assert caught.value.where == f"elastic.{name}={str(value).lower()} elastic.enabled=false"
    assert ElasticSettings(enabled=False).enabled is False
