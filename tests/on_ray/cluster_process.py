"""A Ray cluster of several raylets on this machine, in a process of its own: orders and answers are lines of JSON.

    python cluster_process.py FOLDER

Its processes inherit this process's environment, as those of `ray start` do. What Ray prints goes to stderr: it would
come in the middle of an answer.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

from benchmarks.processes import take_stdout
from elaswave_spmd.controller.on_ray.vendor import ray_module

OBJECT_STORE_BYTES = 80 * 2**20  # the least that Ray takes; the run uses none of it
QUICK = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


class ClusterProcess:
    def __init__(self, folder: str) -> None:
        self._ray = ray = ray_module()
        head = {"num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        head |= {"temp_dir": folder, "_system_config": QUICK}
        self._cluster = ray_module("cluster_utils").Cluster(initialize_head=True, head_node_args=head)
        self._nodes: dict[str, Any] = {}
        ray.init(
            address=self._cluster.address, namespace="elaswave_spmd", log_to_driver=False, logging_level="CRITICAL"
        )

    def answer(self, order: dict[str, Any]) -> object:
        match order:
            case {"address": _}:
                return self._cluster.address
            case {"add": cpus}:
                node = self._cluster.add_node(num_cpus=cpus, object_store_memory=OBJECT_STORE_BYTES)
                self._nodes[node.node_id] = node
                return node.node_id
            case {"kill": node_id}:
                self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)
                return None
            case {"drain": node_id, "within": within_s}:
                return self._drain(node_id, within_s)
            case {"supervisor": run_dir}:
                return self._ray.get(self._ray.get_actor(f"elaswave:{run_dir}").ping.remote(), timeout=60)
            case {"actors": _}:
                return self._ray.util.list_named_actors()
            case {"groups": _}:
                table = self._ray.util.placement_group_table()
                return [group["name"] for group in table.values() if group["state"] != "REMOVED"]
        raise ValueError(order)

    def _drain(self, node_id: str, within_s: float) -> bool:
        client = ray_module("_raylet").GcsClient(address=self._cluster.gcs_address)
        reason = ray_module("core.generated.autoscaler_pb2").DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        return client.drain_node(node_id, reason, "a test", int(1e3 * (time.time() + within_s)))[0]

    def end(self) -> None:
        with contextlib.suppress(Exception):
            self._ray.shutdown()
        self._cluster.shutdown()


def main() -> None:
    answers = take_stdout()
    cluster = ClusterProcess(sys.argv[1])
    try:
        for line in sys.stdin:
            try:
                answer: dict[str, object] = {"answer": cluster.answer(json.loads(line))}
            except Exception as error:
                answer = {"error": repr(error)}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        cluster.end()


if __name__ == "__main__":
    main()
