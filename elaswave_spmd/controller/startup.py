"""From settings to the launcher of a run: this machine's fork server and, where the settings say so, agents on
others.
"""

from __future__ import annotations

import shutil
from collections import Counter

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.schema import RuntimeSettings, Settings, endpoint
from elaswave_spmd.data import DataSpec, PreparedData
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.mesh import Topology
from elaswave_spmd.runtime.devices.selection import WorkerStart, worker_start
from elaswave_spmd.runtime.processes import fork_server_client
from elaswave_spmd.runtime.processes.agents import Agents
from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient
from elaswave_spmd.runtime.processes.launcher import Launcher
from elaswave_spmd.runtime.processes.rendezvous import is_loopback, read_secret, resolve
from elaswave_spmd.runtime.transport.links import make_room

TARGET = "elaswave_spmd.worker.process:main"
PRELOAD = (*fork_server_client.PRELOAD, "randomgen", "elaswave_spmd.worker.process", "elaswave_spmd.models")


def data_spec(settings: Settings) -> DataSpec:
    """What the data room needs of the settings."""
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
    )


def start_launcher(settings: Settings, scratch: str, *, here: bool = False) -> Launcher:
    """Opens the rendezvous, if there is one, and starts the fork server, which imports what workers need meanwhile.

    Args:
        scratch: directory of the sockets; removed with the last worker, and where this raises.
        here: as for ForkServerClient.start.

    Raises:
        ConfigError: a device that cannot be used here; a token file, an address or a number of workers that cannot be.
    """
    try:
        agents = _open(settings)
        local = start_fork_server(worker_start(settings), scratch, settings.timeouts.orphan_grace, here=here)
        return Launcher(local, agents)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def start_fork_server(
    start: WorkerStart, scratch: str, orphan_grace_s: float, *, here: bool = False
) -> ForkServerClient:
    """Starts the fork server of a machine's workers, and says which variables they get."""
    if start.environment:
        print(f"variables of the workers: {start}", flush=True)
    return ForkServerClient.start(
        TARGET,
        preload=(*PRELOAD, *start.preload),
        method=start.method,
        env=start.environment,
        scratch=[scratch],
        orphan_grace_s=orphan_grace_s,
        here=here,
    )


def gather(launcher: Launcher, settings: Settings, data: PreparedData) -> Topology | None:
    """Waits for the agents, deals the workers, and has the agents prepare the same data; None where there are none.

    Returns:
        The failure domain of each rank: its machine.

    Raises:
        RunError: agents are missing at the deadline, or one failed.
        UserError: too few places for the workers; an agent whose data is missing or differs.
    """
    agents, runtime = launcher.agents, settings.runtime
    if agents is None:
        return None
    print(f"waiting for {runtime.agents} agents at {runtime.rendezvous}", flush=True)
    agents.wait_for_all(runtime.agents_timeout)
    ranks = range(settings.mesh.shape.num_workers)
    launcher.deal(ranks, runtime.local_workers)
    hosts = {rank: launcher.host_of(rank) for rank in ranks}
    counts = Counter(hosts.values())
    print("workers: " + ", ".join(f"{number} on {host}" for host, number in counts.items()), flush=True)
    agents.prepare(len(ranks), settings.to_dict(), data.to_dict())
    return Topology.of({rank: (host,) for rank, host in hosts.items()})


def listen_host(runtime: RuntimeSettings) -> str:
    """The address on which links of the controller's machine listen.

    Raises:
        ConfigError: it is not one of this machine's, or one that other machines do not reach.
    """
    if runtime.host is not None:
        return resolve(runtime.host, where=checks.override("runtime.host", runtime.host))
    if runtime.rendezvous is None:
        return "127.0.0.1"
    host, _ = endpoint("runtime.rendezvous", runtime.rendezvous)
    where = checks.override("runtime.rendezvous", runtime.rendezvous)
    address = resolve(host, where=where)
    if is_loopback(address) and not is_loopback(host):
        raise ConfigError(
            "links between machines listen on an address that the others reach",
            got=f"{host} is {address} on this machine",
            where=where,
            fix="runtime.host=ADDRESS, one of those that `hostname -I` shows",
        )
    return address


def _open(settings: Settings) -> Agents | None:
    runtime, workers = settings.runtime, settings.mesh.shape.num_workers
    if runtime.rendezvous is None:
        return None
    if (runtime.local_workers or 0) > workers:
        raise ConfigError(
            "the workers of this machine are some of the mesh's",
            got=f"{runtime.local_workers} of {workers}",
            where=checks.override("runtime.local_workers", runtime.local_workers),
            fix=f"runtime.local_workers={workers}, or a larger mesh",
        )
    assert runtime.token_file is not None
    secret = read_secret(runtime.token_file, where=checks.override("runtime.token_file", runtime.token_file))
    make_room(workers + runtime.agents)
    return Agents(endpoint("runtime.rendezvous", runtime.rendezvous), secret, listen_host(runtime), runtime.agents)
