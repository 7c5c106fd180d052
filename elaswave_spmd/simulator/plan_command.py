"""`python -m elaswave_spmd plan mesh=dp4_pp4 event='fail 6'`: what would be done after an event, and why."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.dvfs import FrequencyRange
from elaswave_spmd.scheduling.rebalance import Decision, Variant, plan_change
from elaswave_spmd.scheduling.step_time import Assignment, StepTime, step_time
from elaswave_spmd.simulator import Case, Change, alike, arguments, healthy, tell

_ARGUMENTS: dict[str, str | None] = {
    "mesh": None,
    "event": "",
    "profile": "",
    "microbatches": "",
    "layers": "",
    "steps": "1000",
    "sharding": "zero1",
    "mirror": "1",
    "memory": "",
    "stages": "true",
    "frequency": "",
    "trace": "",
    "json": "false",
}
_LAYERS = "18"
_MICROBATCHES_EACH = 4
_SHOWN = 16  # stages of a placement

USAGE = """usage: {program} plan mesh=NAME [name=value ...]     what would be done after an event; nothing is run

  mesh=dp4_pp4           the mesh as it is: dpN_ppM, stages3-2
  event='fail 6'         fail RANK ..., slow RANK SPEED, join COUNT; several with ';'
  profile=costs.json     measured costs of a run; without it layers are all alike (10 + 20 ms, the bytes of Llama 7B)
  layers=18              layers of the model, with embedding and head
  micro-batches=16               micro-batches of a step; {each} for each worker of the largest stage where nothing is
  said steps=1000             steps that are left: what a move has to pay for
  sharding=zero1         zero0 to zero3; mirror=1: mirrors of each page
  memory=BYTES           of each worker; stages=false: workers stay in their stage
  frequency='0.8 1.1'    what relative frequencies may be set to: hints are printed
  trace=FILE             write how it goes on in virtual time, for ui.perfetto.dev
  json=true              one line of JSON
