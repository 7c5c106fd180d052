"""Updates are functions of (state, gradient, step): any cut into pages and any replay give the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elaswave_spmd.conf.schema import OptimSettings
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.run_dir.manifest import AVERAGE
from elaswave_spmd.worker.optimizers import (
    SGD,
    AdamW,
    Averaged,
    PageOptimizer,
    Update,
    averages,
    clip_divisor,
    make_optimizer,
)

OPTIMIZERS: list[PageOptimizer] = [AdamW(), AdamW(0.0, (0.8, 0.99), 1e-6), SGD(), SGD(0.1, 0.0), SGD(0.01, 0.9)]
OPTIMIZERS += [Averaged(AdamW(), 0.9), Averaged(SGD(0.1, 0.9), 0.999)]
ALIGNED = 64  # elements; pages are multiples of it: the fused kernel rounds a tensor's last odd elements differently


def steps_of(
    optimizer: PageOptimizer, length: int, cuts: list[int], seed: int, *, decays: bool, divisor: float
) -> list[Tensor]:
    """Parameters and state after three steps, updated in the pieces between these cuts."""
    draw = torch.Generator().manual_seed(seed)
    params = torch.randn(length, generator=draw)
    states = {name: torch.zeros(length) for name in optimizer.state_names}
    for step in (1, 2, 3):
        grads = torch.randn(length, generator=draw) * 3
        pieces = list(pairwise(cuts))
        optimizer.update(
            [params[a:b] for a, b in pieces],
            [grads[a:b] for a, b in pieces],
            {name: [state[a:b] for a, b in pieces] for name, state in states.items()},
            Update(step, 0.01 * step, decays, divisor),
        )
    return [params, *states.values()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@settings(deadline=None, max_examples=40)
@given(
    pages=st.integers(1, 80),
    data=st.data(),
    seed=st.integers(0, 2**32),
    decays=st.booleans(),
    divisor=st.sampled_from([1.0, 1.37, 12.5]),
)
def test_updating_in_pieces_gives_the_bits_of_updating_as_a_whole(
    optimizer: PageOptimizer, pages: int, data: st.DataObject, seed: int, decays: bool, divisor: float
) -> None:
    length = pages * ALIGNED
    inner = data.draw(st.sets(st.integers(0, pages), max_size=6))
    cuts = sorted({0, length, *(cut * ALIGNED for cut in inner)})
    whole = steps_of(optimizer, length, [0, length], seed, decays=decays, divisor=divisor)
    parts = steps_of(optimizer, length, cuts, seed, decays=decays, divisor=divisor)
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("threads", [3, 8])
def test_several_threads_compute_the_bits_of_one(optimizer: PageOptimizer, threads: int) -> None:
    """They divide tensors of more than 32,768 elements by their lengths, which differ from mesh to mesh."""
    pages = 7 * 512 + 3
    cuts = [0, 2049 * ALIGNED, 2051 * ALIGNED, pages * ALIGNED]
    wanted = steps_of(optimizer, pages * ALIGNED, [0, pages * ALIGNED], 3, decays=True, divisor=1.37)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for some in (cuts, [cuts[0], cuts[-1]]):
            found = steps_of(optimizer, pages * ALIGNED, some, 3, decays=True, divisor=1.37)
            assert all(map(torch.equal, found, wanted))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("divisor", [1.0, 2.7])
def test_clipping_is_a_division_of_the_gradient(optimizer: PageOptimizer, divisor: float) -> None:
    param, grad = torch.randn(640), torch.randn(640)
    results = []
    for g, d in ((grad.clone(), divisor), (grad / torch.tensor(divisor), 1.0)):
        p, states = param.clone(), {name: [torch.zeros(640)] for name in optimizer.state_names}
        optimizer.update([p], [g], states, Update(1, 0.1, divisor=d))
        results.append(p)
    assert torch.equal(*results)


@pytest.mark.parametrize("decays", [True, False])
def test_adamw_has_the_bits_of_torch(decays: bool) -> None:
    found = steps_of(AdamW(), 640, [0, 640], 5, decays=decays, divisor=1.0)[0]
    draw = torch.Generator().manual_seed(5)
    param = torch.nn.Parameter(torch.randn(640, generator=draw))
    weight_decay = 0.1 if decays else 0.0
    theirs = torch.optim.AdamW([param], lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay, fused=True)
    for step in (1, 2, 3):
        theirs.param_groups[0]["lr"] = 0.01 * step
        param.grad = torch.randn(640, generator=draw) * 3
        theirs.step()
    assert torch.equal(found, param.detach())


def test_sgd_has_the_bits_of_its_formula() -> None:
    found, momentum = steps_of(SGD(0.1, 0.9), 64, [0, 64], 5, decays=True, divisor=2.0)
    draw = torch.Generator().manual_seed(5)
    param, b = torch.randn(64, generator=draw), torch.zeros(64)
    for step in (1, 2, 3):
        g = torch.randn(64, generator=draw) * 3 / 2.0
        b = b * 0.9 + g.add(param, alpha=0.1)
        param = param.add(b, alpha=-0.01 * step)
    assert torch.equal(found, param) and torch.equal(momentum, b)


def test_padding_stays_zero() -> None:
    for optimizer in OPTIMIZERS:
        param, states = torch.zeros(64), {name: [torch.zeros(64)] for name in optimizer.state_names}
        optimizer.update([param], [torch.zeros(64)], states, Update(1, 0.1, divisor=3.0))
        assert not param.any() and not any(state[0].any() for state in states.values())


def test_the_clip_divisor() -> None:
    assert clip_divisor(3.0, 1.5) == 2.0
    assert clip_divisor(1.0, 1.5) == 1.0 and clip_divisor(1e9, 0.0) == 1.0


def test_optimizers_by_name() -> None:
    settings = {"weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "momentum": 0.9}
    assert make_optimizer("adamw", **settings) == AdamW(0.1, (0.9, 0.95), 1e-8)
    assert make_optimizer("sgd", **settings) == SGD(0.1, 0.9)
    with pytest.raises(ConfigError, match=r"optim\.name=lion is not a known optimizer") as caught:
        make_optimizer("lion", **settings)
    assert caught.value.exists == "adamw, sgd"


@pytest.mark.parametrize(("name", "kind"), [("adamw", AdamW), ("sgd", SGD)])
def test_the_settings_know_what_each_optimizer_reads(name: str, kind: type[AdamW | SGD]) -> None:
    of_all = {field.name for each in (AdamW, SGD) for field in fields(each)}
    reads = {field.name for field in fields(kind)}
    OptimSettings(name=name).check_read(reads)
    for other in of_all - reads:
        with pytest.raises(ConfigError, match=f"optim.{other}=.* is given with optim.name={name}"):
            OptimSettings(name=name).check_read({other})


@pytest.mark.parametrize("optimizer", [AdamW(), SGD(0.1, 0.9)])
def test_an_average_is_that_of_torch_and_changes_nothing_else(optimizer: PageOptimizer) -> None:
    """torch adds by lerp, which rounds in another way: close to it, and the same bits as three plain operations."""
    draw, decay = torch.Generator().manual_seed(7), float(torch.tensor(0.9))
    begin = torch.randn(192, generator=draw)
    alone, averaged = begin.clone(), begin.clone()
    averager, plain = Averaged(optimizer, decay), begin.clone()
    model = torch.nn.ParameterList([begin.clone()])
    theirs = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay))
    theirs.update_parameters(model)  # the first update copies the parameters
    states = {name: [torch.zeros(192)] for name in optimizer.state_names}
    same = {**{name: [torch.zeros(192)] for name in optimizer.state_names}, AVERAGE: [begin.clone()]}
    assert averager.state_names == (*optimizer.state_names, AVERAGE) and averages(averager) and not averages(optimizer)
    for step in range(1, 6):
        grad = torch.randn(192, generator=draw)
        optimizer.update([alone], [grad.clone()], states, Update(step, 0.1, divisor=2.0))
        averager.update([averaged], [grad.clone()], same, Update(step, 0.1, divisor=2.0))
        plain = plain * decay + alone * (1 - decay)
        model[0].data.copy_(alone)
        theirs.update_parameters(model)
    assert torch.equal(averaged, alone) and all(torch.equal(same[n][0], states[n][0]) for n in states)
    assert torch.equal(same[AVERAGE][0], plain)
    torch.testing.assert_close(same[AVERAGE][0], next(theirs.module.parameters()).detach(), rtol=1e-5, atol=1e-6)


def test_an_average_with_a_decay_near_1_tends_to_the_parameters() -> None:
    """And not to 0.99983 of them: 0.9999 and 0.0001, each as fp32, do not add up to 1."""

    class Moving(SGD):
        def update(
            self,
            params: Sequence[Tensor],
            grads: Sequence[Tensor],
            states: Mapping[str, Sequence[Tensor]],
            scalars: Update,
        ) -> None:
            params[0].copy_(0.02 + 1e-3 * torch.randn(4096, generator=draw))

    draw = torch.Generator().manual_seed(7)
    param, states = torch.full((4096,), 0.02), {AVERAGE: [torch.full((4096,), 0.02)]}
    averager = Averaged(Moving(), 0.9999)
    states |= {name: [torch.zeros(4096)] for name in averager.optimizer.state_names}
    for step in range(1, 30_001):
        averager.update([param], [torch.empty(4096)], states, Update(step, 0.1))
    assert float(states[AVERAGE][0].double().mean()) == pytest.approx(0.02, rel=6e-5)
