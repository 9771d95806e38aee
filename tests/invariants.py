"""Independent, deliberately naive checkers: slow, short, and written without a look at what they check."""

from __future__ import annotations

from itertools import pairwise

from hocket.ir import Costs, Graph, Lane, Machine, Plan, Timeline


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
    """Which pairs that touch the same memory could change places, if two steps ran with these waits alone.

    `carried` None: the lanes meet between the steps.
    """
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
        if carried is None:
            runs[1, op] |= {(0, other) for other in plan.lane_of}
        else:
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


def timeline_faults(
    graph: Graph, plan: Plan, costs: Costs, machine: Machine, timeline: Timeline, wait_us: float = 0.0
) -> list[str]:
    """How a simulated timeline breaks the rule of a plan; empty if it does not."""
    faults = []
    spans = {span.op: span for span in timeline.spans}
    if len(timeline.spans) != len(plan) or set(spans) != set(plan.lane_of):
        faults.append("not each op once")
    if timeline.lanes != tuple(lane.name for lane in plan.lanes):
        faults.append("other lanes")
    waits = direct_waits(graph, plan)
    for lane in plan.lanes:
        for op in lane.ops:
            span = spans[op]
            if span.lane != lane.name:
                faults.append(f"{op} on {span.lane}")
            if span.end_us != span.start_us + duration_us(op, lane, graph, costs, machine):
                faults.append(f"{op} takes {span}")
            ends_us = [spans[other].end_us + (wait_us if other not in lane.ops else 0.0) for other in waits[op]]
            earliest_us = max(ends_us, default=0.0)
            if span.start_us < earliest_us or (lane.kind != "channel" and span.start_us != earliest_us):
                faults.append(f"{op} starts at {span.start_us}, not at {earliest_us}")
    return faults


def naive_simulation(graph: Graph, plan: Plan, costs: Costs, machine: Machine) -> dict[str, tuple[float, float]]:
    """Start and end of each op, by walking through time and asking everybody at every instant."""
    waits = direct_waits(graph, plan)
    lane_number = {op: number for number, lane in enumerate(plan.lanes) for op in lane.ops}
    times: dict[str, tuple[float, float]] = {}
    ready_since: dict[str, float] = {}
    now_us = 0.0

    def start(op: str) -> None:
        times[op] = (now_us, now_us + duration_us(op, plan.lane_of[op], graph, costs, machine))

    while len(times) < len(plan):
        ended = {op for op, (_, end_us) in times.items() if end_us <= now_us}
        ready = [op for op in waits if op not in times and waits[op] <= ended]
        at_once = [op for op in ready if plan.lane_of[op].kind != "channel"]
        for op in at_once:
            start(op)
        for op in ready:
            ready_since.setdefault(op, now_us)
        if any(times[op][1] <= now_us for op in at_once):
            continue
        granted = []
        for op in sorted(set(ready) - set(at_once), key=lambda op: (ready_since[op], lane_number[op])):
            device = plan.lane_of[op].device
            busy = [
                other
                for other, (_, end_us) in times.items()
                if (plan.lane_of[other].device == device and end_us > now_us)
                or (other in granted and plan.lane_of[other].device == device)
            ]
            channels = machine.link(*plan.lane_of[op].ends).channels
            if channels is None or len(busy) < channels:
                start(op)
                granted.append(op)
        if any(times[op][1] <= now_us for op in granted):
            continue
        running = [end_us for _, end_us in times.values() if end_us > now_us]
        if not running:
            break
        now_us = min(running)
    return times


def shared_core_simulation(
    graph: Graph, plan: Plan, costs: Costs, machine: Machine, wait_us: float = 0.0
) -> dict[str, tuple[float, float]]:
    """Start and end of each op where lanes name hardware threads: from one change to the next, all speeds anew.

    A core's busy threads together do `smt_speedup` times what one does alone, in equal parts; each thread does its own
    part of its op, and the op is done when they all are. Every lane names its threads.
    """
    waits = direct_waits(graph, plan)
    start_us: dict[str, float] = {}
    end_us: dict[str, float] = {}
    left: dict[tuple[str, int], float] = {}  # by op and thread
    now_us = 0.0

    def told_us(op: str, other: str) -> float:
        return end_us[other] + (wait_us if plan.lane_of[op] is not plan.lane_of[other] else 0.0)

    def core(op: str, thread: int) -> tuple[str, int]:
        lane = plan.lane_of[op]
        return lane.device, thread % machine.by_name[lane.device].cores

    while len(end_us) < len(waits):
        for op in waits:
            if op not in start_us and all(other in end_us and told_us(op, other) <= now_us for other in waits[op]):
                start_us[op] = now_us
                lane = plan.lane_of[op]
                left |= dict.fromkeys([(op, t) for t in lane.cores], duration_us(op, lane, graph, costs, machine))
        speed = {}
        for at in left:
            count = sum(core(*other) == core(*at) for other in left)
            speed[at] = 1.0 if count == 1 else machine.by_name[core(*at)[0]].smt_speedup / count
        later = [told_us(op, other) for op in waits if op not in start_us for other in waits[op] if other in end_us]
        ends = {at: now_us + left[at] / speed[at] for at in left}
        next_us = min([*ends.values(), *(at_us for at_us in later if at_us > now_us)])
        left = {at: left[at] - (next_us - now_us) * speed[at] for at in left if ends[at] > next_us}
        now_us = next_us
        for op in start_us:
            if op not in end_us and not any(other == op for other, _ in left):
                end_us[op] = now_us
    return {op: (start_us[op], end_us[op]) for op in waits}


