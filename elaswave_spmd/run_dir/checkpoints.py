"""The checkpoints of a run on the disk: completing, finding and removing them, and reading them for any mesh.

Their format is in docs/run_files.md:

    <run dir>/checkpoints/step_00000020/shard_<rank>_<incarnation>-<epoch>.safetensors ...
                                        manifest.json          written last: it makes the directory a checkpoint

Workers write shards of the pages that they hold. The controller writes the manifest, since it alone knows when all
shards are complete. Nothing in a checkpoint depends on the mesh that wrote it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from elaswave_spmd.errors import CheckpointError, DataError, FilesError
from elaswave_spmd.run_dir.atomic_write import sync_directory, writing
from elaswave_spmd.run_dir.checkpoint_shard import (
    CHECKPOINTS,
    Shard,
    ShardInfo,
    UnreadableError,
    checkpoint_path,
    read_shard,
)
from elaswave_spmd.run_dir.manifest import MANIFEST, Manifest, load_manifest, save_manifest
from elaswave_spmd.run_dir.rollback import rollback_of
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap, ReplicaSet
from elaswave_spmd.sharding.reshard import ReshardPlan, plan_reshard

_STEP = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, open for reading. Only names and offsets are in memory.

    Reading a checkpoint is a reshard from its shards to the replicas of a mesh, with the same reshard plans as when a
    running mesh changes. The shards act as source workers in these plans: shard i has the rank -1 - i, which no worker
    of a mesh has.

    Args:
        path: the checkpoint's directory.
        manifest: its manifest.
        shards: the shards, in the order of the manifest.
    """

    path: Path
    manifest: Manifest
    shards: tuple[Shard, ...]

    @property
    def step(self) -> int:
        """The version of the state."""
        return self.manifest.step

    @cached_property
    def replicas(self) -> ReplicaMap:
        """The shard that each page range is read from. The loss page is not state and is in no checkpoint."""
        found: dict[int, list[ReplicaSet]] = {layer: [] for layer in range(len(self.manifest.layers))}
        numbers = {shard.info.name: -1 - number for number, shard in enumerate(self.shards)}
        for pages, info in sorted(self.manifest.sources.items()):
            shard = numbers[info.name]
            found[pages[0]].append(ReplicaSet(*pages, shard, frozenset((shard,))))
        return {layer: tuple(of_layer) for layer, of_layer in found.items()}

    def plan_to(self, layout: ModelLayout, replicas: ReplicaMap) -> ReshardPlan:
        """The reshard plan from the shards to the replicas of a mesh.

        Args:
            layout: the layout of the model.
            replicas: the replica sets of all layers. Their page ranges may begin and end at any page.
        """
        # Pages beyond those of the manifest are not state (the loss page), and are in no checkpoint.
        num_pages = [saved.num_pages for saved in self.manifest.layers]
        target = {
            layer: tuple(pages for pages in of_layer if pages.first < num_pages[layer])
            for layer, of_layer in replicas.items()
        }
        return plan_reshard(layout, self.replicas, to=target)

    def read(self, plan: ReshardPlan, rank: int, pages: PageRange, kind: str) -> np.ndarray:
        """Read the state of one page range of one worker from the shards that `plan` copies it from.

        Nothing but this range is read from the disk.

        Args:
            plan: a plan made by `plan_to`.
            rank: the worker.
            pages: a page range of which `rank` is a replica in the plan's target.
            kind: the kind of state, one of `manifest.kinds`.

        Returns:
            fp32 [elements], a new array.

        Raises:
            CheckpointError: a shard cannot be read.
        """
        layer, first, stop = pages
        saved = self.manifest.layers[layer]
        assert 0 <= first < stop <= saved.num_pages and kind in self.manifest.kinds_of(pages), (pages, kind)
        # The plan's copies are cut wherever a page range of the checkpoint or of the mesh ends, so this range may
        # consist of several pieces from several shards.
        start, end = saved.span(first, stop)
        found = np.empty(end - start, np.float32)
        missing = end - start
        for of_layer, a, b in plan.copies_to(rank):
            if of_layer == layer and first <= a and b <= stop:
                whole = next(it for it in self.replicas[layer] if it.first <= a < it.stop)
                (low, high), (whole_start, _) = saved.span(a, b), saved.span(whole.first, whole.stop)
                shard = self.shards[-1 - whole.primary]
                shard.read_into(found[low - start : high - start], whole.key, kind, low - whole_start)
                missing -= high - low
        assert not missing, (pages, rank, missing)
        return found


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Complete a checkpoint. When this returns, the checkpoint is on the disk; if it raises, there is none.

    Raises:
        CheckpointError: a shard is missing, has another size, or does not hold what the manifest says. (That the
            shards hold every page once was checked when the manifest was constructed.)
        FilesError: the disk is full, or the directory is missing.
    """
    assert directory.name == checkpoint_path("", manifest.step).name, (directory, manifest.step)
    _open_shards(directory, manifest)
    save_manifest(directory, manifest)


def open_checkpoint(directory: Path, *, verify: bool) -> Checkpoint:
    """Open a checkpoint, and check its manifest, its shards and their headers.

    Args:
        verify: True to compare every shard with its sha256 as well, which reads all of it. Workers do without this, as
            the controller has verified the checkpoint before they read their parts of it.

    Raises:
        CheckpointError: the checkpoint is unfinished, torn or corrupted.
    """
    manifest = load_manifest(directory)
    shards = _open_shards(directory, manifest)
    if verify:
        for shard in shards.values():
            shard.verify()
    return Checkpoint(directory, manifest, tuple(shards[info.name] for info in manifest.shards))


def find_checkpoints(run_dir: str | Path) -> list[Path]:
    """The directories of a run's checkpoints, complete or not, newest first.

    Raises:
        UnreadableError: the directory of the checkpoints cannot be listed now.
    """
    found = [(int(match[1]), path) for path in _entries(run_dir) if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def step_of(path: Path) -> int:
    """The step of a checkpoint's directory."""
    return int(path.name.partition("_")[2])


