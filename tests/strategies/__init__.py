"""Random inputs of property tests, as `hypothesis` strategies."""

from strategies.cases import MACHINES, Case, gpu_cases, legal_cases, mutated_plans
from strategies.moldable import Moldable, apart_in, decided_cases, instance_by, moldable_cases
from strategies.values import (
    any_costs,
    any_graphs,
    any_machines,
    any_plans,
    any_timelines,
    costs_of,
    graphs,
    plans_of,
    touching_graphs,
)

__all__ = [
    "MACHINES",
    "Case",
    "Moldable",
    "any_costs",
    "any_graphs",
    "any_machines",
    "any_plans",
    "any_timelines",
    "apart_in",
    "costs_of",
    "decided_cases",
    "gpu_cases",
    "graphs",
    "instance_by",
    "legal_cases",
    "moldable_cases",
    "mutated_plans",
    "plans_of",
    "touching_graphs",
]
