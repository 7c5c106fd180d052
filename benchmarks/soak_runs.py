"""One run of `soak`: `python train.py`, and the faults of a plan, each at a moment that is seen in the run itself.

Moments are seen in what the run writes (events.jsonl, metrics.jsonl, checkpoints/), in its processes, and in the
answers of `ctl RUN status`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bits import Outcome, differences, read_outcome
from benchmarks.harness import say
from benchmarks.processes import Program, in_use, new_directory, processes_with, program
from benchmarks.soak_checks import Event, Strike, by_kind, leaked, lives, mended, untold
from benchmarks.soak_plans import (
    ANY,
    CHECKPOINT,
    CONTROLLER_TERM,
    HANG,
    JOIN,
    KILL,
    LATE,
    OF_CONTROLLER,
    PAUSE,
    RESTART,
    ROOTS_KILL,
    START,
    VALIDATION,
    Fault,
    Plan,
    chosen,
)
from elaswave_spmd.controller.admin_client import ask
from elaswave_spmd.errors import RunError, UserError

VALIDATE_EVERY = 25
SETTINGS = (
    "model.layers=2 model.d_model=32 model.heads=2 model.dropout=0.1 train.seq_len=16 train.global_batch=14 "
    f"train.microbatch_size=2 train.validate_every={VALIDATE_EVERY} train.validate_microbatches=24 "
    "optim.warmup_steps=20 page.size=256 data=stdlib timeouts.suspect=4 "
    "elastic.replacements_per_minute=1000"  # far more are killed here than a machine would lose
).split()
"""A small model on real text; 7 micro-batches, which no mesh divides."""
TERMINATED = 128 + signal.SIGTERM
_FINE_S, _LOOK_S = 0.0005, 0.01
_MOMENT_S = 20.0  # how long a moment is waited for; the fault then comes at any moment
_STILL_S = 150.0  # a run without a new step, or a new controller, for so long stands still
_STOPPED_S = 60.0  # a controller that was asked to stop
_ORPHANS_S = 60.0  # workers whose controller was killed save their state, and end
_SETTLED_S = 20.0
_OTHERS_S = 10.0  # shared memory of another program is in use, or removed
_FEWEST = 2  # workers that a fault needs: none takes the last one
_LOOKS = 4


class SoakError(Exception):
    """The run cannot be gone on with: it stands still, or has failed."""


class _Ended(Exception):  # noqa: N818
    """The command has ended by itself."""


@dataclass
class Report:
    """A record of the faults that a run was given, and of the problems that were found.

    Args:
        missed: moments that did not come within their time; their faults came at any moment.
        not_reached: faults of the plan that the run was over for.
    """

    plan: Plan
    strikes: list[Strike] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    missed: Counter[str] = field(default_factory=Counter)
    not_reached: int = 0
    told: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    looks: int = 0
    seconds: float = 0.0


class _Lines:
    """The complete lines of a file that grows. Reads what is new only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.lines: list[bytes] = []

    def read(self) -> list[bytes]:
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._offset += len(whole) + 1
                self.lines += whole.split(b"\n")
        return self.lines


