"""Predict the step of several paced workers by simulation of all their transfers over shared network cards.

A worker's card carries what all servers send it, and a server's what it sends all workers, each transfer a max-min fair
part (`hocket.simulation.cards`). Workers in the same order want the same value of the same server at the same moment;
by links of a fixed rate for each pair that would cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.paced.workload import Workload
from hocket.ir import Costs, Graph, Lane, Link, Machine, NetworkCard, Op, Plan
from hocket.simulation import simulate


def predicted_us(
    work: Workload, orders: Sequence[Sequence[int]], worker_bytes_per_s: float, server_bytes_per_s: float
) -> float:
    """When the last of several workers has ended its step, all having begun together.

    Args:
        work: of each worker.
        orders: for each worker in which it receives.
        worker_bytes_per_s: of each worker's card.
        server_bytes_per_s: of each server's.

    Example:
        >>> from hocket.planning.transfers.receives import Receives
        >>> one = Receives(("a", "b"), (1e6, 1e6), (0, 0), (1,), (1, 2), (1e6, 5e5), (0, 1))
        >>> work = Workload(one, (100, 100), (0, 1), 1.0)
        >>> predicted_us(work, [(0, 1)], 100.0, 100.0), predicted_us(work, [(0, 1)] * 2, 100.0, 100.0)
        (2500000.0, 4500000.0)
    """
    links, ops, lanes = {}, [], []
    for worker, order in enumerate(orders):
        for recv in order:
            server = work.receives.links[recv]
            ops.append(Op(_name(worker, recv), role="recv", size_bytes=work.sizes[recv]))
            ends = (f"server{server}", f"worker{worker}")
            links[ends] = Link(*ends, worker_bytes_per_s, cards=ends)
        for ends in [ends for ends in links if ends[1] == f"worker{worker}"]:
            mine = [recv for recv in order if f"server{work.receives.links[recv]}" == ends[0]]
            lanes.append(Lane("-".join(ends), tuple(_name(worker, r) for r in mine), "channel", links[ends].channel))
    rates = {name: server_bytes_per_s if name.startswith("server") else worker_bytes_per_s for name in sum(links, ())}
    machine = Machine(
        Machine.of(cores=1).devices, tuple(links.values()), cards=tuple(NetworkCard(*card) for card in rates.items())
    )
    timeline = simulate(Graph(tuple(ops)), Plan(tuple(lanes)), Costs({}), machine)
    ended = {span.op: span.end_us for span in timeline.spans}
    return max(
        work.receives.ends_us([ended[_name(worker, recv)] for recv in range(len(work.sizes))])
        for worker in range(len(orders))
    )


def _name(worker: int, recv: int) -> str:
    return f"{worker}:{recv}"
