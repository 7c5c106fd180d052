"""A living agent at a real port, and a process with the run's keys that sends it 10,000 messages which are none."""

from __future__ import annotations

import os
import random
import resource
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from benchmarks.processes import processes_with
from elaswave_spmd.runtime.processes import agent_messages as am
from elaswave_spmd.runtime.processes.agents import Agents
from elaswave_spmd.runtime.transport.credentials import Credentials, RunKeys, RunToken
from elaswave_spmd.runtime.transport.frames import FRAME_BYTES, frames_of
from elaswave_spmd.runtime.transport.links import CONTROLLER
from tests.faults.test_strangers import listening_ports
from tests.ports import free_port
from tests.waiting import PATIENCE_S, eventually

NUM_MESSAGES = 10_000
FLAT_BYTES = 32 << 20
ORDERS = (
    am.Refused(am.Problem("ConfigError", "no", {"rule": "none"})),
    am.PrepareRun(2, {"mesh": {"dp": 2}}, {"corpus": "x"}),
    am.Settled(),
    am.ConnectAgain(-2),
    am.Spawn(1, {"rank": 1}),
    am.Signal(1, 9),
    am.ReportExits(),
    am.BeatsHeard(),
    am.Stop(1.0),
)
BACK = am.Back(am.Hello(2, "tcp://127.0.0.1:1", "b", 2, "2.0"), "run", 1, {1: "tcp://127.0.0.1:2"}, (2,), (3,), 1.5)
BEATS = am.Beats(((1, b"x"),))
REPORTS = (am.Prepared(), am.ExitsReported(), am.Refusals({"a": 1}), BEATS, am.WorkerExited(1, 2, None, 9), BACK)


@dataclass
class Scene:
    """An agent, the controller's side of it, and a socket that is connected to it with the run's keys."""

    agents: Agents
    process: subprocess.Popen[str]
    socket: zmq.Socket[bytes]

    @property
    def num_refused(self) -> int:
        """As the agent tells when it is asked. It lives: it has answered."""
        self.agents.request_exits()
        return sum(self.agents.rejected.values())

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()


@pytest.fixture(params=[RunKeys.make(), RunToken.make()], ids=["encrypted", "plain"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    credentials: Credentials = request.param
    token, mark = tmp_path / "token", f"ELASWAVE_TEST={secrets.token_hex(8)}"
    token.touch(0o600)
    token.write_text(secrets.token_hex(16))
    port = free_port()
    with ExitStack() as stack:
        agents = Agents(("127.0.0.1", port), token.read_bytes(), credentials, "127.0.0.1", 1)
        stack.callback(agents.close, PATIENCE_S)
        sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="ew", dir="/tmp"))
        name, _, value = mark.partition("=")
        process = subprocess.Popen(
            [sys.executable, "-m", "elaswave_spmd", "agent", f"127.0.0.1:{port}", "--token-file", str(token)],
            env={**os.environ, name: value, "XDG_RUNTIME_DIR": sockets},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        stack.callback(process.communicate)
        stack.callback(process.kill)
        agents.wait_for_all(PATIENCE_S)
        (listening,) = listening_ports([process.pid])
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, 0)
        made = context.socket(zmq.PUSH)
        made.setsockopt(zmq.SNDHWM, 0)
        credentials.secure_client(made)
        made.connect(f"tcp://127.0.0.1:{listening}")
        yield Scene(agents, process, made)
        agents.end(0.0)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, err) == (0, ""), out
        assert not processes_with(mark) and not list(Path(sockets).iterdir())


def mutated(draw: random.Random) -> list[bytes]:
    """A message that is no order of the controller: another sender, another form, or bytes that are changed."""
    while True:
        sender = draw.choice([CONTROLLER, CONTROLLER, 0, 1, -2, -3, draw.randrange(-(2**31), 2**31)])
        header = am.encode(draw.choice((*ORDERS, *REPORTS)))
        for _ in range(draw.randrange(4)):
            at = draw.randrange(len(header) + 1)
            header = header[:at] + draw.randbytes(draw.randrange(4)) + header[at + draw.randrange(4) :]
        payloads = [memoryview(draw.randbytes(draw.randrange(1, 40))) for _ in range(draw.choice([0, 0, 0, 1, 3]))]
        kind = draw.choice([0, 0, 0, 1, 0x7F, 0x80, 0x81, 0x82, 0x83, 0xFF])
        head, frames = frames_of(sender, draw.randrange(3), kind, header, payloads, FRAME_BYTES)
        message = [head, *map(bytes, frames)]
        is_whole = True
        match draw.randrange(8):
            case 0:
                message[0] = message[0][: draw.randrange(len(message[0]))]
                is_whole = False
            case 1:
                message.append(draw.randbytes(draw.randrange(20)))
                is_whole = False
            case 2:
                message = [draw.randbytes(draw.randrange(60)) for _ in range(draw.randrange(1, 6))]
                is_whole = False
            case _:
                pass
        # An order that can be right would be carried out; what is not of the controller, or has another form, is none.
        if not is_whole or sender != CONTROLLER or kind or payloads or am.try_decode(header) is None:
            return message


def test_ten_thousand_messages_are_each_counted_and_end_no_agent(scene: Scene) -> None:
    draw = random.Random(13)
    messages = [mutated(draw) for _ in range(NUM_MESSAGES)]
    for message in messages[:1000]:  # whatever is made once
        scene.socket.send_multipart(message)
    eventually(lambda: scene.num_refused == 1000)
    before = scene.resident_bytes
    for message in messages[1000:]:
        scene.socket.send_multipart(message)
    eventually(lambda: scene.num_refused == NUM_MESSAGES)
    assert scene.resident_bytes - before < FLAT_BYTES
    assert len(scene.agents.rejected) > 2, "for several reasons"
