"""`python -m elaswave_spmd ctl RUN ...`: asks a living run, by the socket in its directory. admin_server.py answers.

One line of JSON each way. A request: {"command": "status"}, {"command": "add", "count": 2} or {"command": "drain",
"ranks": [3]}. The answer is an object; the field `error` of a refusal holds what makes a ControlError.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from elaswave_spmd.errors import ControlError, DataError, RunError
from elaswave_spmd.mesh.mesh import shortened_ranks, shortened_workers
from elaswave_spmd.run_dir.directory import is_run_directory, read_events
from elaswave_spmd.run_dir.display import clock_text, count

SOCKET = "ctl.sock"
ANSWER_S = 30.0  # a controller that starts workers, or writes its result, answers after that
_SHOWN = 8  # workers of a stage with their process ids


def main(arguments: Sequence[str], program: str) -> int:
    """Asks, and prints the answer. Returns the exit code.

    Raises:
        ControlError: no such run, a run that is not alive, or a request that it does not follow.
        RunError: the run does not answer.
    """
    options = _parse(arguments, program)
    request: dict[str, object] = {"command": options.command}
    if options.command == "add":
        request |= {"count": options.count} | ({"host": options.host} if options.host else {})
    elif options.command == "drain":
        request |= _drain_request(options)
    answer = ask(options.run, request)
    if options.json:
        print(json.dumps(answer, ensure_ascii=False))
    elif options.command == "status":
        _show(answer, Console())
    elif options.command == "add":
        print(f"{shortened_workers(answer['added'])} will join; training goes on meanwhile")
    else:
        leaving = f"{shortened_workers(answer['leaving'])} will leave, between two steps" if answer["leaving"] else ""
        host = f"{answer['host']} leaves the run, and its agent ends then" if "host" in answer else ""
        print("; ".join(part for part in (leaving, host) if part))
    return 0


def _drain_request(options: argparse.Namespace) -> dict[str, object]:
    """The part of a request to drain that says who."""
    if options.host is None:
        return {"ranks": options.ranks}
    return {"host": options.host} | ({"within": options.within} if options.within is not None else {})


def ask(run: str, request: Mapping[str, object], timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """One request to the run in directory `run`; its answer.

    Raises:
        ControlError: no such run, a run that is not alive, or a request that it does not follow.
        RunError: the run does not answer.
    """
    folder = Path(os.path.expanduser(run))
    try:
        is_run = is_run_directory(folder)
    except PermissionError as error:
        raise _belongs_to_another(run) from error
    if not is_run:
        raise ControlError(
            f"{run} is no run directory",
            rule="a run is named by its directory",
            exists="directories with a config.yaml",
            fix="the run directory, as the run shows it when it starts",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(timeout_s + 5.0)  # longer than the run itself takes to report that it is too busy
        try:
            with socket_address(folder) as address:
                link.connect(address)
            link.sendall(json.dumps(request).encode() + b"\n")
            with link.makefile("rb") as lines:
                line = lines.readline()
        except PermissionError as error:
            raise _belongs_to_another(run) from error
        except BlockingIOError as error:  # the queue of its socket is full: it has accepted no connection for long
            raise RunError(
                f"the run in {run} does not answer: too many requests wait for it already; is its process stopped?"
            ) from error
        except TimeoutError as error:
            raise RunError(f"the run in {run} does not answer; is its process stopped?") from error
        except OSError:
            line = b""
    if not line.endswith(b"\n"):
        raise _not_alive(run, folder)
    answer = json.loads(line)
    if "error" in answer:
        raise ControlError(**answer["error"])
    return answer


def _belongs_to_another(run: str) -> ControlError:
    return ControlError(f"the run in {run} belongs to another user", rule="only the user of a run may ask it")


@contextlib.contextmanager
def socket_address(folder: Path) -> Iterator[str]:
    """A name for the socket in a run's directory that is short however long the directory's is.

    The name of a Unix socket has 108 bytes at most; a descriptor of the directory stands for the rest of it.

    Raises:
        OSError: the directory cannot be opened.
    """
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def status_rows(answer: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The answer to `status` as rows of (name, text) for a person."""
    pids: dict[int, int | None] = {
        w["rank"]: w["pid"] for w in answer["members"] + answer["newcomers"] + answer["spares"]
    }
    rows = [("run", f"{answer['run_dir']}" + (", its workers are starting" if answer["starting"] else ""))]
    done = f"{answer['version']:,} of {count(answer['total_steps'], 'step')}"
    if answer["loss_hex"] is not None:
        loss = float.fromhex(answer["loss_hex"])
        speed = f"{answer['tokens_per_second']:,.0f} {answer['unit']}/s, {clock_text(answer['seconds_left'])} left"
        done += f", loss {loss:.4f}, {speed}"
    rows.append(("committed", done))
    changing = f", changing, waits for {shortened_workers(answer['changing'])}" if answer["changing"] else ""
    rows.append(("mesh", f"{answer['mesh']}, epoch {answer['mesh_epoch']}{changing}"))
    for number, ranks in enumerate(answer["stages"]):
        shown = ", ".join(_worker(rank, pids) for rank in ranks) if len(ranks) <= _SHOWN else shortened_ranks(ranks)
        rows.append((f"stage {number}", shown))
    newcomers = [w["rank"] for w in answer["newcomers"]]
    rows += [("newcomers", ", ".join(_worker(rank, pids) for rank in newcomers[:_SHOWN]))] if newcomers else []
    spares = [f"{_worker(w['rank'], pids)}{'' if w['ready'] else ', starting'}" for w in answer["spares"][:_SHOWN]]
    rows += [("spares", "; ".join(spares))] if spares else []
    for host in answer.get("hosts", ()):
        places = "" if host["places"] is None else f"; {count(host['places'], 'place')}"
        ranks = shortened_workers(host["ranks"]) if host["ranks"] else "no workers"
        rows.append(
            ("host", f"{host['host']}: {ranks}{places}" + ("" if host["state"] == "ready" else f"; {host['state']}"))
        )
    rows += [(name, shortened_ranks(answer[name])) for name in ("leaving", "learners") if answer[name]]
    rows += [("losses", answer["unsurvived"])] if answer["unsurvived"] else []
    return rows + [("event" if not i else "", event["text"]) for i, event in enumerate(answer["events"])]