def has_manifest(directory: Path) -> bool:
    """True for a checkpoint that was completed.

    Raises:
        UnreadableError: the directory cannot be read now, so this is not known.
    """
    try:
        (directory / MANIFEST).stat()
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UnreadableError(f"{directory} cannot be read ({error.strerror or error})") from error


def newest_complete(run_dir: str | Path) -> int:
    """The step of the newest checkpoint that has a manifest; 0 if there is none."""
    return next((step_of(path) for path in find_checkpoints(run_dir) if has_manifest(path)), 0)


def newest_of_life(run_dir: str | Path, incarnation: int) -> int:
    """The step of the newest checkpoint that one life of the run has completed; 0 if it has completed none.

    There may be a newer one of an earlier life, which was found to be bad when this life began.

    Args:
        incarnation: the number of the life.

    Raises:
        UnreadableError: a manifest cannot be read now, so this is not known.
    """
    for directory in find_checkpoints(run_dir):
        try:
            if load_manifest(directory).ballot.incarnation == incarnation:
                return step_of(directory)
        except UnreadableError:
            raise
        except CheckpointError:  # a damaged manifest, or none
            continue
    return 0


def unfinished_shards(run_dir: str | Path, incarnation: int, newest: int) -> list[ShardInfo]:
    """The shards that one life of the run wrote for checkpoints that it has not completed.

    Args:
        incarnation: the number of the life. Hashes of its shards are not verified here.
        newest: the step of its newest complete checkpoint; only shards of later steps are looked for.
    """
    found: list[ShardInfo] = []
    for directory in find_checkpoints(run_dir):
        if step_of(directory) <= newest:
            break
        for path in sorted(directory.glob("shard_*.safetensors")):
            with contextlib.suppress(CheckpointError):  # a damaged shard does not count: its pages are missing
                found.append(read_shard(path).info)
    return [shard for shard in found if shard.ballot.incarnation == incarnation]


def load_newest_good(run_dir: str | Path, newest: int | None = None) -> tuple[Checkpoint, list[tuple[Path, str]]]:
    """Open the newest checkpoint that is complete and matches its hashes.

    Checkpoints that the run has given up and that are still there, as nobody has gone on with it since, are not good.

    Args:
        newest: checkpoints of later steps are ignored; None for all.

    Returns:
        The checkpoint, and (path, reason) of each newer one that is not good.

    Raises:
        CheckpointError: no checkpoint is good. The error names each of them with the reason.
    """
    bad: list[tuple[Path, str]] = []
    back: int | None = None
    with contextlib.suppress(DataError):  # its checkpoints may be good all the same
        back = rollback_of(Path(run_dir))
    for path in find_checkpoints(run_dir):
        if newest is not None and step_of(path) > newest:
            continue
        if back is not None and step_of(path) > back:
            bad.append((path, f"it may be wrong: the run was going back to step {back} (its event rollback)"))
            continue
        try:
            return open_checkpoint(path, verify=True), bad
        except CheckpointError as error:
            bad.append((path, error.what))
    raise CheckpointError(
        f"{run_dir} has no good checkpoint",
        where=str(run_dir),
        exists="; ".join(f"{path.name}: {reason}" for path, reason in bad) or f"nothing in {CHECKPOINTS}/",
        fix="name the directory of a run that has one, or start anew; checkpoint.every=N writes checkpoints",
    )


