"""c10d's reconfigure, from torch 2.14 on: gloo groups that are given other members, and a small launcher around them.

    python -m benchmarks.elastic.systems.reconfigure DIRECTORY

`reconfigure` is experimental, and its documentation leaves to the user who the members are and what becomes of state.
So this command has what one would write for it: it starts workers, starts one again that has ended, and when a member
is lost or has come it asks all for their steps, and gives them the handles of the next group. Whoever is behind the
furthest copies its state from there, by broadcasts. The batch of a step is divided over the members; a step whose
all-reduce has failed is done again. A member that does not answer for a while after another has failed is killed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

_MODULE = "benchmarks.elastic.systems.reconfigure"
_COLLECTIVE_S = 2.0  # time limit of an all-reduce
_SILENT_S = 3.0  # after the first member has failed
_LOOK_S = 0.02
_LAST_S = 2.0  # for the other members to end, when one has finished
_REGROUP, _FINISHED = "regroup", "finished"


@dataclass
class Member:
    """A worker as the launcher sees it."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection | None = None
    waits: dict[str, Any] | None = None  # its step and its handle, while it waits for the next group
    is_told: bool = False  # that others wait


@dataclass
class Launcher:
    """Starts the workers, and decides who is in the next group."""

    directory: str
    workers: int
    members: list[Member] = field(default_factory=list)
    started: int = 0
    groups: int = 0

    def run(self) -> None:
        """Until a worker has finished."""
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # with all that it has started
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address = str(Path(self.directory) / "launcher.sock")
        try:
            with Listener(address, "AF_UNIX") as listener:
                listener._listener._socket.settimeout(_LOOK_S)  # pyright: ignore[reportAttributeAccessIssue]
                self._serve(listener, address, store.port)
        finally:
            for member in self.members:
                member.process.kill()
                member.process.wait()

    def _serve(self, listener: Listener, address: str, port: int) -> None:
        since: float | None = None  # when the first member began to wait for the next group
        finished: float | None = None
        while True:
            self.members = [member for member in self.members if member.process.poll() is None]
            while len(self.members) < self.workers and finished is None:
                command = [sys.executable, "-m", _MODULE, self.directory, address, str(port), str(self.started)]
                self.members.append(Member(self.started, subprocess.Popen(command)))
                self.started += 1
            with contextlib.suppress(TimeoutError, EOFError, OSError):  # nobody has come, or whoever came has ended
                connection = listener.accept()
                number = connection.recv()
                for member in self.members:
                    if member.number == number:
                        member.connection = connection
            for member in self.members:
                message = _heard(member.connection)
                if message == _FINISHED:
                    finished = finished or time.monotonic()
                elif message is not None:
                    member.waits = message
            if finished is not None:
                if not self.members or time.monotonic() > finished + _LAST_S:
                    return
                continue
            since = self._regrouped(since)

    def _regrouped(self, since: float | None) -> float | None:
        """Makes the next group if all who could be in it wait. Returns when the first of them began to wait."""
        waiting = [member for member in self.members if member.waits is not None]
        training = [m for m in self.members if m.connection is not None and m.waits is None]
        if not waiting or (self.groups == 0 and len(waiting) < self.workers):
            return None
        for member in training:
            if not member.is_told:
                member.is_told = True
                _tell(member, _REGROUP)  # seen at the end of its step
        now = time.monotonic()
        since = since or now
        if training:
            if now > since + _SILENT_S:
                for member in training:
                    member.process.kill()
            return since
        self.groups += 1
        steps = {member.number: member.waits["step"] for member in waiting if member.waits is not None}
        furthest = max(steps, key=lambda number: steps[number])
        order = {
            "uuid": self.groups,
            "numbers": [member.number for member in waiting],
            "handles": [member.waits["handle"] for member in waiting if member.waits is not None],
            "from": [member.number for member in waiting].index(furthest),
            "copies": len({*steps.values()}) > 1,
        }
        for member in waiting:
            member.waits, member.is_told = None, False
            _tell(member, order)
        return None


def _heard(connection: Connection | None) -> Any:
    """A message of a worker; None: there is none, or the worker has ended."""
    try:
        return connection.recv() if connection is not None and connection.poll() else None
    except (EOFError, OSError):
        return None


def _tell(member: Member, message: Any) -> None:
    with contextlib.suppress(OSError):  # it has ended
        assert member.connection is not None
        member.connection.send(message)


