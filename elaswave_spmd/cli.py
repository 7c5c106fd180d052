"""The command line: `python train.py`, `python -m elaswave_spmd train` and `elaswave-spmd train` are the same.

`conf.compose` makes settings of the words, the controller runs them. Exit codes: 0 done; 1 the run failed; 2 bad input,
found before the first step; 130 SIGINT (Ctrl-C), 143 SIGTERM, 129 SIGHUP. Heavy imports wait until the settings are
good.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from elaswave_spmd.errors import ConfigError, RunError, UserError, closest
from elaswave_spmd.output import flush_output, mute_output, say, say_error
from elaswave_spmd.runtime.processes.stop_signals import Signalled, StopSignals
from elaswave_spmd.runtime.processes.supervisor import supervise, supervised_by, with_adoption

if TYPE_CHECKING:
    from elaswave_spmd.conf.schema import Settings
    from elaswave_spmd.controller.on_ray.job import HandOver
    from elaswave_spmd.controller.torchrun import Start

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and the ends of lines
# They train: an OSError that nothing answers is a mistake of ours, and not about a file of the user's.
_KEEP_TRACEBACKS = ("agent", "demo")
FIRST_LINE = "elaswave_spmd: preparing ..."
_USAGE = """usage: {program} train [name=value ...]     train a model; {program} train --help shows the settings

  {program} train mesh=dp2_pp2
  {program} agent HOST:PORT --token-file FILE     offer this machine to a run; {program} agent --help
  {program} ctl RUN status|add N|drain RANK ...   ask a run that is going on; {program} ctl --help
  {program} report RUN                            one HTML page about a run; {program} report --help
  {program} watch RUN                             the same page while the run goes on; {program} watch --help
  {program} export RUN --to hf DIR                the model as transformers loads it; {program} export --help
  {program} generate RUN TEXT                     what the model goes on with; {program} generate --help
  {program} demo                                  two runs, one with a killed worker, compared; {program} demo --help
  {program} plan mesh=NAME event='fail 6'         what would be done after an event; {program} plan --help
  {program} simulate scenario=NAME                policies compared in virtual time; {program} simulate --help
"""


def main() -> int:
    """The entry of `python -m elaswave_spmd` and `elaswave-spmd`: takes the command off `sys.argv`.

    Returns:
        The exit code.
    """
    program = "elaswave-spmd" if not sys.argv[0].endswith("__main__.py") else "python -m elaswave_spmd"
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "train":
        del sys.argv[1]
        return train()
    return guarded(lambda: _command(command, program))


def train() -> int:
    """The entry of train.py: settings from `sys.argv`. Returns the exit code."""
    return guarded(_train)


def guarded(command: Callable[[], int]) -> int:
    """Run a command; errors that a user may meet become one clear screen on stderr and an exit code."""
    _open_standard_streams()
    # OpenBLAS starts threads when numpy is imported; this process multiplies no matrices, and forks.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Where a parent has left it ignored, the kernel reaps children unasked, and nobody hears how they ended.
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        return command()
    except UserError as error:
        return _bad_input(error)
    except RunError as error:
        say_error(f"error: {_harmless(str(error))}")
        return FAILED
    except Signalled as signalled:
        say_error(signalled)
        return signalled.exit_code
    except KeyboardInterrupt:
        say_error("interrupted")
        return INTERRUPTED
    finally:
        flush_output()  # else the interpreter does, and makes an exit code of its own of a reader that has left


def _open_standard_streams() -> None:
    """Put the null device in the place of standard streams that are closed (`>&-`), of which Python makes None.

    Else a file or socket of the run would get descriptor 1 or 2, and what a library or a worker prints with it.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number, which is `fd`
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # else a name or a text that it has no characters for would end a run
        # Where descriptor 1 was a file when Python began and is a pipe by now, the change is made, and then an error is
        # raised, as a pipe has no position.
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")


