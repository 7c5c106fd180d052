"""When a run is resumed: finds the workers that still live although their controller has died, and adopts them.

The run's journal names the directory of their sockets, and has a digest of the settings with which they were started.
The process that has locked the run's directory may adopt them (docs/protocol.md, A2). Workers on other machines are
found through their agents, which look for a controller at the rendezvous of the run: whether there are any is known
only when the agents have come back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.resume import saved, without_those_of_one_command
from elaswave_spmd.conf.schema import RAY, MeshSettings, Settings
from elaswave_spmd.controller.resume import (
    Adoption,
    ResumePoint,
    going_back_to,
    known_digests,
    known_validations,
    lock_resumed,
)
from elaswave_spmd.controller.run_fingerprint import as_far_as_saved, identity_of
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.output import say
from elaswave_spmd.recovery.generations import FIRST
from elaswave_spmd.recovery.messages import Prepare
from elaswave_spmd.run_dir import RunDir, read_metrics
from elaswave_spmd.run_dir.checkpoints import newest_of_life
from elaswave_spmd.run_dir.directory import SUMMARY
from elaswave_spmd.run_dir.journal import CHECKPOINT, ORPHAN_GRACE, read_journal
from elaswave_spmd.run_dir.lock import RunLock, workers_live
from elaswave_spmd.run_dir.manifest import layout_fingerprint
from elaswave_spmd.run_dir.run_identity import check_identity
from elaswave_spmd.runtime.processes.adoption import Orphans, read_address
from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient
from elaswave_spmd.runtime.processes.scratch import Scratch
from elaswave_spmd.runtime.transport.credentials import credentials_from_dict

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan

ADOPT, SCRATCH, NEXT_RANK = "adopt", "scratch", "next_rank"
_OTHER_SETTINGS = (
    "workers of the run may wait on machines with agents. They were started with other settings, and are not adopted: "
    "they save their state when their agents find this run, which goes on from the newest checkpoint"
)


def adoption_record(settings: Settings, scratch: str, checkpoint: int) -> dict[str, Any]:
    """The fields of the journal's first line by which the next controller finds the workers and checks their settings.

    Args:
        scratch: the directory of the sockets.
        checkpoint: the step of the newest checkpoint that was in the run's directory, and good, when this life began.
    """
    mesh = checks.plain(dataclasses.asdict(settings.mesh))
    grace = settings.timeouts.orphan_grace
    return {
        SCRATCH: scratch,
        "mesh": mesh,
        "settings": _digest(settings),
        ORPHAN_GRACE: grace,
        CHECKPOINT: checkpoint,
    }


def _digest(settings: Settings) -> str:
    """A digest of the settings with which workers train.

    Without the mesh, which the journal has by itself, as the run may have begun again on another one.
    """
    fields = without_those_of_one_command(settings.to_dict())
    # Without local_workers, which may differ: an agent may come back, or not.
    del fields["mesh"], fields["runtime"]["local_workers"]
    # Ray's supervisor determines these two for each controller, and tells the agents.
    if settings.runtime.launcher == RAY:
        del fields["runtime"]["rendezvous"], fields["runtime"]["agents"]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class OrphanedRun:
    """The living workers of a controller that has died, adopted with their fork server.

    Args:
        settings: the settings of the run, with the mesh on which it was started.
        fork_server: the parent of the workers on this machine, and the directory of its sockets; None if it has ended,
            so that workers may live on other machines only.
        start: the point at which the run goes on.
        begun: what the workers have begun with, by the journal: the `layout` of their model, and the `identity` of the
            run.
    """

    settings: Settings
    fork_server: tuple[ForkServerClient, Scratch] | None
    start: ResumePoint
    begun: Mapping[str, Any]

    @property
    def adoption(self) -> Adoption:
        """The facts with which the controller begins."""
        assert self.start.adoption is not None
        return self.start.adoption

    def open_run_dir(self) -> RunDir:
        """The run's directory, whose lock is held."""
        return RunDir.reopen(self.adoption.run_dir)

    def check_plan(self, plan: RunPlan) -> None:
        """Refuse to go on with a plan of another model, or of other data, than the workers have.

        Their settings are equal. But the files that these name may have changed since the workers read them.

        Raises:
            ConfigError: lists the differences.
        """
        present = identity_of(plan.settings, plan.data)
        saved = self.begun["identity"]
        check_identity(
            {"layout": self.begun["layout"], "data": saved["data"]},
            {"layout": layout_fingerprint(plan.description.layout), "data": as_far_as_saved(present, saved)["data"]},
            where=checks.override("train.resume", str(self.adoption.run_dir)),
            fix="the files of the model and the data as they were when its workers began, which still live",
        )

    def give_back(self) -> None:
        """Leave the workers to another controller, as this one cannot begin. It has sent them nothing yet."""
        if self.fork_server is not None:
            client, scratch = self.fork_server
            client.give_back()
            scratch.give_up()
        for lock in self.start.locks:
            lock.close()


