"""Cost models and measured profiles: values that check themselves, and smoothing that no odd step moves."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.cost_model import CostModel, LayerCost
from elaswave_spmd.scheduling.profiler import LayerSample, ProfileSmoother
from tests.unit.scheduling.planning_cases import microbatch_s, rule_of

SECONDS = st.floats(0, 1e3)
BYTES = st.integers(0, 1 << 40)
LAYERS = st.lists(
    st.builds(LayerCost, st.text(max_size=5), SECONDS, st.floats(1e-6, 1e3), *[BYTES] * 6, st.floats(0, 1)),
    min_size=1,
    max_size=6,
).map(tuple)
COSTS = st.builds(
    CostModel,
    LAYERS,
    st.floats(1, 1e12),
    st.floats(0, 1),
    st.dictionaries(st.integers(0, 99), st.floats(0.01, 10), max_size=5).map(lambda speeds: tuple(speeds.items())),
)


def costs_of(seconds: list[float], **more: object) -> CostModel:
    layers = tuple(LayerCost(f"l{i}", s / 3, s * 2 / 3) for i, s in enumerate(seconds))
    return CostModel(layers, 1e9, **more)  # type: ignore[arg-type]


@given(COSTS)
@settings(deadline=None)
def test_json_gives_the_same_value_back(costs):
    again = CostModel.from_json(costs.to_json())
    assert again == costs and hash(again) == hash(costs) and str(again) == str(costs)


@given(COSTS, st.data())
@settings(deadline=None)
def test_stage_seconds_are_sums_over_its_layers(costs, data):
    first = data.draw(st.integers(0, len(costs.layers) - 1))
    stop = data.draw(st.integers(first + 1, len(costs.layers)))
    rank = data.draw(st.integers(0, 99))
    layers = costs.layers[first:stop]
    forward, backward = sum(ly.forward_s for ly in layers), sum(ly.backward_s for ly in layers)
    assert costs.stage_s(first, stop) == pytest.approx((forward, backward), abs=1e-9)
    assert costs.speeds_of([rank, 1000]).tolist() == [dict(costs.speeds).get(rank, 1.0), 1.0]


@given(COSTS, st.integers(0, 3), st.integers(0, 3), st.integers(1, 5), st.integers(0, 9), st.integers(1, 9))
@settings(deadline=None)
def test_memory_of_a_stage_counts_all_that_a_worker_keeps(costs, zero, mirrors, size, microbatches, in_flight):
    table = rule_of(zero, mirrors).stage_bytes(costs, size=size, microbatches=microbatches, in_flight=in_flight)
    last = len(costs.layers)
    for first in range(last):
        for stop in range(first + 1, last + 1):
            layers = costs.layers[first:stop]
            share = 1.0 if zero == 0 else min(1.0, (1 + mirrors) / size)
            wanted = sum(ly.value_bytes + share * ly.state_bytes for ly in layers)
            wanted += sum(ly.gradient_bytes for ly in layers) * (1 if zero < 2 else 1 / size)
            wanted += min(microbatches, in_flight) * sum(ly.activation_bytes for ly in layers)
            wanted += microbatches * costs.layers[first - 1].boundary_bytes if first else 0
            wanted += microbatches * costs.layers[stop - 1].boundary_bytes if stop < last else 0
            assert table[first, stop] == pytest.approx(wanted, rel=1e-9, abs=1)


def test_with_and_without_speeds():
    costs = costs_of([1, 2], speeds={3: 0.5, 1: 2.0})
    assert costs.speeds == ((1, 2.0), (3, 0.5))
    assert costs.with_speeds({3: 1.5}).speeds == ((1, 2.0), (3, 1.5))
    assert costs.without([3]).speeds == ((1, 2.0),)
    assert costs.message_s(0) == 0.0
    late = CostModel((LayerCost("a", 1, 1, boundary_bytes=50),), 100.0, 0.25)
    assert late.message_s(0) == 0.75
    assert "3: 0.5" in str(costs) and "2 layers, 3 s a micro-batch" in str(costs)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("forward_s", -1.0),
        ("backward_s", math.nan),
        ("forward_s", math.inf),
        ("backward_s", "1"),
        ("state_bytes", -1),
        ("boundary_bytes", 1.5),
        ("name", 3),
    ],
)
def test_bad_layers_are_refused(field, value):
    with pytest.raises(PlanError) as error:
        LayerCost(**{"name": "embed", "forward_s": 1.0, "backward_s": 1.0, field: value})
    assert repr(value) in str(error.value) or str(value) in str(error.value)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"bandwidth": math.inf}, "bandwidth"),
        ({"latency_s": -1.0}, "latency_s"),
        ({"speeds": ((0, 0.0),)}, "the speed of rank 0"),
        ({"speeds": ((-1, 1.0),)}, "numbers, 0 or more"),
        ({"speeds": ((4, 1.0), (4, 2.0))}, "one speed"),
        ({"layers": ()}, "take time"),
        ({"layers": (LayerCost("a", 0, 0),)}, "take time"),
    ],
)
def test_bad_models_are_refused(more, words):
    with pytest.raises(PlanError, match=words):
        CostModel(**{"layers": (LayerCost("a", 1, 1),), "bandwidth": 1.0, **more})


def changed(path: str, value: object) -> str:
    """A good profile with one entry changed ("layers.0.index"), or left out where the value is None."""
    data = json.loads(costs_of([1, 2], speeds={1: 0.5}).to_json())
    *way, last = path.split(".")
    at = data
    for name in way:
        at = at[int(name)] if isinstance(at, list) else at[name]
    if value is None:
        del at[int(last) if isinstance(at, list) else last]
    else:
        at[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ("[" * 100_000, "is not a JSON object"),
        (changed("bandwidth", None), "no 'bandwidth'"),
        (changed("colour", 1), "colour"),
        (changed("layers", {}), "are a list"),
        (changed("layers.0", None), "no layer 0"),
        (changed("layers.1.index", 2), "no layer 1"),
        (changed("layers.1.index", 0), "its own index"),
        (changed("layers.1.forward_s", -2.0), "at least 0"),
        (changed("layers.1.backward_s", None), "no 'backward_s'"),
        (changed("layers.1.tempo", 2), "tempo"),
        (changed("speeds.gpu0", 1.0), "gpu0"),
        (changed("speeds.1", "fast"), "finite number"),
        (changed("latency_s", math.nan), "latency_s"),
    ],
)
def test_bad_profiles_are_refused(text, words):
    with pytest.raises(PlanError, match=words):
        CostModel.from_json(text, "profile.json")


def test_a_profile_of_another_model_or_mesh_is_refused():
    costs = costs_of([1, 2, 3], speeds={7: 0.5})
    assert costs.check(3, range(8)) is costs
    with pytest.raises(PlanError, match=r"profile.json has 3 layers .* and the model 4"):
        costs.check(4, where="profile.json")
    with pytest.raises(PlanError, match=r"ranks 7(.|\n)*ranks 0-6"):
        costs.check(3, range(7))


# ---- measured profiles


def observed(smoother: ProfileSmoother, speeds: dict[int, float], seconds: list[float]) -> ProfileSmoother:
    """One step: even ranks run the first layers, odd ones the others."""
    half = len(seconds) // 2
    samples = [
        LayerSample(rank, layer, seconds[layer] / speed, 2 * seconds[layer] / speed)
        for rank, speed in speeds.items()
        for layer in (range(half) if rank % 2 == 0 else range(half, len(seconds)))
    ]
    return smoother.observe(samples)


BASE = costs_of([9, 9, 9, 9])


def test_a_slow_worker_and_slow_layers_are_distinguished():
    smoother = ProfileSmoother(4)
    for _ in range(3):
        smoother = observed(smoother, {0: 1.0, 2: 1.0, 4: 0.5, 1: 1.0, 3: 1.0}, [1, 2, 3, 4])
    costs = smoother.costs(BASE)
    assert costs.speeds == ((4, 0.5),)
    assert [ly.forward_s for ly in costs.layers] == [1, 2, 3, 4]
    assert [ly.backward_s for ly in costs.layers] == [2, 4, 6, 8]


def test_one_odd_step_changes_nothing_and_a_lasting_change_does():
    healthy = {0: 1.0, 2: 1.0, 1: 1.0, 3: 1.0}
    smoother = ProfileSmoother(4)
    for _ in range(5):
        smoother = observed(smoother, healthy, [1, 2, 3, 4])
    before = smoother.costs(BASE)
    for _ in range(2):
        smoother = observed(smoother, {**healthy, 3: 0.1}, [1, 2, 3, 4])
        assert smoother.costs(BASE) == before
    for _ in range(3):
        smoother = observed(smoother, {**healthy, 3: 0.5}, [1, 2, 3, 4])
    slow = smoother.costs(BASE)
    assert slow.speeds == ((3, 0.5),) and slow.layers == before.layers
    for _ in range(5):
        smoother = observed(smoother, healthy, [1, 2, 3, 4])
    assert smoother.costs(BASE) == before, "a worker that has recovered is as fast as before"


def test_a_slow_first_step_does_not_last():
    smoother = observed(ProfileSmoother(4), {0: 0.1, 1: 0.1}, [1, 2, 3, 4])
    for _ in range(5):
        smoother = observed(smoother, {0: 1.0, 1: 1.0}, [1, 2, 3, 4])
    costs = smoother.costs(BASE)
    assert costs.speeds == () and [ly.forward_s for ly in costs.layers] == pytest.approx([1, 2, 3, 4])


@pytest.mark.parametrize("odd", range(5))
@pytest.mark.parametrize("workers", [(0, 1), (0, 2, 1)], ids=["lone workers", "a stage of two"])
def test_an_odd_step_among_the_first_does_not_last(odd, workers):
    """The first stage takes ten times as long in one step, as with a cold start."""
    smoother, healthy = ProfileSmoother(4), dict.fromkeys(workers, 1.0)
    for step in range(12):
        cold = {rank: 0.1 for rank in workers if step == odd and rank % 2 == 0}
        smoother = observed(smoother, {**healthy, **cold}, [1, 2, 3, 4])
        if step >= 5:
            assert smoother.costs(BASE).speeds == (), step
    assert [ly.forward_s for ly in smoother.costs(BASE).layers] == pytest.approx([1, 2, 3, 4])


@given(st.lists(st.floats(0.975, 1.025), min_size=30, max_size=30))
@settings(deadline=None)
def test_noise_around_the_edge_of_a_grain_changes_no_speed(noise):
    smoother = ProfileSmoother(2, window=1, grain=0.05)
    reported = set()
    for factor in noise:
        smoother = observed(smoother, {0: 1.0, 2: 0.475 * factor}, [1, 1])
        reported.add(smoother.reported[2])
    assert len(reported) == 1 and reported <= {9 * 0.05, 10 * 0.05}


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=6), st.lists(st.floats(0.1, 9), min_size=2, max_size=6))
@settings(deadline=None)
def test_products_of_layer_and_speed_are_what_was_measured(speeds, seconds):
    """The seconds of a worker on a layer are right within the grain."""
    ranks = dict(enumerate(speeds))
    smoother = observed(ProfileSmoother(len(seconds), grain=0.001), ranks, seconds)
    costs, half = smoother.costs(costs_of([1.0] * len(seconds))), len(seconds) // 2
    fastest = max(speeds[half > 0 and rank % 2] for rank in ranks)
    for rank, speed in ranks.items():
        for layer in range(half) if rank % 2 == 0 else range(half, len(seconds)):
            if costs.speed(rank) > 0.2:
                assert microbatch_s(costs, layer, layer + 1, rank) == pytest.approx(
                    3 * seconds[layer] / speed, rel=0.01
                )
    assert fastest > 0


def test_lost_workers_are_forgotten_and_newcomers_have_speed_1():
    smoother = observed(ProfileSmoother(4), {0: 1.0, 2: 0.5, 4: 1.0, 1: 1.0}, [1, 2, 3, 4])
    assert smoother.costs(BASE).speed(2) == 0.5
    left = smoother.forget([2])
    assert left.costs(BASE).speeds == () and left.costs(BASE).speed(8) == 1.0
    assert [a.forward_s for a in left.costs(BASE).layers] == [1, 2, 3, 4]


def test_bad_samples_are_refused_and_empty_ones_change_nothing():
    for seconds in ((-1.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.inf), (1.0, 1.0, math.nan)):
        with pytest.raises(PlanError, match="finite and not negative"):
            LayerSample(0, 0, *seconds)
    with pytest.raises(PlanError, match="layers 0 to 3"):
        ProfileSmoother(4).observe([LayerSample(0, 4, 1.0, 1.0)])
    smoother = ProfileSmoother(4).observe([LayerSample(0, 0, 0.0, 0.0)])
    assert smoother == ProfileSmoother(4) and smoother.costs(BASE) == BASE
    with pytest.raises(PlanError, match="and the model 4"):
        smoother.costs(costs_of([1, 2]))


def test_prefixes_are_cumulative():
    costs = costs_of([3, 6, 9])
    assert [b - a for a, b in pairwise(costs.prefix("forward_s"))] == pytest.approx([1, 2, 3])


def test_the_share_of_weight_gradients_is_the_median_where_they_were_put_off():
    smoother = ProfileSmoother(2, window=3)
    for weights_s in (0.5, 0.75, 1.5, 1.0):
        smoother = smoother.observe([LayerSample(0, 0, 1.0, 2.0), LayerSample(1, 1, 1.0, 2.0, weights_s)])
    costs = smoother.observe([LayerSample(1, 1, 1.0, 2.0)]).costs(costs_of([1, 2]))
    assert [layer.weight_share for layer in costs.layers] == [0.0, 0.5]
    assert [layer.backward_s for layer in costs.layers] == [2.0, 2.0] and costs.layers[1].weights_s == 1.0


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(PlanError, match="weight_share"):
        LayerCost("a", 1, 1, weight_share=share)


# What only products of speeds and seconds show: each part of the mesh that shares no layers has a factor of its own.


def noisy(
    smoother: ProfileSmoother, stages: list[list[int]], steps: int, draw: random.Random, slow: dict[int, float]
) -> ProfileSmoother:
    """Steps of workers that are equally fast, but for noise and `slow`; each stage has two layers of 3 seconds."""
    for _ in range(steps):
        smoother = smoother.observe(
            LayerSample(rank, layer, *[s / slow.get(rank, 1.0) * draw.lognormvariate(0.0, 0.3) for s in (1.0, 2.0)])
            for number, ranks in enumerate(stages)
            for rank in ranks
            for layer in (2 * number, 2 * number + 1)
        )
    return smoother


def seconds_of_layers(smoother: ProfileSmoother) -> list[float]:
    base = CostModel((LayerCost("layer", 1.0, 2.0),) * smoother.num_layers, 1e9, 1e-4)
    return [layer.forward_s + layer.backward_s for layer in smoother.costs(base).layers]


@pytest.mark.parametrize("stages", [[[0], [1, 2]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]])
def test_noise_carries_no_stage_off(stages: list[list[int]]) -> None:
    """Without an anchor all speeds of a stage grow or fade together, without an end."""
    draw, smoother = random.Random(0), ProfileSmoother(2 * len(stages))
    for _ in range(12):
        smoother = noisy(smoother, stages, 250, draw, {})
        assert all(0.5 < speed < 2 for speed in smoother.reported.values()), smoother.reported
        assert all(1.5 < seconds < 6 for seconds in seconds_of_layers(smoother))


def test_a_lone_worker_that_becomes_slower_is_seen_and_in_the_long_run_its_layers_are() -> None:
    draw, stages = random.Random(1), [[0], [1], [2]]
    smoother = noisy(ProfileSmoother(6), stages, 30, draw, {})
    smoother = noisy(smoother, stages, 10, draw, {1: 0.4})
    assert smoother.reported[1] < 0.6 < 0.75 < min(smoother.reported[0], smoother.reported[2])
    smoother = noisy(smoother, stages, 6000, draw, {1: 0.4})
    assert all(0.6 < speed < 1.6 for speed in smoother.reported.values()), smoother.reported
    assert min(seconds_of_layers(smoother)[2:4]) > 4.5


def test_a_speed_beyond_all_bounds_is_one_that_is_reported() -> None:
    smoother = observed(ProfileSmoother(2, window=1), {0: 1.0, 1: 1.0, 2: 1e-200, 3: 1e200}, [1, 2])
    smoother = observed(smoother, {0: 1.0, 1: 1.0, 2: 1e-300, 3: 1e300}, [1, 2])
    assert min(smoother.reported.values()) == 0.02 and max(smoother.reported.values()) == 50.0
