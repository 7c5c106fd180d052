"""Worker processes on the made-up device, with real links, a checkpoint, a kill and a join: the bits of the CPU.

The device computes on the CPU, under another name: this shows nothing about any hardware.
"""

from __future__ import annotations

from pathlib import Path

from elaswave_spmd.run_dir import read_events, read_metrics, read_summary
from tests.faults.fault_runs import PATIENT
from tests.multiprocess.made_up_train import SEEN
from tests.multiprocess.made_up_train import __file__ as script
from tests.multiprocess.real_runs import SMALL, train, train_in_new_interpreter, write_text

NO_HEADS = [word for word in SMALL if word != "model.heads=2"]
ARGUMENTS = [*NO_HEADS, *PATIENT, "model=mlp_tiny", "model.dropout=0.1", "mesh=dp2_pp2", "checkpoint.every=3"]
STEPS = 16
EVENTS = (
    "chaos.events=[{step: 3, kind: kill, rank: 1, point: backward}, {step: 5, kind: join, rank: 0, point: forward}]"
)


def test_a_real_run_on_the_made_up_device(tmp_path: Path) -> None:
    write_text(tmp_path)
    arguments = [*ARGUMENTS, f"train.steps={STEPS}", "sharding=zero3"]
    on_cpu = train(tmp_path, *arguments, "run.dir=cpu")
    assert on_cpu.code == 0, on_cpu.err
    done = train_in_new_interpreter(tmp_path, *arguments, EVENTS, script=Path(script))
    assert done.code == 0, done.err
    assert done.out.count(SEEN) >= 4
    runs = [tmp_path / name for name in ("cpu", "run")]
    wanted, found = ([(line.loss_hex, line.grad_norm_hex) for line in read_metrics(run)] for run in runs)
    assert len(found) == STEPS and found == wanted
    hashes = [read_summary(run)["weights_sha256"] for run in runs]
    assert hashes[0] == hashes[1]
    events = [event["event"] for event in read_events(runs[1])]
    assert {"fail", "join", "checkpoint"} <= {*events}, events