def _command(command: str, program: str) -> int:
    """Any command but `train`."""
    commands = {
        "agent": _agent,
        "ctl": _ctl,
        "report": _report,
        "watch": _watch,
        "export": _export,
        "generate": _generate,
        "demo": _demo,
        "plan": _plan,
        "simulate": _simulate,
    }
    # An agent's reader may leave as well, and its workers are not to end with it: what it says is said by `say`.
    with _reader_may_leave() if command != "agent" else contextlib.nullcontext():
        if command in ("-h", "--help"):
            print(_USAGE.format(program=program))
            return DONE
        if command not in commands:
            raise _unknown(command, ["train", *commands], program)
        del sys.argv[1]
        with _files_of_others(command) if command not in _KEEP_TRACEBACKS else contextlib.nullcontext():
            return commands[command](program)


@contextlib.contextmanager
def _files_of_others(command: str) -> Iterator[None]:
    """A `with` for a command that only reads what it is given, and may write a file of its own.

    An OSError that nothing in it has an answer to is about such a file: of another user, on a disk that is full or a
    mount that is stale. In a run that trains it would be a mistake of ours, whose traceback is needed.
    """
    try:
        yield
    except BrokenPipeError:  # the reader has left
        raise
    except OSError as error:
        name = "" if error.filename is None else f"{error.filename}: "
        raise ConfigError(
            f"{command} has failed: {name}{error.strerror or error}",
            rule="what a command reads and writes is there, and this user may read and write it",
            where=command,
            fix="another path, or what the message says",
        ) from error


def _unknown(command: str, commands: Sequence[str], program: str) -> ConfigError:
    exists = ", ".join(commands)
    if not command:
        return ConfigError("no command is given", rule="a command comes first", exists=exists, fix=f"{program} --help")
    rest = " ".join(sys.argv[1:]) if "=" in command else ""
    like = closest(command, commands)
    fix = f"{program} train {rest}" if rest else f"{program} {like}" if like else f"{program} --help"
    return ConfigError(
        f"{command} is not a command", rule="a command comes first", where=command, exists=exists, fix=fix
    )


def _train() -> int:
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        from elaswave_spmd.conf.help import help_text

        with _reader_may_leave():
            print(help_text())
        return DONE
    show = _takes_out(words, ["--cfg", "job"])
    if _takes_out(words, ["--supervise"]) and not show:
        return supervise(words)
    if (run_dir_fd := supervised_by(os.environ)) is not None:
        words = with_adoption(words)
    with StopSignals() as signals:
        with signals.held():  # inside Hydra an exception of ours can turn into another one
            if not show:
                say(FIRST_LINE)  # something to see at once: what is imported next takes seconds
            from elaswave_spmd.controller.on_ray.job import HandOver  # imports Hydra
            from elaswave_spmd.controller.torchrun import Run, Serve, take_out

            start = _start_of(words)
            if not show and not isinstance(start, HandOver) and start.notice:  # torchrun has started this process
                say(start.notice)
                take_out(os.environ)
            if isinstance(start, Run) and not show and _may_adopt(start.settings):
                # What ends this command before it has adopted workers would leave them behind, with their state.
                return _run(start.settings, signals, run_dir_fd)
        signals.check()
        if show:
            with _reader_may_leave():
                print(start.settings.to_yaml() if isinstance(start, Run | HandOver) else "", end="")
            return DONE
        if isinstance(start, Run):
            return _run(start.settings, signals, run_dir_fd)
    # Outside the `with`: an agent answers signals in its own way, and so does a command that follows a run on Ray.
    if isinstance(start, HandOver):
        from elaswave_spmd.controller.on_ray.command import run_on_ray

        return run_on_ray(start.job)
    return _serve(start.arguments, "elaswave-spmd") if isinstance(start, Serve) else DONE