def _show(answer: Mapping[str, Any], console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in status_rows(answer):
        if console.is_terminal:
            table.add_row(Text(name, style="bold"), Text(value))
        else:  # a line of a log is one line, however long
            console.print(f"{name:<9}  {value}", markup=False, highlight=False, emoji=False, soft_wrap=True)
    if console.is_terminal:
        console.print(table)


def _worker(rank: int, pids: Mapping[int, int | None]) -> str:
    return f"{rank} (pid {pids[rank]})" if pids.get(rank) is not None else str(rank)


def _not_alive(run: str, folder: Path) -> ControlError:
    try:
        # Of others, such as those of callbacks and of texts that are generated, some come after the end.
        last = [event for event in read_events(folder) if event["event"] in ("start", "finish", "stop")][-1]
    except (DataError, IndexError):
        last = {"event": "none"}
    how = {"finish": "which has finished", "stop": f"which has stopped: {last.get('message')}"}
    unknown = f"which goes on on another machine, has ended without a word, or could not make {SOCKET}"
    ended = how.get(last["event"], unknown)
    return ControlError(f"nobody answers in {run}, {ended}", rule="only a run that is going on can be asked")


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(f"{program} ctl", description="Asks a run that is going on.")
    parser.add_argument("run", metavar="RUN", help="its directory")
    answers = argparse.ArgumentParser(add_help=False)
    answers.add_argument("--json", action="store_true", help="the answer as one line of JSON")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("status", parents=[answers], help="how far it is, its workers, its last events")
    add = commands.add_parser("add", parents=[answers], help="start N more workers")
    add.add_argument("count", type=int, metavar="N")
    add.add_argument("--host", metavar="NAME", help="on this machine; default: where agents have most room, else here")
    drain = commands.add_parser("drain", parents=[answers], help="let workers go; nothing is computed again")
    drain.add_argument("ranks", type=int, nargs="*", metavar="RANK")
    drain.add_argument("--host", metavar="NAME", help="in place of RANK: all workers of this machine; its agent ends")
    drain.add_argument(
        "--within", type=float, metavar="SECONDS", help="of --host: then it ends, whoever is still there"
    )
    options = parser.parse_args(arguments)
    if options.command == "drain":
        if bool(options.ranks) == (options.host is not None):
            drain.error("either RANK ... or --host NAME")
        if options.within is not None and options.host is None:
            drain.error("--within SECONDS is for --host NAME")
        if options.within is not None and not (options.within > 0 and math.isfinite(options.within)):
            drain.error(f"--within {options.within:g} is no deadline: a number of seconds above 0")
    return options
