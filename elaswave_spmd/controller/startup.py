"""The start of a run, from settings to a running controller: launcher, plan, the run's directory, and restarts.

`run` is the entry for the command line. It calls `train`, which is the entry for Python. `_Lives` fixes the order in
which everything is made and taken down again. A *life* is the time from one start of the workers to their end: a run
that begins again from a checkpoint has several.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from elaswave_spmd.by_value import ByValue
from elaswave_spmd.callbacks.callback import Callback
from elaswave_spmd.callbacks.named import checked
from elaswave_spmd.conf import checks
from elaswave_spmd.conf.schema import AUTO, LIVE, SPLIT_POINTS, RuntimeSettings, Settings
from elaswave_spmd.controller.checkpoints import CHECKPOINT_KEPT, CheckpointSpec, kept_fields
from elaswave_spmd.controller.dvfs import Frequencies
from elaswave_spmd.controller.ending import Command, Ending
from elaswave_spmd.controller.io import ProcessIO
from elaswave_spmd.controller.lasting_listeners import LastingListeners
from elaswave_spmd.controller.launching import (
    data_spec,
    fork_server_of,
    gather,
    launcher_of,
    most_workers,
    open_agents,
    raise_fd_limit_for,
    start_launcher,
)
from elaswave_spmd.controller.loop import Controller
from elaswave_spmd.controller.model_checks import ModelChecks
from elaswave_spmd.controller.orphaned_run import OrphanedRun, find_orphaned_run
from elaswave_spmd.controller.outcomes import Outcome, RestartFrom, RunFinished, RunStopped
from elaswave_spmd.controller.resume import ResumePoint, complete, going_back_to, open_run
from elaswave_spmd.controller.run_log import RunLog
from elaswave_spmd.data import prepare_data
from elaswave_spmd.errors import ConfigError, RunError, UserError
from elaswave_spmd.output import say, say_error
from elaswave_spmd.run_dir import RunDir, RunObserver
from elaswave_spmd.run_dir.best import ranked_steps
from elaswave_spmd.run_dir.captured_output import CapturedOutput
from elaswave_spmd.run_dir.checkpoints import prune, remove_superfluous, remove_unfinished
from elaswave_spmd.run_dir.discard import discard_after
from elaswave_spmd.run_dir.display import make_display, shows_live
from elaswave_spmd.run_dir.faults import FaultCount
from elaswave_spmd.run_dir.listener import Listeners
from elaswave_spmd.run_dir.lock import WORKERS_LOCK, lock_run_dir
from elaswave_spmd.run_dir.trace import merge_trace
from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient
from elaswave_spmd.runtime.processes.launcher import Launcher
from elaswave_spmd.runtime.processes.scratch import Scratch
from elaswave_spmd.runtime.processes.stop_signals import StopSignals, handle_again
from elaswave_spmd.weights.resolve import resolved

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan

_SAVED_S = 0.05  # seconds between two checks whether workers that save their state have ended


def run(
    settings: Settings,
    *,
    here: bool = False,
    command: Command | None = None,
    signals: StopSignals | None = None,
    callbacks: Sequence[Callback] = (),
    run_dir_fd: int | None = None,
) -> int:
    """Train with these settings. If the run does not finish, print why, and how to go on.

    Args:
        here: as for ForkServerClient.start; True only in the process of a command.
        command: the command as it was typed; the command that resumes the run is made from it.
        signals: the handler of the signals that ask the run to end; None if the caller has none yet.
        callbacks: are told of the run, before those that `run.callbacks` names.
        run_dir_fd: a descriptor to which the path of the run's directory is written as one line, for a supervisor; None
            if there is no supervisor.

    Returns:
        The exit code of the command.

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
                say_error("\n".join(ending.lines()))
                return ending.exit_code(signals.first)


@dataclass(frozen=True)
class _Begun:
    """A life of a run for which everything is made, and has to be taken down at its end.

    Args:
        start: the point at which the life begins; it holds the locks of the run's directories.
    """

    run_dir: RunDir
    start: ResumePoint
    observer: RunObserver
    frequencies: Frequencies
    controller: Controller