def find_orphaned_run(settings: Settings) -> OrphanedRun | None:
    """Adopt the workers of the run that is resumed; None if no workers of it wait for a controller.

    Raises:
        ConfigError: another controller has locked the run; or the workers were started with other settings, or on
            another mesh than the settings name.
    """
    resume, place = settings.train.resume, settings.run.dir
    if settings.timeouts.adopt is None or resume is None or settings.train.resume_at is not None:
        return None
    path = Path(os.path.expanduser(resume)).absolute()
    if (place is not None and Path(os.path.expanduser(place)).absolute() != path) or (path / SUMMARY).exists():
        return None
    if not any(SCRATCH in line for line in read_journal(path)):
        return None
    lock = lock_resumed(path, checks.override("train.resume", resume))
    # A controller that ends in an orderly way empties its lock file and ends its agents. One that is killed does not.
    may_have_agents = settings.runtime.has_agents and lock.was_left
    found = None
    try:
        found = _adopt(settings, path, lock, may_have_agents=may_have_agents)
    finally:
        if found is None:
            lock.close()
    return found


def newcomers(scratch: str, orphans: Orphans) -> tuple[int, ...]:
    """The workers that were about to join: those that live and have no address, and those that ended without one.

    A worker that was ever a member has written its address. So one that has left is not counted, and not started again.
    """
    known = sorted({*orphans.pids, *orphans.ended})
    return tuple(rank for rank in known if read_address(scratch, rank) is None)


def _adopt(settings: Settings, path: Path, lock: RunLock, *, may_have_agents: bool) -> OrphanedRun | None:
    """Adopt the workers of the run in `path`, whose lock is held.

    Returns:
        None if there are no such workers, or if they have to end, as the run was going back to a checkpoint.
    """
    journal = read_journal(path)
    lines = [line for line in journal if line["incarnation"] == journal[-1]["incarnation"]]
    first = lines[0]
    live_here, may_have_agents = workers_live(path), may_have_agents and "credentials" in first  # agents have them
    if SCRATCH not in first or not (live_here or may_have_agents):
        return None
    if (step := going_back_to(path)) is not None:
        if live_here:
            say(f"workers of the run still live, and are ended: it was going back to step {step}")
            _end_workers(next(line[SCRATCH] for line in reversed(lines) if SCRATCH in line), settings)
        return None
    if (mesh := _mesh_of_workers(settings, path, journal, first, live_here=live_here)) is None:
        return None
    with contextlib.ExitStack() as undo:
        folder = next(line[SCRATCH] for line in reversed(lines) if SCRATCH in line)
        fork_server, orphans = _fork_server(folder, settings) if live_here else (None, _NOBODY)
        if fork_server is not None:
            undo.callback(fork_server[1].give_up)
        elif not may_have_agents:
            return None
        prepared = [line for line in lines if line["reason"] == "prepare"]
        known_ranks = [orphans.next_rank, *(line[NEXT_RANK] for line in lines if NEXT_RANK in line)]
        adoption = Adoption(
            run_dir=path,
            generation=FIRST + 1 + sum(line["reason"] == ADOPT for line in lines),
            last_epoch=lines[-1]["epoch"] + 1,  # of the journal's next line
            prepared=Prepare(prepared[-1]["epoch"], prepared[-1]["after"]) if prepared else None,
            credentials=credentials_from_dict(first["credentials"]) if "credentials" in first else None,
            newest_checkpoint=newest_of_life(path, first["incarnation"]) or first.get(CHECKPOINT, 0),
            pids=orphans.pids,
            next_rank=max(known_ranks),
            newcomers=newcomers(folder, orphans),
            seconds=orphans.seconds,
            made=orphans.made,
            has_agents=settings.runtime.has_agents,
            scratch=folder,
            # If no worker is left after all, the run begins again as if that had been known at once.
            mesh=settings.mesh if settings.runtime.has_agents else None,
        )
        known = {line.step: line for line in read_metrics(path)}
        start = ResumePoint(
            first["run"],
            first["incarnation"],
            lines=known,
            validations=known_validations(path),
            digests=known_digests(path),
            locks=(lock,),
            adoption=adoption,
        )
        undo.pop_all()
        return OrphanedRun(replace(settings, mesh=mesh), fork_server, start, first)


