from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hocket.checking import check, hazards
from hocket.errors import InputError
from hocket.ir import Carried, Costs, Device, Edge, Graph, Link, Machine, Op
from hocket.planning import bounds, plan, planners
from hocket.planning.channels import (
    arrivals_us,
    by_earliest,
    earliest_us,
    first_use,
    roots_of,
    transfers_of,
    without_transfers,
)
from hocket.planning.concurrency import Corunning
from hocket.planning.moldable.sgs import parallel_sgs, serial_sgs
from hocket.planning.phases import in_phases
from hocket.simulation import simulate, step_us
from invariants import placement_faults
from strategies import graphs, moldable_cases

MACHINE = Machine(
    (Device("gpu0", "cuda", 4, priorities=2),), (Link("gpu0", "server", 1e6), Link("server", "gpu0", 1e6))
)


def worker(layers: int = 4, size_bytes: float = 15.0) -> Graph:
    """A chain whose gradients go to a server and come back summed up before the update."""
    ops, edges, carried = [], [], []
    last = None
    for n in range(1, layers + 1):
        ops.append(Op(f"f{n}", role="forward"))
        edges += [(last, f"f{n}")] if last else []
        last = f"f{n}"
    for n in range(layers, 0, -1):
        ops += [Op(f"dA{n}", role="activation_grad"), Op(f"dW{n}", role="weight_grad")]
        edges += [(last, f"dA{n}"), (last, f"dW{n}")]
        last = f"dA{n}"
    ops.append(Op("dW0", role="weight_grad"))
    edges.append((last, "dW0"))
    for n in range(1, layers + 1):
        ops += [Op(f"send{n}", role="send", size_bytes=size_bytes), Op(f"recv{n}", role="recv", size_bytes=size_bytes)]
        ops.append(Op(f"u{n}", role="update"))
        edges += [(f"dW{n}", f"send{n}"), (f"send{n}", f"recv{n}"), (f"recv{n}", f"u{n}")]
        carried.append((f"u{n}", f"f{n}"))
    return Graph(tuple(ops), tuple(Edge(*edge) for edge in edges), tuple(Carried(*pair) for pair in carried))


def costs(graph: Graph, us: float = 5.0) -> Costs:
    return Costs({op.name: {"gpu0": us} for op in graph.ops if op.role not in ("send", "recv")})


def test_of_the_gradients_that_are_ready_the_one_that_is_needed_first_goes_first():
    graph = worker()
    made = plan(graph, costs(graph), MACHINE, planner="critical-path")
    check(graph, made, MACHINE)
    hazards(graph, made)
    lanes = {lane.device: lane.ops for lane in made.lanes if lane.kind == "channel"}
    # A transfer takes as long as three weight gradients: while the first is under way, the others come in.
    assert lanes["gpu0->server"] == ("send4", "send1", "send2", "send3")
    assert set(lanes["server->gpu0"]) == {f"recv{n}" for n in range(1, 5)}


def test_that_order_is_faster_than_the_one_in_which_they_are_made():
    graph = worker()
    made = plan(graph, costs(graph), MACHINE, planner="critical-path")
    turned = [replace(x, ops=sorted(x.ops, reverse=True)) if x.kind == "channel" else x for x in made.lanes]
    took_us = [step_us(graph, each, costs(graph), MACHINE) for each in (made, replace(made, lanes=turned))]
    assert took_us[0] < took_us[1]


def test_a_link_of_two_channels_has_two_lanes_and_one_that_never_queues_at_most_eight():
    graph = worker(layers=12)
    for channels, lanes in ((2, 2), (None, 8)):
        links = (Link("gpu0", "server", 1e6, channels=channels), Link("server", "gpu0", 1e6))
        machine = Machine(MACHINE.devices, links)
        made = plan(graph, costs(graph), machine, planner="critical-path")
        check(graph, made, machine)
        assert sum(lane.device == "gpu0->server" for lane in made.lanes) == lanes