class Watch:
    """A reader of the files that a run writes while it goes on."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._metrics = _Lines(run_dir / "metrics.jsonl")
        self._lines = _Lines(run_dir / "events.jsonl")
        self._events: list[Event] = []

    @property
    def step(self) -> int:
        """The last committed step."""
        return len(self._metrics.read())

    @property
    def events(self) -> list[Event]:
        lines = self._lines.read()
        self._events += [json.loads(line) for line in lines[len(self._events) :]]
        return self._events

    @property
    def life(self) -> int:
        """How many controllers have begun with it, restarts included."""
        return len(lives(self.events)) - 1

    def count(self, kind: str) -> int:
        return sum(event["event"] == kind for event in self.events)

    def status(self) -> dict[str, Any] | None:
        """The answer to `ctl RUN status`; None if nobody answers."""
        with contextlib.suppress(UserError, RunError):
            return ask(str(self.run_dir), {"command": "status"}, timeout_s=5.0)
        return None

    def add(self, count: int) -> None:
        """Asks for so many further workers, as an operator does."""
        with contextlib.suppress(UserError, RunError):
            ask(str(self.run_dir), {"command": "add", "count": count}, timeout_s=5.0)

    def writes_checkpoint(self) -> bool:
        """True while the newest checkpoint has no manifest."""
        with contextlib.suppress(OSError):
            names = sorted(os.listdir(self.run_dir / "checkpoints"))
            return bool(names) and not (self.run_dir / "checkpoints" / names[-1] / "manifest.json").exists()
        return False

    def validates(self) -> bool:
        """True from the step before a validation until its event."""
        step = self.step
        return step > 0 and step % VALIDATE_EVERY == 0 and not self._validated(step)

    def _validated(self, step: int) -> bool:
        return any(event["event"] == "validation" and event["step"] == step for event in self.events)


@dataclass(frozen=True)
class Place:
    """Where runs are started: directories with short paths, and the words that all of them share.

    Args:
        more: words beside SETTINGS.
    """

    directory: Path
    steps: int
    more: tuple[str, ...] = ()

    def words(self) -> list[str]:
        cache = f"data.cache={self.directory / 'cache'}"
        return [*SETTINGS, *self.more, f"train.steps={self.steps}", cache]

    @contextlib.contextmanager
    def start(self, folder: Path, name: str, *words: str) -> Iterator[Program]:
        """Starts `python train.py` in a run's folder, which has directories for its sockets and temporary files.

        Args:
            name: of the command; its output lies in the folder of this name.
        """
        own = {"TMPDIR": folder / "t", "XDG_RUNTIME_DIR": folder / "s"}
        for path in own.values():
            path.mkdir(0o700, parents=True, exist_ok=True)  # private: else sockets lie elsewhere
        environment = {name: str(path) for name, path in own.items()}
        command = [sys.executable, "train.py", "run.tensorboard=false", *words]
        with program(command, folder / name, environment) as started:
            yield started

    def undisturbed(self) -> Outcome:
        """The outcome of the run on one worker, without any fault."""
        with new_directory("r-", self.directory) as folder:
            with self.start(folder, "c", *self.words(), "mesh=single", f"run.dir={folder / 'run'}") as run:
                run.finish(_STILL_S * 4)
            return read_outcome(folder / "run", self.steps)


class Soak:
    """Carries a plan out on one run."""

    def __init__(self, plan: Plan, place: Place, folder: Path) -> None:
        self.report = Report(plan)
        self._plan = plan
        self._place = place
        self._folder = folder
        self._watch = Watch(folder / "run")
        self._run: Program | None = None
        self._marks: list[str] = []
        self._descriptors: list[tuple[object, Counter[str]]] = []
        self._shared = set(os.listdir("/dev/shm"))
        self._of_last_life: set[int] = set()  # workers that a restart ends; it may take them a while
        self._progress = (0, 0, 0.0)

    def carry_out(self, standard: Outcome) -> Report:
        """Starts the run, strikes it, waits for its end, and checks what must hold."""
        began = time.monotonic()
        words = [*self._place.words(), *self._plan.words(), f"run.dir={self._watch.run_dir}"]
        faults, commands = list(self._plan.faults), 0
        # Commands that were killed are closed at the end only: their workers may live on beside the one that resumes.
        with contextlib.ExitStack() as stack:
            try:
                while words:
                    self._run = stack.enter_context(self._place.start(self._folder, f"c{commands}", *words))
                    self._marks.append(self._run.mark)
                    commands += 1
                    self._touch()
                    words = self._one_command(faults)
                self._await_end_of_all()
                self._check(standard)
            except SoakError as error:
                self.report.problems.append(str(error))
        self.report.resumed = max(0, commands - 1)
        self.report.not_reached = len(faults)
        self.report.told = Counter(event["event"] for event in self._watch.events)
        self.report.seconds = time.monotonic() - began
        return self.report

    # ---- one command, from its start to its end

    def _one_command(self, faults: list[Fault]) -> list[str]:
        """Carries faults out until the command has ended. Returns the words of the one that resumes it, if any."""
        assert self._run is not None
        while faults and self._alive():
            fault = faults.pop(0)
            try:
                if fault.kind in OF_CONTROLLER:
                    if self._strike_controller(fault):
                        return [f"train.resume={self._watch.run_dir}"]
                else:
                    self._strike_workers(fault)
            except _Ended:
                faults.insert(0, fault)
        self._settle()
        with contextlib.suppress(_Ended):
            while True:
                self._pause(_LOOK_S)
        if code := self._run.process.returncode:
            raise SoakError(f"exit code {code}: {self._output()}")
        return []

    def _alive(self) -> bool:
        assert self._run is not None
        return self._run.process.poll() is None

    def _output(self) -> str:
        assert self._run is not None
        return self._run.log.read_text(errors="replace").strip()[-500:]

    def _touch(self) -> None:
        self._progress = (self._watch.step, self._watch.life, time.monotonic())

    def _pause(self, seconds: float) -> None:
        """Sleeps for a moment.

        Raises:
            _Ended: the command has ended.
            SoakError: it stands still.
        """
        time.sleep(seconds)
        step, life, since = self._progress
        if (step, life) != (self._watch.step, self._watch.life):
            self._touch()
        elif time.monotonic() - since > _STILL_S:
            status = self._watch.status()
            raise SoakError(f"no step for {_STILL_S:.0f} s after step {step}: {json.dumps(status)}; {self._output()}")
        if not self._alive():
            raise _Ended

    def _until(self, condition: Callable[[], object], seconds: float, look: float = _LOOK_S) -> bool:
        """Waits for a condition. Returns whether it held within its time."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                return False
            if look < _LOOK_S:
                time.sleep(look)
                if not self._alive():
                    raise _Ended
            else:
                self._pause(look)
        return True

    # ---- moments

    def _pace(self, fault: Fault) -> None:
        """Lets some steps pass, and the run get at least two workers."""
        goal = self._watch.step + fault.after
        self._until(lambda: self._watch.step >= goal, _STILL_S)
        # What loses more than there are copies of needs a checkpoint to go back to.
        self._until(lambda: self._watch.count("checkpoint"), _STILL_S)
        self._look_at_descriptors()
        self._until(self._enough, _STILL_S, _LOOK_S * 5)

    def _enough(self) -> bool:
        """True if there are workers to lose. Asks for more where nobody else would: for those that have left."""
        status = self._watch.status()
        if status is None or status["starting"]:
            return False
        present = len(status["members"]) + len(status["newcomers"])
        wanted = self._plan.workers if self._plan.replace else _FEWEST
        if present < wanted and not status["changing"]:
            self._watch.add(wanted - present)
        return len(status["members"]) >= _FEWEST and not status["leaving"]

    def _await(self, fault: Fault) -> str:
        """Waits for the fault's moment. Returns the moment that has come."""
        match fault.moment:
            case "start":
                came = self._starts()
            case "restart":
                came = self._provoke_restart()
            case "join":
                came = self._provoke_join()
            case "checkpoint":
                came = self._until(self._watch.writes_checkpoint, _MOMENT_S, _FINE_S)
            case "validation":
                came = self._until(self._watch.validates, _MOMENT_S, _FINE_S)
            case _:
                came = True
        if not came:
            self.report.missed[fault.moment] += 1
        if fault.delay:
            self._pause(fault.delay)
        return fault.moment if came and self._holds(fault.moment) else ANY

    def _holds(self, moment: str) -> bool:
        """True if a moment with a delay in it is not over yet."""
        if moment in (START, RESTART):
            status = self._watch.status()
            return status is None or status["starting"]
        if moment == JOIN:
            status = self._watch.status()
            return status is not None and bool(status["newcomers"] or status["learners"])
        return True

    def _starts(self) -> bool:
        assert self._run is not None
        return self._until(self._run.workers, _STILL_S)

    def _provoke_restart(self) -> bool:
        """Kills two workers at once, which loses state unless there are more copies; then waits for new workers."""
        assert self._run is not None
        before = self._watch.count("restart")
        old = self._of_last_life = set(self._run.workers())
        members = self._members()
        self._kill(members[: min(2, len(members) - 1)], KILL, ANY)
        if not self._until(lambda: self._watch.count("restart") > before, 2.0):
            return False
        run = self._run
        return self._until(lambda: set(run.workers()) - old, _STILL_S)

    def _provoke_join(self) -> bool:
        """Has a worker join: in place of one that is killed for it, or asked for."""
        status = self._watch.status()
        if status is None:
            return False
        if not status["newcomers"]:
            if self._plan.replace:
                self._kill(self._members()[-1:], KILL, ANY)
            else:
                self._watch.add(1)
        return self._until(lambda: (self._watch.status() or {}).get("newcomers"), _MOMENT_S, _FINE_S)

    # ---- faults

    def _members(self, *, newcomers: bool = True) -> list[tuple[int | None, int]]:
        """(rank, pid) of the living workers. Ranks are None while workers start."""
        assert self._run is not None
        status = self._watch.status()
        if status is None or status["starting"]:
            return [(None, pid) for pid in self._run.workers() if pid not in self._of_last_life]
        return [
            (w["rank"], w["pid"]) for w in status["members"] + status["newcomers"] * newcomers if w["pid"] is not None
        ]

    def _strike_workers(self, fault: Fault) -> None:
        if fault.moment != START:
            self._pace(fault)
        # A newcomer that stands still delays nobody: it is given up after timeouts.join, when a run may be over.
        stops = fault.kind in (PAUSE, LATE, HANG)
        known = self._members(newcomers=not stops) if fault.moment in (CHECKPOINT, VALIDATION) else None
        moment = self._await(fault)
        workers = known or self._members(newcomers=not stops)
        if fault.newcomer and not stops and moment == JOIN and (status := self._watch.status()):
            new = {w["rank"] for w in status["newcomers"]} | set(status["learners"])
            workers = sorted(workers, key=lambda worker: worker[0] not in new)
            victims = workers[:1] + [workers[1 + i] for i in chosen(fault.victims[1:], len(workers) - 1)]
        else:
            victims = [workers[i] for i in chosen(fault.victims, len(workers))]
        members = set(self._members(newcomers=False))
        while victims and members <= set(victims):
            victims.pop()
        match fault.kind:
            case "kill" | "pair":
                self._kill(victims, fault.kind, moment, fault.gap)
            case "term":
                for victim in victims:
                    self._signal(victim, signal.SIGTERM, fault.kind, moment)
            case _:
                for victim in victims:
                    self._stop(victim, fault, moment)

    def _kill(self, victims: list[tuple[int | None, int]], kind: str, moment: str, gap: float = 0.0) -> None:
        for number, victim in enumerate(victims):
            if number:
                time.sleep(gap)
            self._signal(victim, signal.SIGKILL, kind, moment)

    def _stop(self, victim: tuple[int | None, int], fault: Fault, moment: str) -> None:
        """SIGSTOP, and what follows it."""
        rank, pid = victim
        if not self._signal(victim, signal.SIGSTOP, fault.kind, moment):
            return
        if fault.kind == PAUSE:
            time.sleep(fault.gap)
        elif rank is not None:
            self._until(lambda: self._is_gone(rank, pid), _STILL_S)
        if fault.kind in (PAUSE, LATE):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _is_gone(self, rank: int, pid: int) -> bool:
        own = lives(self._watch.events)[-1]
        told = any(event["event"] in ("fail", "leave") and rank in event["ranks"] for event in own)
        return told or not Path(f"/proc/{pid}").exists()

    def _signal(self, victim: tuple[int | None, int], number: int, kind: str, moment: str) -> bool:
        rank, pid = victim
        life = self._watch.life
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return False
            os.kill(pid, number)
        except (OSError, ProcessLookupError):
            return False
        # Its step is read afterwards: this process may have been held up before the signal, while the run went on.
        self.report.strikes.append(Strike(kind, moment, life, self._watch.step, rank, pid))
        return True

    def _strike_controller(self, fault: Fault) -> bool:
        """Ends the command, and checks how it ends. Returns False if it had ended before."""
        assert self._run is not None
        self._pace(fault)
        # Without a checkpoint a killed controller leaves what its workers save; a run of no step has nothing.
        moment = self._await(fault)
        pid, kind = self._run.process.pid, fault.kind
        strike = Strike(kind, moment, self._watch.life, self._watch.step, None, pid)
        roots = [child for child, parent in processes_with(self._run.mark).items() if parent == pid]
        self._run.process.send_signal(signal.SIGTERM if kind == CONTROLLER_TERM else signal.SIGKILL)
        for root in roots if kind == ROOTS_KILL else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(root, signal.SIGKILL)
        try:
            code = self._run.process.wait(_STOPPED_S)
        except subprocess.TimeoutExpired:
            raise SoakError(f"{strike}: it did not end within {_STOPPED_S:.0f} s; {self._output()}") from None
        if code == 0 and self._watch.count("finish"):
            return False
        self.report.strikes.append(strike)
        expected = TERMINATED if kind == CONTROLLER_TERM else -signal.SIGKILL
        if code != expected:
            self.report.problems.append(f"{strike}: exit code {code}, not {expected}: {self._output()}")
        elif kind == CONTROLLER_TERM and "train.resume=" not in self._output():
            self.report.problems.append(f"{strike}: it does not print how to go on: {self._output()}")
        if kind != CONTROLLER_TERM and fault.at_once:
            return True
        self._await_end_of_all()
        return True

    # ---- checks

    def _await_end_of_all(self) -> None:
        """All processes of commands that have ended end, too: at once, or after they have saved their state.

        Raises:
            SoakError: some are left.
        """
        until = time.monotonic() + _ORPHANS_S
        while left := [pid for mark in self._marks for pid in processes_with(mark)]:
            if time.monotonic() > until:
                raise SoakError(f"{len(left)} processes are left: {[_command(pid) for pid in left]}")
            time.sleep(_LOOK_S)

    def _settle(self) -> None:
        """Waits until nothing changes any more, for a last look at descriptors."""
        with contextlib.suppress(_Ended):
            self._until(self._is_settled, _SETTLED_S, _LOOK_S * 5)
            self._look_at_descriptors()

    def _is_settled(self) -> bool:
        status = self._watch.status()
        if status is None or status["starting"]:
            return False
        starts = not all(spare["ready"] for spare in status["spares"])
        return not starts and not any(status[name] for name in ("newcomers", "leaving", "learners", "changing"))

    def _look_at_descriptors(self) -> None:
        """Counts the controller's descriptors, if the run is at rest.

        A file that is written to disk for a checkpoint is open twice for as long as the disk takes. What has grown is
        looked at again: a leak stays.
        """
        until = time.monotonic() + _SETTLED_S
        while (look := self._descriptors_at_rest()) is not None:
            if not leaked([*self._descriptors, look]) or time.monotonic() > until:
                self._descriptors.append(look)
                self.report.looks += 1
                return
            time.sleep(0.5)

    def _descriptors_at_rest(self) -> tuple[str, Counter[str]] | None:
        """The state of the run, and the fewest descriptors of several looks; None if the run is not at rest."""
        assert self._run is not None
        looks = []
        for _ in range(_LOOKS):
            if not self._is_settled():
                return None
            time.sleep(_LOOK_S)  # the connection of that question is closed by then
            looks.append(_descriptors(self._run.process.pid))
        status = self._watch.status()
        if status is None or not self._is_settled():
            return None
        # One process, also through restarts.
        state = f"command {len(self._marks)}, {len(status['members'])} workers, {len(status['spares'])} spares"
        return state, min(looks, key=lambda look: sum(look.values()))

    def _check(self, standard: Outcome) -> None:
        """Checks a run that has finished."""
        problems = self.report.problems
        try:
            found = read_outcome(self._watch.run_dir, self._place.steps)
        except (OSError, ValueError) as error:
            problems.append(str(error))
        else:
            problems += differences(found, standard)
        problems += untold(self._watch.events, self.report.strikes, self._place.steps)
        problems += mended(self._watch.events)
        problems += leaked(self._descriptors)
        problems += [f"left: {path}" for path in self._left()]

    def _left(self) -> list[str]:
        """Files that are there and should not."""
        run_dir = self._watch.run_dir
        found = [path for name in ("s", "t") for path in (self._folder / name).rglob("*")]
        found += [*run_dir.rglob(".*"), *run_dir.rglob("ctl.sock"), *run_dir.rglob("trace-*")]
        found += [path for path in (run_dir / "checkpoints").glob("*") if not (path / "manifest.json").exists()]
        return [str(path) for path in [*found, *self._left_in_shared_memory()]]

    def _left_in_shared_memory(self) -> list[Path]:
        """Files in /dev/shm that nobody uses. All processes of the run have ended: what is used is another program's.

        Another program may be about to map its file, or to remove it, so a file is left if it is there for a while.
        Semaphores of multiprocessing are another program's in any case: nothing here uses that module.
        """
        until = time.monotonic() + _OTHERS_S
        while True:
            names = sorted(set(os.listdir("/dev/shm")) - self._shared)
            shared = [Path("/dev/shm", name) for name in names if not name.startswith("sem.mp-")]
            left = [path for path in shared if not in_use(path) and path.exists()]
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.5)


def run_plan(plan: Plan, place: Place, standard: Outcome, keep: Path | None) -> Report:
    """One run with the faults of a plan. What a run with problems has left is moved to `keep`."""
    with new_directory("k-", place.directory) as folder:
        soak = Soak(plan, place, folder)
        report = soak.carry_out(standard)
        if report.problems and keep is not None:
            target = keep / f"seed{plan.seed}-run{plan.number}"
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                os.rename(folder, target)
            (target / "strikes").write_text("\n".join([str(plan), *map(str, report.strikes), *report.problems]) + "\n")
            say(f"  kept: {target}")
        return report


def _descriptors(pid: int) -> Counter[str]:
    targets = []
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                targets.append(os.readlink(entry))
    return by_kind(targets)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return f"{pid} {state} {words.decode(errors='replace')[:100]}"
    return str(pid)
