"""The manifest of a durable checkpoint: what was saved, of which run, in which shards (docs/run_files.md).

It is written last, so a checkpoint exists from the moment that its manifest does; and it is refused unless its shards
hold every page of state once.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from elaswave_spmd.conf.format_version import FORMAT_FIELD, FORMAT_VERSION, version_mismatch
from elaswave_spmd.errors import CheckpointError, ConfigError
from elaswave_spmd.run_dir.checkpoint_shard import ShardInfo, checkpoint_path
from elaswave_spmd.run_dir.json_lines import replacing, sync_directory, write_all, writing
from elaswave_spmd.run_dir.lock import Ballot
from elaswave_spmd.sharding.layout import LOSS, ModelLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap, all_runs

MANIFEST = "manifest.json"
_MAX_LISTED = 40


@dataclass(frozen=True)
class SavedLayer:
    """How one layer's state was cut in pages.

    Args:
        page_size: elements.
        blocks: (first page, pages, first element, stop element), ascending and without gaps.
    """

    page_size: int
    blocks: tuple[tuple[int, int, int, int], ...]

    @property
    def num_pages(self) -> int:
        return sum(pages for _, pages, _, _ in self.blocks)

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """Elements [start, stop) of the state pages [first, stop), of any blocks."""
        return self._start(first), self._start(stop)

    def _start(self, page: int) -> int:
        for first, pages, start, stop in self.blocks:
            if first <= page < first + pages:
                return start + (page - first) * self.page_size
            if page == first + pages == self.num_pages:
                return stop
        raise AssertionError((page, self))


def layout_fingerprint(layout: ModelLayout) -> dict[str, Any]:
    """What of a layout decides where each parameter's state lies and how it is updated; JSON's own types."""
    return {
        "page_size": layout.page_size,
        "layers": [
            {
                "name": layer.name,
                "blocks": [[b.first_page, b.num_pages, b.start, b.stop] for b in layer.state_blocks],
                "parameters": [
                    {
                        "name": s.parameter.name,
                        "shape": list(s.parameter.shape),
                        "start": s.start,
                        "decay": s.parameter.decay,
                        "lr_scale": s.parameter.lr_scale,
                    }
                    for b in layer.state_blocks
                    for s in b.slots
                ],
                "reads": [s.parameter.name for b in layer.reader_blocks for s in b.slots],
            }
            for layer in layout.layers
        ],
    }


@dataclass(frozen=True)
class Manifest:
    """A checkpoint in words.

    Args:
        run: id of the run.
        step: version of the state.
        ballot: incarnation and mesh epoch of the checkpoint. Shards are of this incarnation and of no later epoch.
        last_committed: step of the last metrics line when it was written, at least `step`.
        identity: the settings and versions that are part of the run's bits; see `check_identity`.
        layout: see `layout_fingerprint`.
        kinds: of state, "master" and the optimizer's.
        shards: a page range may lie in several; the first serves.
        validation: what is known of a validation, or None.

    Raises:
        CheckpointError: a shard of another run, step, incarnation, or of a later epoch; pages missing, or in two
            different runs.
        TypeError, ValueError: `identity`, `layout` or `validation` are not plain JSON.
    """

    run: str
    step: int
    ballot: Ballot
    last_committed: int
    identity: Mapping[str, Any]
    layout: Mapping[str, Any]
    kinds: tuple[str, ...]
    shards: tuple[ShardInfo, ...]
    validation: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.step <= self.last_committed, (self.step, self.last_committed)
        for name in ("identity", "layout", "validation"):
            object.__setattr__(self, name, json.loads(_compact(getattr(self, name))))
        for shard in self.shards:
            known = (shard.run, shard.step, shard.ballot.incarnation)
            if known != (self.run, self.step, self.ballot.incarnation) or shard.ballot > self.ballot:
                raise CheckpointError(
                    f"{shard.name} belongs to run {shard.run}, step {shard.step}, {shard.ballot}, "
                    f"and its checkpoint to run {self.run}, step {self.step}, {self.ballot}",
                    rule="the shards of a checkpoint have its run, step and incarnation, and no later epoch",
                )
        if wrong := list(_uncovered(self.layers, self.sources)):
            raise CheckpointError(
                f"the shards of step {self.step} do not hold every page once: {'; '.join(wrong)}",
                rule="a checkpoint holds every page of state exactly once",
            )

    @cached_property
    def layers(self) -> tuple[SavedLayer, ...]:
        """How each layer's state was cut."""
        size = self.layout["page_size"]
        return tuple(SavedLayer(size, tuple(tuple(b) for b in layer["blocks"])) for layer in self.layout["layers"])

    @cached_property
    def sources(self) -> Mapping[PageRange, ShardInfo]:
        """Run of pages -> the shard to read it from."""
        return {run: shard for shard in reversed(self.shards) for run in shard.runs}

    def to_json(self) -> str:
        """One field a line; the last is the sha256 of the others."""
        fields = {
            FORMAT_FIELD: FORMAT_VERSION,
            "run": self.run,
            "step": self.step,
            **self.ballot._asdict(),
            "last_committed": self.last_committed,
            "identity": self.identity,
            "layout": self.layout,
            "kinds": list(self.kinds),
            "shards": [shard.to_dict() for shard in self.shards],
            "validation": self.validation,
        }
        lines = (f"{_compact(name)}: {_compact(value)}" for name, value in {**fields, "sha256": _hash(fields)}.items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Inverse of `to_json`.

        Raises:
            CheckpointError: torn, damaged, of a format that this version does not know, or not complete.
        """
        try:
            fields = json.loads(text)
            sha256 = fields.pop("sha256")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError("the manifest is torn, or none") from error
        # First, since another version may also hash differently.
        if mismatch := version_mismatch(fields.get(FORMAT_FIELD)):
            raise CheckpointError(f"the manifest {mismatch}")
        if sha256 != _hash(fields):
            raise CheckpointError("the manifest does not match its sha256")
        of = {"run": fields["run"], "step": fields["step"], "incarnation": fields["incarnation"]}
        return cls(
            fields["run"],
            fields["step"],
            Ballot(fields["incarnation"], fields["epoch"]),
            fields["last_committed"],
            fields["identity"],
            fields["layout"],
            tuple(fields["kinds"]),
            tuple(ShardInfo.from_dict(shard, **of) for shard in fields["shards"]),
            fields["validation"],
        )


def save_manifest(directory: Path, manifest: Manifest) -> None:
    """Put a manifest in place. `checkpoints.write_manifest` checks the shards first.

    Raises:
        FilesError: the disk is full, or the directory is gone.
    """
    path = directory / MANIFEST
    with writing(path):  # the directories' own names, before what makes them count
        sync_directory(directory.parent)
        sync_directory(directory.parent.parent)
    with replacing(path) as file:
        write_all(file, manifest.to_json().encode())


def load_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint's directory.

    Raises:
        CheckpointError: there is none, it is damaged, or of another step than the directory.
    """
    try:
        manifest = Manifest.from_json((directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointError("it has no manifest: it was never finished") from None
    except OSError as error:
        raise CheckpointError(f"the manifest cannot be read ({error.strerror or error})") from error
    if directory.name != checkpoint_path("", manifest.step).name:
        raise CheckpointError(f"the manifest belongs to step {manifest.step}")
    return manifest


def check_identity(saved: Mapping[str, Any], present: Mapping[str, Any], *, where: str = "train.resume") -> None:
    """Refuse to resume a run that would not have the same bits.

    Args:
        saved: plain values, nested as one likes: a manifest's `identity`, or its `layout`.
        present: the same of the run that is to go on.
        where: what asked for it, for the message.

    Raises:
        ConfigError: lists every difference with both values.
    """
    old, new = dict(_leaves(saved)), dict(_leaves(present))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if not names:
        return
    lines = [f"{name}: saved {old.get(name, 'nothing')}, now {new.get(name, 'nothing')}" for name in names]
    more = [f"and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    raise ConfigError(
        "the run was saved with other values:" + "".join(f"\n  {line}" for line in lines[:_MAX_LISTED] + more),
        rule="the bits of a run depend on these values, so they must not change when it is resumed",
        where=where,
        fix="use the saved values, or start another run",
    )


def _leaves(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, JSON of the value): by text, so that 1, 1.0 and true differ, and tuples equal lists.

    An empty mapping is as good as none.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{prefix}[{number}]")
    else:
        yield prefix, _compact(value)


def _uncovered(layers: tuple[SavedLayer, ...], runs: Mapping[PageRange, ShardInfo]) -> Iterator[str]:
    """What keeps runs from holding every state page once, in words."""
    at = dict.fromkeys(range(len(layers)), 0)
    for layer, first, stop in sorted(runs):
        if not (layer in at and 0 <= first < stop <= layers[layer].num_pages):
            yield f"layer {layer} has no pages [{first}, {stop})"
            continue
        if first > at[layer]:
            yield f"layer {layer}: pages [{at[layer]}, {first}) are missing"
        elif first < at[layer]:
            yield f"layer {layer}: pages [{first}, {min(stop, at[layer])}) are in two different runs"
        at[layer] = max(at[layer], stop)
    for layer, saved in enumerate(layers):
        if at[layer] < saved.num_pages:
            yield f"layer {layer}: pages [{at[layer]}, {saved.num_pages}) are missing"


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _hash(fields: Mapping[str, Any]) -> str:
    """sha256 of the fields as JSON without spaces, names sorted."""
    text = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


# Who writes which pages of a durable checkpoint: a pure function of the replica map.
def writers_of(replicas: ReplicaMap, layout: ModelLayout) -> dict[PageRange, int]:
    """Run of state pages -> the worker that writes it: a mirror where there is one, else the primary.

    Pages are spread evenly: the largest runs first, each to whoever has the fewest pages so far. The loss page is no
    state. Whoever knows the map of a mesh epoch knows the writers, without a word.
    """
    loads: Counter[int] = Counter()
    found: dict[PageRange, int] = {}
    for run in sorted(all_runs(replicas), key=lambda r: (-r.num_pages, r.key)):
        if layout.layers[run.layer].block_of(run.first).kind == LOSS:
            continue
        writer = min(run.mirrors or (run.primary,), key=lambda rank: (loads[rank], rank))
        loads[writer] += run.num_pages
        found[run.key] = writer
    return found
