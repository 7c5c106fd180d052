"""Steps in virtual time on a cost model, and the policies of other systems on the same costs. Needs no torch."""

from elaswave_spmd.simulator.changes import Change
from elaswave_spmd.simulator.engine import FREE, Run, Wires, execute
from elaswave_spmd.simulator.failures import FailureRate, Fleet, Repair, exponential, outages
from elaswave_spmd.simulator.goodput import Drops, GoesOn, Restarts, Scale, Stalls
from elaswave_spmd.simulator.optimum import Optimum, optimum
from elaswave_spmd.simulator.policies import Case, Constants, DropReplica, Ours, Outcome, Policy, Restart
from elaswave_spmd.simulator.recompute import RecomputedStep, recompute_step
from elaswave_spmd.simulator.reroute import Reroute
from elaswave_spmd.simulator.shapes import alike, healthy, llama
from elaswave_spmd.simulator.templates import Templates
from elaswave_spmd.simulator.trace import Timeline
from elaswave_spmd.simulator.transition import Phase, Transition, simulate_transition
from elaswave_spmd.simulator.work import Span, Work

__all__ = [
    "FREE",
    "Case",
    "Change",
    "Constants",
    "DropReplica",
    "Drops",
    "FailureRate",
    "Fleet",
    "GoesOn",
    "Optimum",
    "Ours",
    "Outcome",
    "Phase",
    "Policy",
    "RecomputedStep",
    "Repair",
    "Reroute",
    "Restart",
    "Restarts",
    "Run",
    "Scale",
    "Span",
    "Stalls",
    "Templates",
    "Timeline",
    "Transition",
    "Wires",
    "Work",
    "alike",
    "execute",
    "exponential",
    "healthy",
    "llama",
    "optimum",
    "outages",
    "recompute_step",
    "simulate_transition",
]
