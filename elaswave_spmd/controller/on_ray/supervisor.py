"""The actor that has the run: it starts the controller's command, and keeps agents where the cluster has nodes.

When its process or its node is lost, Ray starts the actor again, mostly on another node. It finds the run's actors and
its files, and starts the command again, which goes on in the directory of the run: it adopts the workers that agents
have kept (docs/protocol.md, A1 to A12), and resumes the run where there are none.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import traceback

from elaswave_spmd.conf.resume import words_resuming
from elaswave_spmd.controller import admin_client
from elaswave_spmd.controller.on_ray import tied
from elaswave_spmd.controller.on_ray.cluster import RayCluster
from elaswave_spmd.controller.on_ray.decisions import (
    REFUSED,
    Action,
    ActorState,
    AddAgent,
    After,
    AgentActor,
    Begin,
    Drain,
    Fleet,
    Move,
    Node,
    RemoveAgent,
    StartAgent,
    Tell,
    after_controller,
    how_to_begin,
    is_in_vain,
    to_start,
    workers_wait,
)
from elaswave_spmd.controller.on_ray.files import LOG, JobFiles
from elaswave_spmd.controller.on_ray.job import MARK, Job, process_environment, words_at
from elaswave_spmd.controller.on_ray.node import check_node, node_id
from elaswave_spmd.controller.on_ray.vendor import ray_module
from elaswave_spmd.errors import ConfigError, ControlError, FilesError, RunError
from elaswave_spmd.runtime.transport.free_ports import free_port

_TURN_S = 0.3
_REGATHER_S = 15.0
"""After a restart: how long all of the first agents are waited for. A node of them may be lost."""

_WAITING_S = 3.0
"""The same where workers wait, as the controller finds out by itself who is lost."""

_CHECK_S = 120.0
_ORPHANS_S = 120.0
"""How long workers that have lost their controller are waited for, where the run has no checkpoint but theirs."""

_SETTLED_S = 1.0
"""After which workers that have lost their controller are no processes that are just ending."""

_ELSEWHERE_S = 5.0
_SAVES_S = 120.0
_CLEANS = 3


class Supervisor:
    """The actor. Its thread does everything; calls are answered at once.

    Args:
        job: the run.
    """

    def __init__(self, job: Job) -> None:
        self._stop = threading.Event()
        threading.Thread(target=self._run, args=(job,), name="supervisor", daemon=True).start()

    def stop(self) -> None:
        """Have the run save its state and end."""
        self._stop.set()

    def ping(self) -> int:
        """Answer, with the process id."""
        return os.getpid()

    def _run(self, job: Job) -> None:
        """The thread. It ends only with its process: nobody would notice an actor that answers and does nothing."""
        try:
            if self._is_over(job):
                ray = ray_module()
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
                return
            time.sleep(_ELSEWHERE_S)
        except _MovesError:
            pass  # Ray starts the actor again, elsewhere, as this node takes nobody any more
        except BaseException:
            _say(traceback.format_exc())
            time.sleep(_ELSEWHERE_S)
        os._exit(1)

    def _is_over(self, job: Job) -> bool:
        """One life of the actor. Returns False if Ray is to start it again.

        Raises:
            _MovesError: at once, and on another node.
        """
        files = JobFiles(job)
        if problem := check_node(job).problem:
            # Started again on a node that has come since. Where nothing is shared, nothing can be said in the log.
            _say(f"{node_id()} cannot have the controller: {problem}")
            return False
        cluster, life = None, None
        try:
            cluster = RayCluster(job)
            if files.code is None:
                life = SupervisorLife(job, files, cluster, self._stop)
                # Written before anything is removed: what fails from here on is not the run.
                files.end(life.run())
        except _MovesError:
            raise
        except BaseException:  # of Ray, of the file system, or of this program
            _say(traceback.format_exc())  # the disk of the run may be what has failed
            files.append(traceback.format_exc().encode())
            if not _is_broken(files):
                files.tell("the supervisor has failed, and is started again")
                return False
            files.tell("the supervisor has failed again and again: the run saves its state and ends")
            if life is not None:
                life.save()
            files.end(1)
        for _ in range(_CLEANS if cluster is not None else 0):
            try:
                assert cluster is not None
                cluster.remove_all()
                files.remove_notes()
                break
            except BaseException:
                _say(traceback.format_exc())
                time.sleep(_ELSEWHERE_S)
        return True


def _say(text: str) -> None:
    """Print for Ray's log of this actor, where that can be written: its disk may be the one that is full."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def _is_broken(files: JobFiles) -> bool:
    """Count an error of the supervisor; True if it is not to be started again. A disk that is full counts nothing."""
    try:
        files.progress = progress = files.progress.crashed()
    except (OSError, FilesError):
        return False
    return progress.is_broken


