"""`elaswave_spmd.plan` and `elaswave_spmd.simulate`: plans and policies without a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elaswave_spmd.api.keywords import copied, put
from elaswave_spmd.conf.given_files import path_given
from elaswave_spmd.errors import ConfigError

if TYPE_CHECKING:
    from elaswave_spmd.simulator.plan import Plan
    from elaswave_spmd.simulator.report import Report


def plan(mesh: str | None = None, event: str = "", *, settings: Mapping[str, Any] | None = None) -> Plan:
    """The placement after an event, as a run would decide it, with expected step times, what moves, and the reasons.

        found = ew.plan("dp4_pp4", "fail 6")
        found.before.seconds, found.decision.last.time.seconds, found.decision.reasons; print(found)

    Args:
        mesh: "dp4_pp4", ...; None: as settings have it ("mesh.dp", "mesh.stages").
        event: "fail RANK ...", "slow RANK SPEED", "join COUNT"; several with ";". "": none.
        settings: of `train`; those that name a model, a batch or a profile change the plan as with the command `plan`.

    Raises:
        UserError: a setting, a mesh or an event that cannot be; a plan that does not fit in memory.
    """
    from elaswave_spmd.conf.compose import words_of
    from elaswave_spmd.simulator.plan import plan_of

    named = copied(settings)
    put(named, "mesh", mesh, "mesh")
    if not isinstance(event, str):
        raise ConfigError(f"event is {event!r}, which is no text", where="event", fix='event="fail 6"')
    return plan_of(words_of(named), event)


def simulate(scenario: str, *, settings: Mapping[str, Any] | None = None) -> Report:
    """A scenario in virtual time: what this system and others do after its events, as tables.

        for table in ew.simulate("small_events").tables:
            print(table.title, table.columns, table.rows)

    Args:
        scenario: a name ("small_events"), or the path of a YAML file.
        settings: of `train` that take the place of the scenario's own: "sharding", "train.steps", "seed".

    Raises:
        UserError: a scenario or a setting that cannot be.
    """
    from elaswave_spmd.conf.compose import words_of
    from elaswave_spmd.simulator.simulate import scenario_of
    from elaswave_spmd.simulator.tables import run_scenario

    name = path_given("scenario", scenario)
    return run_scenario(Path(name).stem, scenario_of(name, words_of(copied(settings))))
