"""Placement of ops in a given order: each starts as soon as its cores and its predecessors allow.

For every set of widths some order gives the shortest placements: that of their starts. So a search over orders and
widths can find the optimum. A search over the priorities of `parallel_sgs` may miss it: no priority leads to a plan
that leaves a core idle although a ready op would fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from hocket.planning.moldable.instance import Instance, Placement


def serial_sgs(instance: Instance, widths: Sequence[int], order: Sequence[int]) -> list[Placement]:
    """Placements of the ops in `order`, which respects every edge.

    An op takes the lane of a predecessor or another known lane if that is idle when the op can start, or else the cores
    that have been idle for the shortest time.
    """
    num_cores, wait_us = instance.num_cores, instance.wait_us
    free_us = [0.0] * num_cores  # the time from which each core is idle
    used_by: list[tuple[int, ...]] = [()] * num_cores
    lanes: dict[int, list[tuple[int, ...]]] = {}
    placed: dict[int, Placement] = {}
    for op in order:
        width = widths[op]
        waits = [placed[other] for other in instance.predecessors[op]]
        waits += [placed[other] for other in instance.apart.get(op, ()) if other in placed]
        ready_us = max([other.end_us for other in waits], default=0.0)
        ready_us = max(ready_us, instance.ready_us(op))
        ready_us = max(ready_us, sorted(free_us)[width - 1])
        known = lanes.setdefault(width, [])
        near = [other.cores for other in sorted(waits, key=lambda p: -p.end_us) if len(other.cores) == width]
        for cores in (*near, *known):
            if all(free_us[core] <= ready_us for core in cores):
                break
        else:
            idle = [core for core in range(num_cores) if free_us[core] <= ready_us]
            cores = tuple(sorted(sorted(idle, key=lambda core: -free_us[core])[:width]))
            known.append(cores)
        start_us = instance.ready_us(op)
        for other in waits:
            start_us = max(start_us, other.end_us if other.cores == cores else other.end_us + wait_us)
        for core in cores:
            if used_by[core]:
                start_us = max(start_us, free_us[core] if used_by[core] == cores else free_us[core] + wait_us)
        end_us = start_us + instance.durations_us[op][width]
        placed[op] = Placement(op, cores, start_us, end_us)
        for core in cores:
            free_us[core], used_by[core] = end_us, cores
    return list(placed.values())