class SupervisorLife:
    """One life of the supervisor.

    Args:
        stop: set when a person wants the run to end.
    """

    def __init__(self, job: Job, files: JobFiles, cluster: RayCluster, stop: threading.Event) -> None:
        self._job = job
        self._files = files
        self._cluster = cluster
        self._stop = stop
        self._home = node_id()
        self._host = ray_module("util").get_node_ip_address()
        self._fleet = Fleet(job.places, job.aim, self._home)
        self._nodes: dict[str, Node] = {}
        self._controller: subprocess.Popen[bytes] | None = None
        self._rendezvous = ""
        self._moves = False
        self._was_started = False  # the last controller: its command was started
        self._resumes = False  # it was to go on with the run
        self._shards: frozenset[str] = frozenset()  # that there were when it was started
        self._vain_shards: frozenset[str] = frozenset()  # that there were when it found nothing to go on with
        self._refusals = 0  # in a row, of controllers that were started

    def save(self) -> None:
        """Have the controller end, if there is one, as by Ctrl-C."""
        if self._controller is not None and self._controller.poll() is None:
            self._controller.terminate()
            try:
                self._controller.wait(_SAVES_S)
            except subprocess.TimeoutExpired:
                return

    @property
    def _is_asked(self) -> bool:
        """True if a person wants the run to end. A call is quick; the file is seen also after a restart."""
        return self._stop.is_set() or self._files.is_asked_to_stop

    def run(self) -> int:
        """Run until the run has ended. Returns its exit code.

        Raises:
            _MovesError: the supervisor is to go on on another node.
        """
        files, progress = self._files, self._files.progress
        if progress.starts and files.has_result:
            return 0  # it had finished when the one before was lost
        if self._is_asked:
            if progress.starts:
                self._files.tell("the run ends, as was asked")
                self._end_orphans()
            return 128 + signal.SIGTERM
        self._nodes = self._cluster.nodes()
        are_waiting = self._find_waiting()
        if (code := self._gather(is_first=not progress.starts, are_waiting=are_waiting)) is not None:
            if self._is_asked:
                self._end_orphans()
            return code
        while True:
            if files.progress.is_vain:
                files.tell(f"the controller was started {files.progress.starts} times, and the run got no further")
                self._end_waiting()
                return 1
            goes_on, had_checkpoint = files.progress.starts > 0, files.has_checkpoint
            code = self._live(are_waiting=are_waiting)
            files.progress = files.progress.ended(code, time.time(), was_started=self._was_started)
            if code < 0 and files.has_result:
                return 0  # it was killed when the result was written
            in_vain = self._ended_in_vain(code, had_checkpoint=had_checkpoint)
            after = after_controller(code, moves=self._moves, is_asked=self._is_asked, goes_on=goes_on, in_vain=in_vain)
            match after:
                case After.END:
                    if code < 0:
                        self._end_orphans()
                    elif code and goes_on:  # it may not have come so far that it had workers
                        self._end_waiting()
                    return 128 - code if code < 0 else code
                case After.MOVE:
                    files.tell("the run's state is saved; the controller goes on on another node")
                    raise _MovesError
                case After.AGAIN if files.progress.is_refused(time.time()):
                    files.tell("the controller is refused again and again: the run ends")
                    self._end_waiting()
                    return code
                case After.AGAIN:
                    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
                    files.tell(f"the controller has ended {how}: it is started again")
                    time.sleep(0.0 if code < 0 else _ELSEWHERE_S)
                    are_waiting = self._find_waiting()

    def _ended_in_vain(self, code: int, *, had_checkpoint: bool) -> bool:
        """True if the last controller was to go on with the run, and found nothing to go on with."""
        if not self._was_started:
            return False
        files = self._files
        self._refusals = self._refusals + 1 if code == REFUSED else 0
        in_vain = self._resumes and is_in_vain(
            code,
            had_checkpoint=had_checkpoint,
            has_checkpoint=files.has_checkpoint,
            steps=files.steps - files.progress.steps,
            refusals=self._refusals,
        )
        self._vain_shards = self._shards if in_vain else frozenset()
        return in_vain

    def _name(self, node: str) -> str:
        """The name of a node by its id."""
        return self._nodes[node].name if node in self._nodes else node

    def _refuse(self, node: str, problem: str) -> int:
        self._files.append(f"error: node {self._name(node)} cannot serve the run: {problem}\n".encode())
        return REFUSED

    def _gather(self, *, is_first: bool, are_waiting: bool) -> int | None:
        """Reserve what the first agents need, and make their actors. Returns an exit code if the run cannot begin."""
        job, cluster = self._job, self._cluster
        cluster.reserve_first()
        deadline = time.monotonic() + (job.timeout_s if is_first else 0.0 if are_waiting else _REGATHER_S)
        while not cluster.are_reserved():
            if self._is_asked:
                return 128 + signal.SIGTERM
            if time.monotonic() > deadline:
                if not is_first:
                    break
                self._files.append(
                    f"error: the Ray cluster has had no room for {job.described()} within {job.timeout_s:g} s "
                    "(runtime.agents_timeout)\n".encode()
                )
                return 1
        cluster.make_first()
        if not is_first:
            return None
        self._files.tell(f"the run has {job.described()}")
        if job.not_adopted:
            self._files.tell(f"a controller that is lost takes its workers along ({job.not_adopted})")
        for checked in cluster.check(range(job.agents), max(_CHECK_S, job.timeout_s)):
            if checked.problem:
                return self._refuse(checked.node, checked.problem)
        return None

    def _live(self, *, are_waiting: bool) -> int:
        """One life of the controller. Returns its exit code.

        Args:
            are_waiting: workers wait for it.
        """
        self._was_started = self._resumes = False
        agents = self._ready_agents(are_waiting=are_waiting)
        if self._is_asked:
            self._end_orphans()
            return 128 + signal.SIGTERM
        are_waiting = are_waiting or self._are_there_waiting()  # an actor may have answered late
        if not agents:
            self._files.tell("no agent has a place any more")
            return 1
        try:
            words = self._words(are_waiting=are_waiting)
        except ConfigError as error:  # a controller that Ray was cut off from still has the directory
            self._files.tell(error.what)
            return REFUSED
        if self._is_asked:
            self._end_orphans()
            return 128 + signal.SIGTERM
        progress = self._files.progress
        is_back = progress.node == self._home
        port = free_port(self._host, progress.port if is_back else 0)
        self._rendezvous = f"{self._host}:{port}"
        self._files.progress = progress.started(self._files.steps, port, self._home)
        for key in to_start(agents, self._rendezvous):
            self._start(key)
        self._shards = self._files.shards
        self._start_controller(words, len(agents), are_waiting=are_waiting)
        assert self._controller is not None
        is_asked = False
        while (code := self._controller.poll()) is None:
            if self._is_asked and not is_asked:
                is_asked = True
                self._controller.terminate()
            self._turn()
            time.sleep(_TURN_S)
        return code

    @property
    def _may_be_waiting(self) -> bool:
        return self._job.adopt_s is not None and bool(self._files.progress.starts) and self._files.has_begun

    def _are_there_waiting(self) -> bool:
        """True if workers wait for the next controller, as far as actors have told."""
        if not self._may_be_waiting:
            return False
        return any(agent.has_workers for agent in self._cluster.agents()) or self._are_own_waiting()

    def _are_own_waiting(self) -> bool:
        """True if workers wait that were beside the last controller, on this node: elsewhere nobody adopts them."""
        if self._files.progress.node != self._home or not self._files.has_workers:
            return False
        time.sleep(_SETTLED_S)  # a fork server that was left without workers ends at once
        return self._files.has_workers

    def _find_waiting(self) -> bool:
        """True if workers wait for the next controller. Actors have some time to tell."""
        if not self._may_be_waiting:
            return False
        began, found = time.monotonic(), None
        while found is None and not self._is_asked:
            self._hear_answers()
            found = workers_wait(self._cluster.agents(), time.monotonic() - began)
            time.sleep(_TURN_S if found is None else 0.0)
        return bool(found) or self._are_own_waiting()

    def _ready_agents(self, *, are_waiting: bool) -> list[AgentActor]:
        """The agents that the controller is to wait for: after a restart perhaps fewer than the run began with.

        Args:
            are_waiting: workers wait for it, so that it has to be there soon.
        """
        began = time.monotonic()
        # Beside the controller there is no device that Ray has given to the run.
        patience_s = self._job.timeout_s if self._job.needs_device else _REGATHER_S
        patience_s = _WAITING_S if are_waiting else patience_s
        while True:
            self._nodes = self._cluster.nodes()
            self._hear_answers()
            agents = self._cluster.agents()
            ready = [agent for agent in agents if self._is_ready(agent) or (are_waiting and agent.has_workers)]
            waited = time.monotonic() - began
            is_enough = len(ready) >= self._job.agents or (ready and waited > patience_s)
            if self._is_asked or is_enough or waited > self._job.timeout_s:
                return ready
            time.sleep(_TURN_S)

    def _is_ready(self, agent: AgentActor) -> bool:
        node = self._nodes.get(agent.node)
        is_there = node is not None and node.stays and agent.state is not ActorState.PLACING
        return is_there and agent.code != REFUSED and not self._fleet.cannot_start(agent)

    def _words(self, *, are_waiting: bool) -> list[str]:
        """The words of the user, or those that go on with the run.

        Args:
            are_waiting: workers wait for a controller that goes on.

        Raises:
            ConfigError: the controller before still has the directory.
        """
        files = self._files
        has_begun = files.progress.starts > 0 and files.has_begun
        if has_begun and not are_waiting and not files.has_checkpoint:
            self._await_orphans(are_to_end=self._job.adopt_s is not None)  # what they write may be all there is
        begin = how_to_begin(
            has_begun=has_begun,
            are_waiting=are_waiting,
            has_checkpoint=files.has_checkpoint,
            shards=files.shards,
            in_vain=self._vain_shards,
        )
        if begin is Begin.AS_TYPED:
            return [*self._job.words]
        # A controller that only finds the directory locked would not say whether there is something to go on with.
        files.check_free(nobody_waits=not are_waiting and self._job.adopt_s is not None)
        if begin is Begin.ANEW and (aside := files.put_aside()) is not None:
            files.tell(f"the run has no checkpoint, and begins again; what it has left is in {aside}")
            return [*self._job.words]
        if are_waiting:
            files.tell("workers wait for the next controller, which adopts them")
        self._resumes = True
        return words_resuming(self._job.words, self._job.run_dir)

    def _end_waiting(self) -> None:
        """Have workers that wait for a controller write their state and end, as none comes any more."""
        if self._job.adopt_s is not None:
            self._end_orphans()

    def _end_orphans(self) -> None:
        """Wait until workers that have lost their controller have written their state, and do not wait for another."""
        if self._files.progress.starts:
            self._await_orphans(are_to_end=self._job.adopt_s is not None)

    def _await_orphans(self, *, are_to_end: bool = False) -> None:
        """Wait for workers that have lost their controller: they write their state, and end.

        Args:
            are_to_end: they would wait for another controller, and do so at once.
        """
        began, terminated = time.monotonic(), set[int]()
        # Those of the controller itself are told nothing: they wait as long as they would for the next one.
        while time.monotonic() - began < _ORPHANS_S + (self._job.adopt_s or 0.0):
            self._hear_answers()
            agents, waited = self._cluster.agents(), time.monotonic() - began
            for agent in agents if are_to_end else ():
                if agent.has_workers and agent.key not in terminated:
                    terminated.add(agent.key)
                    self._cluster.terminate(agent.key)
            is_unknown = waited < _REGATHER_S and any(agent.state is ActorState.PLACING for agent in agents)
            if not is_unknown and not any(agent.has_workers for agent in agents) and not self._files.has_workers:
                return
            time.sleep(_TURN_S)

    def _start_controller(self, words: list[str], agents: int, *, are_waiting: bool) -> None:
        job = self._job
        is_first = self._files.progress.starts == 1
        if are_waiting and (job.needs_device or self._cluster.are_reserved()):
            # It adopts workers of those that are there. Should it begin again later, it waits for all that are to come.
            agents = max(agents, job.agents)
        are_all = is_first or job.needs_device or agents * job.places >= job.workers
        beside = "" if are_all else "; workers without a place there are beside the controller"
        name = self._nodes[self._home].name
        self._files.tell(f"the controller is on node {name}, and meets {agents} agents at {self._rendezvous}{beside}")
        added = words_at(job, self._rendezvous, agents, are_all=are_all)
        environment = {**process_environment(job, os.environ), MARK: json.dumps(added)}
        command = [job.python, "-m", "elaswave_spmd", "train", *words]
        with self._files.opened(LOG) as log:
            self._controller = tied.start(command, environment, job.folder, log)
        self._was_started = True

    def _start(self, key: int) -> None:
        agent = next(agent for agent in self._cluster.agents() if agent.key == key)
        self._cluster.start(key, self._rendezvous, self._name(agent.node))

    def _turn(self) -> None:
        """Look at the cluster, and do what follows."""
        self._nodes = self._cluster.nodes()
        self._hear_answers()
        turn = self._fleet.turn(self._nodes, self._cluster.agents(), self._rendezvous, time.monotonic())
        self._carry_out(turn)

    def _hear_answers(self) -> None:
        """Do what follows from the answers of actors that were to start their agents."""
        now = time.monotonic()
        for key, report in self._cluster.answers():
            name = self._name(report.node)
            if report.problem:
                self._carry_out(self._fleet.failed(key, report.node, name, report.problem))
            elif report.failure:
                self._carry_out(self._fleet.not_started(key, report.node, name, report.failure, now))
            else:
                self._carry_out(self._fleet.started(key, report.node, name, report.facts))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Tell(line):
                    self._files.tell(line)
                case StartAgent(key):
                    self._start(key)
                case AddAgent(node):
                    self._cluster.add(node)
                case RemoveAgent(key):
                    self._cluster.remove(key)
                case Drain(key, name, within_s):
                    self._drain(key, name, within_s)
                case Move():
                    self._moves = True
                    if self._controller is not None:
                        self._controller.terminate()

    def _drain(self, key: int, name: str, within_s: float | None) -> None:
        """Ask the run, which lives on this machine. Where it refuses or cannot answer, the agent goes anyway."""
        request: dict[str, object] = {"command": "drain", "host": name}
        if within_s is not None:
            request["within"] = within_s
        try:
            admin_client.ask(self._job.run_dir, request)
        except (ControlError, RunError) as error:
            why = error.what if isinstance(error, ControlError) else error.headline
            self._files.tell(f"the run does not drain {name} ({why}): its agent gets SIGTERM")
            self._cluster.terminate(key)


class _MovesError(Exception):
    """The supervisor ends, for Ray to start it on another node."""
