import pytest

from hocket.errors import InputError
from hocket.ir import Costs, Device, Edge, Graph, Link, Machine, Op
from hocket.planning import plan
from hocket.planning.transfers.receives import receives_of
from hocket.simulation import simulate
from planning.transfers.examples import ONE_CORE, random_step
from support.refusals import refused


def test_ops_with_the_same_recvs_are_one_group():
    ops = (Op("r1", role="recv"), Op("r2", role="recv"), *map(Op, "abcde"))
    edges = (("r1", "a"), ("a", "b"), ("r2", "b"), ("r2", "c"), ("r1", "c"), ("c", "e"))
    graph = Graph(ops, tuple(Edge(*edge) for edge in edges))
    found = receives_of(graph, Costs({name: {"1": 2.0**-at} for at, name in enumerate("abcde")}), ONE_CORE)
    assert dict(zip(found.groups, found.works_us, strict=True)) == {0b01: 1.0, 0b11: 0.5 + 0.25 + 0.0625, 0: 0.125}
    assert found.members.tolist() == [[True, False], [True, True], [False, False]]
    assert found.by_first_use == (0, 1)


@pytest.mark.parametrize("seed", range(60))
def test_the_makespan_of_an_order_is_that_of_its_plan(seed):
    step = random_step(seed)
    found = receives_of(step.graph, step.costs, step.machine)
    made = plan(step.graph, step.costs, step.machine, "transfers", order="random", seed=seed)
    (wire,) = [lane for lane in made.lanes if lane.kind == "channel"]
    order = [found.names.index(name) for name in wire.ops]
    simulated_us = simulate(step.graph, made, step.costs, step.machine).makespan_us
    assert found.makespan_us(order) == pytest.approx(simulated_us, rel=1e-12)


def test_channels_of_a_link_carry_side_by_side():
    graph = Graph(tuple(Op(name, role="recv", size_bytes=4.0) for name in "abc"))
    for channels, expected in ((1, [4.0, 8.0, 12.0]), (2, [4.0, 4.0, 8.0]), (None, [4.0, 4.0, 4.0])):
        machine = Machine(ONE_CORE.devices, (Link("server", "cpu0", 1e6, channels=channels),))
        assert receives_of(graph, Costs({}), machine).arrivals_us((0, 1, 2)) == expected


def test_a_gpu_that_all_costs_know_computes():
    graph = Graph((Op("r", role="recv", size_bytes=1.0), Op("a")), (Edge("r", "a"),))
    machine = Machine((*ONE_CORE.devices, Device("gpu0", "cuda")), (Link("server", "gpu0", 1e6),))
    assert receives_of(graph, Costs({"a": {"gpu0": 3.0}}), machine).works_us == (3.0,)


def test_what_cannot_be_ordered_is_named():
    graph = Graph((Op("r", role="recv"), Op("a")), (Edge("r", "a"),))
    refused("no duration for op 'a'", receives_of, graph, Costs({}), ONE_CORE)
    with pytest.raises(InputError, match="op 'r' is a recv, and no link leads to 'cpu0'"):
        receives_of(graph, Costs({"a": {"1": 1.0}}), Machine.of(cores=1))