def _mesh_of_workers(
    settings: Settings, path: Path, journal: Sequence[Mapping[str, Any]], first: Mapping[str, Any], *, live_here: bool
) -> MeshSettings | None:
    """The mesh of the workers that may live; None: none is known to, and the settings are not those that they have.

    Args:
        first: the first line of the journal of this life of the run.
        live_here: some live on this machine.

    Raises:
        ConfigError: some live here and have other settings.
    """
    if first["settings"] != _digest(settings):
        if not live_here:
            # Whether any lives elsewhere is not known. If so, its agent has it save its state, and joins after that.
            say(_OTHER_SETTINGS)
            return None
        # Before anything is adopted: with the settings that they have they can still be adopted.
        raise ConfigError(
            f"workers of the run in {path} still live, and were started with other settings",
            rule="a controller that comes back has the settings of the workers that it adopts",
            where=checks.override("train.resume", str(path)),
            fix="the command of the run as it was; or with timeouts.adopt=null: it waits until they have saved their "
            "state and ended, and goes on from there",
        )
    mesh = MeshSettings.from_fields(first["mesh"])
    if settings.mesh.shape == mesh.shape:
        return mesh
    if _has_had(settings, path, journal):
        # Named or not: a supervisor's command names the mesh of the run's begin, and so does config.yaml.
        name, other = mesh.shape.name, settings.mesh.shape.name
        say(f"workers of the run still live: its mesh is theirs, {name}, and not {other}, as earlier")
        return mesh
    if not live_here:
        say(_OTHER_SETTINGS)
        return None
    raise ConfigError(
        f"workers of the run in {path} still live, on the mesh {mesh.shape.name}, and another mesh is named, "
        f"{settings.mesh.shape.name}",
        rule="a controller that comes back has the mesh of the workers that it adopts",
        where=checks.override("train.resume", str(path)),
        fix="no mesh, and they are adopted; or timeouts.adopt=null beside it: it waits until they have saved "
        "their state and ended, and goes on from there on the mesh that is named",
    )


def _has_had(settings: Settings, path: Path, journal: Sequence[Mapping[str, Any]]) -> bool:
    """True if the run had the mesh of these settings, at its begin or later: so no other one is asked for.

    It may have begun again on a smaller one since, or have been resumed on another one.
    """
    of_lives = [line["mesh"] for line in journal if "mesh" in line]
    with contextlib.suppress(ConfigError):
        of_lives.append(saved(str(path))["mesh"])
    return any(MeshSettings.from_fields(had).shape == settings.mesh.shape for had in of_lives)


def _end_workers(folder: str, settings: Settings) -> None:
    """End the workers of this machine at once: their state may be wrong, so nobody adopts or saves it.

    Those of agents end when these find another life of the run (A1), which discards what they have saved.
    """
    fork_server, _ = _fork_server(folder, settings)
    if fork_server is not None:
        client, scratch = fork_server
        client.stop(0.0)
        scratch.remove()


_NOBODY = Orphans({}, 0, (), 0.0)
"""What is known of a machine without a worker, whose fork server has ended."""


def _fork_server(folder: str, settings: Settings) -> tuple[tuple[ForkServerClient, Scratch] | None, Orphans]:
    """Adopt the fork server of this machine, with its workers; None: it has none that has lost its controller."""
    try:
        scratch = Scratch.adopted(folder)
    except OSError:
        return None, _NOBODY
    taken = ForkServerClient.adopt(folder, settings.timeouts.orphan_grace)
    if taken is None:
        scratch.give_up()
        return None, _NOBODY
    client, orphans = taken
    return (client, scratch), orphans
