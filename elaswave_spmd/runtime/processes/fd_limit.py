"""The limit of open files of a process, raised so that the links of a run fit."""

from __future__ import annotations

import resource
from contextlib import suppress

from elaswave_spmd.errors import ConfigError

FDS_PER_LINK = 7
"""Both directions of a link: two sockets, their connections' ends, a monitor, the peer's memory and its bell."""

_OTHER_FDS = 100  # data, logs, pipes, what libraries keep open
_FDS_OF_STRANGERS = 1 << 16  # more than the ports that one address has to connect from


def raise_fd_limit(num_workers: int, *, strangers: bool = False) -> None:
    """Raise this process's soft limit of open files to the hard one if `num_workers` links would not fit.

    Called before the worker processes are made: they inherit the limit, and each has as many links.

    Args:
        strangers: processes listen on ports, so that anybody can open connections, each of which takes a descriptor
            until it is closed for want of credentials. Once all are taken no file of the run can be written, which
            ends it. The limit is raised to have room for them too, as far as the system lets it.

    Raises:
        ConfigError: the hard limit is too low.
    """
    needed = _fds_needed(num_workers)
    _raise_for_links(num_workers, needed)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + _FDS_OF_STRANGERS
    if strangers and not _allows(soft, wanted):
        with suppress(ValueError, OSError):  # systems that have another limit below the hard one; links fit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if _allows(hard, wanted) else hard, hard))


def _raise_for_links(num_workers: int, needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _allows(soft, needed):
        return
    if not _allows(hard, needed):
        raise ConfigError(
            f"{num_workers} workers need {needed} open files in every process, and {hard} are allowed (ulimit -Hn)",
            rule=f"every process has a link to every worker, and a link takes {FDS_PER_LINK} open files",
            where="mesh",
            fix=f"ulimit -n {needed}, which may need an administrator, or fewer workers",
        )
    # Some systems refuse an unlimited soft limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


def fits_fd_limit(num_workers: int) -> bool:
    """True if `num_workers` links fit among the files that a process of this run may have open."""
    return _allows(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _fds_needed(num_workers))


def _fds_needed(num_workers: int) -> int:
    return FDS_PER_LINK * num_workers + _OTHER_FDS


def _allows(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
