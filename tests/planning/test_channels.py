from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hocket.checking import check, hazards
from hocket.errors import InputError
from hocket.ir import Carried, Costs, Device, Edge, Graph, Link, Machine, Op
from hocket.planning import plan
from hocket.planning.channels import transfers_of, without_transfers
from hocket.simulation import simulate, step_us
from strategies import graphs

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
    turned = type(made)(
        tuple(
            type(lane)(lane.name, tuple(sorted(lane.ops, reverse=True)), lane.kind, lane.device)
            if lane.kind == "channel"
            else lane
            for lane in made.lanes
        ),
        made.after,
    )
    assert step_us(graph, made, costs(graph), MACHINE) < step_us(graph, turned, costs(graph), MACHINE)


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
