"""Independent, deliberately naive simulators."""

from hocket.ir import Costs, Graph, Machine, Plan
from invariants.plans import direct_waits, duration_us


def naive_simulation(
    graph: Graph, plan: Plan, costs: Costs, machine: Machine, wait_us: float = 0.0
) -> dict[str, tuple[float, float]]:
    """Start and end of each op, by walking through time and asking every op at every instant."""
    waits = direct_waits(graph, plan)
    lane_number = {op: number for number, lane in enumerate(plan.lanes) for op in lane.ops}
    times: dict[str, tuple[float, float]] = {}
    ready_since: dict[str, float] = {}
    now_us = 0.0

    def start(op: str) -> None:
        times[op] = (now_us, now_us + duration_us(op, plan.lane_of[op], graph, costs, machine))

    def told_us(op: str, other: str) -> float:
        """When an op knows that another one has ended."""
        if other not in times:
            return float("inf")
        return times[other][1] + (wait_us if lane_number[op] != lane_number[other] else 0.0)

    while len(times) < len(plan):
        ready = [op for op in waits if op not in times and all(told_us(op, other) <= now_us for other in waits[op])]
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
        moments = [end_us for _, end_us in times.values()]
        moments += [told_us(op, other) for op in waits if op not in times for other in waits[op]]
        now_us = min(at_us for at_us in moments if at_us > now_us)
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
        # An op with nothing left has ended, even if another one takes its place at this moment.
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