def _start_of(words: Sequence[str]) -> Start | HandOver:
    """The part of this process in the run that `words` describe: torchrun or Ray's supervisor may have started it."""
    from elaswave_spmd.controller.on_ray.job import controller_settings, hand_over
    from elaswave_spmd.controller.torchrun import Run, start_of

    folder = _working_directory()
    if (settings := controller_settings(words, os.environ)) is not None:
        return Run(settings)
    return hand_over(words, os.environ, folder) or start_of(words, os.environ)


def _working_directory() -> str:
    """The directory in which the command was started."""
    try:
        return os.getcwd()
    except OSError as error:  # it was removed; to import torch without one ends the process
        raise ConfigError(
            f"the working directory cannot be found ({error.strerror})",
            rule="a command is started in a directory that exists: paths and your modules are looked for from there",
            fix="cd to another directory, or to the one that has the same name by now",
        ) from error


def _takes_out(words: list[str], flag: list[str]) -> bool:
    """Remove the consecutive words of a flag from `words`. Returns whether they were there."""
    for start in range(len(words)):
        if words[start : start + len(flag)] == flag:
            del words[start : start + len(flag)]
            return True
    return False


def _may_adopt(settings: Settings) -> bool:
    """True for a command that adopts living workers, if there are any."""
    return settings.train.resume is not None and settings.timeouts.adopt is not None


def _run(settings: Settings, signals: StopSignals, run_dir_fd: int | None) -> int:
    """Run a controller. `run_dir_fd`: the descriptor to which it writes the run's directory, if it has a supervisor."""
    from elaswave_spmd.runtime.devices.selection import worker_start

    worker_start(settings)  # refuses a device that cannot be used here; what it lacks may keep torch from importing
    from elaswave_spmd.controller import startup as controller  # imports torch: only now that the settings are good

    command = controller.Command.typed(sys.argv[1:], is_supervised=run_dir_fd is not None)
    return controller.run(settings, here=True, command=command, signals=signals, run_dir_fd=run_dir_fd)


def _agent(program: str) -> int:
    return _serve(sys.argv[1:], program)


def _serve(arguments: Sequence[str], program: str) -> int:
    """Run an agent."""
    _working_directory()
    from elaswave_spmd.runtime.devices import check_usable

    check_usable("cpu")  # that torch can be imported; the run's own device is known once the controller sends it
    from elaswave_spmd.controller import agent_command  # imports torch

    return agent_command.main(arguments, program)


def _ctl(program: str) -> int:
    from elaswave_spmd.controller import admin_client

    return admin_client.main(sys.argv[1:], program)


def _report(program: str) -> int:
    from elaswave_spmd.report import report_command

    return report_command.main(sys.argv[1:], program)


def _watch(program: str) -> int:
    from elaswave_spmd.report import watch_command

    return watch_command.main(sys.argv[1:], program)


def _export(program: str) -> int:
    from elaswave_spmd.weights import export_command

    return export_command.main(sys.argv[1:], program)


def _generate(program: str) -> int:
    from elaswave_spmd.weights import generate_command

    return generate_command.main(sys.argv[1:], program)


def _demo(program: str) -> int:
    from elaswave_spmd.demo import demo_command

    return demo_command.main(sys.argv[1:], program)


def _plan(program: str) -> int:
    from elaswave_spmd.simulator import plan_command

    return plan_command.main(sys.argv[1:], program)


def _simulate(program: str) -> int:
    from elaswave_spmd.simulator import simulate_command

    return simulate_command.main(sys.argv[1:], program)


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """A `with` whose output may be cut short by its reader: `--help | head -3` is no error.

    Only around commands that print and end. A run that trains must not end like this because of a broken socket.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        mute_output()
        raise SystemExit(DONE) from None


def _harmless(text: str) -> str:
    """The text with escapes for what steers a terminal: names in it may come from files of anybody, such as weights."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _bad_input(error: UserError) -> int:
    text = _harmless(str(error))
    if not sys.stderr.isatty():
        say_error(f"error: {text}")
        return BAD_INPUT
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    Console(stderr=True).print(Panel(Text(text), title="error", title_align="left", border_style="red", expand=False))
    return BAD_INPUT
