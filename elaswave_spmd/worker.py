"""A worker process: opens its links, takes its place, and drives its executor from its mailbox."""

from __future__ import annotations

import resource
import traceback
from typing import Any, cast

import torch

from elaswave_spmd.assembly import RunPlan, make_executor, plan_run
from elaswave_spmd.data import PreparedData
from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.allocator import keep_freed_memory
from elaswave_spmd.runtime.links import CONTROLLER, Links, Transport
from elaswave_spmd.runtime.mailbox import ControllerGone, Envelope, Mailbox
from elaswave_spmd.runtime.port import LinkPort, Stopped
from elaswave_spmd.settings import Settings

_CONNECT_TIMEOUT_S = 60.0
_FAREWELL_MS = 2000


def main(spec: dict[str, Any]) -> int:
    """Entry of a worker process.

    Args:
        spec: plain data: rank, life_fd (from the zygote); settings, data, controller (address), directory, token.

    Returns: the exit code.
    """
    rank, settings = int(spec["rank"]), Settings.from_dict(spec["settings"])
    torch.set_num_threads(settings.runtime.threads_per_worker)
    keep_freed_memory()
    mailbox = Mailbox()
    links = Links(
        rank,
        mailbox,
        transport=cast(Transport, settings.runtime.transport),
        directory=spec["directory"],
        token=bytes.fromhex(spec["token"]),
        life_fd=spec["life_fd"],
    )
    try:
        links.connect(CONTROLLER, spec["controller"])
        plan = plan_run(settings, PreparedData.from_dict(spec["data"]))
        links.send(CONTROLLER, m.encode(m.Ready(rank, links.address)))
        _work(rank, plan, links, mailbox)
    except Stopped:
        pass
    except BaseException:
        links.send(CONTROLLER, m.encode(m.Failed(rank, traceback.format_exc())))
        links.close(_FAREWELL_MS)
        return 1
    links.close(_FAREWELL_MS)
    return 0


def _work(rank: int, plan: RunPlan, links: Links, mailbox: Mailbox) -> None:
    """The worker's life, from its place in the mesh to the controller's Stop."""
    place, early = _await_place(mailbox)
    plan = plan.with_place(place)
    for peer, address in place.addresses.items():
        if peer != rank:
            links.connect(peer, address)
    if missing := links.wait_connected((p for p in place.addresses if p != rank), _CONNECT_TIMEOUT_S):
        raise RunError(f"worker {rank} could not connect to workers {missing} within {_CONNECT_TIMEOUT_S:g} s")
    port = LinkPort(links, mailbox, plan.job.torch_dtype, early)
    executor = make_executor(plan, rank, port)
    for _ in executor.run():
        mailbox.wait()
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    port.send(CONTROLLER, m.Finished(rank, executor.state_bytes(), peak_kib * 1024))
    while True:
        mailbox.wait()
        port.take()


def _await_place(mailbox: Mailbox) -> tuple[m.Place, list[Envelope]]:
    """The PLACE that makes this worker a member, and what arrived before it from members that had theirs earlier."""
    early: list[Envelope] = []
    while True:
        item = mailbox.get()
        if isinstance(item, ControllerGone):
            raise Stopped
        if not isinstance(item, Envelope):
            continue
        message = m.decode(item.header)
        if isinstance(message, m.Place):
            return message, early
        if isinstance(message, m.Stop):
            raise Stopped
        early.append(item)
