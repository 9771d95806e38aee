"""Upward ranks: for each op the longest path from its start to the end of the step (HEFT, Topcuoglu et al. 2002)."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.ir import Graph


def upward_ranks(
    order: Sequence[int], successors: Sequence[Sequence[int]], durations_us: Sequence[float]
) -> list[float]:
    """The ranks of n ops, in microseconds.

    In `order` each op comes after all that it depends on.
    """
    ranks = list(durations_us)
    for op in reversed(order):
        onward = [ranks[after] for after in successors[op]]
        if onward:
            ranks[op] += max(onward)
    return ranks


def graph_ranks(graph: Graph, durations_us: Sequence[float]) -> list[float]:
    """The ranks of the ops of `graph`, in its order of ops."""
    number = graph.index
    successors = [[number[name] for name in graph.successors[op.name]] for op in graph.ops]
    return upward_ranks([number[name] for name in graph.order], successors, durations_us)