def worker(directory: str, address: str, port: int, number: int) -> None:
    """One worker."""
    import torch
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    from benchmarks.elastic import problem
    from benchmarks.elastic.lines import Writer

    torch.set_num_threads(1)
    job = problem.Job.read(directory)
    order, writer = job.order(), Writer(directory)
    launcher = Client(address, "AF_UNIX")
    launcher.send(number)
    model = problem.model()
    optimizer = problem.adamw(model)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes its state, and changes nothing: all gradients are 0
    for state in optimizer.state.values():
        state["step"].zero_()
    group = Group(TCPStore("127.0.0.1", port, is_master=False), number)
    step, contributed = 0, None
    is_first = True
    while True:
        launcher.send({"step": step, "handle": group.handle})
        wanted = launcher.recv()
        while wanted == _REGROUP:
            wanted = launcher.recv()
        try:
            group.change(wanted)
            if wanted["copies"]:
                step = group.copy(step, [*parameters, *_state_of(optimizer)], wanted["from"])
        except RuntimeError:
            continue
        if contributed is not None and step >= contributed[0]:
            writer.step(*contributed)  # the others have made the update that this one has not seen to its end
        contributed = None
        if is_first:
            writer.start()
            is_first = False
        members, place = wanted["numbers"], wanted["numbers"].index(number)
        try:
            while step < job.steps:
                ids = problem.share(order[step], place, len(members))
                tokens, targets = problem.batch(ids)
                loss = problem.mean_loss(model(tokens), targets)
                optimizer.zero_grad(set_to_none=False)
                (loss * len(ids) / job.global_batch).backward()
                contributed = step + 1, ids, loss.item()
                regroups = group.sum([p.grad for p in parameters], is_asked=launcher.poll())
                torch.nn.utils.clip_grad_norm_(parameters, problem.CLIP)
                optimizer.step()
                step += 1
                writer.step(*contributed)
                contributed = None
                if regroups:
                    break
        except RuntimeError:  # of the all-reduce: a member is lost, or takes too long
            continue
        if step >= job.steps:
            launcher.send(_FINISHED)
            return


def _state_of(optimizer: Any) -> list[Any]:
    return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq", "step")]


class Group:
    """A gloo group that is given other members."""

    def __init__(self, store: Any, number: int) -> None:
        from torch.distributed import ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        options._timeout = timedelta(seconds=_COLLECTIVE_S)
        options.enable_reconfigure = True
        self._group = gloo(store, number, number + 1, options)

    @property
    def handle(self) -> str:
        return self._group.get_reconfigure_handle()

    def change(self, wanted: dict[str, Any]) -> None:
        """Makes the group of these members. RuntimeError: one of them did not come."""
        from torch.distributed import distributed_c10d as c10d

        options: Any = getattr(c10d, "ReconfigureOptions")()  # noqa: B009  (older torch has none)
        options.uuid = wanted["uuid"]
        options.handles = wanted["handles"]
        options.timeout = timedelta(seconds=_COLLECTIVE_S)
        self._group.reconfigure(options).wait()

    def copy(self, step: int, tensors: Sequence[Any], root: int) -> int:
        """Copies the tensors of one member to all. Returns its step."""
        import torch
        from torch.distributed import distributed_c10d as c10d

        options = c10d.BroadcastOptions()
        options.rootRank = root
        flat = torch.cat([torch.tensor([float(step)]), *(tensor.detach().float().flatten() for tensor in tensors)])
        self._group.broadcast([flat], options).wait()
        with torch.no_grad():
            for tensor, values in zip(tensors, flat[1:].split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(values.view(tensor.shape))
        return int(flat[0])

    def sum(self, gradients: Sequence[Any], *, is_asked: bool) -> bool:
        """Adds up gradients over the members, in place. Returns True if any of them was asked to regroup."""
        import torch

        flat = torch.cat([torch.tensor([float(is_asked)]), *(gradient.flatten() for gradient in gradients)])
        self._group.allreduce([flat]).wait()
        for gradient, values in zip(gradients, flat[1:].split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view(gradient.shape))
        return bool(flat[0])


def main(words: Sequence[str]) -> None:
    """The command of the system, or one of its workers."""
    if len(words) > 1:
        worker(words[0], words[1], int(words[2]), int(words[3]))
    else:
        Launcher(words[0], json.loads((Path(words[0]) / "job.json").read_text())["workers"]).run()


if __name__ == "__main__":
    main(sys.argv[1:])