class Unfinished(Exception):  # noqa: N818  (it wraps an error)
    """A run did not finish. The command line and `elaswave_spmd.train` catch it and report it to the user.

    Attributes:
        error: the exception that ended the run.
        run_dir: the directory that the run leaves behind; None if it leaves nothing.
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
        signals: the handler of the signals that ask the run to end; the caller has entered it.
        here: as for ForkServerClient.start.
        given: objects that workers get by value, as they cannot import them; None if there are none.
        callbacks: as for `run`.
        run_dir_fd: as for `run`.

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
    """The lives of one run. When state is lost for good the run begins again, usually from a checkpoint.

    Attributes:
        run_dir: the directory that the run leaves behind; None if it leaves nothing.
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
        self._has_gone_back = False  # True once it went back as it could not be decided which worker was wrong
        self._has_begun_again = False
        self._faults = FaultCount()  # of all lives
        self._captured: CapturedOutput | None = None  # what workers print, where a live view is shown
        self.run_dir: Path | None = None

    def run(self, *, here: bool) -> None:
        """Run from the first worker to the last step.

        Raises:
            BaseException: what ended the run; all workers are gone.
        """
        try:
            self._run(here=here)
        except BaseException as error:
            # For an error between two lives, or at the begin of a later one. An error during a life has ended the
            # listeners already, and then this does nothing.
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
                    if restart.doubted is not None:  # first of all: no failure below may leave wrong results behind
                        # The life that has ended has given its lock up: another command may resume the run.
                        with lock_run_dir(restart.run_dir):
                            discard_after(restart.run_dir, restart.step)
                        self._listeners.given_up(restart.step)
                    restarts.count(restart)
                    self._has_begun_again = True
                    here = False  # the last life has started threads in this process, so it must not fork any more
                    if settings.run.display == LIVE:  # the terminal may be gone by now
                        settings = replace(settings, run=replace(settings.run, display=AUTO))
                    self._has_gone_back |= restart.is_undecided
                    if restart.is_begin:
                        settings, again = beginning_again(settings, restart), restart.run_dir
                        continue
                    # As if the user had resumed the run on the mesh that is left.
                    settings = replace(
                        beginning_again(settings, restart),
                        train=replace(settings.train, resume=str(restart.run_dir), resume_at=None),
                        run=replace(settings.run, dir=None),
                    )
                    again = None
                case RunStopped(error):
                    raise error
                case _:
                    return

    def _run_once(self, settings: Settings, again: Path | None, *, here: bool) -> Outcome:
        """Carry out one life of the run, to its end or to the loss after which the run has to begin again.

        Args:
            again: the directory of the life before, if the run begins once more as that one did; else None.
        """
        # Held, as workers that can be adopted have state to save: the controller handles the signal after the adoption.
        with self._signals.held():
            # Not for a run that begins again: it has ended its own workers.
            if not self._has_begun_again and (orphaned := find_orphaned_run(settings)) is not None:
                return self._go_on(orphaned)
        self._signals.check()  # a signal may have come by now, or while the last life was cleaned up
        # Held, so that no signal interrupts between the making of the scratch directory and the code that removes it.
        with self._signals.held():
            scratch = Scratch()
            # Started before everything else: this process still has a single thread, so it may fork, and the fork
            # server imports torch while this process looks for the data.
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
        """A context in which signals raise, within one in which they are held. A signal that is pending raises now."""
        with self._signals.raising():
            self._signals.check()
            yield

    def _go_on(self, orphaned: OrphanedRun) -> Outcome:
        """Carry out the life of a controller that has come back: as `_run_once`, with its predecessor's workers."""
        settings = orphaned.settings
        with contextlib.ExitStack() as unmade:
            # Until a controller is made, an error must not end the workers: they are left for the next controller.
            unmade.callback(orphaned.give_back)
            raise_fd_limit_for(settings)
            agents = open_agents(settings, orphaned.start)
            if agents is not None:
                unmade.callback(agents.give_back)
                say(f"waiting for the agents of the run at {settings.runtime.rendezvous}")
            client, scratch = orphaned.fork_server or self._new_fork_server(settings)
            launcher = launcher_of(settings, client, agents)
            undo = unmade.pop_all()
        with self._ending(launcher, scratch), undo:
            return self._run_with(launcher, settings, scratch.path, None, orphaned, undo)

    def _new_fork_server(self, settings: Settings) -> tuple[ForkServerClient, Scratch]:
        """A fork server that starts newcomers, in place of the predecessor's, which has ended with its workers."""
        scratch = Scratch()
        try:
            return fork_server_of(settings, scratch.path, captured=self._captured), scratch
        except BaseException:
            scratch.remove()
            raise

    @contextlib.contextmanager
    def _ending(self, launcher: Launcher, scratch: Scratch) -> Iterator[None]:
        """A context at whose end all processes of the life are ended and the directory of its sockets is removed."""
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
        """Carry out a life, from the preparation of its data to the end of its workers.

        Args:
            launcher: starts the workers.
            scratch: the directory of the sockets.
            again: as for `_run_once`.
            orphaned: the run whose workers are adopted; None if this life starts its own.
            until_made: undone if no controller can be made; None if there is nothing to undo.
        """
        # Only after the fork server was started: callbacks are a user's code, whose imports may start threads.
        self._listeners.load_callbacks()
        data = prepare_data(data_spec(settings))
        # Imported here and not at the top, as it imports torch: the fork server does the same meanwhile, for workers.
        from elaswave_spmd.worker.plan_run import check_given_weights, plan_run, read_profile

        self._listeners.prepare_texts(data)
        costs = read_profile(settings.schedule.profile) if settings.schedule.profile else None
        plan = plan_run(settings, data, costs=costs)
        check_given_weights(plan)
        # With agents the run is planned twice: this first plan finds errors in the settings before it waits for agents,
        # and the second one below uses the topology of the machines that came.
        if orphaned is not None:
            orphaned.check_plan(plan)
            if launcher.agents is not None:
                launcher.agents.go_on(most_workers(settings), settings.to_dict(), data.to_dict())
        elif (topology := gather(launcher, settings, data)) is not None:
            plan = plan_run(settings, data, topology, costs)
        handle_again(self._signals)
        begun = self._begin(plan, launcher, scratch, again, orphaned, until_made or contextlib.ExitStack())
        return self._train(plan, launcher, begun)

    def close(self) -> None:
        """Stop capturing what workers print. Idempotent."""
        if self._captured is not None:
            self._captured.close()
            self._captured = None

    def _show_captured(self) -> None:
        """Print what workers have written to the captured output and the live view has not shown."""
        if self._captured is not None:
            for line in self._captured.lines(rest=True):
                say_error(line)

    def _train(self, plan: RunPlan, launcher: Launcher, begun: _Begun) -> Outcome:
        """Train until the workers have ended, and discard the run's directory if nothing in it is worth keeping."""
        run_dir = begun.run_dir
        before, self.run_dir = self.run_dir, run_dir.path
        if self._run_dir_fd is not None:
            with contextlib.suppress(OSError):  # the supervisor is gone
                os.write(self._run_dir_fd, os.fsencode(run_dir.path) + b"\n")
        with self._signals.held():
            outcome = self._control(plan, launcher, begun)
            has_started = begun.controller.protocol.started
            if self._signals.first is not None and not has_started and run_dir.discard():
                self.run_dir = None  # no step was done, so the user can simply give the same command again
            if isinstance(outcome, RunStopped) and isinstance(outcome.error, UserError):
                # A worker has refused the input before it was ready. This is treated like bad input that is found
                # before any worker is started: nothing is left behind.
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
        """Make the controller, and everything that it needs. An error in here leaves no trace of the run.

        Once this has returned, the run's directory stays, with its log.
        """
        signals = self._signals
        with contextlib.ExitStack() as undo:
            # For a new directory signals are held, so that none interrupts between its making and the callback that
            # discards it. A directory that is resumed stays in any case, and opening it may have to wait for the
            # workers of a killed controller, which a signal must be able to interrupt.
            with signals.held() if plan.settings.train.resume is None else contextlib.nullcontext():
                if orphaned is None:
                    run_dir, start = open_run(plan, plan.data, again)
                    undo.callback(start.close)
                else:  # on an error `until_made` gives the locks and the workers back, for the next controller
                    run_dir, start = orphaned.open_run_dir(), orphaned.start
                undo.callback(run_dir.discard)
            if orphaned is None:
                signals.check()
            launcher.ready()
            display = make_display(choice=plan.settings.run.display, captured=self._captured)
            board = plan.settings.run.tensorboard
            listener = Listeners(self._listeners.made) if self._listeners.made else None
            observer = RunObserver(run_dir, display=display, board=board, listener=listener, faults=self._faults)
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
        """Let the controller train; then end the workers, and clean up the checkpoints in the run's directory."""
        run_dir, observer = begun.run_dir, begun.observer
        ends = self._listeners.ending(observer)
        # True if shards without a manifest may be a whole checkpoint, which is so after an exception.
        may_be_completed = True
        with contextlib.closing(begun.start):
            try:
                with observer, ends as end, begun.frequencies, contextlib.ExitStack() as ended:
                    ended.callback(merge_trace, run_dir.path)
                    ended.callback(launcher.stop, 0.0)
                    try:
                        with self._signals.as_events(begun.controller.stop_requested):
                            end.outcome = outcome = begun.controller.run()
                    except Exception:  # not KeyboardInterrupt: then a signal asks to end at once, without saving
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
                        # Only here: after any other end, shards without a manifest may still become a checkpoint, now
                        # (`complete` below) or with the next controller.
                        remove_unfinished(run_dir.path)
                        self._remove_worse(run_dir.path, observer)
            finally:
                if may_be_completed:
                    # The command's last lines name the newest checkpoint. That may be one whose last shard was written
                    # and not reported before the end. If it cannot be completed now, the error is left to the command
                    # that resumes the run, so that it does not hide the error that ended this one.
                    with contextlib.suppress(OSError, RunError, UserError):
                        if going_back_to(run_dir.path) is None:  # otherwise it may be wrong
                            complete(run_dir.path)
        return outcome

    def _let_save(self, launcher: Launcher, members: Iterable[int], seconds: float) -> None:
        """Wait until the members have saved their state and ended. The controller has closed its links to them.

        To the members this looks as if the controller had been killed, so they finish the step under way and save. A
        signal ends the waiting. If the fork server of this machine has died, so have the workers here, and those of
        agents alone save.
        """
        members, until, signals = list(members), time.monotonic() + seconds, list[int]()
        if not (left := launcher.may_live(members)):
            return
        who = "the workers" if len(left) == len(members) else "the workers on other machines"
        say(f"{who} save their state, within {seconds:g} s; a signal ends them at once")
        # A RunError is suppressed, as another error is being raised.
        with self._signals.passing_to(signals.append), contextlib.suppress(RunError):
            while (left := launcher.may_live(left)) and not signals and time.monotonic() < until:
                if launcher.signal(left[-1], 0):
                    time.sleep(_SAVED_S)
                else:
                    left.pop()

    def _remove_worse(self, run_dir: Path, observer: RunObserver) -> None:
        """Remove the checkpoints that the last validations have pushed out of the best (`checkpoint.keep_best`).

        The run has its result, so it ends as one that has finished even if they stay: because they cannot be removed,
        as the event says then, or because it takes longer than `timeouts.shutdown`, or because of a signal.
        """
        settings, until, signals = self._settings, time.monotonic() + self._settings.timeouts.shutdown, list[int]()
        keep, keep_best = settings.checkpoint.keep, settings.checkpoint.keep_best
        if not keep_best:
            return
        with self._signals.passing_to(signals.append):
            try:
                prune(
                    run_dir,
                    keep,
                    None,
                    ranked_steps(run_dir),
                    keep_best,
                    is_over=lambda: bool(signals) or time.monotonic() >= until,
                )
            except (OSError, RunError, UserError) as error:
                step = 0 if observer.last is None else observer.last.step
                with contextlib.suppress(RunError):  # a full disk
                    observer.on_event(CHECKPOINT_KEPT, **kept_fields(step, str(error)))


