"""The start of a run, from settings to a running controller: launcher, plan, the run's directory, and restarts.

`run` is the entry for the command line, and uses `train`, which is that for Python; `_Lives` has the order in which
everything is made and taken down again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from elaswave_spmd.by_value import ByValue
from elaswave_spmd.callbacks.callback import Callback
from elaswave_spmd.callbacks.named import checked
from elaswave_spmd.conf import checks
from elaswave_spmd.conf.schema import AUTO, LIVE, RuntimeSettings, Settings
from elaswave_spmd.controller.checkpoints import CheckpointSpec
from elaswave_spmd.controller.dvfs import Frequencies
from elaswave_spmd.controller.ending import Command, Ending
from elaswave_spmd.controller.io import ProcessIO
from elaswave_spmd.controller.lasting_listeners import LastingListeners
from elaswave_spmd.controller.launching import (
    data_spec,
    fork_server_of,
    gather,
    most_workers,
    open_agents,
    raise_fd_limit_for,
    start_launcher,
)
from elaswave_spmd.controller.loop import Controller
from elaswave_spmd.controller.model_checks import ModelChecks
from elaswave_spmd.controller.orphaned_run import OrphanedRun, find_orphaned_run
from elaswave_spmd.controller.outcomes import Outcome, RestartFrom, RunFinished, RunStopped
from elaswave_spmd.controller.resume import ResumePoint, complete, open_run
from elaswave_spmd.controller.run_log import RunLog
from elaswave_spmd.data import prepare_data
from elaswave_spmd.errors import ConfigError, RunError, UserError
from elaswave_spmd.run_dir import RunDir, RunObserver
from elaswave_spmd.run_dir.best import ranked_steps
from elaswave_spmd.run_dir.captured_output import CapturedOutput
from elaswave_spmd.run_dir.checkpoints import prune, remove_superfluous, remove_unfinished
from elaswave_spmd.run_dir.discard import discard_after
from elaswave_spmd.run_dir.display import make_display, shows_live
from elaswave_spmd.run_dir.listener import Listeners
from elaswave_spmd.run_dir.lock import WORKERS_LOCK
from elaswave_spmd.run_dir.trace import merge_trace
from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient
from elaswave_spmd.runtime.processes.launcher import Launcher
from elaswave_spmd.runtime.processes.scratch import Scratch
from elaswave_spmd.runtime.processes.stop_signals import StopSignals
from elaswave_spmd.weights.resolve import resolved

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan

_SAVED_S = 0.05  # between two looks at workers that save their state


def run(
    settings: Settings,
    *,
    here: bool = False,
    command: Command | None = None,
    signals: StopSignals | None = None,
    callbacks: Sequence[Callback] = (),
    run_dir_fd: int | None = None,
) -> int:
    """Train with these settings. Returns the exit code; a run that did not finish has said why, and how to go on.

    Args:
        here: as for ForkServerClient.start, if this is a command's process.
        command: as it was typed, for the command that goes on.
        signals: that ask the run to end, where the caller has them already.
        callbacks: that hear of the run, before those that `run.callbacks` names.
        run_dir_fd: a descriptor to which the run's directory is written, a line for a supervisor; None: there is none.

    Raises:
        UserError: bad input, found before the first step; nothing is left behind.
    """
    with contextlib.ExitStack() as stack:
        signals = signals or stack.enter_context(StopSignals())
        try:
            train(settings, signals, here=here, callbacks=callbacks, run_dir_fd=run_dir_fd)
            return 0
        except Unfinished as end:
            with signals.held():
                ending = Ending(end.error, settings, command or Command(), end.run_dir)
                lines = "\n".join(ending.lines())
                with contextlib.suppress(OSError):  # the terminal is closed
                    print(lines, file=sys.stderr, flush=True)
                return ending.exit_code(signals.first)


@dataclass(frozen=True)
class _Begun:
    """A life of a run that may train from now on, and is to be ended.

    Args:
        start: where it begins; it holds the locks.
    """

    run_dir: RunDir
    start: ResumePoint
    observer: RunObserver
    frequencies: Frequencies
    controller: Controller


class Unfinished(Exception):  # noqa: N818  (it wraps an error)
    """A run did not finish. Caught by the two that answer for it, the command line and `elaswave_spmd.train`.

    Attributes:
        error: that ended it.
        run_dir: what the run has written and leaves; None: nothing.
    """

    def __init__(self, error: BaseException, run_dir: Path | None) -> None:
        self.error = error
        self.run_dir = run_dir
        super().__init__(str(error))


def train(
    settings: Settings,
    signals: StopSignals,
    *,
    here: bool = False,
    given: ByValue | None = None,
    callbacks: Sequence[Callback] = (),
    run_dir_fd: int | None = None,
) -> Path:
    """Train with these settings, to the end.

    Args:
        signals: that ask the run to end, entered by the caller.
        here: as for ForkServerClient.start.
        given: what the run gets by value.
        callbacks, run_dir_fd: as for `run`.

    Returns:
        The run's directory.

    Raises:
        UserError: bad input, found before the first step; nothing is left behind.
        Unfinished: anything else.
    """
    if given is not None:
        _refuse_agents(settings, given)
    lives = _Lives(settings, signals, given, checked(callbacks), run_dir_fd)
    try:
        with given.importable() if given is not None else contextlib.nullcontext():
            lives.run(here=here)
    except BaseException as error:
        if isinstance(error, UserError) and lives.run_dir is None:
            raise
        raise Unfinished(error, lives.run_dir) from error
    finally:
        lives.close()
    assert lives.run_dir is not None
    return lives.run_dir


def _refuse_agents(settings: Settings, given: ByValue) -> None:
    if settings.runtime.rendezvous is None:
        return
    names = " and ".join(given.objects)
    raise ConfigError(
        f"{names} cannot be imported, and the run has agents on other machines",
        rule="code goes by value to the processes of this machine only; an agent imports it, and executes nothing that "
        "it is sent",
        where=checks.override("runtime.rendezvous", settings.runtime.rendezvous),
        fix=f"move {names} into a file that is on all machines, and import it from there",
    )


class _Lives:
    """The lives of one run: it begins again, mostly from its checkpoint, where state was lost for good.

    Attributes:
        run_dir: what the run has written and leaves; None: nothing.
    """

    def __init__(
        self,
        settings: Settings,
        signals: StopSignals,
        given: ByValue | None = None,
        callbacks: Sequence[Callback] = (),
        run_dir_fd: int | None = None,
    ) -> None:
        self._run_dir_fd = run_dir_fd
        self._settings = settings
        self._signals = signals
        self._given = given
        self._listeners = LastingListeners(settings, signals, callbacks)
        self._has_gone_back = False  # since nobody could tell which worker was wrong
        self._has_begun_again = False
        self._captured: CapturedOutput | None = None  # what workers print, where a live view is shown
        self.run_dir: Path | None = None

    def run(self, *, here: bool) -> None:
        """Run from the first worker to the last step.

        Raises:
            BaseException: what ended it; all workers are gone.
        """
        try:
            self._run(here=here)
        except BaseException as error:
            # Between two lives, or in the begin of a later one: whatever ends one that trains has ended them already.
            self._listeners.end(error)
            raise

    def _run(self, *, here: bool) -> None:
        settings, restarts = resolved(self._settings), Restarts()
        again: Path | None = None
        if shows_live(settings.run.display):
            self._captured = CapturedOutput()
        while True:
            match self._run_once(settings, again, here=here):
                case RestartFrom() as restart:
                    if restart.doubted is not None:  # first: nothing that follows leaves what may be wrong
                        discard_after(restart.run_dir, restart.step)
                        self._listeners.given_up(restart.step)
                    restarts.count(restart)
                    self._has_begun_again = True
                    here = False  # by now this process has had threads, and must not fork
                    if settings.run.display == LIVE:  # the terminal may be gone by now
                        settings = replace(settings, run=replace(settings.run, display=AUTO))
                    self._has_gone_back |= restart.is_undecided
                    if restart.is_begin:
                        settings, again = beginning_again(settings, restart), restart.run_dir
                        continue
                    # As if the user had resumed the run on the mesh that is left.
                    settings = replace(
                        settings if restart.doubted is None else beginning_again(settings, restart),
                        mesh=restart.mesh,
                        train=replace(settings.train, resume=str(restart.run_dir), resume_at=None),
                        run=replace(settings.run, dir=None),
                        runtime=with_local_workers(settings.runtime, restart.mesh.shape.num_workers),
                    )
                    again = None
                case RunStopped(error):
                    raise error
                case _:
                    return

    def _run_once(self, settings: Settings, again: Path | None, *, here: bool) -> Outcome:
        """One life, from its first worker to its end or to the loss after which it has to begin again.

        Args:
            again: the directory of the life before, if the run begins as that one did; else None.
        """
        # A signal that comes before the workers are adopted is an event afterwards: they have state to save.
        with self._signals.held():
            # A run that begins again has ended its workers.
            if not self._has_begun_again and (orphaned := find_orphaned_run(settings)) is not None:
                return self._go_on(orphaned)
        self._signals.check()  # one may have come by now, or while the last life was cleared up
        # No signal finds the directory half made, or with nobody who removes it.
        with self._signals.held():
            scratch = Scratch()
            # Started first: this process has one thread now, and the fork server imports the rest while this one finds
            # the data.
            try:
                with self._interrupted():
                    launcher = start_launcher(
                        settings, scratch.path, here=here, given=self._given, captured=self._captured
                    )
            except BaseException:
                scratch.remove()
                raise
            with self._ending(launcher, scratch), self._interrupted():
                return self._run_with(launcher, settings, scratch.path, again)

    @contextlib.contextmanager
    def _interrupted(self) -> Iterator[None]:
        """A `with` that signals interrupt, though they are held around it; one that has come already does at once."""
        with self._signals.raising():
            self._signals.check()
            yield

    def _go_on(self, orphaned: OrphanedRun) -> Outcome:
        """The life of a controller that has come back: as `_run_once`, with the workers of the one before."""
        settings = orphaned.settings
        with contextlib.ExitStack() as unmade:
            unmade.callback(orphaned.give_back)  # until a controller is made, an error leaves them to the next one
            raise_fd_limit_for(settings)
            agents = open_agents(settings, orphaned.start)
            if agents is not None:
                unmade.callback(agents.give_back)
                print(f"waiting for the agents of the run at {settings.runtime.rendezvous}", flush=True)
            client, scratch = orphaned.fork_server or self._new_fork_server(settings)
            launcher = Launcher(client, agents)
            undo = unmade.pop_all()
        with self._ending(launcher, scratch), undo:
            return self._run_with(launcher, settings, scratch.path, None, orphaned, undo)

    def _new_fork_server(self, settings: Settings) -> tuple[ForkServerClient, Scratch]:
        """A fork server for newcomers, in place of one that has ended with its workers."""
        scratch = Scratch()
        try:
            return fork_server_of(settings, scratch.path, captured=self._captured), scratch
        except BaseException:
            scratch.remove()
            raise

    @contextlib.contextmanager
    def _ending(self, launcher: Launcher, scratch: Scratch) -> Iterator[None]:
        """A `with` at whose end no process of the life is left, nor the directory of its sockets."""
        try:
            yield
        finally:
            with self._signals.held():
                # No grace: workers treat SIGTERM as a request to leave gracefully, and no controller remains to answer.
                launcher.stop(grace_s=0.0)
                scratch.remove()
                self._show_captured()

    def _run_with(
        self,
        launcher: Launcher,
        settings: Settings,
        scratch: str,
        again: Path | None,
        orphaned: OrphanedRun | None = None,
        until_made: contextlib.ExitStack | None = None,
    ) -> Outcome:
        """Carry out a life, from its data to the end of its workers.

        Args:
            until_made: what is undone if no controller can be made.
        """
        # After the fork server was started: what a user's file imports may start threads.
        self._listeners.load_callbacks()
        data = prepare_data(data_spec(settings))
        # Imported here: it brings torch, which the fork server is importing meanwhile for the workers.
        from elaswave_spmd.worker.plan_run import check_given_weights, plan_run, read_profile

        self._listeners.prepare_texts(data)
        costs = read_profile(settings.schedule.profile) if settings.schedule.profile else None
        plan = plan_run(settings, data, costs=costs)
        check_given_weights(plan)
        # Planned twice where there are agents: what is wrong with the settings is found before anybody waits for them.
        if orphaned is not None:
            if launcher.agents is not None:
                launcher.agents.go_on(most_workers(settings), settings.to_dict(), data.to_dict())
        elif (topology := gather(launcher, settings, data)) is not None:
            plan = plan_run(settings, data, topology, costs)
        begun = self._begin(plan, launcher, scratch, again, orphaned, until_made or contextlib.ExitStack())
        return self._train(plan, launcher, begun)

    def close(self) -> None:
        """Closing again is allowed."""
        if self._captured is not None:
            self._captured.close()
            self._captured = None

    def _show_captured(self) -> None:
        """Show what workers have printed while there was no view."""
        if self._captured is not None:
            with contextlib.suppress(OSError):  # the terminal is closed
                for line in self._captured.lines(rest=True):
                    print(line, file=sys.stderr)

    def _train(self, plan: RunPlan, launcher: Launcher, begun: _Begun) -> Outcome:
        """Train, to the end of the workers."""
        run_dir = begun.run_dir
        before, self.run_dir = self.run_dir, run_dir.path
        if self._run_dir_fd is not None:
            with contextlib.suppress(OSError):  # the supervisor is gone
                os.write(self._run_dir_fd, os.fsencode(run_dir.path) + b"\n")
        with self._signals.held():
            outcome = self._control(plan, launcher, begun)
            has_started = begun.controller.protocol.started
            if self._signals.first is not None and not has_started and run_dir.discard():
                self.run_dir = None  # nothing was done: the same command can be given again
            if isinstance(outcome, RunStopped) and isinstance(outcome.error, UserError):
                # Refused by a worker before it was ready: bad input, as if it had been found before any worker started.
                run_dir.discard()
                self.run_dir = before
        return outcome

    def _begin(
        self,
        plan: RunPlan,
        launcher: Launcher,
        scratch: str,
        again: Path | None,
        orphaned: OrphanedRun | None,
        until_made: contextlib.ExitStack,
    ) -> _Begun:
        """All that a controller needs, and the controller. Until workers train, an error leaves no trace of the run.

        Afterwards the directory stays, with its log.
        """
        signals = self._signals
        with contextlib.ExitStack() as undo:
            # No signal comes between the making of a directory and the note that it is to be removed. One that is
            # resumed stays anyway, and may be waited for.
            with signals.held() if plan.settings.train.resume is None else contextlib.nullcontext():
                if orphaned is None:
                    run_dir, start = open_run(plan, plan.data, again)
                    undo.callback(start.close)
                else:  # `until_made` leaves all to the next controller
                    run_dir, start = orphaned.open_run_dir(), orphaned.start
                undo.callback(run_dir.discard)
            if orphaned is None:
                signals.check()
            launcher.ready()
            display = make_display(choice=plan.settings.run.display, captured=self._captured)
            board = plan.settings.run.tensorboard
            listener = Listeners(self._listeners.made) if self._listeners.made else None
            observer = RunObserver(run_dir, display=display, board=board, listener=listener)
            undo.callback(observer.close)
            frequencies = undo.enter_context(Frequencies.open(plan.settings.schedule, scratch))
            controller = make_controller(
                plan,
                launcher,
                observer,
                scratch,
                start=start,
                frequencies=frequencies,
                has_gone_back=self._has_gone_back,
            )
            if orphaned is None or orphaned.fork_server is None:
                launcher.hold(run_dir.path / WORKERS_LOCK)
            start.life_began()
            undo.pop_all()
            until_made.pop_all()
        return _Begun(run_dir, start, observer, frequencies, controller)

    def _control(self, plan: RunPlan, launcher: Launcher, begun: _Begun) -> Outcome:
        """Let the controller train; then end the workers, and put the run's directory in order."""
        run_dir, observer = begun.run_dir, begun.observer
        ends = self._listeners.ending(observer)
        may_be_completed = True  # after an exception
        with contextlib.closing(begun.start):
            try:
                with observer, ends as end, begun.frequencies, contextlib.ExitStack() as ended:
                    ended.callback(merge_trace, run_dir.path)
                    ended.callback(launcher.stop, 0.0)
                    try:
                        with self._signals.as_events(begun.controller.stop_requested):
                            end.outcome = outcome = begun.controller.run()
                    except Exception:  # else a signal asks for the end at once
                        if begun.controller.protocol.started:
                            members = begun.controller.protocol.placement.mesh.members
                            self._let_save(launcher, members, plan.settings.timeouts.orphan_grace)
                        raise
                    may_be_completed = isinstance(outcome, RunStopped)
                    if isinstance(outcome, RestartFrom):
                        launcher.dismiss("the run begins again")
                    launcher.stop(grace_s=0.0)
                    remove_superfluous(run_dir.path)
                    if isinstance(outcome, RunFinished):
                        # Else what the workers have written may still be completed, now or by the next controller.
                        remove_unfinished(run_dir.path)
                        self._remove_worse(run_dir.path)
            finally:
                if may_be_completed:
                    # Its last lines name the newest checkpoint: also one whose last report had not come yet. What
                    # cannot be completed now is said by whoever resumes the run, and hides no other error here.
                    with contextlib.suppress(OSError, RunError, UserError):
                        complete(run_dir.path)
        return outcome

    def _let_save(self, launcher: Launcher, members: Iterable[int], seconds: float) -> None:
        """Wait until members have saved their state and ended, whose controller has closed its links to them.

        They finish the step under way, as if it had been killed. A signal ends the waiting.
        """
        left, until, signals = list(members), time.monotonic() + seconds, list[int]()
        with contextlib.suppress(OSError):  # the terminal is closed
            print(f"the workers save their state, within {seconds:g} s; a signal ends them at once", flush=True)
        # An error here hides no other one: the fork server has died, say, and with it all that there is to wait for.
        with self._signals.passing_to(signals.append), contextlib.suppress(RunError):
            while left and not signals and time.monotonic() < until:
                launcher.poll()
                if launcher.signal(left[-1], 0):
                    time.sleep(_SAVED_S)
                else:
                    left.pop()

    def _remove_worse(self, run_dir: Path) -> None:
        """Remove the checkpoints that were among the best until the last validations."""
        settings = self._settings.checkpoint
        if settings.keep_best:
            prune(run_dir, settings.keep, None, ranked_steps(run_dir), settings.keep_best)


