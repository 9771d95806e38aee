"""Random cases: a graph, a legal plan of it and all it takes to run it; and plans with something changed."""

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from hocket.ir import Costs, Device, Graph, Lane, Link, Machine, Plan, Share
from strategies.values import costs_of, graphs, plans_of, topological_orders


@dataclass(frozen=True)
class Case:
    """A graph and all it takes to run it."""

    graph: Graph
    plan: Plan
    costs: Costs
    machine: Machine


MACHINES = st.builds(
    lambda cores, smt, more, gpu, links: Machine(
        (Device("cpu0", cores=cores, smt=smt), *more, *([Device("gpu0", "cuda", 4)] if gpu else [])),
        tuple(Link(src, "here", 1e6, 5.0, channels) for src, channels in links.items()),
    ),
    st.integers(1, 4),
    st.integers(1, 2),
    st.just(()) | st.builds(lambda cores: (Device("cpu1", cores=cores),), st.integers(1, 2)),
    st.booleans(),
    st.dictionaries(st.sampled_from(["server0", "server1"]), st.sampled_from([None, 1, 2]), max_size=2),
)


@st.composite
def legal_cases(draw, max_ops: int = 10, machines=MACHINES) -> Case:
    """A random legal plan: lanes of all kinds, some on the same cores, which `after` then keeps apart."""
    graph = draw(graphs(max_ops=max_ops))
    machine = draw(machines)
    lanes = draw(_lanes(machine))
    order = draw(topological_orders(graph))
    ops: dict[str, list[str]] = {lane.name: [] for lane in lanes}
    after: dict[str, tuple[str, ...]] = {}
    shares = _shares(lanes, machine)
    for op in order:
        carries = graph[op].role in ("recv", "send", "other")
        lane = draw(st.sampled_from([lane for lane in lanes if carries or lane.kind != "channel"]))
        others = [ops[other][-1] for other in shares[lane.name] if ops[other]]
        if others:
            after[op] = tuple(others)
        ops[lane.name].append(op)
    plan = Plan(
        tuple(
            Lane(lane.name, ops[lane.name], lane.kind, lane.device, lane.width, lane.cores, lane.priority)
            for lane in lanes
        ),
        after,
    )
    costs = draw(costs_of(graph, widths=8, devices=tuple(machine.by_name)))
    if draw(st.booleans()):  # transfers without a cost of their own take what the link says
        on_channels = {op for lane in plan.lanes if lane.kind == "channel" for op in lane.ops}
        costs = costs.restricted(op.name for op in graph.ops if op.name not in on_channels)
    return Case(graph, plan, costs, machine)


@st.composite
def gpu_cases(draw, max_ops: int = 8) -> Case:
    """A plan of streams on one or two GPUs that their ops share; times without ties, so that any rounding will do."""
    graph = draw(graphs(max_ops=max_ops))
    several = st.sampled_from([0.0, 1.0, 3.7])
    gpus = [
        Device(f"gpu{n}", "cuda", 4, priorities=3, launch_us=draw(several), graph_launch_us=0.3, event_us=draw(several))
        for n in range(draw(st.integers(1, 2)))
    ]
    plan = draw(plans_of(graph, kind="stream"))
    lanes = tuple(
        replace(lane, device=draw(st.sampled_from(gpus)).name, priority=draw(st.integers(0, 2))) for lane in plan.lanes
    )
    chance = draw(st.randoms(use_true_random=False))
    names = [gpu.name for gpu in gpus]
    durations = {op.name: {name: chance.uniform(1, 50) for name in names} for op in graph.ops}
    shares = {
        op.name: {name: Share(chance.choice((1.0, chance.uniform(0.05, 1))), chance.uniform(0, 1)) for name in names}
        for op in graph.ops
        if chance.random() < 0.8
    }
    return Case(graph, replace(plan, lanes=lanes), Costs(durations, shares=shares), Machine(tuple(gpus)))


@st.composite
def _lanes(draw, machine: Machine) -> list[Lane]:
    lanes = []
    for device in machine.devices:
        for number in range(draw(st.integers(1, 3))):
            name = f"{device.name}.{number}"
            if device.kind == "cuda":
                lanes.append(Lane(name, kind="stream", device=device.name))
                continue
            if draw(st.booleans()):
                cores = draw(st.lists(st.integers(0, device.cores - 1), min_size=1, max_size=device.cores, unique=True))
                width = draw(st.integers(len(cores), len(cores) * device.smt))
                lanes.append(Lane(name, device=device.name, width=width, cores=tuple(cores)))
            else:
                width = draw(st.integers(1, device.cores * device.smt))
                lanes.append(Lane(name, device=device.name, width=width))
    for link in machine.links:
        device = f"{link.src}->{link.dst}"
        count = draw(st.integers(0, 3))
        lanes += [Lane(f"{link.src}.{number}", kind="channel", device=device) for number in range(count)]
    return lanes


def _shares(lanes: list[Lane], machine: Machine) -> dict[str, list[str]]:
    """Lanes that may meet on a core: more than need be, for a lane that is not pinned may meet them all."""
    return {
        lane.name: [
            other.name
            for other in lanes
            if lane is not other
            and lane.kind == other.kind == "cores"
            and lane.device == other.device
            and (not lane.cores or not other.cores or set(lane.cores) & set(other.cores))
        ]
        for lane in lanes
    }


@st.composite
def mutated_plans(draw, case: Case) -> Plan:
    """The case's plan with something changed: often illegal now, sometimes by luck still legal."""
    plan = case.plan
    lanes = [list(lane.ops) for lane in plan.lanes]
    after = dict(plan.after)
    filled = [number for number, ops in enumerate(lanes) if ops]
    for _ in range(draw(st.integers(1, 2))):
        how = draw(st.sampled_from(["drop", "strange", "swap", "move", "strip", "strip all", "wait"]))
        lane = draw(st.sampled_from(filled))
        at = draw(st.integers(0, max(len(lanes[lane]) - 1, 0)))
        if how == "drop":
            lanes[lane] = lanes[lane][:at] + lanes[lane][at + 1 :]
        elif how == "strange" and "strange" not in lanes[lane]:
            lanes[lane].insert(at, f"strange{lane}.{len(lanes[lane])}")
        elif how == "swap" and lanes[lane]:
            other = draw(st.integers(0, len(lanes[lane]) - 1))
            lanes[lane][at], lanes[lane][other] = lanes[lane][other], lanes[lane][at]
        elif how == "move" and lanes[lane]:
            op = lanes[lane].pop(at)
            target = draw(st.integers(0, len(lanes) - 1))
            lanes[target].insert(draw(st.integers(0, len(lanes[target]))), op)
        elif how == "strip" and after:
            after.pop(draw(st.sampled_from(sorted(after))))
        elif how == "strip all":
            after = {}
        elif how == "wait":
            ops = [op for lane_ops in lanes for op in lane_ops]
            if ops:
                op = draw(st.sampled_from(ops))
                after[op] = (*after.get(op, ()), draw(st.sampled_from(ops)))
    left = {op for ops in lanes for op in ops}
    return Plan(
        tuple(
            Lane(lane.name, ops, lane.kind, lane.device, lane.width, lane.cores)
            for lane, ops in zip(plan.lanes, lanes, strict=True)
        ),
        {op: tuple(other for other in others if other in left) for op, others in after.items() if op in left},
    )