"""


@dataclass(frozen=True)
class Plan:
    """A case, and what is decided."""

    case: Case
    decision: Decision
    before: StepTime
    source: str
    planned_s: float

    @property
    def mirror_bytes(self) -> float:
        """Copies of state that were lost and are made again, in the background."""
        rule, old, costs = self.case.rule, self.case.healthy, self.case.costs
        if rule.zero_level == 0:
            return 0.0
        total = costs.prefix("state_bytes")
        lost = set(self.case.change.gone)
        found = 0.0
        for (first, stop), members in zip(pairwise(old.layer_cuts), old.stages, strict=True):
            state = float(total[stop] - total[first])
            found += sum(rank in lost for rank in members) * rule.state_share(len(members)) * state
        return found

    @property
    def ratio(self) -> float:
        """(throughput after / before) over (aggregate speed after / before), in the end."""
        return self.before.seconds / self.decision.last.time.seconds / self.case.share


def main(argv: Sequence[str], program: str) -> int:
    """Plans and prints. Returns the exit code.

    Raises:
        ConfigError: arguments that are none.
        UserError: a mesh, an event or a profile that cannot be; a plan that does not fit in memory.
    """
    if {"-h", "--help"} & set(argv):
        print(USAGE.format(program=program, each=_MICROBATCHES_EACH), end="")
        return 0
    values = arguments.read(argv, _ARGUMENTS, "plan")
    plan = make(values)
    if values["trace"]:
        _write_trace(plan, Path(values["trace"]).expanduser())
    print(json.dumps(as_json(plan)) if arguments.flag(values, "json") else "\n".join(lines(plan)))
    return 0


def make(values: dict[str, str]) -> Plan:
    """The plan that the arguments ask for."""
    mesh = Mesh.initial(MeshShape.parse(values["mesh"]))
    costs, source = _costs(values, mesh)
    zero = _zero(values)
    microbatches = values["microbatches"] or str(_MICROBATCHES_EACH * max(len(members) for members in mesh.stages))
    case = Case(
        healthy(mesh, costs, arguments.whole({"microbatches": microbatches}, "microbatches", 1), zero=zero),
        costs,
        Change.parse(values["event"]) if values["event"] else Change(),
        remaining_steps=arguments.whole(values, "steps", 0),
        mirror_count=arguments.whole(values, "mirror", 0),
        memory_limit=_memory(values),
    )
    frequencies = arguments.numbers(values, "frequency", 2)
    before = step_time(case.healthy, costs, case.rule)
    stages = arguments.flag(values, "stages")
    began = perf_counter()
    decision = plan_change(
        case.placement,
        case.after,
        case.remaining_steps,
        stages=case.change.stages(mesh),
        memory_limit=case.memory_limit,
        mirror_count=case.mirror_count,
        stage_counts=None if stages else (),
        frequencies=FrequencyRange(*frequencies) if frequencies else None,
        goal_s=before.seconds,
    )
    return Plan(case, decision, before, source, perf_counter() - began)


def _costs(values: dict[str, str], mesh: Mesh) -> tuple[CostModel, str]:
    if not values["profile"]:
        number = arguments.whole({"layers": values["layers"] or _LAYERS}, "layers", 1)
        return alike(number), f"made up: {number} layers that are alike, the bytes of Llama 7B"
    where = f"profile={values['profile']}"
    try:
        text = Path(values["profile"]).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError("a profile can be read", got=str(error), where=where, fix="costs.json of a run") from None
    costs = CostModel.from_json(text, where)
    number = arguments.whole(values, "layers", 1) if values["layers"] else len(costs.layers)
    return costs.check(number, mesh.members, where), values["profile"]


def _zero(values: dict[str, str]) -> int:
    words = [f"zero{level}" for level in range(4)]
    if values["sharding"] not in words:
        raise ConfigError(
            "sharding is a ZeRO level",
            got=values["sharding"] or "nothing",
            where=f"sharding={values['sharding']}",
            exists=", ".join(words),
            fix="sharding=zero1",
        )
    return words.index(values["sharding"])


def _memory(values: dict[str, str]) -> float:
    found = arguments.numbers(values, "memory", 1)
    if found and not found[0] > 0:
        where = f"memory={values['memory']}"
        raise ConfigError("memory is a number of bytes above 0", got=values["memory"], where=where, fix="memory=64e9")
    return found[0] if found else math.inf


# ---- what is shown


def lines(plan: Plan) -> list[str]:
    """The plan for a person."""
    case, decision = plan.case, plan.decision
    found = [
        f"mesh {case.placement.mesh.shape}, {case.healthy.num_microbatches} micro-batches, event: {case.change}",
        f"costs {plan.source}; {case.costs.bandwidth:.4g} B/s a link",
        "",
        f"old placement: {plan.before}",
        *_placement(case.healthy),
    ]
    later = decision.later
    moves = decision.now.move.bytes > 0
    title = "new placement" if later is None else "new placement, at once"
    found += ["", f"{title}: {decision.now.time}", *_placement(decision.now.assignment)]
    if later is not None:
        found += ["", f"new placement, when its state is there: {later.time}", *_placement(later.assignment)]
    found += ["", "bytes:"]
    found.append(f"  before going on: {decision.now.move}" if moves else "  before going on: none")
    if later is not None:
        found.append(f"  in the background: {later.move}, for which nobody waits")
    if plan.mirror_bytes:
        found.append(f"  lost copies made again, in the background: {plan.mirror_bytes:,.0f} B")
    before, now, after = plan.before.seconds, decision.now.time.seconds, decision.last.time.seconds
    found += [
        "",
        f"step: expected to take {before:.4g} s before, {now:.4g} s at once, {after:.4g} s in the end",
        f"throughput: {before / after:.3f} of before, with {case.share:.3f} of the aggregate speed: {plan.ratio:.3f}",
    ]
    found += [f"why: {reason}" for reason in decision.reasons]
    found += [f"hint: {hint}" for hint in decision.hints[:_SHOWN]]
    return [*found, f"planned in {plan.planned_s:.3f} s"]


def _placement(assignment: Assignment) -> list[str]:
    found = [f"  {line}" for line in str(assignment).splitlines()]
    return found if len(found) <= _SHOWN else [*found[:_SHOWN], f"  ... {len(found) - _SHOWN} more stages"]


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data. Placements have one entry for each stage."""
    decision, case = plan.decision, plan.case
    hints = [{"stage": h.stage, "ranks": list(h.ranks), "frequencies": list(h.frequencies)} for h in decision.hints]
    return {
        "mesh": case.placement.mesh.shape.name,
        "event": str(case.change),
        "costs": plan.source,
        "old": {"step_s": plan.before.seconds, "how": plan.before.how, **_stages(case.healthy)},
        "now": _variant(decision.now),
        "later": _variant(decision.later) if decision.later else None,
        "mirror_bytes": plan.mirror_bytes,
        "speed_left": case.share,
        "ratio": plan.ratio,
        "reasons": list(decision.reasons),
        "hints": hints,
        "planned_s": plan.planned_s,
    }


def _variant(variant: Variant) -> dict[str, Any]:
    move = {"bytes": variant.move.bytes, "bound_bytes": variant.move.bound_bytes, "seconds": variant.move.seconds}
    return {"step_s": variant.time.seconds, "how": variant.time.how, "move": move, **_stages(variant.assignment)}


def _stages(assignment: Assignment) -> dict[str, Any]:
    return {
        "stages": [list(members) for members in assignment.stages],
        "layer_cuts": list(assignment.layer_cuts),
        "microbatch_counts": [list(counts) for counts in assignment.microbatch_counts],
    }


def _write_trace(plan: Plan, path: Path) -> None:
    story = tell(plan.case, plan.decision)
    try:
        story.timeline.write(path)
    except OSError as error:
        raise ConfigError(
            "a trace is written to a file", got=str(error), where=f"trace={path}", fix="a file that can be written"
        ) from None
