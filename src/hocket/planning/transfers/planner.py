"""`transfers`: parameters arrive in the order that unblocks the most work.

The planner of TicTac (Hashemi, Jyothi, Campbell: "TicTac: Accelerating distributed deep learning with communication
scheduling", MLSys 2019): the worker's step begins with a recv for each parameter, and their order on the wire decides
how much of the computation overlaps with receiving::

    wire      [ w1 ][ w2 ][        w3        ]          wire      [        w3        ][ w2 ][ w1 ]
    compute         [ f1 ][ f2 ]             [ f3 ]     compute                                   [ f1 ][ f2 ][ f3 ]

The default order is searched from the paper's TAC and the order of first use (`insertion`). Each of the paper's orders
is available by name. The other ops are planned for the arrivals of their parameters, by ``list`` and by ``serial``: it
computes each gradient as early as the program does, so that its send need not wait. A GPU has ``critical-path``.
The candidate that simulates shortest is taken, and the order of first use is always one.

If no order can gain much, because the wire or the computation is the bottleneck (the potential S of
`hocket.planning.bounds` is below 2%), recvs keep the order of the graph, the plan's planner is
``transfers-unordered``, and the log gives the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from hocket.errors import InputError
from hocket.ir import Costs, Graph, Machine, Plan
from hocket.planning.base import Planner, gpu_of
from hocket.planning.bounds import bounds, potential
from hocket.planning.channels import ComputePlanner, first_use, plan_around, transfers_of, without_transfers
from hocket.planning.critical_path import CriticalPath
from hocket.planning.list_scheduler import ListScheduler
from hocket.planning.serial import Serial
from hocket.planning.transfers.orders import Order, exact_order, random_order, searched_order, tac_order, tic_order
from hocket.planning.transfers.receives import Receives, receives_of
from hocket.simulation import simulate

# Below this potential recvs are not ordered: the best order gains at most this share over the worst.
MIN_POTENTIAL = 0.02

# The planner's name in plans whose recvs are not ordered.
UNORDERED = "transfers-unordered"

_ORDERS: dict[str, Callable[[Receives], Order]] = {
    "tic": tic_order,
    "tac": tac_order,
    "layer": lambda receives: receives.by_first_use,
    "fifo": lambda receives: tuple(range(len(receives))),
    "reverse": lambda receives: searched_order(receives)[::-1],
    "exact": exact_order,
}

ORDERS = ("auto", "tic", "tac", "layer", "fifo", "random", "reverse", "exact")

_log = logging.getLogger(__name__)


class Transfers(Planner):
    """Receive parameters in the order of the earliest step end, and plan the other ops for their arrivals.

    Args:
        order: ``auto`` for the searched order, ``tic`` or ``tac`` for the paper's heuristics, ``layer`` for first use,
            ``fifo`` for the order of the graph, ``random``, ``reverse`` for the reverse of the searched order (a
            baseline), ``exact`` for the best order of up to 16 recvs on one computing resource.
        seed: of ``random``.

    Example:
        >>> from hocket.ir import Edge, Link, Op
        >>> ops = (Op("r2", role="recv", size_bytes=3.0), Op("r1", role="recv", size_bytes=5.0), Op("a"), Op("b"))
        >>> graph = Graph(ops, (Edge("r1", "a"), Edge("a", "b"), Edge("r2", "b")))
        >>> machine = Machine(Machine.of(cores=1).devices, (Link("server", "cpu0", 1e6),))
        >>> print(Transfers().plan(graph, Costs({"a": {"1": 7.0}, "b": {"1": 2.0}}), machine), end="")
        hocket-plan/1 planner=transfers
        lane cpu0 kind=cores device=cpu0 width=1 cores=0
        run a
        run b
        lane server.cpu0.0 kind=channel device=server->cpu0
        run r1
        run r2
    """

    name = "transfers"
    automatic = False

    def __init__(self, order: str = "auto", seed: int = 0) -> None:
        if order not in ORDERS:
            raise InputError(f"planner transfers: expected order to be one of {', '.join(ORDERS)}, got {order!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InputError(f"planner transfers: expected seed to be a whole number, got {seed!r}")
        self.order, self.seed = order, seed

    def plan(self, graph: Graph, costs: Costs, machine: Machine) -> Plan:
        transfers = transfers_of(graph, costs, machine)
        if not transfers:
            return self.compute_plan(graph, costs, machine, {})
        compute = without_transfers(graph, transfers)
        planners: tuple[ComputePlanner, ...] = (self.compute_plan, Serial().compute_plan)
        if gpu_of(compute, costs, machine) is not None:
            planners = (partial(CriticalPath().compute_plan, updates_last=True),)
        receives = receives_of(graph, costs, machine)
        sends = first_use(graph, transfers)
        best: Plan | None = None
        best_us = 0.0
        for name, order in self._candidates(receives, graph, costs, machine):
            # The recvs by their place in the order, and after them all other transfers.
            urgency = {name: len(order) + place for name, place in sends.items()}
            urgency |= {receives.names[recv]: float(place) for place, recv in enumerate(order)}
            for planner in planners:
                made = replace(plan_around(graph, transfers, costs, machine, urgency, planner), planner=name)
                makespan_us = simulate(graph, made, costs, machine).makespan_us
                if best is None or makespan_us < best_us:
                    best, best_us = made, makespan_us
        assert best is not None
        return best

    def compute_plan(self, graph: Graph, costs: Costs, machine: Machine, earliest_us: Mapping[str, float]) -> Plan:
        return replace(ListScheduler().compute_plan(graph, costs, machine, earliest_us), planner=self.name)

    def _candidates(
        self, receives: Receives, graph: Graph, costs: Costs, machine: Machine
    ) -> Iterator[tuple[str, Order]]:
        """Orders to choose from, each with the planner's name in its plan."""
        if self.order == "random":
            yield f"{self.name}-random", random_order(receives, self.seed)
        elif self.order != "auto":
            yield f"{self.name}-{self.order}", _ORDERS[self.order](receives)
        else:
            gain = potential(bounds(graph, costs, machine))
            if gain < MIN_POTENTIAL:
                _log.info("transfers are not ordered: no order can gain more than %.1f%% over another", 100 * gain)
                yield UNORDERED, _ORDERS["fifo"](receives)
                return
            yield from (
                (self.name, order) for order in dict.fromkeys((searched_order(receives), receives.by_first_use))
            )