def test_costs_may_name_the_link_and_its_time():
    graph = worker(layers=2)
    machine = Machine(MACHINE.devices, (Link("gpu0", "a", 1e6), Link("gpu0", "b", 1e6), Link("a", "gpu0", 1e6)))
    named = costs(graph).merged(Costs({"send1": {"gpu0->b": 7.0}, "send2": {"gpu0->b": 8.0}}))
    made = plan(graph, named, machine, planner="critical-path")
    assert {made.lane_of[f"send{n}"].device for n in (1, 2)} == {"gpu0->b"}
    assert simulate(graph, made, named, machine).by_op["send2"].duration_us == 8.0


def test_no_link():
    graph = worker(layers=2)
    machine = Machine(MACHINE.devices, (Link("gpu0", "server", 1e6),))
    with pytest.raises(InputError, match="op 'recv1' is a recv, and no link leads to 'gpu0'"):
        plan(graph, costs(graph), machine, planner="critical-path")


@given(graph=graphs(roles=("forward", "activation_grad", "weight_grad", "update", "send", "recv")), data=st.data())
def test_lanes_never_wait_for_each_other_in_a_circle(graph, data):
    wired = transfers_of(graph, Costs({}), MACHINE)
    compute = without_transfers(graph, wired)
    assume(len(compute))
    known = Costs({op.name: {"gpu0": data.draw(st.floats(0, 50))} for op in compute.ops})
    made = plan(graph, known, MACHINE, planner="critical-path")
    check(graph, made, MACHINE)
    hazards(graph, made)
    assert transfers_of(compute, known, MACHINE) == ()


def test_what_a_transfer_is():
    ops = tuple(Op(name, role=role) for name, role in (("get", "recv"), ("put", "send"), ("sum", "other")))
    graph = Graph(ops)
    alone = Machine.of(cores=1)
    assert transfers_of(graph, Costs({}), alone) == ("get", "put")  # nothing says what they would take on cores
    on_cores = Costs({op.name: {"1": 5.0} for op in ops})
    assert transfers_of(graph, on_cores, alone) == ()
    inward = Machine(alone.devices, (Link("server", "cpu0", 1e6),))
    assert transfers_of(graph, on_cores, inward) == ("get",)
    assert transfers_of(graph, Costs({"get": {"a->b": 5.0}, "put": {"1": 5.0}}), alone) == ("get",)
    either = Costs({"get": {"a->b": 5.0, "cpu0": 9.0}, "put": {"1": 5.0}})
    assert transfers_of(graph, either, alone) == ()  # known on a device, and no link leads there


def test_what_waits_for_a_transfer_waits_for_what_that_waits_for():
    ops = (Op("a"), Op("s", role="send"), Op("r", role="recv"), Op("b"))
    graph = Graph(ops, (Edge("a", "s", 4.0), Edge("s", "r", 4.0), Edge("r", "b", 4.0)), (Carried("b", "a"),))
    compute = without_transfers(graph, ("s", "r"))
    assert compute.edges == (Edge("a", "b"),)
    assert compute.carried == graph.carried


TWO_CORES = Machine(Machine.of(cores=2).devices, (Link("server", "cpu0", 1e6), Link("cpu0", "server", 1e6)))

OPTIONS = {"concurrency": {"lookahead_ms": 20.0}, "exact": {"time_limit_s": 10.0}}


def graph_of(edges: str, *recvs: str, sends: str = "", size_bytes: float = 50.0) -> Graph:
    pairs = [pair.split(">") for pair in edges.split()]
    names = dict.fromkeys([*recvs, *(end for pair in pairs for end in pair)])
    role = {**dict.fromkeys(recvs, "recv"), **dict.fromkeys(sends.split(), "send")}
    ops = [Op(name, role=role.get(name, "forward"), size_bytes=size_bytes) for name in names]
    return Graph(tuple(ops), tuple(Edge(*pair) for pair in pairs))


def test_first_use_goes_by_the_graphs_order():
    graph = graph_of("a>x x>y b>y", "never", "b", "a")
    assert first_use(graph, ["never", "b", "a"]) == {"a": 0.0, "b": 1.0, "never": 2.0}


