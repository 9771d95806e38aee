import numpy as np
import pytest

from hocket.errors import FormatError, InputError
from hocket.ir import Buffer, Carried, Costs, Device, Edge, Graph, Link, Machine, Op
from hocket.planning.partition import PartitionProblem, Tensor, equal_devices, partitioned, problem_of
from support.refusals import fails, refused

TWO = equal_devices(Machine.of(cores=1), 2)


def costs_of(graph: Graph) -> Costs:
    return Costs({op.name: {"1": 10.0} for op in graph.ops})


def test_a_device_of_speed_0_is_named():
    with np.errstate(divide="ignore"):
        takes_us = np.array([[1.0, 1.0]]) / np.array([1.0, 0.0])
    with pytest.raises(InputError, match=r"op 'a' takes inf us on device 'slow'.*is its speed 0"):
        PartitionProblem(("a",), takes_us, devices=("fast", "slow"))
    fails(FormatError, "flops_per_s", Machine, (Device("cpu0", flops_per_s=0.0),))


def test_self_loops_are_refused():
    with pytest.raises(InputError, match="'a' reads a tensor that it makes itself"):
        PartitionProblem(("a",), np.ones((1, 1)), (Tensor(0, (0,), 1.0),))
    refused("'a' waits for itself", PartitionProblem, ("a",), np.ones((1, 1)), waits=((0, 0),))
    fails(FormatError, "cycle: a -> a", Graph, (Op("a"),), (Edge("a", "a", 1.0),))


def test_an_op_that_fits_no_device_is_named_with_its_bytes():
    fields = {"memory_bytes": np.array([1.0, 5000.0]), "memory_limit_bytes": np.array([100.0, 4000.0])}
    with pytest.raises(InputError, match="op 'large' needs 5,000 bytes, and no device has more than 4,000"):
        PartitionProblem(("small", "large"), np.ones((2, 2)), **fields)
    with pytest.raises(InputError, match="op 'large' with the 1 ops that stay with it needs 5,001 bytes"):
        PartitionProblem(("small", "large"), np.ones((2, 2)), group=np.array([7, 7]), **fields)
    fields = {"memory_bytes": np.array([60.0, 60.0, 60.0]), "memory_limit_bytes": np.array([80.0, 80.0])}
    refused("need 180 bytes, and the devices have 160", PartitionProblem, ("a", "b", "c"), np.ones((3, 2)), **fields)


def test_other_values_that_make_no_sense():
    refused("durations for 2 ops on each device, got shape", PartitionProblem, ("a", "b"), np.ones((3, 2)))
    refused("at most 64 devices, got 65", PartitionProblem, ("a",), np.ones((1, 65)))
    refused("an op that is not there", PartitionProblem, ("a",), np.ones((1, 1)), (Tensor(0, (3,), 1.0),))
    with pytest.raises(InputError, match="2 values of memory_limit_bytes, got 1"):
        PartitionProblem(("a",), np.ones((1, 2)), memory_limit_bytes=np.ones(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "speed"}, "unknown objective 'speed'"),
        ({"epsilon": -0.1}, r"expected epsilon in \[0, 1\), got -0.1"),
        ({"budget_s": 0.0}, "expected a budget > 0 s"),
        ({"budget_s": float("inf")}, "expected a budget > 0 s, less than a year"),
        ({"objective": "time", "acyclic": True}, "time takes neither epsilon nor acyclic"),
        ({"objective": "pipeline", "micro_batches": 2}, "2 micro-batches for 3 stages"),
    ],
)
def test_options_that_make_no_sense(options, message):
    refused(message, partitioned, PartitionProblem(tuple("abcd"), np.ones((4, 3))), **options)


def test_more_devices_than_ops():
    refused("3 devices, and only 2 ops", partitioned, PartitionProblem(("a", "b"), np.ones((2, 3))))


def test_a_graph_becomes_a_problem():
    """Tensors once per source, updates into the next step, one home for what is written, memory by who makes it."""
    buffers = (
        Buffer("w", 40.0, "lasting"),
        Buffer("fwd:0", 8.0),
        Buffer("grad:0", 40.0, "kept"),
        Buffer("m", 40.0, "lasting"),
    )
    ops = (
        Op("fwd", role="forward", layer="fc", reads=("w",), writes=("fwd:0",)),
        Op("grad", role="weight_grad", reads=("fwd:0",), writes=("grad:0",)),
        Op("momentum", role="update", reads=("grad:0", "m"), writes=("m",)),
        Op("step", role="update", reads=("m", "w"), writes=("w", "m")),
    )
    edges = (Edge("fwd", "grad", 8.0), Edge("grad", "momentum", 40.0), Edge("momentum", "step", 40.0))
    graph = Graph(ops, edges, (Carried("step", "fwd"), Carried("step", "momentum")), buffers)
    problem = problem_of(graph, costs_of(graph), TWO)
    assert {(t.source, t.readers, t.size_bytes) for t in problem.tensors} == {
        *((0, (1,), 8.0), (1, (2,), 40.0), (2, (3,), 40.0)),
        *((3, (0,), 40.0), (3, (2,), 40.0)),  # the parameter, and the momentum
    }
    assert problem.group[2] == problem.group[3] != problem.group[1]
    assert problem.memory_bytes.tolist() == [8.0, 40.0, 40.0, 40.0]
    assert problem.backward.tolist() == [False, True, True, True]


