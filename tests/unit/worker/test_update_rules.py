"""Groups of parameters: which rule each parameter gets, how the pages have it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elaswave_spmd.conf.schema import OptimGroup, Settings
from elaswave_spmd.errors import ConfigError, ModelError
from elaswave_spmd.models import GPT, LayeredModel, freeze_parameters
from elaswave_spmd.run_dir.manifest import layout_fingerprint
from elaswave_spmd.sharding.layout import UpdateRule
from elaswave_spmd.worker.model_layout import describe
from elaswave_spmd.worker.optimizers import AdamW, Update
from elaswave_spmd.worker.update_rules import update_rules


def gpt(*, tied: bool = False) -> LayeredModel:
    with torch.device("meta"):
        return GPT(vocab_size=29, seq_len=6, layers=2, d_model=16, heads=2, tied=tied)


def group(match: str, lr_scale: float | None = None, weight_decay: float | None = None) -> OptimGroup:
    return OptimGroup(match, lr_scale, weight_decay)


def test_without_groups_the_model_decides() -> None:
    model = gpt()
    rules = update_rules(model, ())
    assert rules == {name: UpdateRule(model.decays(name, tuple(p.shape))) for name, p in model.named_parameters()}
    assert layout_fingerprint(describe(model).layout) == layout_fingerprint(describe(model, groups=()).layout)


def test_each_setting_is_looked_up_by_itself_and_in_any_order() -> None:
    model = gpt()
    groups = [group("embed.* head.*", 0.5), group("*.bias, head.norm.*", None, 0.3), group("block?.mlp*", 2.0)]
    groups.append(group("block1.mlp*.weight", None, 0.0))
    rules = update_rules(model, groups)
    assert rules == update_rules(model, groups[::-1])
    assert rules["embed.weight"] == UpdateRule(True, 0.5)
    assert rules["head.norm.weight"] == UpdateRule(True, 0.5, 0.3), "the weight decay of a group is for vectors, too"
    assert rules["block0.attn.qkv.weight"] == UpdateRule(True)
    of_mlp = {rule for name, rule in rules.items() if name.startswith("block1.mlp")}
    assert of_mlp == {UpdateRule(False, 2.0), UpdateRule(True, 2.0, 0.3)}


def test_the_pages_of_a_layer_have_the_rules_in_few_segments() -> None:
    groups = [group("*.bias", 0.5, 0.2), group("block0.attn.*", 3.0)]
    with pytest.raises(ModelError, match=r"both match block0\.attn"):
        describe(gpt(), groups=groups)
    layout = describe(gpt(), groups=[group("*.mlp*.bias", 0.5, 0.2), group("block0.attn.*", 3.0)]).layout
    for layer in layout.layers:
        rules = [segment.rule for segment in layer.segments]
        assert len(rules) == len(set(rules)) == len({s.parameter.rule for b in layer.state_blocks for s in b.slots})
        for segment in layer.segments:
            inside = [s.parameter for s in layer.slots if segment.start <= s.start < segment.stop]
            assert inside and {p.rule for p in inside} == {segment.rule}


def test_groups_are_part_of_what_a_run_is_resumed_with() -> None:
    plain, scaled, decayed = (
        layout_fingerprint(describe(gpt(), groups=groups).layout)
        for groups in ((), (group("head.*", 0.5),), (group("head.*", None, 0.3),))
    )
    assert plain != scaled != decayed != plain
    # The same, said in another way, is the same run.
    same = [group("head.norm.*", 0.5), group("head.weight", 0.5)]
    assert layout_fingerprint(describe(gpt(), groups=same).layout) == scaled


def test_a_tied_parameter_has_the_group_of_its_owner() -> None:
    rules = update_rules(gpt(tied=True), [group("embed.weight", 0.1, 0.0)])
    assert rules["embed.weight"] == rules["head.weight"] == UpdateRule(False, 0.1)
    layout = describe(gpt(tied=True), groups=[group("embed.weight head.weight", 0.1)]).layout
    assert {b.slots[0].parameter.rule for b in layout.layers[-1].reader_blocks} == {UpdateRule(True, 0.1)}


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def test_a_parameter_with_two_names_is_matched_by_either() -> None:
    model = LayeredModel({"one": TwoNames(), "two": TwoNames()})
    plain = update_rules(model, ())
    for match in ("one.a.weight", "*e.b.weight"):
        half = dict.fromkeys(("one.a.weight", "one.b.weight"), UpdateRule(True, 0.5))
        assert update_rules(model, [group(match, 0.5)]) == {**plain, **half}
        slots = describe(model, groups=[group(match, 0.5)]).layout.layers[0].slots
        found = {slot.parameter.name: slot.parameter.lr_scale for slot in slots}
        assert found == {"one.a.weight": 0.5, "one.a.bias": 1}
    with pytest.raises(ModelError, match=r"both match one\.a\.weight, with another lr_scale"):
        update_rules(model, [group("one.a.weight", 0.5), group("one.b.weight", 0.1)])


@pytest.mark.parametrize(
    ("groups", "tied", "told"),
    [
        ([group("embedding.*", 0.1)], False, r"embedding.\* in optim.groups=.* matches no parameter of GPT"),
        ([group("head.* nothing", 0.1)], False, "nothing in optim.groups"),
        ([group("head.*", 0.1), group("*.weight", 0.2)], False, "both match head.weight, with another lr_scale"),
        ([group("head.*", None, 0.1), group("*.weight", 1.0, 0)], False, "with another weight_decay"),
        ([group("block0.*", 0.1)], False, "all parameters of optim.groups=.* are frozen"),
        ([group("head.weight", 0.1)], True, "embed.weight, to which it is tied, is in no such group"),
        ([group("head.weight", 0.1), group("embed.weight", 0.2)], True, "tied, has lr_scale=0.2"),
    ],
)
def test_what_is_refused(groups: list[OptimGroup], tied: bool, told: str) -> None:
    model = gpt(tied=tied)
    freeze_parameters(model, ["block0.*"])
    with pytest.raises(ModelError, match=told) as caught:
        describe(model, groups=groups)
    assert caught.value.rule and caught.value.fix and "optim.groups=[{match: " in caught.value.where


@pytest.mark.parametrize(
    "item",
    [
        {"match": "a"},
        {"lr_scale": 1.0},
        {"match": "a", "lr_scale": 0},
        {"match": "a", "weight_decay": -1},
        {"match": 1.5},
    ],
)
def test_groups_are_checked_when_they_are_made(item: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_dict({"optim": {"groups": [item]}})
    assert caught.value.where.startswith("optim.groups")


def test_an_update_with_a_weight_decay_of_its_own_is_that_of_another_optimizer() -> None:
    draw = torch.Generator().manual_seed(1)
    param, grad = torch.randn(128, generator=draw), torch.randn(128, generator=draw)
    found = []
    for optimizer, update in (
        (AdamW(0.1), Update(1, 0.5, weight_decay=0.3)),
        (AdamW(0.3), Update(1, 0.5)),
        (AdamW(0.1), Update(1, 0.5, decays=False, weight_decay=0.3)),
    ):
        p, states = param.clone(), {name: [torch.zeros(128)] for name in optimizer.state_names}
        optimizer.update([p], [grad.clone()], states, update)
        found.append(p)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