def test_roots_wait_for_nothing():
    graph = graph_of("a>x x>s s>back", "a", "back", sends="s")
    assert roots_of(graph, ["a", "back", "s"]) == ("a",)


def test_an_op_can_start_when_all_it_depends_on_has_arrived():
    graph = graph_of("a>x x>y b>y y>z", "a", "b")
    arrived = arrivals_us(graph, ("a", "b"), Costs({}), TWO_CORES, {"a": 1.0, "b": 0.0})
    assert arrived == {"b": 50.0, "a": 100.0}
    assert earliest_us(graph, {"a": 10.0, "b": 30.0}) == {"a": 10.0, "b": 30.0, "x": 10.0, "y": 30.0, "z": 30.0}
    assert by_earliest(graph, {"a": 50.0}) == ("b", "x", "y", "z", "a")
    assert by_earliest(graph, {}) == graph.order


@pytest.mark.parametrize("name", list(planners()))
def test_every_planner_starts_what_has_arrived(name):
    """The program has `late` first, but its parameter arrives last: an order by program waits for it."""
    graph = graph_of("late_w>late early_w>early", "early_w", "late_w")
    graph = Graph((*graph.ops[:2], graph["late"], graph["early"]), graph.edges)
    costs = Costs({name: {"1": 100.0} for name in ("late", "early")})
    machine = Machine(Machine.of(cores=1).devices, (Link("server", "cpu0", 1e6),))
    options = {"order": "fifo"} if name == "transfers" else OPTIONS.get(name, {})
    made = plan(graph, costs, machine, name, **options)
    check(graph, made, machine)
    (wire,) = [lane for lane in made.lanes if lane.kind == "channel"]
    us = simulate(graph, made, costs, machine).makespan_us
    assert us == 250.0, (wire.ops, made)  # one arrival, then both ops


@given(data=st.data())
@pytest.mark.parametrize("name", [name for name in planners() if name != "exact"])
def test_plans_of_any_planner_are_legal_and_within_the_bounds(name, data):
    chance = data.draw(st.randoms(use_true_random=False))
    recvs = [f"r{n}" for n in range(chance.randint(1, 5))]
    ops = [f"op{n}" for n in range(chance.randint(1, 8))]
    sends = [f"s{n}" for n in range(chance.randint(0, 3))]
    pairs = [f"{chance.choice(recvs + ops[:at])}>{op}" for at, op in enumerate(ops) for _ in range(2)]
    pairs += [f"{chance.choice(ops)}>{name}" for name in sends]
    graph = graph_of(" ".join(dict.fromkeys(pairs)), *recvs, sends=" ".join(sends))
    costs = Costs({op: {"1": chance.uniform(1, 90), "2": chance.uniform(1, 90)} for op in ops})
    made = plan(graph, costs, TWO_CORES, name, **OPTIONS.get(name, {}))
    check(graph, made, TWO_CORES)
    makespan_us = simulate(graph, made, costs, TWO_CORES).makespan_us
    limits = bounds(graph, costs, TWO_CORES)
    assert limits.lower_us <= makespan_us * (1 + 1e-9)
    if name == "serial":
        assert makespan_us <= limits.upper_us * (1 + 1e-9)


@given(case=moldable_cases(), data=st.data())
def test_no_placement_starts_before_its_earliest_start(case, data):
    graph, instance = case.graph, case.instance
    arrived = {op.name: data.draw(st.floats(0, 200)) for op in graph.ops if not graph.predecessors[op.name]}
    earliest = earliest_us(graph, arrived)
    later = replace(instance, earliest_us=[earliest.get(op.name, 0.0) for op in graph.ops])
    widths = instance.best_width
    placements = [
        parallel_sgs(later, widths, later.ranks_us),
        serial_sgs(later, widths, later.order),
        Corunning(later, widths, [[width] for width in widths]).run(),
        in_phases(later, sorted(later.order, key=later.ready_us), 60.0),
    ]
    for placed in placements:
        assert not placement_faults(later, placed)
        assert all(one.start_us >= later.ready_us(one.op) * (1 - 1e-12) for one in placed)
