"""The processes and the machines of a run: the fork server of this one, the agents of others, and who starts where.

A run needs them before it has a plan, so nothing here knows the model. `controller/startup.py` calls these functions
in the order of a start. An agent starts its own machine's fork server by the same one, and prepares the same data.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from elaswave_spmd.by_value import ByValue
from elaswave_spmd.conf import checks
from elaswave_spmd.conf.schema import Settings, endpoint
from elaswave_spmd.controller.io import credentials_of, listen_host
from elaswave_spmd.controller.resume import ResumePoint
from elaswave_spmd.data import DataSpec, PreparedData
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.mesh import Mesh, MeshShape, Topology
from elaswave_spmd.output import say
from elaswave_spmd.run_dir.captured_output import CapturedOutput
from elaswave_spmd.run_dir.display import count
from elaswave_spmd.runtime.devices.selection import WorkerStart, worker_start
from elaswave_spmd.runtime.processes import fork_server_client
from elaswave_spmd.runtime.processes.agents import AdoptedLife, Agents
from elaswave_spmd.runtime.processes.fd_limit import raise_fd_limit
from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient, ForkServerSpec
from elaswave_spmd.runtime.processes.launcher import Launcher
from elaswave_spmd.runtime.processes.rendezvous import read_secret
from elaswave_spmd.runtime.transport.shared_memory import why_not_shared

TARGET = "elaswave_spmd.worker.process:main"
PRELOAD = (*fork_server_client.PRELOAD, "randomgen", "elaswave_spmd.worker.process", "elaswave_spmd.models")


def data_spec(settings: Settings) -> DataSpec:
    """The settings of the data as a value of the data room, which is below conf and cannot import it."""
    d = settings.data
    return DataSpec(
        name=d.name,
        path=d.path,
        tokenizer=d.tokenizer,
        target=d.target,
        args=d.args,
        cache=d.cache,
        validation_fraction=d.validation_fraction,
        seq_len=settings.train.seq_len,
        column=d.column,
    )


def start_launcher(
    settings: Settings,
    scratch: str,
    *,
    here: bool = False,
    given: ByValue | None = None,
    captured: CapturedOutput | None = None,
) -> Launcher:
    """Opens the rendezvous, if there is one, and starts the fork server, which imports what workers need meanwhile.

    Args:
        scratch: directory of the sockets; removed with the last worker, and where this raises.
        here, given: as for ForkServerSpec.
        captured: takes what workers of this machine print to a terminal; None: the terminal does.

    Raises:
        ConfigError: a device that cannot be used here; a token file, an address or a number of workers that cannot be.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, scratch, ignore_errors=True)
        agents = open_agents(settings, None)
        if agents is not None:
            undo.callback(agents.close, 0.0)
        # Before the fork server: workers inherit the limit from it.
        raise_fd_limit_for(settings)
        if settings.runtime.transport == "shm" and (why := why_not_shared()):
            say(f"links go over Unix sockets (runtime.transport=ipc): memory is not shared, since {why}")
        local = fork_server_of(settings, scratch, here=here, given=given, captured=captured)
        undo.pop_all()
    return launcher_of(settings, local, agents)


def launcher_of(settings: Settings, fork_server: ForkServerClient, agents: Agents | None) -> Launcher:
    """The launcher of a run's workers, as its settings have it."""
    return Launcher(fork_server, agents, starts_here=settings.runtime.local_workers != 0)


def fork_server_of(
    settings: Settings,
    scratch: str,
    *,
    here: bool = False,
    given: ByValue | None = None,
    captured: CapturedOutput | None = None,
) -> ForkServerClient:
    """Start the fork server of the controller's machine, as the settings of the run have it; see `start_launcher`."""
    spec = ForkServerSpec(
        scratch=(scratch,),
        orphan_grace_s=settings.timeouts.orphan_grace,
        adopt_s=settings.timeouts.adopt,
        here=here,
        given=given,
        streams={} if captured is None else captured.streams,
    )
    return start_fork_server(worker_start(settings), spec)


def start_fork_server(start: WorkerStart, spec: ForkServerSpec) -> ForkServerClient:
    """Start the fork server of a machine's workers, and print the environment variables that they get.

    Args:
        start: what the run's device asks for.
        spec: everything else.
    """
    if start.environment:
        say(f"variables of the workers: {start}")
    preload = (*PRELOAD, *start.preload)
    return ForkServerClient.start(TARGET, replace(spec, preload=preload, method=start.method, env=start.environment))


