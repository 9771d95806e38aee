"""The time oracle of a graph: measured where measured, else analytic; between widths `Costs` interpolates."""

from __future__ import annotations

from hocket.ir import Costs, Graph, Machine
from hocket.profiling.analytic import estimate, measure_rates

__all__ = ["complete"]


def complete(graph: Graph, measured: Costs, machine: Machine) -> Costs:
    """`measured`, and an estimate for every op of `graph` that it does not know.

    The machine's rates are measured now if it does not state them (a fraction of a second).
    """
    missing = [op.name for op in graph.ops if op.name not in measured]
    if not missing:
        return measured
    device = machine.devices[0]
    if device.flops_per_s is None or device.bytes_per_s is None:
        machine = measure_rates(machine, device=device.name)
    return estimate(graph, machine, device=device.name).restricted(missing).merged(measured)
