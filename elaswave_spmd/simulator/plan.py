"""Plans without a run: the placement after an event, with its costs and the reasons. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from time import perf_counter
from typing import Any

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.compose import named_settings, settings_from
from elaswave_spmd.conf.given_files import text_of
from elaswave_spmd.conf.schema import EMULATED, NEVER, ModelSettings, Settings
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.mesh import Mesh
from elaswave_spmd.recovery.reconfiguration import Stages, assign_evenly
from elaswave_spmd.scheduling.cost_model import PROFILE_FIX, CostModel
from elaswave_spmd.scheduling.dvfs import FrequencyRange
from elaswave_spmd.scheduling.partition import balance_layers
from elaswave_spmd.scheduling.placement import CONTIGUOUS
from elaswave_spmd.scheduling.rebalance import Decision, PlanSettings, Variant, plan_change
from elaswave_spmd.scheduling.state_moves import Move, layout_of_costs
from elaswave_spmd.scheduling.step_time import Assignment, StepTime, state_limit, step_time
from elaswave_spmd.sharding import P, Shardings
from elaswave_spmd.simulator import Case, Change, alike, healthy, llama
from elaswave_spmd.simulator.shapes import LlamaShape

LAYERS = 18
MICROBATCHES_PER_WORKER = 4
DECLARED = Shardings(grads=P("dp"), optim=P("dp"))  # what the models of this package declare, for sharding=model
_SHOWN = 16  # the most stages of a placement, hints, and workers of a mesh with its reshard plan, that are shown
_WIDTH = 150  # the most characters of a line of a reshard plan


@dataclass(frozen=True)
class Plan:
    """The plan after an event. `print(plan)` shows what the command `plan` prints.

    Args:
        case: the healthy placement, the costs and the event.
        decision: the decision. `now` is the placement at once. `later` is the placement once its state has been moved
            in the background, or None if there is no other one. Each has its expected step time (`time.seconds`), its
            assignment and the state that it moves. `reasons` says why.
        before: the step time before the event; `before.seconds` is the expected number of seconds.
        source: a text that names the origin of the costs.
        planned_s: the seconds that planning took.
    """

    case: Case
    decision: Decision
    before: StepTime
    source: str
    planned_s: float

    @property
    def ratio(self) -> float:
        """(throughput after / before) over (aggregate speed after / before), in the end."""
        return self.before.seconds / self.decision.last.time.seconds / self.case.share

    def __str__(self) -> str:
        return "\n".join(lines(self))

    def as_json(self) -> dict[str, Any]:
        """The plan as plain data. Placements have one item for each stage."""
        return as_json(self)


def plan_of(words: Sequence[str], event: str) -> Plan:
    """The plan for an event, with the settings that are named by words of a command line.

    Args:
        words: the words, such as "mesh=dp4_pp4".
        event: an event such as "fail 6; join 1"; "" for none.

    Raises:
        ConfigError: a setting is invalid, or no mesh is named.
        UserError: the mesh, the event or the profile is invalid, or no plan fits in memory.
    """
    named = named_settings(words)
    if not any(name.split(".")[0] == "mesh" for name in named) and "train.resume" not in named:
        raise ConfigError("no mesh is given", rule="plan needs a mesh", fix="plan mesh=dp4_pp4 event='fail 6'")
    return make(settings_from(words), named, event)


def make(settings: Settings, named: Collection[str], event: str) -> Plan:
    """The plan for an event.

    Args:
        settings: the settings of a run.
        named: the names of the settings that the command line names. If it names no model, or no batch, the costs and
            the number of micro-batches have other defaults than for `train`, whose defaults are for one small worker.
        event: an event such as "fail 6; join 1"; "" for none.

    Raises:
        UserError: see `plan_of`.
    """
    schedule = settings.schedule
    if not schedule.microbatches:
        raise ConfigError(
            "schedule.microbatches=false is given",
            rule="plan assigns micro-batches by the speed of workers",
            fix="leave schedule.microbatches out",
        )
    mesh = Mesh.initial(settings.mesh.shape)
    costs, source = _costs(settings, named, mesh)
    shardings = DECLARED.with_zero(settings.sharding.zero_level)
    case = Case(
        healthy(mesh, costs, _num_microbatches(settings, named, mesh), shardings),
        costs,
        Change.parse(event) if event else Change(),
        remaining_steps=settings.train.steps,
        mirror_count=settings.mirror.count,
        memory_limit=schedule.memory_limit or math.inf,
        layout=layout_of_costs(costs, settings.page.size),
    )
    before = step_time(case.healthy_split, costs, case.rule)
    stages = case.change.stages(mesh)
    limits = FrequencyRange(
        schedule.f_min, schedule.f_max, schedule.f_margin, schedule.f_changes, schedule.f_change_ms / 1e3
    )
    asked = PlanSettings(
        layout=case.layout,
        memory_limit=case.memory_limit,
        state_limit=_state_limit(case, stages) if schedule.memory_limit is None else math.inf,
        mirror_count=case.mirror_count,
        split=case.split,
        align=schedule.align,
        stage_counts=None if schedule.layers and schedule.stages else (),
        keeps_layers=not schedule.layers,
        min_gain=schedule.min_gain,
        frequencies=limits if schedule.frequency != "none" else None,
    )
    began = perf_counter()
    decision = plan_change(
        case.placement,
        case.after,
        case.remaining_steps,
        asked,
        stages=stages,
        goal_s=before.seconds,
    )
    return Plan(case, decision, before, source, perf_counter() - began)


def _state_limit(case: Case, stages: Stages) -> float:
    """The most bytes of state that a plan of a run may give to one worker after the event.

    Args:
        stages: the workers that are left, by stage, between which layers are cut as a run cuts them at once.
    """
    cuts, sizes = case.healthy.layer_cuts, [len(members) for members in stages]
    if len(stages) != case.healthy.num_stages and case.layout is not None:
        cuts = balance_layers(list(case.layout.work), sizes)
    present = Assignment(stages, cuts, assign_evenly(stages, case.healthy.num_microbatches), CONTIGUOUS)
    return state_limit(case.healthy, present, case.costs, case.rule)


def _num_microbatches(settings: Settings, named: Collection[str], mesh: Mesh) -> int:
    if {"train.global_batch", "train.resume"} & set(named):
        return settings.num_microbatches
    return MICROBATCHES_PER_WORKER * max(len(members) for members in mesh.stages)


def _costs(settings: Settings, named: Collection[str], mesh: Mesh) -> tuple[CostModel, str]:
    """The cost model, and a text that says where the costs come from."""
    names_model = any(name.split(".")[0] == "model" or name == "train.resume" for name in named)
    model, schedule = settings.model, settings.schedule
    if schedule.profile is not None:
        costs = _profile(schedule.profile, model.layers + 2 if names_model else None, mesh)
        source = schedule.profile
    elif names_model and (shape := _shape(settings)) is not None:
        costs = llama(shape, tokens=settings.train.microbatch_size * settings.train.seq_len)
        source = f"modelled: {model.label}, {len(costs.layers)} layers, 160 TFLOP/s a worker"
    else:
        number = model.layers + 2 if names_model else LAYERS
        costs = alike(number)
        source = f"made up: {number} layers that are alike, the bytes of Llama 7B"
    if not _splits(settings):
        costs = replace(costs, layers=tuple(replace(layer, weight_share=0.0) for layer in costs.layers))
    return costs.with_links(schedule.latency, schedule.bandwidth), source


def _splits(settings: Settings) -> bool:
    """True if workers with these settings run the backward of a layer in two parts, where its bits allow it."""
    if settings.schedule.split_backward == NEVER:
        return False
    if settings.runtime.device == EMULATED:
        return settings.emulated.weight_share > 0
    return settings.checks_model and settings.runtime.device in ("cpu", "xla")


def _shape(settings: Settings) -> LlamaShape | None:
    """The sizes of a model of this package; None for `mlp` and for models of the user's own."""
    model: ModelSettings = settings.model
    words = 256 if settings.data.tokenizer == "bytes" else 32_000
    if model.target == "llama":
        hidden, kv_heads = (
            checks.whole(f"model.args.{name}", model.args.get(name, 0)) for name in ("hidden", "kv_heads")
        )
        hidden, kv_heads = hidden or model.d_model * 8 // 3, kv_heads or model.heads
        return LlamaShape(model.layers, model.d_model, hidden, kv_heads / model.heads, words)
    if model.target == "gpt":  # two matrices of width x 4 width have as many parameters as three of width x 8/3 width
        return LlamaShape(model.layers, model.d_model, model.d_model * 8 // 3, 1.0, words)
    return None


def _profile(path: str, num_layers: int | None, mesh: Mesh) -> CostModel:
    where = f"schedule.profile={path}"
    try:
        text = text_of(path)
    except OSError as error:
        raise ConfigError(f"cannot read {where} ({error.strerror or error})", where=where, fix=PROFILE_FIX) from None
    except UnicodeError as error:
        raise ConfigError(f"cannot read {where} ({error})", where=where, fix=PROFILE_FIX) from None
    costs = CostModel.from_json(text, where)
    return costs.check(num_layers or len(costs.layers), mesh.members, where)


# ---- what is shown


def lines(plan: Plan) -> list[str]:
    """The lines of text that show a plan."""
    case, decision = plan.case, plan.decision
    found = [
        f"mesh {case.placement.mesh.shape}, {case.healthy.num_microbatches} micro-batches, event: {case.change}",
        f"costs {plan.source}; {case.costs.bandwidth:.4g} B/s a link",
        "",
        f"old placement: {plan.before}",
        *_placement(case.healthy),
    ]
    later = decision.later
    title = "new placement" if later is None else "new placement, at once"
    found += ["", f"{title}: {decision.now.time}", *_placement(decision.now.assignment)]
    if later is not None:
        found += ["", f"new placement, when its state is there: {later.time}", *_placement(later.assignment)]
    found += ["", "state:", *_moves(decision)]
    before, now, after = plan.before.seconds, decision.now.time.seconds, decision.last.time.seconds
    found += [
        "",
        f"step: expected to take {before:.4g} s before, {now:.4g} s at once, {after:.4g} s in the end",
        f"throughput: {before / after:.3f} of before, with {case.share:.3f} of the aggregate speed: {plan.ratio:.3f}",
    ]
    found += [f"why: {reason}" for reason in decision.reasons]
    found += [f"hint: {hint}" for hint in decision.hints[:_SHOWN]]
    return [*found, f"planned in {plan.planned_s:.3f} s"]


def _moves(decision: Decision) -> list[str]:
    """The reshard plans of a decision in bytes, and whether training waits for them."""
    now, later = decision.now.move, decision.later
    promoted = f"{now.promotions:,} page ranges are promoted in place" if now.promotions else ""
    if now == Move():
        found = ["  before going on: nothing moves"]
    elif decision.layers_stay and not now.from_checkpoint:
        found = [f"  before going on: {promoted or 'nothing moves'}"]
        found += [f"  in the background, replicas made again: {now}"] if now.copies else []
    else:
        found = [f"  before going on: {now}" + (f"; {promoted}" if promoted else "")]
    found += _shown_plan(now)
    if later is not None:
        found += [f"  in the background, then: {later.move}, for which no worker waits", *_shown_plan(later.move)]
    return found


def _shown_plan(move: Move) -> list[str]:
    """The lines of the reshard plan itself; empty on meshes that are too large to read it."""
    sharding = move.plan.sharding if move.plan else None
    if sharding is None or not move.copies or sharding.mesh.num_workers > _SHOWN:
        return []
    return [f"    {line if len(line) <= _WIDTH else line[: _WIDTH - 4] + ' ...'}" for line in move.text().splitlines()]


def _placement(assignment: Assignment) -> list[str]:
    found = [f"  {line}" for line in str(assignment).splitlines()]
    return found if len(found) <= _SHOWN else [*found[:_SHOWN], f"  ... {len(found) - _SHOWN} more stages"]


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    decision, case = plan.decision, plan.case
    hints = [
        {
            "stage": hint.stage,
            "ranks": list(hint.ranks),
            "starts": list(hint.pace.starts),
            "frequencies": list(hint.pace.frequencies),
        }
        for hint in decision.hints
    ]
    return {
        "mesh": case.placement.mesh.shape.name,
        "event": str(case.change),
        "costs": plan.source,
        "old": {"step_s": plan.before.seconds, "how": plan.before.how, **_stages(case.healthy)},
        "now": _variant(decision.now),
        "later": _variant(decision.later) if decision.later else None,
        "layers_stay": decision.layers_stay,
        "speed_left": case.share,
        "ratio": plan.ratio,
        "reasons": list(decision.reasons),
        "hints": hints,
        "planned_s": plan.planned_s,
    }


def _variant(variant: Variant) -> dict[str, Any]:
    figures = [field.name for field in fields(Move) if field.name != "plan"]
    move = {name: getattr(variant.move, name) for name in figures}
    return {"step_s": variant.time.seconds, "how": variant.time.how, "move": move, **_stages(variant.assignment)}


def _stages(assignment: Assignment) -> dict[str, Any]:
    return {
        "stages": [list(members) for members in assignment.stages],
        "layer_cuts": list(assignment.layer_cuts),
        "microbatch_counts": [list(counts) for counts in assignment.microbatch_counts],
    }