def test_tied_weights_are_moved_to_whoever_reads_them_elsewhere():
    ops = (
        Op("first", reads=("w",)),
        Op("last", reads=("w",)),
        Op("update", role="update", reads=("w",), writes=("w",)),
    )
    carried = (Carried("update", "first"), Carried("update", "last"))
    graph = Graph(
        ops, (Edge("first", "last", 4.0), Edge("last", "update", 4.0)), carried, (Buffer("w", 100.0, "lasting"),)
    )
    problem = problem_of(graph, costs_of(graph), TWO)
    assert (2, (0, 1), 100.0) in {(t.source, t.readers, t.size_bytes) for t in problem.tensors}


def test_twins_and_color_classes_stay_together():
    ops = (Op("f", layer="a"), Op("g", layer="b"), Op("dg", role="weight_grad", layer="b"), Op("df", layer="a"))
    graph = Graph(ops, (Edge("f", "g", 1.0), Edge("g", "dg", 1.0), Edge("dg", "df", 1.0)))
    group = problem_of(graph, costs_of(graph), TWO, twins=True).group.tolist()
    assert group[0] == group[3] != group[1] == group[2]
    group = problem_of(graph, costs_of(graph), TWO, together=[("f", "dg")]).group.tolist()
    assert group[0] == group[2] != group[1]
    refused("no op is called 'x'", problem_of, graph, costs_of(graph), TWO, together=[("x",)])


def test_ops_that_see_what_is_written_share_its_home():
    """Up to the last write of a value, from the first write of what lasts; what the graph says is together; draws."""
    draws = {"reads": ("rng",), "writes": ("rng",)}
    ops = (
        Op("make", writes=("v",)),
        Op("early", reads=("v", "w")),
        Op("change", reads=("v",), writes=("v",)),
        Op("late", reads=("v",)),
        Op("update", reads=("w",), writes=("w",)),
        Op("after", reads=("w",)),
        Op("drop", **draws),
        Op("drop2", **draws),
        Op("alone"),
    )
    buffers = (Buffer("v", 8.0), Buffer("w", 8.0, "lasting"), Buffer("rng", 0.0, "lasting"))
    graph = Graph(ops, buffers=buffers, together=(("late", "alone"),))
    group = problem_of(graph, costs_of(graph), TWO).group.tolist()
    names = [op.name for op in ops]
    found = {frozenset(n for n, g in zip(names, group, strict=True) if g == one) for one in group}
    together = ({"make", "early", "change"}, {"update", "after"}, {"drop", "drop2"}, {"late", "alone"})
    assert found == {frozenset(each) for each in together}


def test_cheap_ops_follow_the_neighbour_that_they_share_the_most_with():
    graph = Graph((Op("big"), Op("small"), Op("other")), (Edge("big", "small", 9.0), Edge("small", "other", 5.0)))
    costs = Costs({"big": {"1": 100.0}, "small": {"1": 1.0}, "other": {"1": 100.0}})
    group = problem_of(graph, costs, TWO, expensive=0.9).group.tolist()
    assert group[0] == group[1] != group[2]
    assert len(set(problem_of(graph, costs, TWO).group.tolist())) == 3
    refused("expensive=0", problem_of, graph, costs, TWO, expensive=0.0)


def test_times_by_device_and_the_slowest_link():
    fast = Device("fast", flops_per_s=4e9, bytes_per_s=1e12)
    slow = Device("slow", flops_per_s=1e9, bytes_per_s=1e12)
    machine = Machine(
        (fast, slow), (Link("fast", "slow", 1e6, 5.0), Link("slow", "fast", 2e6, 7.0), Link("x", "fast", 1.0))
    )
    graph = Graph((Op("a", flops=1e6), Op("b")), (Edge("a", "b", 10.0),))
    costs = Costs({"a": {"1": 100.0}, "b": {"fast": 1.0, "slow": 9.0}})
    problem = problem_of(graph, costs, machine)
    assert problem.duration_us.tolist() == [[100.0, 400.0], [1.0, 9.0]]
    assert problem.tensors[0].transfer_us == 17.0
    assert problem.shares[0] == pytest.approx(409 / 510)
    refused("no duration for op 'b'", problem_of, graph, Costs({"a": {"1": 1.0}}), machine)