def beginning_again(settings: Settings, restart: RestartFrom) -> Settings:
    """The settings of a run that begins as it did, or goes back, on the mesh that is left.

    Faults are injected at the first attempt of a step: those of the steps that were begun have happened. Those with a
    rate may happen in every step.
    """
    chaos, last = settings.chaos, restart.step if restart.doubted is None else restart.doubted
    events = tuple(event for event in chaos.events if event.rate or event.step > last + 1)
    runtime = with_local_workers(settings.runtime, restart.mesh.shape.num_workers)
    return replace(settings, mesh=restart.mesh, runtime=runtime, chaos=replace(chaos, events=events))


def with_local_workers(runtime: RuntimeSettings, most: int) -> RuntimeSettings:
    """The settings of a mesh with so many workers: fewer may be left than the controller's machine was to have."""
    local = runtime.local_workers
    return runtime if local is None else replace(runtime, local_workers=min(local, most))


class Restarts:
    """The restarts of one command: a run that gets no further is not begun again for ever."""

    _MAX_IN_A_ROW = 3

    def __init__(self) -> None:
        self._steps: list[int] = []

    def count(self, restart: RestartFrom) -> None:
        """The run is about to begin again.

        Raises:
            RunError: the run has been begun again at the same checkpoint too often.
        """
        self._steps.append(restart.step)
        if self._steps[-self._MAX_IN_A_ROW - 1 :].count(restart.step) > self._MAX_IN_A_ROW:
            raise RunError(
                f"the run was begun again {self._MAX_IN_A_ROW} times after step {restart.step}, and got no further"
            )


