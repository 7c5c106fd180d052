"""Whole runs on a device that is no CPU, in a process of its own: for test_made_up_device and test_gpu.

    python -m tests.simulated.device_runs 'DEVICE BESIDE MODEL DTYPE MESH ZERO [EVENT ...]' [CASE ...]

Prints for each case a line of JSON: what differs from the same run on one worker of BESIDE, and what happened.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from elaswave_spmd.models import LayeredModel
from elaswave_spmd.recovery.controller_protocol import Policy
from elaswave_spmd.runtime.devices import Device, Island, device_of
from tests.cluster import SimulatedCluster
from tests.cluster.faults import AnyFault, Fault, ThenFault
from tests.cluster.made_up_device import NAME, MadeUp, register
from tests.cluster.processes import Trained
from tests.simulated.bits_cases import (
    TRAIN,
    VALIDATION,
    Run,
    description_of,
    meta_model,
    mirrored_placement,
    one_thread,
    outcome,
)

EVENTS: dict[str, AnyFault] = {
    "kill": Fault(2, "kill", 1, "backward"),
    "join": ThenFault("join", settled=True),
    "term": ThenFault("term", settled=True),
    "corrupt": Fault(2, "corrupt", 0, "forward"),
    "rebalance": ThenFault("rebalance", settled=True),
}


class Runs:
    """Runs of one arithmetic. `seen`: the devices of whatever layers were given."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.seen: set[str] = set()

    def _model(self) -> LayeredModel:
        model = meta_model(self._run.model)
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda _, given: self._look(given[0]))
        return model

    def _look(self, x: Tensor) -> None:
        self.seen.add(x.device.type)

    def train(self, device: Device, mesh: str, zero: int, faults: Sequence[AnyFault] = ()) -> Trained:
        run, placement = self._run, mirrored_placement(self._run, mesh, zero, 1 if faults else 0)
        cluster = SimulatedCluster(
            replace(run.job(), verify_every=1 if any(fault.kind == "corrupt" for fault in faults) else 0),
            placement,
            description_of(run),
            self._model,
            TRAIN,
            VALIDATION,
            faults=faults,
            policy=Policy(mirror_count=1),
            device=device,
        )
        trained = cluster.run()
        assert cluster.plan.num_injected == len(faults), cluster.plan.num_injected
        return trained


@one_thread()
def main(device: str, beside: str, model: str, dtype: str, mesh: str, zero: str, *events: str) -> dict[str, object]:
    """Runs one case. Returns what differs, the devices that layers saw, both runs' losses, and the number of epochs."""
    runs = Runs(Run(model=model, dtype=dtype, microbatches=4, steps=4, checkpointing=dtype == "bf16"))
    # The made-up device has no fused attention, and takes the kernel that is made of operators.
    kernel = sdpa_kernel(SDPBackend.MATH) if device == NAME else nullcontext()
    first, second = ((MadeUp() if name == NAME else device_of(name)).open(0, Island()) for name in (beside, device))
    with kernel:
        wanted = outcome(runs.train(first, "single", 0))
        runs.seen.clear()
        trained = runs.train(second, mesh, int(zero), [EVENTS[event] for event in events])
    found = outcome(trained)
    return {
        "differs": [name for name in vars(found) if getattr(found, name) != getattr(wanted, name)],
        "seen": sorted(runs.seen),
        "losses": found.losses,
        "beside": wanted.losses,
        "epochs": len(trained.epochs),
    }


if __name__ == "__main__":
    cases = [case.split() for case in sys.argv[1:]]
    operators = register() if any(case[0] == NAME for case in cases) else []  # before the first backward of any device
    for case in cases:
        print(json.dumps(main(*case)), flush=True)
    del operators