def gather(launcher: Launcher, settings: Settings, data: PreparedData) -> Topology | None:
    """Wait for the first agents, assign the workers to machines, and have the agents prepare the same data.

    Returns:
        The failure domain of each rank, which is its machine; None if the run has no agents.

    Raises:
        RunError: agents are missing at the deadline, or one failed.
        UserError: too few places for the workers; an agent whose data is missing or differs.
    """
    agents, runtime = launcher.agents, settings.runtime
    if agents is None:
        return None
    if runtime.agents:
        say(f"waiting for {count(runtime.agents, 'agent')} at {runtime.rendezvous}")
        agents.wait_for_all(runtime.agents_timeout)
    hosts = _assigned(launcher, settings)
    counts = Counter(hosts.values())
    say("workers: " + ", ".join(f"{number} on {host}" for host, number in counts.items()))
    for stage, host in _alone(settings, hosts):
        say(
            f"stage {stage} is on {host} alone, and so are the mirrors of its state: if that machine is lost, the run "
            "is back at its newest checkpoint"
        )
    agents.prepare(most_workers(settings), settings.to_dict(), data.to_dict())
    return Topology.of({rank: (host,) for rank, host in hosts.items()})


def _assigned(launcher: Launcher, settings: Settings) -> dict[int, str]:
    """Assign all workers to machines. Returns rank -> host.

    Machines have neighbours in a stage, whose gradients go to each other, unless a stage would lie on one machine
    alone: a machine that is lost would take all replicas of its state along. Then each has workers of all stages.
    """
    shape, num_local = settings.mesh.shape, settings.runtime.local_workers
    ranks: Sequence[int] = range(shape.num_workers)
    launcher.assign(ranks, num_local)
    hosts = {rank: launcher.host_of(rank) for rank in ranks}
    if _alone(settings, hosts):
        launcher.assign(across_stages(shape), num_local)
        hosts = {rank: launcher.host_of(rank) for rank in ranks}
    return hosts


def _alone(settings: Settings, hosts: Mapping[int, str]) -> list[tuple[int, str]]:
    """(stage, host) of the stages that one of several machines has alone, with all mirrors of their state.

    Stages with too few members for all mirrors have some in other stages.
    """
    count, stages = settings.mirror.count, Mesh.initial(settings.mesh.shape).stages
    if not count or len({*hosts.values()}) == 1:
        return []
    found = []
    for stage, members in enumerate(stages):
        first, *others = {hosts[rank] for rank in members}
        if not others and len(members) > count:
            found.append((stage, first))
    return found


def across_stages(shape: MeshShape) -> list[int]:
    """All ranks, the first of each stage, then the second of each, and so on."""
    stages = Mesh.initial(shape).stages
    return [members[i] for i in range(max(map(len, stages))) for members in stages if i < len(members)]


def most_workers(settings: Settings) -> int:
    """The workers that a run may have beside spares, as far as its settings say."""
    return settings.elastic.max_workers or settings.mesh.shape.num_workers


def raise_fd_limit_for(settings: Settings) -> None:
    """Have room for the links of all that the settings have room for, and for strangers where there are ports."""
    links = most_workers(settings) + settings.elastic.spares + (settings.runtime.agents or 0)
    raise_fd_limit(links, strangers=settings.runtime.transport == "tcp")


def open_agents(settings: Settings, start: ResumePoint | None) -> Agents | None:
    """Open the rendezvous; None: the run has none.

    Args:
        start: of a controller that adopts the workers of one that has died; None: it does not.
    """
    runtime, workers = settings.runtime, settings.mesh.shape.num_workers
    if runtime.rendezvous is None:
        return None
    if start is None and (runtime.local_workers or 0) > workers:
        raise ConfigError(
            f"runtime.local_workers={runtime.local_workers} is more than the mesh's {workers} workers",
            rule="the workers of this machine are some of the mesh's",
            where=checks.override("runtime.local_workers", runtime.local_workers),
            fix=f"runtime.local_workers={workers}, or a larger mesh",
        )
    assert runtime.token_file is not None
    host = listen_host(runtime)
    secret = read_secret(runtime.token_file, where=checks.override("runtime.token_file", runtime.token_file))
    where = endpoint("runtime.rendezvous", runtime.rendezvous)
    if start is not None and (adoption := start.adoption) is not None:
        assert adoption.credentials is not None, "agents are for runtime.transport=tcp"
        here, first_free = frozenset(adoption.made), adoption.next_rank
        life = AdoptedLife(start.run, start.incarnation, adoption.generation, here, first_free)
        return Agents(where, secret, adoption.credentials, host, 0, life)
    credentials = credentials_of(runtime)
    assert credentials is not None, "agents are for runtime.transport=tcp"
    return Agents(where, secret, credentials, host, runtime.agents or 0)
