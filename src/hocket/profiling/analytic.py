"""The analytic model: an op takes as long as its arithmetic or its memory traffic, whichever is longer.

The roofline of Williams, Waterman and Patterson (2009), with one constant more for what every op costs at the least.
It is right within a small factor, and only for ops that were never measured.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from timeit import repeat

import torch

from hocket.errors import InputError
from hocket.ir import Costs, Graph, Machine

# Dispatching one op from Python, by the order of magnitude.
_OP_US = 3.0
# Runs of a product and of a copy, of which the median is taken.
RUNS = 5


def estimate(graph: Graph, machine: Machine, *, device: str = "cpu0") -> Costs:
    """Durations of all ops at width 1 and at all cores of `device`, from flops, bytes and the device's rates.

    Arithmetic is taken to scale with the width, memory traffic not.

    Raises:
        InputError: the device has no rates. `measure_rates` finds those of this machine.
    """
    found = machine.by_name.get(device)
    if found is None or found.flops_per_s is None or found.bytes_per_s is None:
        raise InputError(f"machine: device {device!r} has no flops_per_s and bytes_per_s to estimate with")
    durations: dict[str, dict[str, float]] = {}
    for op in graph.ops:
        memory_us = op.size_bytes / found.bytes_per_s * 1e6
        arithmetic_us = op.flops / found.flops_per_s * 1e6
        durations[op.name] = {
            str(width): _OP_US + max(arithmetic_us * found.cores / width, memory_us) for width in {1, found.cores}
        }
    return Costs(durations, sources=dict.fromkeys(durations, "analytic"), note=f"estimated from rates of {device}")


def measure_rates(machine: Machine) -> Machine:
    """`machine` with the rates of its CPU measured: a matrix product for arithmetic, a large copy for memory."""
    size = 768
    a, b = torch.randn(size, size), torch.randn(size, size)
    source = torch.empty(16 * 2**20)
    target = torch.empty_like(source)
    out = torch.empty(size, size)
    product_s = _seconds(lambda: torch.mm(a, b, out=out))
    copy_s = _seconds(lambda: target.copy_(source))
    return machine.with_rates(
        "cpu0", flops_per_s=2.0 * size**3 / product_s, bytes_per_s=2.0 * source.numel() * 4 / copy_s
    )


def _seconds(work: Callable[[], object]) -> float:
    work()
    return median(repeat(work, repeat=RUNS, number=1))