def make_controller(
    plan: RunPlan,
    launcher: Launcher | ForkServerClient,
    observer: RunObserver,
    scratch: str,
    *,
    start: ResumePoint | None = None,
    frequencies: Frequencies | None = None,
    has_gone_back: bool = False,
) -> Controller:
    """The controller of a run over real processes.

    Args:
        scratch: directory of the sockets.
        start: the point at which the run begins; None: with initial values.
        has_gone_back: as in Controller.

    Raises:
        ConfigError: the links cannot be opened with these settings.
        DataError, FilesError: the run's journal is damaged, or cannot be written.
    """
    run_dir = observer.run_dir.path
    start = start or ResumePoint.fresh(run_dir)
    checkpoints = CheckpointSpec.for_run(plan, start, run_dir)
    guard = frequencies.socket if frequencies is not None else None
    io = ProcessIO(plan, launcher, scratch, run_dir, checkpoints, frequency_guard=guard, adoption=start.adoption)
    from elaswave_spmd.worker.plan_run import given_digests

    model_checks = ModelChecks(plan, start.digests, given_digests(plan))
    log = RunLog(plan, observer, start)
    return Controller(
        plan,
        io,
        log,
        checkpoints,
        frequencies,
        model_checks,
        has_gone_back=has_gone_back,
        adoption=start.adoption,
    )
