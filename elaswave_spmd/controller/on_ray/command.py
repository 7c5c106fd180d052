"""The command `train ... runtime.launcher=ray`: hands the run to a Ray cluster, and shows what becomes of it.

The run is the cluster's: it goes on when this command is killed, and the same command shows it again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from elaswave_spmd.controller.on_ray.files import JobFiles, begun_twice
from elaswave_spmd.controller.on_ray.job import Job
from elaswave_spmd.controller.on_ray.vendor import ray_module
from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.runtime.processes.stop_signals import StopSignals, signal_name

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOK_S = 0.2
_CHECK_S = 120.0
_GONE_S = 60.0
_ASK_S = 5.0  # between two looks whether the supervisor is there


def run_on_ray(job: Job) -> int:
    """Begin the run, or find it, and follow it to its end. Returns its exit code.

    Raises:
        ConfigError: no Ray, no cluster, another run in the same directory.
        RunError: the cluster is gone.
    """
    ray = ray_module()
    with _connected(ray):
        files = JobFiles(job)
        if _find(ray, job) is not None and files.code is not None:
            _wait_until_gone(ray, job)  # of a run that has ended
        supervisor, shown = _find(ray, job), None
        if supervisor is None:
            with files.beginning() as is_new:
                supervisor = _find(ray, job)  # again: another command may have begun it meanwhile
                if supervisor is None:
                    supervisor, shown = _begin(ray, job, files, is_new=is_new)
        if shown is None:
            if files.words() != [*job.words]:
                raise ConfigError(
                    f"a run in {job.run_dir} is going on, and was begun by other words",
                    rule="a run has one controller at a time; the same command as before shows it",
                    where="run.dir",
                    exists=" ".join(files.words() or ()),
                    fix="another run.dir",
                )
            shown = 0
            print(f"ray: the run in {job.run_dir} is going on; this is its log from the begin", flush=True)
        # Ray has handlers of its own for signals: these come after them.
        with StopSignals() as signals:
            return _follow(ray, job, files, supervisor, signals, shown)


@contextlib.contextmanager
def _connected(ray: Any) -> Iterator[None]:
    """A connection to the cluster that RAY_ADDRESS names, or to that of this machine."""
    errors = ray_module("exceptions")
    from elaswave_spmd.controller.on_ray.cluster import NAMESPACE
    from elaswave_spmd.controller.on_ray.node import AUTH

    if os.environ.get(AUTH, "").lower() != "token":
        raise ConfigError(
            f"{AUTH}={os.environ.get(AUTH, 'not set')}: the Ray cluster is asked for without a token",
            rule="who can reach a cluster that asks for no token can run code on it, and read the run's secret",
            where=AUTH,
            fix=f"{AUTH}=token, here and for `ray start` on all nodes; `ray get-auth-token --generate` makes a token",
        )
    address = os.environ.get("RAY_ADDRESS", "auto")
    if "://" in address:
        raise ConfigError(
            f"RAY_ADDRESS={address} is that of a Ray client",
            rule="the command is a driver on a node of the cluster, which sees the directory of the run",
            where="RAY_ADDRESS",
            fix="RAY_ADDRESS=HOST:PORT of the head, on one of its nodes; or `ray job submit`",
        )
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="CRITICAL")
    except (ConnectionError, errors.AuthenticationError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster can be reached ({str(error).splitlines()[0]})",
            rule="runtime.launcher=ray hands the run to a cluster that is there",
            where=f"RAY_ADDRESS={address}",
            fix="ray start --head, or RAY_ADDRESS=HOST:PORT",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _find(ray: Any, job: Job) -> Any:
    """The supervisor of a run in this directory; None: there is none."""
    try:
        return ray.get_actor(job.name)
    except ValueError:
        return None


def _check_nodes(ray: Any, job: Job) -> None:
    """Check all nodes: the controller may come to each of them.

    Raises:
        ConfigError: the run cannot use one of them.
    """
    errors, strategies = ray_module("exceptions"), ray_module("util.scheduling_strategies")
    from elaswave_spmd.controller.on_ray.node import check_node

    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    check = ray.remote(check_node)
    asked = {}
    for node in nodes:
        there = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        asked[node] = check.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(job)
    for node, question in asked.items():
        name = f"{nodes[node]['NodeManagerHostname']}-{node[:8]}"
        try:
            problem = ray.get(question, timeout=_CHECK_S).problem
        except errors.RayError as error:
            problem = f"it does not answer, or elaswave_spmd cannot be imported there ({str(error).splitlines()[-1]})"
        if problem:
            raise ConfigError(
                f"node {name} of the Ray cluster cannot serve the run: {problem}",
                rule="the controller may come to any node, so all nodes share the directory of the run, have its "
                "environment, and let nothing but the run end its processes",
                where="runtime.launcher=ray",
            )


def _begin(ray: Any, job: Job, files: JobFiles, *, is_new: bool) -> tuple[Any, int]:
    """Begin the run. Returns its supervisor, and the length of the log before.

    Raises:
        ConfigError: the cluster cannot have it, or another command has begun it.
    """
    from elaswave_spmd.controller.on_ray.supervisor import Supervisor

    try:
        job = job.shared_out([node["Resources"] for node in ray.nodes() if node["Alive"]])
        files.make()
        _check_nodes(ray, job)
    except BaseException:
        if is_new:
            files.discard()
        raise
    shown = files.log.stat().st_size
    # It asks for no resources: it mostly waits, and must find a place on any node.
    options = {"name": job.name, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0}
    try:
        return ray.remote(Supervisor).options(**options).remote(job), shown
    except ValueError:  # the name is taken: where the file system has locks for each machine alone
        raise begun_twice(job.run_dir) from None


def _wait_until_gone(ray: Any, job: Job) -> None:
    """Wait until the supervisor of a run that has ended has removed what the run had in the cluster."""
    deadline = time.monotonic() + _GONE_S
    while _find(ray, job) is not None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _follow(ray: Any, job: Job, files: JobFiles, supervisor: Any, signals: StopSignals, shown: int) -> int:
    """Show the log until the run has ended."""
    asked, question, looked = 0, None, time.monotonic()

    def tell(number: int) -> None:
        nonlocal asked
        asked = number

    with open(files.log, "rb") as log, signals.as_events(tell, count=1):
        log.seek(shown)
        while True:
            code = files.code  # before the log is read: what is written then is the last of it
            _show(log.read())
            if code is not None:
                _wait_until_gone(ray, job)
                return code
            if asked:
                asked = 0
                _show(f"ray: {signal_name(signals.first or 2)}: the run saves its state and ends\n".encode())
                with contextlib.suppress(OSError):
                    files.ask_to_stop()  # it may be started again at this moment, and would not hear the call
                supervisor.stop.remote()
            if question is None and time.monotonic() - looked > _ASK_S:
                question = supervisor.ping.remote()
            if question is not None and ray.wait([question], timeout=0)[0]:
                _check_alive(ray, job, files, question)
                question, looked = None, time.monotonic()
            time.sleep(_LOOK_S)


def _check_alive(ray: Any, job: Job, files: JobFiles, question: Any) -> None:
    """Look at an answer of the supervisor. A question is lost with the process that it was put to, not only for good.

    Raises:
        RunError: it is gone for good, and has not said how the run has ended.
    """
    errors = ray_module("exceptions")
    try:
        ray.get(question)
    except errors.RayError as error:
        if _find(ray, job) is None and files.code is None:
            raise RunError(f"the run's supervisor is gone, and Ray does not start it again: {error}") from error


def _show(text: bytes) -> None:
    with contextlib.suppress(OSError):  # the reader has left already
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
