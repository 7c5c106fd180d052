"""Room for the links of a run among the files that a process may have open."""

from __future__ import annotations

import resource

from elaswave_spmd.errors import ConfigError

PER_LINK = 5  # both directions: two sockets, their connections' ends, a monitor
_OTHERS = 100  # data, logs, pipes, what libraries keep open


def make_room(num_workers: int) -> None:
    """Raises this process's soft limit of open files to the hard one if `num_workers` links would not fit.

    To be called before the workers' processes are made: they inherit it, and each has as many links.

    Raises:
        ConfigError: the hard limit is too low.
    """
    needed = PER_LINK * num_workers + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _allows(soft, needed):
        return
    if not _allows(hard, needed):
        raise ConfigError(
            f"every process has a link to every worker, and a link takes {PER_LINK} open files",
            got=f"{num_workers} workers, {needed} open files",
            where="mesh",
            exists=f"{hard} open files for a process (ulimit -Hn)",
            fix=f"ulimit -n {needed}, which may need an administrator, or fewer workers",
        )
    # Some systems refuse an unlimited soft limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


def has_room(num_workers: int) -> bool:
    """Whether `num_workers` links fit among the files that a process of this run may have open."""
    return _allows(resource.getrlimit(resource.RLIMIT_NOFILE)[0], PER_LINK * num_workers + _OTHERS)


def _allows(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
