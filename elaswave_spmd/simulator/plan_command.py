"""The command `plan`: the placement after an event, printed.

`python -m elaswave_spmd plan mesh=dp4_pp4 event='fail 6'` takes the settings of `train` and needs no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from elaswave_spmd.conf.compose import own_arguments, own_flag
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.simulator import simulate_transition
from elaswave_spmd.simulator.plan import DECLARED, LAYERS, MICROBATCHES_PER_WORKER, Plan, plan_of

_OWN = {"event": "", "trace": "", "json": "false"}

USAGE = """usage: {program} plan mesh=NAME [event=...] [name=value ...]

Shows what would be done after an event. No worker runs.

Own arguments:
  event='fail 6'                 fail RANK ..., slow RANK SPEED, join COUNT; several with ';'
  trace=FILE                     write how it goes on in virtual time, for ui.perfetto.dev
  json=true                      one line of JSON

All settings of train are accepted, so that its command line can be used here. These change the plan:
  mesh=dp4_pp4                   or mesh.dp=6250 mesh.pp=16, or 'mesh.stages=[3,2]'
  sharding=zero1                 zero0 to zero3; sharding=model: {declared}, as the models of this package declare it
  model=llama_7b                 modelled costs of its layers; where no model is named, {layers} layers that are
                                 all alike (10 + 20 ms a micro-batch, the bytes of a layer of Llama 7B)
  train.global_batch=64          with train.microbatch_size, the micro-batches of a step; where none is named,
                                 {each} for each worker of the largest stage
  train.steps=400                steps that are left, which a move has to pay for
  mirror.count=1                 mirrors of each page
  schedule.profile=costs.json    measured costs of a run
  schedule.bandwidth=, schedule.latency=      of a link
  schedule.memory_limit=64e9     bytes that each worker has room for
  runtime.check_model=false      backwards are whole, as on devices other than cpu and xla; else they are in two parts,
                                 as the profile says, or where none is named in all layers
  schedule.split_backward=never  backwards are whole
  schedule.layers=false          layers stay where they are
  schedule.stages=true           the number of stages may change
  schedule.frequency=            with f_min, f_max, f_margin, f_changes and f_change_ms: hints for the frequencies of
                                 devices
"""


def main(argv: Sequence[str], program: str) -> int:
    """Plan and print. Returns the exit code.

    Raises:
        ConfigError: an argument or a setting is invalid.
        UserError: the mesh, the event or the profile is invalid, or no plan fits in memory.
    """
    if {"-h", "--help"} & set(argv):
        print(
            USAGE.format(program=program, each=MICROBATCHES_PER_WORKER, layers=LAYERS, declared=DECLARED.name),
            end="",
        )
        return 0
    own, words = own_arguments(argv, _OWN, "plan")
    as_one_line = own_flag(own, "json")
    plan = plan_of(words, own["event"])
    if own["trace"]:
        _write_trace(plan, Path(os.path.expanduser(own["trace"])))
    print(json.dumps(plan.as_json()) if as_one_line else plan)
    return 0


def _write_trace(plan: Plan, path: Path) -> None:
    transition = simulate_transition(plan.case, plan.decision)
    try:
        transition.timeline.write(path)
    except OSError as error:
        what = f"cannot write trace={path} ({error.strerror or error})"
        raise ConfigError(what, where=f"trace={path}", fix="a file that can be written") from None
