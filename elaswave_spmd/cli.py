"""The command line: `python train.py`, `python -m elaswave_spmd train` and `elaswave-spmd train` are the same.

Hydra composes, `settings.from_config` checks, the controller runs. Exit codes: 0 done; 1 the run failed (or Hydra
refused an override, in its own words); 2 bad input, found before any worker starts; 130 Ctrl-C. Heavy imports wait
until the settings are good.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from elaswave_spmd.errors import ConfigError, RunError, UserError

if TYPE_CHECKING:
    from elaswave_spmd.conf.schema import Settings

GROUPS = (
    *("mesh", "sharding", "model", "data", "optim", "train", "page", "runtime", "run"),
    *("elastic", "mirror", "checkpoint", "timeouts", "chaos", "schedule", "emulated"),
)
DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
_USAGE = """usage: {program} train [name=value ...]     train a model; {program} train --help shows the settings

  {program} train mesh=dp2_pp2
  {program} agent HOST:PORT --token-file FILE     lend this machine to a run; {program} agent --help
  {program} ctl RUN status|add N|drain RANK ...   ask a run that is going on; {program} ctl --help
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
    if command in ("-h", "--help"):
        print(_USAGE.format(program=program))
        return DONE
    commands = {"agent": _agent, "ctl": _ctl, "plan": _plan, "simulate": _simulate}
    if command != "train" and command not in commands:
        print(_USAGE.format(program=program), file=sys.stderr)
        exists = ", ".join(("train", *commands))
        got = command or "nothing"
        return _bad_input(ConfigError("a command comes first", got=got, exists=exists, fix=f"{program} train"))
    del sys.argv[1]
    return train() if command == "train" else guarded(lambda: commands[command](program))


def train() -> int:
    """The entry of train.py: settings from `sys.argv`. Returns the exit code."""
    return guarded(_train)


def guarded(command: Callable[[], int]) -> int:
    """Run a command; errors that a user may meet become one clear screen on stderr and an exit code."""
    # OpenBLAS starts threads when numpy is imported; this process multiplies no matrices, and forks.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        return command()
    except UserError as error:
        return _bad_input(error)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def refuse_multirun(arguments: Sequence[str]) -> None:
    """Hydra writes files of its own as soon as it sees a sweep, so this comes before it.

    Raises:
        ConfigError: -m, --multirun (or what argparse takes for it), or hydra.mode=MULTIRUN.
    """
    for argument in arguments:
        is_flag = re.fullmatch(r"-m.*|--mu?l?t?i?r?u?n?", argument)
        if is_flag or re.fullmatch(r"\+*hydra\.mode=.*", argument):
            raise ConfigError(
                "a command is one run; sweeps are left to a shell",
                got=argument,
                where="the command line",
                fix="for seed in 0 1 2; do python train.py seed=$seed; done",
            )


def refuse_choices_without_name(arguments: Sequence[str]) -> None:
    """`mesh=3` and `model=null`, on which Hydra would end with a traceback.

    Raises:
        ConfigError: with the form of a choice.
    """
    for argument in arguments:
        group, _, choice = argument.partition("=")
        if group in GROUPS and re.fullmatch(r"null|true|false|[-+]?[0-9._]+(e[-+]?[0-9]+)?", choice, re.IGNORECASE):
            raise ConfigError(
                f"{group} is chosen by a name",
                got=choice,
                where=argument,
                exists="what --help lists under Choices",
                fix=f"mesh=dp{choice}, mesh=pp{choice}" if group == "mesh" and choice.isdigit() else f"{group}=NAME",
            )


def _train() -> int:
    refuse_multirun(sys.argv[1:])
    refuse_choices_without_name(sys.argv[1:])
    with _interrupt_deferred():
        config = _compose()
    if config is None:
        return DONE
    from elaswave_spmd.conf.resume import settings_of

    return _run(settings_of(*config))


def _run(settings: Settings) -> int:
    from elaswave_spmd.runtime.devices.selection import worker_start

    worker_start(settings)  # refuses a device that cannot be used here; what it lacks may keep torch from importing
    from elaswave_spmd.controller import startup as controller  # imports torch: only now that the settings are good

    return controller.run(settings, here=True)


def _agent(program: str) -> int:
    from elaswave_spmd.runtime.devices import check_usable

    check_usable("cpu")  # that torch can be imported; the run's own device is known once the controller tells it
    from elaswave_spmd.controller import agent  # imports torch

    return agent.main(sys.argv[1:], program)


def _ctl(program: str) -> int:
    from elaswave_spmd.controller import admin_client

    return admin_client.main(sys.argv[1:], program)


def _plan(program: str) -> int:
    from elaswave_spmd.simulator import plan_command

    return plan_command.main(sys.argv[1:], program)


def _simulate(program: str) -> int:
    from elaswave_spmd.simulator import simulate_command

    return simulate_command.main(sys.argv[1:], program)


def _compose() -> Any:
    """What Hydra composes from `sys.argv`, a DictConfig, and the overrides that it took; None if it only printed."""
    import hydra.core.hydra_config

    from elaswave_spmd.conf import register_mesh_names

    register_mesh_names()
    composed: list[Any] = []

    # Hydra ignores what its task returns and prints a traceback for what it raises: so the task only keeps the config.
    @hydra.main(config_path="pkg://elaswave_spmd.conf", config_name="config", version_base="1.3")
    def keep(config: Any) -> None:
        composed.append((config, list(hydra.core.hydra_config.HydraConfig.get().overrides.task)))

    keep()
    return composed[0] if composed else None


@contextlib.contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Ctrl-C counts at the end of the `with`. Within Hydra it can turn into another exception, which Hydra prints."""
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def _bad_input(error: UserError) -> int:
    if not sys.stderr.isatty():
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    Console(stderr=True).print(
        Panel(Text(str(error)), title="error", title_align="left", border_style="red", expand=False)
    )
    return BAD_INPUT
