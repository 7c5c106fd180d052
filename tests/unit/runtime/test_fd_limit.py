"""Limits of open files, on a made-up system."""

from __future__ import annotations

import resource

import pytest

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.processes import fd_limit
from elaswave_spmd.runtime.processes.fd_limit import fits_fd_limit, raise_fd_limit

INF = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits that were set; the last one is in force."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(fd_limit.resource, "getrlimit", lambda _: found[-1])
    monkeypatch.setattr(fd_limit.resource, "setrlimit", lambda _, pair: found.append(pair))
    return found


@pytest.mark.parametrize(
    ("before", "workers", "after"),
    [
        ((1024, 4096), 4, (1024, 4096)),  # room enough: nothing is touched
        ((1024, 4096), 500, (4096, 4096)),
        ((1024, INF), 500, (3600, INF)),
        ((INF, INF), 100_000, (INF, INF)),
    ],
)
def test_the_soft_limit_is_raised_where_needed(
    limits: list[tuple[int, int]], before: tuple[int, int], workers: int, after: tuple[int, int]
) -> None:
    limits.append(before)
    raise_fd_limit(workers)
    assert limits[-1] == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1 << 30), (65664, 1 << 30)),
        ((1024, INF), (65664, INF)),
        ((1 << 20, 1 << 20), (1 << 20, 1 << 20)),
        ((INF, INF), (INF, INF)),
    ],
)
def test_where_strangers_can_connect_there_is_room_for_them(
    limits: list[tuple[int, int]], before: tuple[int, int], after: tuple[int, int]
) -> None:
    limits.append(before)
    raise_fd_limit(4, strangers=True)
    assert limits[-1] == after


def test_a_system_that_has_no_room_for_strangers_is_no_error(
    limits: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int, pair: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(fd_limit.resource, "setrlimit", refuse)
    limits.append((1024, INF))
    raise_fd_limit(4, strangers=True)


def test_room_is_what_the_soft_limit_leaves(limits: list[tuple[int, int]]) -> None:
    limits.append((600, 4096))
    assert fits_fd_limit(71) and not fits_fd_limit(72)
    limits.append((INF, INF))
    assert fits_fd_limit(100_000)


def test_a_hard_limit_that_is_too_low_is_refused(limits: list[tuple[int, int]]) -> None:
    limits.append((1024, 4096))
    with pytest.raises(ConfigError, match=r"(?s)^1000 workers need 7100 open files.*4096 .*ulimit -n 7100"):
        raise_fd_limit(1000)
    assert limits == [(1024, 4096)]
