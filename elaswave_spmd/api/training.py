"""`elaswave_spmd.train`: the command `train` as a function, for scripts and notebooks."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elaswave_spmd.api.keywords import Given, copied, name_data, name_model, put
from elaswave_spmd.api.results import RunResult, load_run
from elaswave_spmd.by_value import ByValue
from elaswave_spmd.conf.given_files import path_given
from elaswave_spmd.errors import RunError, RunInterrupted, StoppedBySignal
from elaswave_spmd.runtime.processes.stop_signals import Signalled, StopSignals
from elaswave_spmd.user_code import refuse_edited

if TYPE_CHECKING:
    from elaswave_spmd.callbacks import Callback
    from elaswave_spmd.conf.schema import Settings
    from elaswave_spmd.controller.startup import Unfinished
    from elaswave_spmd.models import LayeredModel


def train(
    model: str | Callable[..., LayeredModel] | None = None,
    data: str | Callable[..., Any] | Any | None = None,
    mesh: str | None = None,
    *,
    steps: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    settings: Mapping[str, Any] | None = None,
) -> RunResult:
    """Train a model on this machine, or with agents on several, from a script or a notebook. Returns when it has ended.

    It is the command `python train.py`, with the same settings, the same errors and the same files. May be called again
    and again in one process, from one thread at a time; what it changes in the process is put back: handlers of
    signals, limits, `sys.path`. Ctrl-C reaches it on the main thread only.

        run = ew.train(MyModel, MyData(), "dp2_pp2", steps=200, settings={"optim.lr": 1e-3})
        run.history.loss, run.weights["head.weight"]

    What other processes can import (a class in a file) they import, by its name. Anything else (what a script's
    `__main__` or a cell of a notebook defines, lambdas, constructed datasets) they get by value: pickled once by
    cloudpickle, in each process of this machine the same bytes.

    Args:
        model: a choice ("llama_tiny"), "my_file.MyModel", a subclass of LayeredModel, or a function that returns one.
            It is called in each process, with those of vocab_size, seq_len, layers, d_model, heads and dropout that it
            names. None: the default, or that of the run that is resumed.
        data: a choice ("stdlib", "text", "bin"), "my_file.MyDataset", a class or function, called with what it names of
            seq_len and split; or a map-style dataset that is constructed already (`__len__`, `__getitem__` with a
            sample, and `vocab_size`), of which the tail is held out for validation.
        mesh: "single", "dp4", "dp2_pp2", ...
        steps: `train.steps`.
        resume: the directory of a run to go on with, `train.resume`, in its own directory unless `run_dir` names
            another one. A model or data that it got by value is given again.
        run_dir: `run.dir`; None: a new one, runs/<model>-<mesh>-<time>.
        callbacks: objects of subclasses of `elaswave_spmd.Callback`, which hear of the run in this process, each on a
            thread of its own.
        settings: names and values of the command line, {"optim.lr": 1e-3, "sharding": "zero2"}, as Python has them: a
            text is a text, and None is null.

    Returns:
        The run, read from its files.

    Raises:
        UserError: bad input, with the rule and the fix (`elaswave_spmd.errors`); nothing is left behind.
        RunError: the run has failed: an exception in a worker (WorkerError), too few workers, a full disk, ... Its
            state and the call that goes on are printed to stderr; `error.run_dir` is its directory.
        RunInterrupted: Ctrl-C, the stop button of a notebook, SIGTERM or SIGHUP. It is a KeyboardInterrupt. The run has
            finished its step and has saved its state; its message has the call that goes on. A second one ends the
            run at once.
    """
    given = Given()
    named = copied(settings)
    name_model(model, named, given)
    name_data(data, named, given)
    put(named, "mesh", mesh, "mesh")
    put(named, "steps", steps, "train.steps")
    put(named, "resume", None if resume is None else path_given("resume", resume), "train.resume")
    put(named, "run_dir", None if run_dir is None else path_given("run_dir", run_dir), "run.dir")
    with StopSignals() as signals, _process_as_it_was():
        try:
            with signals.held():  # inside Hydra an exception of ours can turn into another one
                from elaswave_spmd.conf.compose import settings_from, words_of
                from elaswave_spmd.controller.torchrun import refuse_call

                composed = settings_from(words_of(named))
                refuse_call(composed, [name for name, value in named.items() if value is not None])
            signals.check()
            return load_run(_trained(composed, signals, given, named, callbacks))
        except Signalled as signalled:  # before there was a run, or while its files were read
            raise RunInterrupted(str(signalled), None) from None


def _trained(
    settings: Settings, signals: StopSignals, given: Given, named: Mapping[str, Any], callbacks: Sequence[Callback]
) -> Path:
    """Train; the run's directory.

    Args:
        settings: of the run; `named` are those of the call among them.

    Raises:
        UserError, RunError, RunInterrupted: as for `train`.
    """
    from elaswave_spmd.runtime.devices.selection import worker_start

    for keyword, target in (("model", settings.model.target), ("data", settings.data.target)):
        if target is not None:
            refuse_edited(target, keyword)
    worker_start(settings)  # refuses a device that cannot be used here; what it lacks may keep torch from importing
    from elaswave_spmd.controller import startup

    by_value = ByValue.of(given.objects) if given.objects else None
    try:
        return startup.train(settings, signals, given=by_value, callbacks=callbacks)
    except startup.Unfinished as end:
        with signals.held():
            error = _error_of(end, settings, given, named, callbacks)
    raise error


def _error_of(
    end: Unfinished, settings: Settings, given: Given, named: Mapping[str, Any], callbacks: Sequence[Callback]
) -> BaseException:
    """The exception that the caller gets for a run that did not finish. What is left of the run is in it or printed."""
    from elaswave_spmd.controller.ending import Call, Ending

    call = Call(given.names.get("model"), given.names.get("data"), bool(callbacks), named)
    ending = Ending(end.error, settings, call, end.run_dir)
    if isinstance(end.error, StoppedBySignal | KeyboardInterrupt):
        return RunInterrupted("\n".join(ending.lines()), end.run_dir)
    with contextlib.suppress(OSError):
        print("\n".join(ending.state()), file=sys.stderr, flush=True)
    if isinstance(end.error, RunError):
        end.error.run_dir = end.run_dir
    return end.error


@contextlib.contextmanager
def _process_as_it_was() -> Iterator[None]:
    """A `with` after which this process has the import path and the limit of open files that it had before."""
    path, limit = list(sys.path), resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield
    finally:
        for folder in [folder for folder in sys.path if folder not in path]:
            sys.path.remove(folder)  # the working directory, in which models are looked for
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
