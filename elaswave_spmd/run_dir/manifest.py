"""The manifest of a durable checkpoint: what was saved, of which run, in which shards (docs/run_files.md).

The manifest is written last, so a checkpoint exists as soon as its manifest does. A manifest whose shards do not hold
every page of state exactly once cannot be constructed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from elaswave_spmd.conf.format_version import FORMAT_FIELD, FORMAT_VERSION, version_mismatch
from elaswave_spmd.errors import CheckpointError
from elaswave_spmd.regular_files import read_regular
from elaswave_spmd.run_dir.atomic_write import replacing, sync_directory, writing
from elaswave_spmd.run_dir.checkpoint_shard import ShardInfo, UnreadableError, checkpoint_path
from elaswave_spmd.run_dir.journal import Ballot
from elaswave_spmd.run_dir.json_lines import read_json
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import PageRange

MANIFEST = "manifest.json"
AVERAGE = "average"
"""The kind of state that is an average of the parameters over the steps (`optim.ema`)."""


@dataclass(frozen=True)
class SavedLayer:
    """The pages of one layer's state, as they were when it was saved.

    Args:
        page_size: the number of elements of a page. The last page of a block may be shorter.
        blocks: (first page, number of pages, first element, stop element), ascending and without gaps.
        frozen_from: the first frozen page, which comes after all trained pages; None if there is none.
    """

    page_size: int
    blocks: tuple[tuple[int, int, int, int], ...]
    frozen_from: int | None = None

    @property
    def num_pages(self) -> int:
        return sum(pages for _, pages, _, _ in self.blocks)

    def is_frozen(self, page: int) -> bool:
        """True if a page is frozen, so that its only kind of state is the master."""
        return self.frozen_from is not None and page >= self.frozen_from

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """The elements [start, stop) that the state pages [first, stop) hold; the pages may lie in several blocks."""
        return self._start(first), self._start(stop)

    def _start(self, page: int) -> int:
        for first, pages, start, stop in self.blocks:
            if first <= page < first + pages:
                return start + (page - first) * self.page_size
            if page == first + pages == self.num_pages:
                return stop
        raise AssertionError((page, self))


def layout_fingerprint(layout: ModelLayout) -> dict[str, Any]:
    """The parts of a layout that decide where each parameter's state lies and how it is updated, as plain JSON."""
    return {
        # Left out if no parameter is frozen. It comes first, so that an error shows another set of frozen parameters
        # before the differences that follow from it.
        **({"frozen": list(layout.frozen)} if layout.frozen else {}),
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
                        # Only if a group of parameters has one, since manifests of earlier versions do not have it.
                        **({} if s.parameter.weight_decay is None else {"weight_decay": s.parameter.weight_decay}),
                    }
                    for b in layer.state_blocks
                    for s in b.slots
                ],
                "reads": [s.parameter.name for b in layer.reader_blocks for s in b.slots],
                **({"frozen_from": layer.num_trained_pages} if layer.num_frozen_elements else {}),
            }
            for layer in layout.layers
        ],
    }


