"""The last lines of a run that did not finish: what happened, the state that is left, and the command that goes on.

Every end comes here, when all processes of the run have ended: so there is one answer to "what now?", and it names a
checkpoint that has just been read and compared with its hashes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elaswave_spmd.conf.schema import RAY, TORCHRUN, Settings
from elaswave_spmd.controller.io import newest_checkpoint
from elaswave_spmd.errors import RunError, StoppedBySignal, UserError, headline_of
from elaswave_spmd.run_dir.checkpoints import newest_complete
from elaswave_spmd.run_dir.directory import SUMMARY
from elaswave_spmd.run_dir.json_lines import plain
from elaswave_spmd.run_dir.lock import workers_live
from elaswave_spmd.runtime.processes.stop_signals import Signalled

_OF_NODES = (
    *("runtime.rendezvous", "runtime.agents", "runtime.local_workers", "runtime.agent_workers", "runtime.launcher"),
)
"""A command that torchrun starts on all nodes, or that Ray does, does not take these from the run that it resumes."""
_NOT_AGAIN = ("train.resume", "run.dir")
"""The settings that a command which goes on with a run states itself."""


def _is_repeated(name: str, *, was_resumed: bool, also: Collection[str]) -> bool:
    """True if a command that goes on names a setting of the one that ended; args as for `Command.resuming`."""
    group = name.partition(".")[0]
    return name not in _NOT_AGAIN and group != "chaos" and (was_resumed or group == "run" or name in also)


@dataclass(frozen=True)
class Command:
    """The command as it was typed.

    Args:
        program: everything before the settings, such as (python, train.py), and the flag of a supervised command.
        words: the settings, name=value.
    """

    program: tuple[str, ...] = ("python", "train.py")
    words: tuple[str, ...] = ()

    @classmethod
    def typed(cls, words: Sequence[str], *, is_supervised: bool = False) -> Command:
        """The command of this process, whose settings are `words`.

        Args:
            is_supervised: a supervisor has started this process, with the words that were typed except for its flag.
        """
        whole, words = sys.orig_argv, tuple(words)
        flag = ("--supervise",) if is_supervised else ()
        if not whole or tuple(whole[len(whole) - len(words) :]) != words:
            return cls((os.path.basename(sys.executable), sys.argv[0], *flag), words)  # not started by a command line
        program = whole[: len(whole) - len(words)]
        # A script that an installer has made is run by its first line; what was typed is its name.
        if len(program) > 1 and (name := os.path.basename(program[1])) and shutil.which(name) == program[1]:
            program = [name, *program[2:]]
        return cls((*program, *flag), words)

    def resuming(
        self, run_dir: Path, *, was_resumed: bool, into: Path | None = None, also: Collection[str] = ()
    ) -> str:
        """The command that goes on from the newest checkpoint in `run_dir`, as it is typed into a shell.

        A run's settings are in its directory. Repeated are those that are not: what belongs to one command (`run.*`),
        and whatever was named when the run was resumed, as config.yaml is that of its begin. Injected faults are not.

        Args:
            was_resumed: this command went on with the run in `run_dir`.
            into: another directory to go on in.
            also: names of settings that are repeated as well.
        """
        # Hydra: only a command line has it loaded already.
        from elaswave_spmd.conf.compose import setting_of, word_of

        kept = []
        for word in self.words:
            if _is_repeated(setting_of(word), was_resumed=was_resumed, also=also):
                kept.append(word)
        folder = () if into is None else (word_of("run.dir", str(into)),)
        return shlex.join((*self.program, word_of("train.resume", str(run_dir)), *folder, *kept))

    def again(self) -> str:
        """The same command once more."""
        return shlex.join((*self.program, *self.words))


@dataclass(frozen=True)
class Call:
    """A call of `elaswave_spmd.train`, for the call that goes on. What it says is Python.

    Args:
        model, data: what stands for that which is given by value, and so has to be given again: its name in the
            caller's module, or "..." if it has none there; None: it is in the run's settings.
        has_callbacks: callbacks were given, as objects.
        settings: the settings of the call, by name.
    """

    model: str | None = None
    data: str | None = None
    has_callbacks: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)

    def resuming(
        self, run_dir: Path, *, was_resumed: bool, into: Path | None = None, also: Collection[str] = ()
    ) -> str:
        """The call that goes on from the newest checkpoint in `run_dir`; as for `Command.resuming`."""
        again = {"model.target": self.model, "data.target": self.data}  # given by a keyword, not among the settings
        kept = {
            name: value
            for name, value in self.settings.items()
            if _is_repeated(name, was_resumed=was_resumed, also=also) and again.get(name) is None
        }
        given = {"resume": repr(str(run_dir)), "model": self.model, "data": self.data}
        given["run_dir"] = None if into is None else repr(str(into))
        given["callbacks"] = "..." if self.has_callbacks else None
        given["settings"] = repr(plain(kept)) if kept else None
        same = [name for name, text in given.items() if text == "..."]
        some = " and ".join([", ".join(same[:-1]), same[-1]] if len(same) > 1 else same)
        more = f", with the {some} of this call in place of ..." if same else ""
        return f"train({', '.join(f'{name}={text}' for name, text in given.items() if text is not None)}){more}"

    def again(self) -> str:
        """The same call once more."""
        return "the same call"


@dataclass(frozen=True)
class Ending:
    """A run that did not finish, once all of its processes have ended.

    Args:
        error: that ended it.
        settings: as the command named them.
        command: as it was typed, or called from Python.
        run_dir: that the run has written to and has left; None: it left nothing.
    """

    error: BaseException
    settings: Settings
    command: Command | Call
    run_dir: Path | None

    def lines(self) -> list[str]:
        """The lines: an account of what happened, and what can be done."""
        try:
            state = self.state()
        except (OSError, RunError, UserError) as error:  # what happened is said all the same
            state = [f"what is left of the run cannot be looked at ({headline_of(error)})"]
        return [self._what(), *state]

    def _what(self) -> str:
        error = self.error
        if isinstance(error, StoppedBySignal):
            return str(error)
        if isinstance(error, KeyboardInterrupt):
            return headline_of(error)
        if isinstance(error, RunError | UserError):
            return f"error: {error}"
        return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()

    def state(self) -> list[str]:
        """The state that is left, and the command that goes on from it; or why there is none."""
        source = self.settings.train.resume
        earlier = Path(os.path.expanduser(source)).absolute() if source is not None else None
        folder = self.run_dir or earlier
        if self.run_dir is None and earlier is not None and workers_live(earlier):
            return [
                f"workers of the run in {earlier} still live: they wait for another controller, or save their state",
                f"resume with: {self.command.again()}",
            ]
        if folder is None:
            return ["nothing to resume: no step was done, and nothing is left of the run"]
        checkpoint = newest_checkpoint(folder)
        if checkpoint is None and earlier is not None and earlier != folder:
            folder = earlier  # another directory than the one that it went on from: there is no checkpoint in it yet
            checkpoint = newest_checkpoint(folder)
        if checkpoint is None and not folder.exists():
            also = _OF_NODES if self._is_of_nodes else ()
            command = self.command.resuming(Path("/NEW/PLACE"), was_resumed=folder == earlier, also=also)
            moved = f"if it was moved to /NEW/PLACE, resume with: {command}"
            return [f"nothing to resume: there is no {folder}", moved]
        if checkpoint is None:
            every, why = self.settings.checkpoint.every, "checkpoint.every=N writes them"
            if every and not newest_complete(folder):
                why = f"with checkpoint.every={every} none was finished yet"
            return [f"nothing to resume: {folder} has no good checkpoint ({why})"]
        # What this command names must not be in use, and a run that has its result is not resumed in its place.
        taken = self.run_dir is not None and (self.run_dir != folder or (folder / SUMMARY).exists())
        if self.run_dir is None:
            command = self.command.again()
        else:
            into = self.run_dir.with_name(f"{self.run_dir.name}_2") if taken else None
            also = _OF_NODES if self._is_of_nodes else ()
            command = self.command.resuming(folder, was_resumed=folder == earlier, into=into, also=also)
        agents = ", and its agents again" if self.settings.runtime.agents else ""
        if self._is_of_nodes:
            agents = ", by torchrun on all nodes" if self.settings.runtime.launcher == TORCHRUN else ""
        known = str(checkpoint.path) in str(self.error)
        lines = [] if known else [f"newest checkpoint: {checkpoint.path}, after step {checkpoint.step}"]
        return [*lines, f"resume with: {command}{agents}"]

    @property
    def _is_of_nodes(self) -> bool:
        """True if torchrun or Ray has started the command, and agents on other nodes."""
        return self.settings.runtime.launcher in (TORCHRUN, RAY) and self.settings.runtime.rendezvous is not None

    def exit_code(self, number: int | None) -> int:
        """The exit code; `number`: of the first signal that asked the run to end."""
        if number is not None:
            return 128 + number
        if isinstance(self.error, Signalled):
            return self.error.exit_code
        return 130 if isinstance(self.error, KeyboardInterrupt) else 1
