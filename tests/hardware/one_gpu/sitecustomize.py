"""Lets several processes on one GPU be members of a group of NCCL: each one says that it is a host of its own.

NCCL refuses two members on one GPU of one host. With this folder on PYTHONPATH every process, forked ones too, names
itself as its host, and NCCL connects them over sockets. It shows order, faults and bits, and nothing about speed.
"""

import os


def _be_a_host() -> None:
    os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"


_be_a_host()
os.register_at_fork(after_in_child=_be_a_host)