def layout_summary(layout: ModelLayout) -> str:
    """A line that differs for layouts with other fingerprints: "2 layers, 1,234 parameters, sha256 0a1b2c...".

    The controller sends it to workers, which have imported the model by themselves. Its numbers are for errors.
    """
    digest = hashlib.sha256(json.dumps(layout_fingerprint(layout), sort_keys=True).encode()).hexdigest()
    return f"{len(layout.layers)} layers, {layout.num_parameters:,} parameters, sha256 {digest[:16]}"


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Args:
        run: the id of the run.
        step: the version of the state.
        ballot: the incarnation and mesh epoch of the checkpoint. Its shards have this incarnation and no later epoch.
        last_committed: the step of the last metrics line when the manifest was written, at least `step`.
        identity: the settings and versions that the run's bits depend on; see run_identity.py.
        layout: see `layout_fingerprint`.
        kinds: the kinds of state: first "master", then those of the optimizer.
        shards: the shards. A page range may be in several of them; it is read from the first.
        validation: the step and loss of the newest validation since this controller started, or None.

    Raises:
        CheckpointError: a shard is of another run, step or incarnation, or of a later epoch; or pages are missing, or
            are in two different page ranges.
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
        # Through JSON and back, so that a manifest that was just made equals the one that is read from its file.
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
        """The pages of each layer's state."""
        size = self.layout["page_size"]
        return tuple(
            SavedLayer(size, tuple(tuple(b) for b in layer["blocks"]), layer.get("frozen_from"))
            for layer in self.layout["layers"]
        )

    def kinds_of(self, pages: PageRange) -> tuple[str, ...]:
        """The kinds of state that a page range has. A frozen one has only the first kind, the master."""
        return self.kinds[:1] if self.layers[pages[0]].is_frozen(pages[1]) else self.kinds

    @cached_property
    def sources(self) -> Mapping[PageRange, ShardInfo]:
        """Page range -> the shard to read it from."""
        return {page_range: shard for shard in reversed(self.shards) for page_range in shard.pages}

    def to_json(self) -> str:
        """The manifest as JSON with one field a line; the last field is the sha256 of the others."""
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
            CheckpointError: the text is torn or damaged, has another format version, or names shards that do not make a
                checkpoint.
        """
        try:
            fields = read_json(text)
            sha256 = fields.pop("sha256")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError("the manifest is torn, or is not a manifest") from error
        # Before the hash, since another version may also compute the hash differently.
        if mismatch := version_mismatch(fields.get(FORMAT_FIELD)):
            raise CheckpointError(f"the manifest {mismatch}")
        if sha256 != _hash(fields):
            raise CheckpointError("the manifest does not match its sha256")
        try:
            if not all(isinstance(fields[name], dict) for name in ("identity", "layout")):
                raise TypeError("identity and layout are objects")
            shared = {"run": fields["run"], "step": fields["step"], "incarnation": fields["incarnation"]}
            return cls(
                fields["run"],
                fields["step"],
                Ballot(fields["incarnation"], fields["epoch"]),
                fields["last_committed"],
                fields["identity"],
                fields["layout"],
                tuple(fields["kinds"]),
                tuple(ShardInfo.from_dict(shard, **shared) for shard in fields["shards"]),
                fields["validation"],
            )
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError("the manifest has other fields than those of a checkpoint") from error


def sets_of_shards(shards: Collection[ShardInfo]) -> Iterator[tuple[ShardInfo, ...]]:
    """The sets of a step's shards that may make up a checkpoint: all, then those of each mesh epoch, newest first.

    The shards of a step may be written in several mesh epochs, with different page ranges. Then a page may be in two
    different page ranges, and only the shards of one epoch can make up a checkpoint.
    """
    yield tuple(shards)
    ballots = sorted({shard.ballot for shard in shards}, reverse=True)
    if len(ballots) > 1:
        yield from (tuple(shard for shard in shards if shard.ballot == ballot) for ballot in ballots)


def save_manifest(directory: Path, manifest: Manifest) -> None:
    """Write a manifest into a checkpoint's directory. `checkpoints.write_manifest` checks the shards first.

    Raises:
        FilesError: the disk is full, or the directory is missing.
    """
    path = directory / MANIFEST
    with writing(path):  # the directories' own names must be on the disk before the manifest is
        sync_directory(directory.parent)
        sync_directory(directory.parent.parent)
    with replacing(path, durable=True) as scratch:
        scratch.write_bytes(manifest.to_json().encode())


def load_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint's directory.

    Raises:
        CheckpointError: there is none, it is damaged, or it belongs to another step than the directory.
        UnreadableError: it cannot be read now.
    """
    try:
        manifest = Manifest.from_json(read_regular(directory / MANIFEST))
    except FileNotFoundError:
        raise CheckpointError("it has no manifest: it was never finished") from None
    except OSError as error:
        raise UnreadableError(f"the manifest cannot be read ({error.strerror or error})") from error
    if directory.name != checkpoint_path("", manifest.step).name:
        raise CheckpointError(f"the manifest belongs to step {manifest.step}")
    return manifest


def _uncovered(layers: tuple[SavedLayer, ...], page_ranges: Mapping[PageRange, ShardInfo]) -> Iterator[str]:
    """The reasons why page ranges do not hold every state page exactly once; none if they do."""
    at = dict.fromkeys(range(len(layers)), 0)  # layer -> the first page that no page range held so far
    for layer, first, stop in sorted(page_ranges):
        if not (layer in at and 0 <= first < stop <= layers[layer].num_pages):
            yield f"layer {layer} has no pages [{first}, {stop})"
            continue
        if first > at[layer]:
            yield f"layer {layer}: pages [{at[layer]}, {first}) are missing"
        elif first < at[layer]:
            yield f"layer {layer}: pages [{first}, {min(stop, at[layer])}) are in two different page ranges"
        at[layer] = max(at[layer], stop)
    for layer, saved in enumerate(layers):
        if at[layer] < saved.num_pages:
            yield f"layer {layer}: pages [{at[layer]}, {saved.num_pages}) are missing"


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _hash(fields: Mapping[str, Any]) -> str:
    """The sha256 of the fields as JSON without spaces, with sorted names."""
    text = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
