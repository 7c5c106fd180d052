"""The wait for file descriptors, of any number."""

from __future__ import annotations

import math
import socket

from elaswave_spmd.ready import is_any_ready, ready_among
from tests.descriptors import OF_SELECT, beyond_select


def test_descriptors_of_any_number_are_waited_for() -> None:
    with beyond_select():
        here, there = socket.socketpair()
        with here, there:
            descriptor = here.fileno()
            assert descriptor >= OF_SELECT and not is_any_ready([descriptor], timeout_s=0.0)
            assert ready_among([here, there], 0.0) == []
            assert is_any_ready([descriptor], [descriptor], 0.0), "it can be written"
            there.send(b"x")
            assert is_any_ready([here, descriptor])
            assert ready_among([descriptor, there]) == [descriptor] and ready_among([there, here]) == [here]


def test_an_end_counts_as_ready() -> None:
    here, there = socket.socketpair()
    with here:
        there.close()
        assert is_any_ready([here]) and ready_among([here]) == [here]


def test_a_wait_may_be_longer_than_poll_takes() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.send(b"x")
        for seconds in (1e300, math.inf):
            assert is_any_ready([here], timeout_s=seconds) and ready_among([here], seconds) == [here]