def placement_faults(instance, placed, wait_us: float = 0.0, apart=None) -> list[str]:
    """How placements of moldable ops (see `hocket.planning.moldable.instance`) break the rules; empty if they do not.

    Each op once, for as long as its width says; nobody on a core that another has; after all it waits for, and later
    by `wait_us` than what ran on another lane, be it waited for or on the same core; never beside one it is kept
    `apart` from.
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
            if one.start_us < other.end_us + (wait_us if other.cores != one.cores else 0.0):
                faults.append(f"{one.op} starts before {before} is known to have ended")
    for one in placed:
        for other in placed:
            if one.op == other.op or (one.start_us, one.end_us) > (other.start_us, other.end_us):
                continue
            gap_us = other.start_us - one.end_us
            if set(one.cores) & set(other.cores) and gap_us < 0:
                faults.append(f"{one.op} and {other.op} at once on a core")
            if other.op in (apart or {}).get(one.op, ()) and gap_us < 0:
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
                # Of the cores that are idle by then, those that have been so for the shortest time.
                idle = [at_us for at_us in free_us if at_us <= ready_us]
                busy = [at_us for at_us in free_us if at_us > ready_us]
                after = sorted([*idle[: len(idle) - width], *busy, *[end_us] * width])
                found = min(found, best({**ends_us, op: end_us}, after))
        return found

    return best({}, [0.0] * instance.num_cores)


def naive_gpu_simulation(graph: Graph, plan: Plan, costs: Costs, machine: Machine, launches: str):
    """Start and end of each op of a plan of streams: what is left of each op, walked on from change to change."""
    waits = direct_waits(graph, plan)
    lane_number = {op: number for number, lane in enumerate(plan.lanes) for op in lane.ops}
    gpus = {device.name: device for device in machine.devices}

    def gpu(op: str):
        return gpus[plan.lane_of[op].device]

    level: dict[str, int] = {}
    while len(level) < len(waits):
        for op, others in waits.items():
            if op not in level and all(other in level for other in others):
                level[op] = 1 + max((level[other] for other in others), default=0)
    launched_us: dict[str, float] = {}
    clock = dict.fromkeys(gpus, 0.0)
    for op in sorted(waits, key=lambda op: (level[op], lane_number[op])):
        cost = {"free": 0.0, "eager": gpu(op).launch_us, "graph": gpu(op).graph_launch_us}[launches]
        clock[gpu(op).name] += cost
        launched_us[op] = clock[gpu(op).name]

    def earliest_us(op: str) -> float | None:
        """When an op may start, if everything it waits for has ended."""
        if any(other not in ended for other in waits[op]):
            return None
        event_us = gpu(op).event_us if launches != "free" else 0.0
        apart = {other: event_us if lane_number[other] != lane_number[op] else 0.0 for other in waits[op]}
        return max([launched_us[op], *(ended[other] + apart[other] for other in waits[op])])

    left = {op: costs.duration_us(op, device=gpu(op).name) for op in waits}
    ready: dict[str, float] = {}
    started: dict[str, float] = {}
    ended: dict[str, float] = {}
    now_us = 0.0
    while len(ended) < len(waits):
        soon = {op: earliest_us(op) for op in waits if op not in ready}
        ready |= {op: at_us for op, at_us in soon.items() if at_us is not None and at_us <= now_us}
        running = sorted(
            (op for op in ready if op not in ended),
            key=lambda op: (-plan.lane_of[op].priority, ready[op], lane_number[op]),
        )
        room = {name: [1.0, 1.0] for name in gpus}
        rate = {}
        for op in running:
            share = costs.shares.get(op, {}).get(gpu(op).name)
            if share is None:
                rate[op] = 1.0
            else:
                mine = room[gpu(op).name]
                rate[op] = min([1.0, *(part / asked for part, asked in zip(mine, share, strict=True) if asked)])
                rate[op] = rate[op] if rate[op] >= 1e-9 else 0.0
                for at, asked in enumerate(share):
                    mine[at] = max(0.0, mine[at] - rate[op] * asked)
            if rate[op]:
                started.setdefault(op, now_us)
        # What has nothing left is over, even if another one takes its place at this very moment.
        done = [op for op in running if op in started and left[op] <= 1e-9]
        if done:
            for op in done:
                ended[op] = now_us
            continue
        moments = [now_us + left[op] / rate[op] for op in running if rate[op]]
        moments += [at_us for at_us in soon.values() if at_us is not None and at_us > now_us]
        next_us = min(moments)
        for op in running:
            left[op] -= rate[op] * (next_us - now_us)
        now_us = next_us
    return {op: (started[op], ended[op]) for op in waits}


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
                    found,
                    best({**ends_us, op.name: end_us}, [*free_us[:number], end_us, *free_us[number + 1 :]]),
                )
        return found

    return best({}, [0.0] * len(lanes))