def prune(
    run_dir: str | Path,
    keep: int,
    trusted: int | None = None,
    best: Sequence[int] = (),
    keep_best: int = 0,
    *,
    looks: Looks | None = None,
    is_over: Callable[[], bool] = lambda: False,
    disk: AbstractContextManager[object] | None = None,
) -> list[Path]:
    """Remove all but the newest `keep` good checkpoints, and unfinished or bad ones between and before them.

    Checkpoints newer than the newest good one are left alone, since workers may be writing them. The checkpoints that
    are kept are read as a whole and compared with their hashes: a good one is removed only after `keep` newer ones were
    found to be good, the newest of them now. One that cannot be read now (a lack of descriptors, a network file system
    that does not answer) is neither counted as good nor removed as bad. If nothing would be removed even if all are
    good, none is read.

    Args:
        keep: how many good checkpoints are kept, newest first; at least 1.
        trusted: the newest good checkpoint of this step or an older one is kept as well; None if none is needed.
        best: steps in the order of their validation loss, the lowest first.
        keep_best: how many good checkpoints of the steps in `best` are kept as well, in that order.
        looks: of earlier calls for this directory; None if there are none.
        is_over: called before each file is read and before each removal. Once it returns True nothing more is removed.
        disk: entered for each removal.

    Returns:
        The directories that were removed.

    Raises:
        FilesError: a directory cannot be removed. The others are removed first; the error is about the first one.
    """
    assert keep >= 1, keep
    found = find_checkpoints(run_dir)
    if not _superfluous(found, keep, trusted, best, keep_best, _is_complete):
        return []
    is_good = (looks or Looks()).now(found, is_over)
    superfluous = _superfluous(found, keep, trusted, best, keep_best, is_good)
    removed: list[Path] = []
    errors: list[FilesError] = []
    for path in superfluous:
        with disk or contextlib.nullcontext():
            if is_over():
                break
            try:
                _remove(path)
            except FilesError as error:  # for example in a network file system, while another process reads from it
                errors.append(error)
        removed.append(path)
    if errors:
        raise errors[0]
    return removed


def _superfluous(
    paths: Sequence[Path], keep: int, trusted: int | None, best: Sequence[int], keep_best: int, is_good: _IsGood
) -> list[Path]:
    """The checkpoints that `prune` removes, newest first; args as there, and `paths` of all of them, newest first."""
    num_good = 0
    found: list[Path] = []
    precious = _first_good(paths, best, keep_best, is_good)
    for path in paths:
        # Newest first. Verifying a checkpoint reads all of it, so no more are verified once enough were good.
        wanted = num_good < keep or (trusted is not None and step_of(path) <= trusted)
        good = is_good(path, anew=not num_good) if wanted else False
        if good:
            num_good += 1
            if trusted is not None and step_of(path) <= trusted:
                trusted = None
        elif num_good and good is not None and path not in precious:
            found.append(path)
    return found


def _remove(path: Path) -> None:
    with writing(path):
        # The manifest first: a removal that is interrupted leaves an unfinished checkpoint, not a corrupted one.
        (path / MANIFEST).unlink(missing_ok=True)
        sync_directory(path)
        shutil.rmtree(path)


def remove_shards(run_dir: str | Path, step: int, names: Sequence[str]) -> None:
    """Remove shards of a checkpoint that will not be completed; errors are ignored.

    Its directory stays: a worker that is about to write another shard must find it.

    Args:
        step: of the checkpoint.
        names: of the shards' files.
    """
    for name in names:
        with contextlib.suppress(OSError):
            (checkpoint_path(run_dir, step) / name).unlink()


def remove_unfinished(run_dir: str | Path) -> None:
    """Remove the directories without a manifest. Called when no worker writes any more; errors are ignored."""
    with contextlib.suppress(UnreadableError, OSError):
        for path in find_checkpoints(run_dir):
            if not has_manifest(path):
                shutil.rmtree(path, ignore_errors=True)


