"""Optima and longest paths by enumeration, and checkers of placements."""

from hocket.ir import Costs, Graph, Lane


def placement_faults(instance, placed) -> list[str]:
    """Violations of the rules by placements of moldable ops (see `hocket.planning.moldable.instance`); empty if none.

    Each op once, for as long as its width says; no op on a core that another has; after all it waits for, and later
    by `instance.wait_us` than what ran on another lane, be it waited for or on the same core; never beside one that it
    is kept apart from.
    """
    faults = []
    if sorted(one.op for one in placed) != list(range(len(instance.durations_us))):
        return ["not each op once"]
    by_op = {one.op: one for one in placed}
    for one in placed:
        lasts_us = instance.durations_us[one.op][len(one.cores)]
        if len(set(one.cores)) != len(one.cores) or not set(one.cores) <= set(range(instance.num_cores)):
            faults.append(f"{one.op} on cores {one.cores}")
        if abs(one.end_us - one.start_us - lasts_us) > 1e-9 * max(1.0, one.end_us):
            faults.append(f"{one.op} lasts {one.end_us - one.start_us}, not {lasts_us}")
        for before in instance.predecessors[one.op]:
            other = by_op[before]
            if one.start_us < other.end_us + (instance.wait_us if other.cores != one.cores else 0.0):
                faults.append(f"{one.op} starts before {before} is known to have ended")
    for one in placed:
        for other in placed:
            if one.op == other.op or (one.start_us, one.end_us) > (other.start_us, other.end_us):
                continue
            gap_us = other.start_us - one.end_us
            if set(one.cores) & set(other.cores) and gap_us < 0:
                faults.append(f"{one.op} and {other.op} at once on a core")
            if other.op in instance.apart.get(one.op, ()) and gap_us < 0:
                faults.append(f"{one.op} beside {other.op}")
    return faults


def moldable_optimum_us(instance) -> float:
    """The shortest makespan of moldable ops, by trying every order and every width; cores are alike."""
    count = len(instance.durations_us)

    def best(ends_us: dict[int, float], free_us: list[float]) -> float:
        if len(ends_us) == count:
            return max(ends_us.values(), default=0.0)
        found = float("inf")
        for op in range(count):
            if op in ends_us or any(other not in ends_us for other in instance.predecessors[op]):
                continue
            for width in range(1, instance.num_cores + 1):
                ready_us = max([free_us[width - 1], *(ends_us[other] for other in instance.predecessors[op])])
                end_us = ready_us + instance.durations_us[op][width]
                # Among the cores that are idle by then, those that became idle last.
                idle = [at_us for at_us in free_us if at_us <= ready_us]
                busy = [at_us for at_us in free_us if at_us > ready_us]
                after = sorted([*idle[: len(idle) - width], *busy, *[end_us] * width])
                found = min(found, best({**ends_us, op: end_us}, after))
        return found

    return best({}, [0.0] * instance.num_cores)


def longest_path_us(graph: Graph, durations_us: dict[str, float]) -> float:
    def from_op(op: str) -> float:
        onward = [from_op(edge.dst) for edge in graph.edges if edge.src == op]
        return durations_us[op] + max(onward, default=0.0)

    return max((from_op(op.name) for op in graph.ops), default=0.0)


def optimum_us(graph: Graph, costs: Costs, lanes: list[Lane]) -> float:
    """The shortest makespan on these lanes, by trying every order and every assignment."""

    def best(ends_us: dict[str, float], free_us: list[float]) -> float:
        if len(ends_us) == len(graph):
            return max(ends_us.values(), default=0.0)
        found = float("inf")
        for op in graph.ops:
            if op.name in ends_us or any(other not in ends_us for other in graph.predecessors[op.name]):
                continue
            for number, lane in enumerate(lanes):
                ready_us = max([free_us[number], *(ends_us[other] for other in graph.predecessors[op.name])])
                end_us = ready_us + costs.duration_us(op.name, width=lane.width, device=lane.device)
                found = min(
                    found, best({**ends_us, op.name: end_us}, [*free_us[:number], end_us, *free_us[number + 1 :]])
                )
        return found

    return best({}, [0.0] * len(lanes))
