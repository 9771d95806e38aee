"""Allotments: widths of all ops, before their order and cores are decided.

Two bounds limit a step: its longest chain, and its area (time by cores) over the number of cores. Narrow ops keep the
area small, wide ops the chain short. So there are three kinds of allotments:

- by price: at the price ``p`` of a core, an op takes the width that minimises ``duration * (1 + p * width / cores)``.
  ``p = 0`` gives every op its fastest width, a large ``p`` its most economical one (Turek, Wolf, Yu: "Approximate
  algorithms for scheduling parallelizable tasks", SPAA 1992, show that one such choice suffices for a constant factor).
- by the chain: begin with every op at its most economical width. While the longest chain exceeds the area over the
  cores, widen those of its ops that gain the most time for their area (Radulescu, van Gemund: "A low-cost approach
  towards mixed task and data parallel scheduling", ICPP 2001).
- equal: all ops at the same width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from hocket.planning.moldable.instance import Instance

PRICES = (1.0, 0.25, 4.0, 0.0, 0.5, 2.0, 8.0, 1e9)
# Ratios of the longest chain to the area over the cores at which an allotment is tried, on the way down.
BALANCES = (2.0, 1.75, 1.5, 1.25, 1.0, 0.8)
# Share of the ops on the longest chain that is widened at once. Smaller steps take longer and gain little.
SHARE = 0.2
# Lanes of equal width to try.
EQUAL = (2, 4, 3, 8, 6, 1, 5, 7)


def allotments(instance: Instance) -> Iterator[list[int]]:
    """Distinct allotments, from the three kinds in turn, those first that are good most often."""
    seen: set[tuple[int, ...]] = set()
    lanes = [instance.num_cores // count for count in EQUAL if count <= instance.num_cores]
    equal = ([width] * len(instance.durations_us) for width in lanes)
    ways = [equal, _by_prices(instance), _by_chain(instance)]
    while ways:
        for way in list(ways):
            for made in way:
                widths = instance.usable(made)
                key = tuple(widths)
                if key not in seen:
                    seen.add(key)
                    yield widths
                    break
            else:
                ways.remove(way)


def _by_prices(instance: Instance) -> Iterator[list[int]]:
    steps = ladder(instance.num_cores)
    for price in PRICES:
        if len(steps) > 1:  # with every op on at most half of the cores, so that two can run at once
            yield _by_price(instance, price, steps[:-1])
        yield _by_price(instance, price, steps)


def ladder(num_cores: int) -> list[int]:
    """All cores, half of them, a quarter, ...: widths whose lanes lie side by side and within each other."""
    steps = [num_cores]
    while steps[-1] > 1:
        steps.append(steps[-1] // 2)
    return steps[::-1]


def useful_widths(durations_us: Sequence[float]) -> list[int]:
    """The widths of one op that are faster than every narrower one."""
    found: list[int] = []
    for width in range(1, len(durations_us)):
        if durations_us[width] < (durations_us[found[-1]] if found else float("inf")):
            found.append(width)
    return found


def _by_price(instance: Instance, price: float, steps: Sequence[int]) -> list[int]:
    factors = [(width, 1.0 + price * width / instance.num_cores) for width in steps]
    found = []
    for of_op in instance.durations_us:
        best, best_value = 1, float("inf")
        for width, factor in factors:
            value = of_op[width] * factor
            if value < best_value:
                best, best_value = width, value
        found.append(best)
    return found


def _by_chain(instance: Instance) -> Iterator[list[int]]:
    durations, cores = instance.durations_us, instance.num_cores
    steps = ladder(cores)
    widths = instance.usable(_by_price(instance, 1e9, steps))
    wider = [_wider(of_op, steps) for of_op in durations]
    area_us = sum(of_op[width] * width for of_op, width in zip(durations, widths, strict=True))
    balances = list(BALANCES)
    while balances:
        ranks = instance.ranks_at_us(widths)
        chain = _chain(instance, ranks)
        balance = ranks[chain[0]] * cores / area_us if chain and area_us else 0.0
        if balance <= balances[0]:
            yield list(widths)
            balances = [other for other in balances if other < balance]
        open_ = [op for op in chain if widths[op] in wider[op]]
        if not open_:
            break
        open_.sort(key=lambda op: _gain(durations[op], widths[op], wider[op][widths[op]]), reverse=True)
        for op in open_[: max(1, int(SHARE * len(open_)))]:
            width = wider[op][widths[op]]
            area_us += durations[op][width] * width - durations[op][widths[op]] * widths[op]
            widths[op] = width
    yield list(widths)


def _wider(durations_us: Sequence[float], steps: Sequence[int]) -> dict[int, int]:
    """The next faster width of the ladder for each width that is faster than all narrower ones."""
    useful = [steps[0]]
    for width in steps[1:]:
        if durations_us[width] < durations_us[useful[-1]]:
            useful.append(width)
    return dict(pairwise(useful))


def _gain(durations_us: Sequence[float], width: int, wider: int) -> float:
    """Time saved per additional area."""
    saved_us = durations_us[width] - durations_us[wider]
    more_us = durations_us[wider] * wider - durations_us[width] * width
    return saved_us / more_us if more_us > 0 else float("inf")


def _chain(instance: Instance, ranks: Sequence[float]) -> list[int]:
    """The ops of one longest chain, from the first to the last."""
    at = max(range(len(ranks)), key=ranks.__getitem__, default=-1)
    chain: list[int] = []
    while at >= 0:
        chain.append(at)
        at = max(instance.successors[at], key=ranks.__getitem__, default=-1)
    return chain