def remove_superfluous(run_dir: str | Path) -> None:
    """Remove files in complete checkpoints that their manifests do not list.

    These are surplus shards, and files of writers that were ended because the checkpoint was complete without them.
    Called when no worker writes any more; errors are ignored.
    """
    found: list[Path] = []
    with contextlib.suppress(UnreadableError):
        found = find_checkpoints(run_dir)
    for path in found:
        with contextlib.suppress(CheckpointError, OSError):
            named = {MANIFEST, *(shard.name for shard in load_manifest(path).shards)}
            for file in path.iterdir():
                if file.name not in named:
                    file.unlink()


def _first_good(paths: Sequence[Path], steps: Sequence[int], number: int, is_good: _IsGood) -> list[Path]:
    """The first `number` good checkpoints of these steps, in this order, and before them any that cannot be read now.

    A checkpoint that cannot be read now may be a good one, so it is included, and not counted.
    """
    by_step = {step_of(path): path for path in paths}
    found: list[Path] = []
    for step in steps:
        if number and step in by_step and (good := is_good(by_step[step], anew=False)) is not False:
            found.append(by_step[step])
            number -= bool(good)
    return found


class _IsGood(Protocol):
    """True if a checkpoint is complete and matches its hashes, False if not; None if it cannot be read now.

    Args:
        anew: do not answer from what was found at an earlier time.
    """

    def __call__(self, path: Path, *, anew: bool) -> bool | None: ...


def _is_complete(path: Path, *, anew: bool) -> bool | None:
    """As `_IsGood`, if every checkpoint that has a manifest were good."""
    with contextlib.suppress(UnreadableError):
        return has_manifest(path)
    return None


class Looks:
    """Finds out whether checkpoints are good. Verifying one reads all of it, so those that were good are remembered.

    That counts while the checkpoint has the same files, by their inodes, sizes and times. That one is not good,
    or cannot be read, is not remembered for longer than one `prune`.
    """

    def __init__(self) -> None:
        self._good: dict[Path, Mapping[str, tuple[int, ...]]] = {}  # path -> its files when it was found to be good

    def now(self, paths: Sequence[Path], is_over: Callable[[], bool]) -> _IsGood:
        """A function that finds it out, for one `prune`. It reads each checkpoint once at most.

        Args:
            paths: all checkpoints that there are now.
            is_over: as for `prune`. Once it returns True it is said of all that they cannot be read.
        """
        self._good = {path: files for path, files in self._good.items() if path in paths}
        found: dict[Path, bool | None] = {}

        def is_good(path: Path, *, anew: bool) -> bool | None:
            if path not in found:
                if not anew and path in self._good and self._good[path] == _files_of(path):
                    return True
                found[path] = self._look(path, is_over)
            return found[path]

        return is_good

    def _look(self, path: Path, is_over: Callable[[], bool]) -> bool | None:
        self._good.pop(path, None)
        files = _files_of(path)  # before they are read
        try:
            for shard in open_checkpoint(path, verify=False).shards:
                if is_over():
                    return None
                shard.verify()
            if files:
                self._good[path] = files
            return True
        except UnreadableError:
            return None
        except CheckpointError:
            return False


def _files_of(path: Path) -> Mapping[str, tuple[int, ...]]:
    """What tells the files of a checkpoint from others of these names; empty if they cannot be looked at."""
    try:
        about = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(path)}
    except OSError:
        return {}
    return {name: (it.st_ino, it.st_size, it.st_mtime_ns) for name, it in about.items()}


def _entries(run_dir: str | Path) -> list[Path]:
    folder = Path(run_dir) / CHECKPOINTS
    try:
        return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    except OSError as error:  # a stale mount, or a lack of permission
        raise UnreadableError(
            f"the checkpoints of {run_dir} cannot be listed ({error.strerror or error})",
            rule="a run goes on from its newest good checkpoint",
            where=str(folder),
            fix="make the directory readable, or mount it again",
        ) from error


def _open_shards(directory: Path, manifest: Manifest) -> Mapping[str, Shard]:
    """Read the headers of a checkpoint's shards, and compare them with the manifest. Returns the shards by name.

    Raises:
        CheckpointError: a shard is missing, damaged, or holds something else.
    """
    shards: dict[str, Shard] = {}
    for info in manifest.shards:
        shard = read_shard(directory / info.name)
        if shard.info != info:
            raise CheckpointError(f"{info.name} is not the shard that the manifest names")
        for page_range in info.pages:
            layer, first, last = page_range
            start, stop = manifest.layers[layer].span(first, last)
            kinds = manifest.kinds_of(page_range)
            if any(shard.arrays.get((page_range, kind), (0, 0))[1] != stop - start for kind in kinds):
                raise CheckpointError(f"{info.name} does not hold all state of its pages")
        shards[info.name] = shard
    return shards