def beginning_again(settings: Settings, restart: RestartFrom) -> Settings:
    """The settings of a run that begins again as it began, or goes back to a checkpoint, on the mesh that is left.

    Injected faults of steps that were begun before are left out: a fault happens at the first attempt of its step only.
    Faults with a rate stay, as they may happen in every step. Faults at points that the mesh that is left never reaches
    would be refused.
    """
    chaos, last = settings.chaos, restart.step if restart.doubted is None else restart.doubted
    is_one_stage = len(restart.mesh.shape.stage_sizes) == 1 and not settings.schedule.stages
    unreached = SPLIT_POINTS if is_one_stage else ()
    due = (event for event in chaos.events if event.rate or event.step > last + 1)
    events = tuple(event for event in due if event.point not in unreached)
    runtime = with_local_workers(settings.runtime, restart.mesh.shape.num_workers)
    return replace(settings, mesh=restart.mesh, runtime=runtime, chaos=replace(chaos, events=events))


def with_local_workers(runtime: RuntimeSettings, most: int) -> RuntimeSettings:
    """The settings with `local_workers` limited to `most`, the number of workers of the new mesh.

    Fewer workers may be left than the settings gave to the controller's machine.
    """
    local = runtime.local_workers
    return runtime if local is None else replace(runtime, local_workers=min(local, most))


class Restarts:
    """Counts the restarts of one command, so that a run that gets no further is not begun again forever."""

    _MAX_IN_A_ROW = 3

    def __init__(self) -> None:
        self._steps: list[int] = []

    def count(self, restart: RestartFrom) -> None:
        """Count a restart.

        Raises:
            RunError: the run has begun again after the same step too often.
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
    """Make the controller of a run whose workers are real processes.

    Args:
        launcher: starts the workers.
        observer: the run's directory, display and boards.
        scratch: the directory of the sockets.
        start: the point at which the run begins; None for a new run, which begins with its initial values.
        frequencies: as in Controller.
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
