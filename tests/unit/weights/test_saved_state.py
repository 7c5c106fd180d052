"""Given weights from checkpoints, and pages that are filled with given weights on any placement."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

from elaswave_spmd.conf.schema import ModelSettings, Settings
from elaswave_spmd.errors import ConfigError, UserError
from elaswave_spmd.run_dir.checkpoints import open_checkpoint
from elaswave_spmd.sharding.layout import LOSS, LayerLayout, ModelLayout
from elaswave_spmd.weights.given import GivenWeights, owned_parameters
from elaswave_spmd.weights.resolve import resolved
from elaswave_spmd.weights.sources import SavedState, whole
from elaswave_spmd.weights.trained import open_run, open_source
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.model_layout import describe
from elaswave_spmd.worker.optimizers import AdamW
from elaswave_spmd.worker.plan_run import begins_with_given_weights
from elaswave_spmd.worker.state import HeldState
from tests.published_models import MODELS
from tests.unit.run_dir.checkpoint_cases import flip, save, small_layout
from tests.unit.runtime.runtime_cases import HOST, placed


def test_any_range_of_a_parameter_in_a_checkpoint(tmp_path: Path) -> None:
    directory, state = save(tmp_path, 3)
    source, draw = SavedState(directory), random.Random(1)
    slots = {s.parameter.name: (la.index, s) for la in small_layout().layers for b in la.state_blocks for s in b.slots}
    assert set(source.shapes) == set(slots)
    for name, (layer, slot) in slots.items():
        assert source.shapes[name] == slot.parameter.shape
        wanted = torch.from_numpy(state[layer, "master"][slot.start : slot.stop].copy()).view(torch.int32)
        assert torch.equal(whole(source, name).reshape(-1).view(torch.int32), wanted)
        for _ in range(30):
            first, stop = sorted(draw.sample(range(len(wanted) + 1), 2))
            assert torch.equal(source.read(name, first, stop).view(torch.int32), wanted[first:stop])


def test_a_run_is_resolved_to_its_newest_good_checkpoint_or_its_weights(tmp_path: Path) -> None:
    save(tmp_path, 2)
    newest, _ = save(tmp_path, 4)
    (tmp_path / "config.yaml").write_text("format: 2\n")
    settings = Settings(model=ModelSettings(init_from=str(tmp_path)))
    assert resolved(settings).model.init_from == str(newest)
    shard = next(newest.glob("shard_*"))
    flip(shard, shard.stat().st_size - 4)
    assert open_checkpoint(newest, verify=False)
    assert (resolved(settings).model.init_from or "").endswith("step_00000002")
    with pytest.raises(UserError, match="does not match its sha256"):
        resolved(Settings(model=ModelSettings(init_from=str(newest))))
    (tmp_path / "weights.safetensors").touch()
    assert (resolved(settings).model.init_from or "").endswith("step_00000002"), "the run has not finished"
    assert open_source(tmp_path)[0].name == "step_00000002"
    (tmp_path / "summary.json").write_text("{}")
    assert resolved(settings).model.init_from == str(tmp_path / "weights.safetensors")


def test_the_best_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """It was that checkpoint, whether or not it is the best one."""
    directory, _ = save(tmp_path, 3)
    (tmp_path / "config.yaml").write_text("format: 2\n")
    assert open_run(str(directory)).path == directory
    with pytest.raises(ConfigError, match="step_00000003 is a checkpoint, and the best one is asked for") as caught:
        open_run(str(directory), best=True)
    assert caught.value.fix.startswith(f"{tmp_path}, its run")


class _Shaped(nn.Module):
    """A module with the parameters of a layout's layer."""

    def __init__(self, layer: LayerLayout) -> None:
        super().__init__()
        for slot in layer.slots:
            name = slot.parameter.name.removeprefix(layer.name + ".").replace(".", "_")
            setattr(self, name, nn.Parameter(torch.empty(slot.parameter.shape)))


def masters(layout: ModelLayout, given: GivenWeights, workers: int, zero: int) -> dict[int, torch.Tensor]:
    """The masters of all layers, put together from the pages that the workers of one stage fill."""
    depth = len(layout.layers)
    runs = placed((workers,), (0, depth), ((workers, *[0] * (workers - 1)),), zero).replica_map(layout)
    found = {layer.index: torch.full((layer.num_state_elements,), torch.nan) for layer in layout.layers}
    for rank in range(workers):
        held = [
            pages
            for ranges in runs.values()
            for pages in ranges
            if rank in pages.replicas and layout.layers[pages.layer].block_of(pages.first).kind != LOSS
        ]
        state = HeldState(layout, AdamW(), HOST, separate_master=True)
        values: dict[int, ValueBuffer] = {}
        state.rebind(held, values)
        state.initialise(given.part)
        given.close()
        for part in state:
            assert part.version == 0
            found[part.pages.layer][part.start : part.stop] = part.master
    return found


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
@pytest.mark.parametrize("page_size", [64, 256])
def test_pages_are_filled_with_the_same_bits_by_any_workers(tmp_path: Path, name: str, page_size: int) -> None:
    published = MODELS[name]
    model = published.model()
    given = GivenWeights(ModelSettings(target=published.target, init_from=str(published.write(tmp_path))), model)
    layout = describe(model, page_size=page_size).layout
    one = masters(layout, given, 1, 0)
    for workers, zero in ((3, 1), (5, 3)):
        other = masters(layout, given, workers, zero)
        assert all(torch.equal(one[layer], other[layer]) for layer in one)
    sizes = dict(owned_parameters(model))
    for layer in layout.layers:
        for slot in (s for b in layer.state_blocks for s in b.slots):
            wanted = given.part(slot.parameter.name, 0, sizes[slot.parameter.name])
            assert torch.equal(one[layer.index][slot.start : slot.stop], wanted)


def test_a_run_begins_with_given_weights_and_a_resumed_one_with_its_checkpoint() -> None:
    def begins(model: dict[str, str], train: dict[str, str]) -> bool:
        return begins_with_given_weights(Settings.from_dict({"model": model, "train": train}))

    assert begins({"init_from": "a"}, {})
    assert not begins({"init_from": "a"}, {"resume": "runs/a"}) and not begins({}, {})
