"""Independent, deliberately naive checkers of plans: what waits for what, legality, hazards, memory."""

from itertools import pairwise

from hocket.ir import Costs, Graph, Lane, Machine, Plan


def duration_us(op: str, lane: Lane, graph: Graph, costs: Costs, machine: Machine) -> float:
    if lane.kind == "cores":
        return costs.lookup(op, width=lane.width, device=lane.device).duration_us
    if lane.kind == "stream" or op in costs.durations_us:
        return costs.lookup(op, device=lane.device).duration_us
    src, dst = lane.device.split("->")
    link = next(link for link in machine.links if link.src == src and link.dst == dst)
    return link.latency_us + graph[op].size_bytes / link.bytes_per_s * 1e6


def direct_waits(graph: Graph, plan: Plan) -> dict[str, set[str]]:
    """For each op of the plan what it waits for directly: edges, `after`, and the op before it on its lane."""
    waits: dict[str, set[str]] = {}
    for lane in plan.lanes:
        for at, op in enumerate(lane.ops):
            waits[op] = {edge.src for edge in graph.edges if edge.dst == op} | set(plan.after.get(op, ()))
            if at > 0:
                waits[op].add(lane.ops[at - 1])
    return waits


def all_waits(graph: Graph, plan: Plan) -> dict[str, set[str]]:
    """For each op of the plan all it waits for, directly or not; itself, if it is on a circle."""
    waits = direct_waits(graph, plan)
    found = {}
    for op in waits:
        seen: set[str] = set()
        todo = list(waits[op])
        while todo:
            other = todo.pop()
            if other not in seen:
                seen.add(other)
                todo += waits.get(other, ())
        found[op] = seen
    return found


def illegality(graph: Graph, plan: Plan, machine: Machine | None) -> str | None:
    """Why a plan is illegal, by brute force; None if it is legal."""
    ran = [op for lane in plan.lanes for op in lane.ops]
    if sorted(ran) != sorted(op.name for op in graph.ops):
        return "does not run each op once"
    waits = all_waits(graph, plan)
    if any(op in waits[op] for op in ran):
        return "deadlock"
    for lane in plan.lanes:
        for op in lane.ops:
            if lane.kind == "channel" and graph[op].role not in ("send", "recv", "other"):
                return f"{op} computes on a channel"
        if machine is not None and not _fits(lane, machine):
            return f"no place for {lane.name}"
    for one in plan.lanes:
        for other in plan.lanes:
            if one.name != other.name and _meet(one, other, plan, machine):
                for a in one.ops:
                    for b in other.ops:
                        if a not in waits[b] and b not in waits[a]:
                            return f"{a} and {b} may run at once on a core"
    return None


def _fits(lane: Lane, machine: Machine) -> bool:
    if lane.kind == "channel":
        return lane.device in [f"{link.src}->{link.dst}" for link in machine.links]
    device = machine.by_name.get(lane.device)
    if device is None:
        return False
    if lane.kind == "stream":
        return device.kind == "cuda"
    if device.kind != "cpu" or lane.width > device.cores * device.smt:
        return False
    if not lane.cores:
        return True
    if max(lane.cores) < device.cores:
        return len(lane.cores) <= lane.width <= len(lane.cores) * device.smt
    return max(lane.cores) < device.cores * device.smt and lane.width == len(lane.cores)


def _meet(one: Lane, other: Lane, plan: Plan, machine: Machine | None) -> bool:
    if not one.kind == other.kind == "cores" or one.device != other.device:
        return False
    if one.cores and other.cores:
        return bool(_threads(one, machine) & _threads(other, machine))
    if machine is None:
        return False
    device = machine.by_name[one.device]
    used = [lane for lane in plan.lanes if lane.kind == "cores" and lane.device == one.device and lane.ops]
    pinned = {core % device.cores for lane in used for core in lane.cores}
    loose_width = sum(lane.width for lane in used if not lane.cores)
    return loose_width + len(pinned) * device.smt > device.cores * device.smt


def _threads(lane: Lane, machine: Machine | None) -> set[int]:
    """The hardware threads of a pinned lane: those it names, or all of its cores' if it is wider than these."""
    if machine is None or lane.width == len(lane.cores):
        return set(lane.cores)
    device = machine.by_name[lane.device]
    return {core + sibling * device.cores for core in lane.cores for sibling in range(device.smt)}


def lost_orders(graph: Graph, plan: Plan, waits, carried) -> list[str]:
    """Return pairs that touch the same memory and could change places, if two steps ran with these waits alone."""
    runs = {(step, op): set() for step in (0, 1) for op in plan.lane_of}
    for lane in plan.lanes:
        chain = [(step, op) for step in (0, 1) for op in lane.ops]
        for first, second in pairwise(chain):
            runs[second].add(first)
    for op, others in waits.items():
        for other in others:
            for step in (0, 1):
                runs[step, op].add((step, other))
    for op in plan.lane_of:
        runs[1, op] |= {(0, other) for other in carried.get(op, ())}
    above = {}
    for run in runs:
        seen, todo = set(), list(runs[run])
        while todo:
            other = todo.pop()
            if other not in seen:
                seen.add(other)
                todo += runs[other]
        above[run] = seen
    lasting = {buffer.name for buffer in graph.buffers if buffer.life == "lasting"}
    program = [(step, op) for step in (0, 1) for op in graph.order]
    faults = []
    for at, (late, second) in enumerate(program):
        for early, first in program[:at]:
            shared = set(graph[first].writes) & {*graph[second].reads, *graph[second].writes}
            shared |= set(graph[first].reads) & set(graph[second].writes)
            if early != late:
                shared &= lasting
            if shared and (early, first) not in above[late, second]:
                faults.append(f"{first} of step {early} and {second} of step {late} on {shared}")
    return faults


def held_bytes(graph: Graph, run) -> list[float]:
    """The bytes alive after each event of a run (pairs of an op and "start" or "end"), counted from scratch."""
    size = {buffer.name: buffer for buffer in graph.buffers}
    touched = {buffer for op in graph.ops for buffer in (*op.reads, *op.writes)}
    always = sum(b.size_bytes for b in graph.buffers if b.life in ("lasting", "input") and b.name in touched)
    made, found = set(), []
    ended: set[str] = set()
    for op, what in run:
        if what == "start":
            made |= set(graph[op].writes)
        else:
            ended.add(op)
        alive = always
        for name in made:
            users = {other.name for other in graph.ops if name in (*other.reads, *other.writes)}
            if size[name].life == "kept" or (size[name].life == "step" and not users <= ended):
                alive += size[name].size_bytes
        found.append(alive)
    return found
