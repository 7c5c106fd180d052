"""Made-up workers in the fork server's place, for tests of the controller: real links, no processes, no training."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller.loop import Controller
from elaswave_spmd.controller.outcomes import RunStopped
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.packed_reconfigure import Unpacker
from elaswave_spmd.runtime.processes.fork_server_client import Exited, NotStartedError
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox
from elaswave_spmd.sharding.layout import ModelLayout
from tests.waiting import PATIENCE_S

Script = Callable[["Workers"], None]
_BEAT_S = 0.05


class _OverError(Exception):
    """The controller's run has ended: so does the story."""


class Workers:
    """In the fork server's place: two workers that do what `script` says once both have been asked for.

    A script that waits for what the controller says is a `story`: it has a thread of its own.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.ended: list[Exited] = []  # what `poll` says next
        self.unreaped: list[Exited] = []  # what the fork server would find if it looked now
        self.killed: list[int] = []  # by the controller
        self.stopped = False
        self.specs: dict[int, dict[str, Any]] = {}
        self.limit: int | None = None  # this many can be started from now on, no more
        self.not_started: list[int] = []
        self._read, self._write = os.pipe()
        self._links: dict[int, Links] = {}
        self._mailboxes: dict[int, Mailbox] = {}
        self._unpackers: defaultdict[int, Unpacker] = defaultdict(Unpacker)

    @property
    def ranks(self) -> list[int]:
        """The workers that the controller has asked for."""
        return list(self._links)

    def ready(self) -> None: ...

    def hold(self, lock: Path) -> None: ...

    def spawn(self, rank: int, spec: dict[str, Any], limit_s: float | None = None) -> None:
        if self.limit is not None:
            if not self.limit:
                self.not_started.append(rank)
                raise NotStartedError("[Errno 11] Resource temporarily unavailable")
            self.limit -= 1
        self._mailboxes[rank] = mailbox = Mailbox()
        self.specs[rank] = spec
        self._links[rank] = Links(rank, mailbox, directory=spec["directory"])
        self._links[rank].connect(CONTROLLER, spec["controller"])
        if rank == 1:
            self.script(self)

    def say(self, message: Any, payload: torch.Tensor | None = None) -> None:
        """A worker, the one that the message names, says this to the controller."""
        self.say_as(message.rank, message, payload)

    def say_as(self, rank: int, message: m.Message, payload: torch.Tensor | None = None) -> None:
        assert not self._links[rank].wait_connected([CONTROLLER], PATIENCE_S) or self.stopped
        self._links[rank].send(CONTROLLER, m.encode(message), () if payload is None else (payload.numpy(),))

    def beat(self, rank: int) -> None:
        """A sign of life; nobody hears it when the controller is about to end."""
        self._links[rank].send(CONTROLLER, m.encode(m.Heartbeat(rank, 0, True, "made up")))

    def take(self, rank: int) -> list[m.AnyMessage]:
        """The messages that the controller has sent to a worker since the last call."""
        items = self._mailboxes[rank].take_all()
        found = [m.decode(item.header) for item in items if isinstance(item, Envelope)]
        unpacked = self._unpackers[rank].unpacked
        return [unpacked(message) if isinstance(message, m.PackedReconfigure) else message for message in found]

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            self.say(m.Ready(rank, self._links[rank].address))

    def end(self, *exits: Exited) -> None:
        self.ended += exits
        os.write(self._write, b"\n")

    def fileno(self) -> int:
        return self._read

    def poll(self) -> list[Exited]:
        found, self.ended = self.ended, []
        return found

    def signal(self, rank: int, number: int, limit_s: float | None = None) -> bool:
        assert number == 0, "a worker that is killed is not waited for"
        self.end(*self.unreaped)
        return True

    def order_signal(self, rank: int, number: int) -> None:
        assert number
        self.killed.append(rank)

    def keep_up(self) -> None: ...

    def stop(self, grace_s: float = 2.0) -> None:
        self.stopped = True
        for links in self._links.values():
            links.close()
        os.close(self._read)
        os.close(self._write)


class Story:
    """The life of made-up workers, in a thread of its own. They answer every Prepare, and send heartbeats.

    Args:
        tell: the story; it ends early, and quietly, when the controller's run has ended.
    """

    def __init__(self, tell: Callable[[Story], None]) -> None:
        self._tell = tell
        self.over = False
        self.error: BaseException | None = None
        self.heard: dict[int, list[m.AnyMessage]] = {}
        self.versions: dict[int, int] = {}
        self.dead: set[int] = set()
        self.silent: set[int] = set()  # their hearts do not beat
        self.mute: set[int] = set()  # they answer no Prepare
        self.workers = Workers(self._begin)
        self._threads: list[threading.Thread] = []  # none before two workers are started

    def _begin(self, workers: Workers) -> None:
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._run, self._beat)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """The controller's run has ended; says what went wrong in the story."""
        self.over = True
        for thread in self._threads:
            thread.join()
        self.workers.stop()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self._tell(self)
        except _OverError:
            pass
        except BaseException as error:
            self.error = error
            self.workers.end(Exited(0, 0, None, 11), Exited(1, 0, None, 11))  # so that the run ends

    def _beat(self) -> None:
        while not self.over:
            for rank in set(self.workers.ranks) - self.dead - self.silent:
                self.workers.beat(rank)
            time.sleep(_BEAT_S)

    def listen(self) -> None:
        """Takes what has come, and answers."""
        for rank in set(self.workers.ranks) - self.dead:
            for message in self.workers.take(rank):
                self.heard.setdefault(rank, []).append(message)
                if isinstance(message, m.Prepare) and rank not in self.mute:
                    self.workers.say(m.StepReport(message.epoch, rank, self.versions.get(rank, 0)))

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.over:
                raise _OverError
            assert time.monotonic() < deadline, self.heard
            time.sleep(0.005)
            self.listen()

    def places(self, rank: int) -> list[m.Reconfigure]:
        return [message for message in self.heard.get(rank, ()) if isinstance(message, m.Reconfigure)]

    def prepares(self, rank: int) -> list[m.Prepare]:
        return [message for message in self.heard.get(rank, ()) if isinstance(message, m.Prepare)]

    def start(self, *ranks: int) -> None:
        """These listen, and get their places."""
        self.workers.start(*ranks)
        self.until(lambda: all(self.places(rank) for rank in ranks))

    def until_epoch(self, rank: int, members: set[int]) -> m.Reconfigure:
        """Waits until a worker has a place in a mesh of exactly these."""
        self.until(lambda: self.places(rank) and {r for s in self.places(rank)[-1].stages for r in s} == members)
        return self.places(rank)[-1]

    def apply(self, step: int, *ranks: int) -> None:
        for rank in ranks:
            self.workers.say(m.Applied(step, self.places(rank)[-1].epoch, rank, 1.0 / step, 0.5, True))
            self.versions[rank] = step

    def kill(self, rank: int, number: int = 9) -> None:
        self.dead.add(rank)
        self.workers.end(Exited(rank=rank, pid=70 + rank, code=None, signal=number))

    def fail(self, rank: int, step: int, report: str, *, stays: bool = False) -> None:
        """A worker reports an exception. Its process ends, unless it stays with its state."""
        self.workers.say(m.Failed(rank, report, step))
        if not stays:
            self.dead.add(rank)

    def finish(self, layout: ModelLayout) -> None:
        """Whoever is left says, in every epoch that is still to come, that it has done all steps."""
        said: dict[int, int] = {}
        while True:
            for rank in set(self.workers.ranks) - self.dead:
                place = self.places(rank)[-1] if self.places(rank) else None
                if place is None or said.get(rank) == place.epoch or not any(rank in s for s in place.stages):
                    continue
                said[rank] = place.epoch
                for layer in layout.layers:
                    for block in layer.state_blocks:
                        start, stop = layer.span(block.first_page, block.first_page + block.num_pages)
                        pages = m.FinalPages(layer.index, block.first_page, block.first_page + block.num_pages)
                        self.workers.say_as(rank, pages, torch.zeros(stop - start))
                self.workers.say(m.Finished(rank, place.epoch, {}, {}))
            before = len(said)
            self.until(lambda before=before: len(said) != before or self._asked(said))

    def _asked(self, said: dict[int, int]) -> bool:
        """True if a worker has another place than the one that it has finished in."""
        return any(self.places(r) and self.places(r)[-1].epoch != said.get(r) for r in set(self.heard) - self.dead)


def run_to_end(controller: Controller) -> None:
    """Runs a controller. Raises the error with which it stops, if it does."""
    if isinstance(outcome := controller.run(), RunStopped):
        raise outcome.error


def settings_in(folder: Path, steps: int = 2, timeouts: dict[str, float] | None = None, **elastic: Any) -> Settings:
    (folder / "text.txt").write_text("a few words for a model that is never trained. " * 40)
    return Settings.from_dict(
        {
            "mesh": {"dp": 2},
            "model": {"target": "mlp", "layers": 1, "d_model": 8, "heads": 1},
            "data": {"name": "text", "path": str(folder / "text.txt"), "cache": str(folder / "cache")},
            "train": {"seq_len": 8, "global_batch": 4, "microbatch_size": 2, "steps": steps},
            "elastic": elastic or {},
            "timeouts": timeouts or {},
            "run": {"dir": str(folder / "run"), "tensorboard": False},
        }
    )
