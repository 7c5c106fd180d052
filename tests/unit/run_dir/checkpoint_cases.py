"""Small models' state as checkpoints: random layouts and cuts, and one that is always the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from elaswave_spmd.run_dir.checkpoint_shard import ShardInfo, checkpoint_path, write_shard
from elaswave_spmd.run_dir.checkpoints import write_manifest
from elaswave_spmd.run_dir.journal import Ballot
from elaswave_spmd.run_dir.manifest import Manifest, layout_fingerprint
from elaswave_spmd.sharding.layout import LayerUse, ModelLayout, ParameterInfo, lay_out
from elaswave_spmd.sharding.replicas import PageRange

BALLOT = Ballot(1, 3)
KINDS = ("master", "exp_avg")
State = dict[tuple[int, str], np.ndarray]
"""(layer, kind) -> fp32 of all state elements of the layer."""


def small_layout() -> ModelLayout:
    """Layers of 5, 0 and 2 state pages, the last of each block short; the last layer reads a parameter of the first."""
    embed = (ParameterInfo("embed.weight", (9, 33)), ParameterInfo("embed.scale", (130,), decay=False))
    head = (ParameterInfo("head.bias", (150,), lr_scale=0.5),)
    uses = [LayerUse("embed", embed), LayerUse("act", ()), LayerUse("head", head, (("head.weight", "embed.weight"),))]
    return lay_out(uses, page_size=128)


@st.composite
def layouts(draw: st.DrawFn) -> ModelLayout:
    """Of layers with no, few and many pages, some last in a block and short, some layers with a tied parameter."""
    sizes = draw(st.lists(st.lists(st.integers(1, 700), max_size=3), min_size=1, max_size=4))
    uses = []
    for i, layer in enumerate(sizes):
        owners = [use.parameters[0].name for use in uses if use.parameters]
        reads = ((f"layer{i}.tied", owners[0]),) if owners and draw(st.booleans()) else ()
        uses.append(
            LayerUse(f"layer{i}", tuple(ParameterInfo(f"layer{i}.p{j}", (n,)) for j, n in enumerate(layer)), reads)
        )
    return lay_out(uses, page_size=draw(st.sampled_from([64, 128, 320])))


@st.composite
def cuts(draw: st.DrawFn, layout: ModelLayout) -> list[PageRange]:
    """Every state page in one run, runs cut anywhere, also across blocks."""
    runs = []
    for layer in layout.layers:
        if pages := layer.num_state_pages:
            at = sorted({0, pages, *draw(st.lists(st.integers(0, pages), max_size=5))})
            runs += [(layer.index, first, stop) for first, stop in pairwise(at)]
    return runs


def whole(layout: ModelLayout) -> list[PageRange]:
    """One run per layer."""
    return [(layer.index, 0, layer.num_state_pages) for layer in layout.layers if layer.num_state_pages]


def state_of(layout: ModelLayout, seed: int) -> State:
    """Numbers with all kinds of bits."""
    rng = np.random.default_rng(seed)
    return {
        (layer.index, kind): rng.integers(0, 2**32, layer.num_state_elements, np.uint32).view(np.float32)
        for layer in layout.layers
        for kind in KINDS
    }


def part(layout: ModelLayout, state: State, run: PageRange, kind: str) -> np.ndarray:
    """A run's values, by the layout's own account of where pages lie."""
    layer = layout.layers[run[0]]
    spans = [layer.span(page, page + 1) for page in range(run[1], run[2])]
    return np.concatenate([state[run[0], kind][a:b] for a, b in spans])


def write_shards(
    directory: Path,
    layout: ModelLayout,
    state: State,
    runs_by_rank: Mapping[int, Iterable[PageRange]],
    *,
    step: int,
    ballot: Ballot = BALLOT,
    run: str = "r1",
) -> tuple[ShardInfo, ...]:
    """A shard per rank."""
    infos = []
    for rank, runs in runs_by_rank.items():
        arrays = {key: {kind: part(layout, state, key, kind) for kind in KINDS} for key in runs}
        infos.append(write_shard(directory, step, ballot, rank, arrays, run=run))
    return tuple(infos)


def manifest_of(layout: ModelLayout, shards: Sequence[ShardInfo], step: int, **changes: Any) -> Manifest:
    """A manifest of these shards."""
    fields: dict[str, Any] = {
        "run": "r1",
        "step": step,
        "ballot": BALLOT,
        "last_committed": step + 1,
        "identity": {"seed": 7, "optim": {"betas": (0.9, 0.95)}},
        "layout": layout_fingerprint(layout),
        "kinds": KINDS,
        "shards": tuple(shards),
    }
    return Manifest(**{**fields, **changes})


def save(run_dir: Path, step: int, ballot: Ballot = BALLOT) -> tuple[Path, State]:
    """A good checkpoint of the small layout, from two workers."""
    layout = small_layout()
    state = state_of(layout, step)
    directory = checkpoint_path(run_dir, step)
    runs = {0: [(0, 0, 2), (2, 1, 2)], 5: [(0, 2, 5), (2, 0, 1)]}
    shards = write_shards(directory, layout, state, runs, step=step, ballot=ballot)
    write_manifest(directory, manifest_of(layout, shards, step, ballot=ballot))
    return directory, state


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Turn one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)
