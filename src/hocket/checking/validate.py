"""`check` raises for a plan that may not run a graph on a machine."""

from __future__ import annotations

from hocket.checking.core_exclusivity import check_core_exclusivity
from hocket.errors import InputError, PlanError
from hocket.ir import Device, Graph, Lane, Machine, Plan, check_ops, execution_order, names_threads, waits_of

# Only these kinds may be on a connection; "other" may be anything.
_TRANSFERS = ("recv", "send", "other")


def check(graph: Graph, plan: Plan, machine: Machine | None = None) -> None:
    """Raise a `PlanError` if `plan` is not legal.

    A legal plan

    - runs every op of the graph exactly once, and no other op,
    - has no lanes that wait for each other in a circle,
    - runs ops on lanes that share a core one after the other, in an order that edges, `Plan.after` and the lanes
      themselves enforce. Also with SMT a core belongs to one lane at a time, unless lanes name its hardware threads
      one by one (see `hocket.ir.Lane.cores`): then each thread does,
    - and, if a `machine` is given, has lanes that exist there: cores and widths that the device has, streams on a
      GPU, channels over a link that leads the right way (a link that only leads out of this machine's devices receives
      nothing). Lanes that are not pinned may run on any cores. If the lanes of a device are together wider than the
      device, they count as sharing all of its cores.

    Raises:
        PlanError: names the op or the lane at fault, and why.

    Example:
        >>> from hocket.ir import Edge, Graph, Lane, Op, Plan
        >>> graph = Graph((Op("a"), Op("b")), (Edge("a", "b"),))
        >>> check(graph, Plan((Lane("main", ("a", "b")),)))
        >>> check(graph, Plan((Lane("main", ("b", "a")),)))
        Traceback (most recent call last):
        hocket.errors.PlanError: deadlock: op 'b' depends on 'a'; op 'a' comes after 'b' on lane 'main'
    """
    check_ops(graph, plan)
    for lane in plan.lanes:
        _check_roles(lane, graph)
        if machine is not None:
            _check_lane(lane, machine)
            _check_ways(lane, graph, machine)
    waits = waits_of(graph, plan)
    check_core_exclusivity(graph, plan, machine, waits, execution_order(graph, plan, waits))


def _check_roles(lane: Lane, graph: Graph) -> None:
    if lane.kind == "channel":
        for op in lane.ops:
            if graph[op].role not in _TRANSFERS:
                raise PlanError(
                    f"op {op!r} has the role {graph[op].role!r}, but lane {lane.name!r} is a channel; it carries "
                    f"ops of the roles {', '.join(_TRANSFERS)}",
                    op=op,
                    lane=lane.name,
                )


def _check_ways(lane: Lane, graph: Graph, machine: Machine) -> None:
    if lane.kind == "channel":
        link = machine.link(*lane.ends)
        for op in lane.ops:
            if not machine.carries(link, graph[op].role):
                raise PlanError(
                    f"op {op!r} is a {graph[op].role}, and lane {lane.name!r} leads the other way: {link.channel}",
                    op=op,
                    lane=lane.name,
                )


def _check_lane(lane: Lane, machine: Machine) -> None:
    def refuse(message: str) -> PlanError:
        first = lane.ops[0] if lane.ops else None
        runs = f" (it runs {first!r})" if first else ""
        return PlanError(f"lane {lane.name!r}{runs}: {message}", op=first, lane=lane.name)

    if lane.kind == "channel":
        try:
            machine.link(*lane.ends)
        except InputError as error:
            raise refuse(str(error)) from None
        return
    device = machine.by_name.get(lane.device)
    if device is None:
        raise refuse(f"the machine has no device {lane.device!r}, only {', '.join(machine.by_name)}")
    if lane.kind == "stream":
        if device.kind != "cuda":
            raise refuse(f"a stream needs a cuda device, and {device.name!r} is a {device.kind}")
        return
    if device.kind != "cpu":
        raise refuse(f"a lane of cores needs a cpu device, and {device.name!r} is a {device.kind}")
    problem = _cores_problem(lane, device)
    if problem:
        raise refuse(problem)


def _cores_problem(lane: Lane, device: Device) -> str:
    threads = f" of {device.smt} threads" if device.smt > 1 else ""
    has = f"{device.name!r} has {device.cores} cores{threads}"
    if lane.width > device.cores * device.smt:
        return f"width {lane.width}, but {has}"
    if not lane.cores:
        return ""
    missing = [core for core in lane.cores if core >= device.cores * device.smt]
    if missing:
        return f"pinned to core {missing[0]}, but {has}, counted from 0"
    if names_threads(lane, device):
        if lane.width != len(lane.cores):
            return f"width {lane.width} is not that of the {len(lane.cores)} hardware threads it is pinned to; {has}"
    elif not len(lane.cores) <= lane.width <= len(lane.cores) * device.smt:
        return f"width {lane.width} does not fit the {len(lane.cores)} cores it is pinned to; {has}"
    return ""
