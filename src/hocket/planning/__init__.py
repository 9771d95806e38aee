"""Planners: from a graph, its costs and a machine to a plan. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hocket.errors import InputError
from hocket.heap import collections_held
from hocket.ir import Costs, Graph, Machine, Plan
from hocket.ir.placement import scattered, with_own_cores
from hocket.planning.base import Planner
from hocket.planning.bounds import Bounds, bounds, efficiency, potential
from hocket.planning.concurrency import Concurrency
from hocket.planning.critical_path import CriticalPath
from hocket.planning.exact import Exact
from hocket.planning.list_scheduler import ListScheduler
from hocket.planning.partition import PartitionPlanner
from hocket.planning.phases import Phases
from hocket.planning.serial import Serial
from hocket.planning.transfers import Transfers

__all__ = ["Bounds", "Planner", "bounds", "efficiency", "plan", "planners", "potential"]

_PLANNERS: dict[str, type[Planner]] = {
    planner.name: planner
    for planner in (Serial, ListScheduler, Phases, Concurrency, CriticalPath, Transfers, PartitionPlanner, Exact)
}


def planners() -> Mapping[str, type[Planner]]:
    """The planners of this version by name.

    Example:
        >>> list(planners())
        ['serial', 'list', 'phases', 'concurrency', 'critical-path', 'transfers', 'partition', 'exact']
    """
    return MappingProxyType(_PLANNERS)


def plan(graph: Graph, costs: Costs, machine: Machine, planner: str = "list", **options: Any) -> Plan:
    """A plan of `graph` on `machine`, made by the planner of that name.

    Args:
        graph: the ops of one step.
        costs: the duration of each.
        machine: its devices and links.
        planner: a key of `planners`.
        **options: the planner's own, such as ``lanes=2`` of ``list``.

    Raises:
        InputError: an unknown planner or option, an op without a cost, or a machine that the planner cannot use.

    Example:
        >>> from hocket.ir import Costs, Graph, Machine, Op
        >>> graph, costs = Graph((Op("a"), Op("b"))), Costs({"a": {"1": 30.0}, "b": {"1": 30.0}})
        >>> len(plan(graph, costs, Machine.of(cores=2)).lanes)
        2
    """
    if planner not in _PLANNERS:
        raise InputError(f"unknown planner {planner!r}; available: {', '.join(_PLANNERS)}")
    maker = _PLANNERS[planner]
    takes = [] if maker.__init__ is object.__init__ else list(inspect.signature(maker).parameters)
    for name in options:
        if name not in takes:
            raise InputError(f"planner {planner}: unknown option {name!r}; it takes {', '.join(takes) or 'no options'}")
    # Planning allocates hundreds of thousands of objects and hardly a cycle. Garbage collection would take a third of
    # the planning time of a step of 3,000 ops.
    with collections_held():
        made = maker(**options).plan(graph, costs, machine)
    if costs.placement == "scatter":
        made = scattered(made, machine)
    return with_own_cores(made, graph, machine, costs.placements) if costs.placements else made
