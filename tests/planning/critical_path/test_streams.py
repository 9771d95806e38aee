import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.checking import check
from hocket.ir import Edge, Graph, Lane, Op, Plan
from hocket.planning.critical_path.streams import (
    MAX_STREAMS,
    METHODS,
    TASKS,
    hardware_levels,
    step_order,
    stream_plan,
    streams_of,
)
from planning.critical_path.examples import branching, network
from strategies import graphs


def streams(graph: Graph, durations=None, **options):
    return streams_of(graph, {op.name: (durations or {}).get(op.name, 1.0) for op in graph.ops}, **options)


def test_a_chain_needs_three_streams_however_deep_it_is():
    for layers in (2, 9):
        assert set(streams(network(layers)).lanes()) == {("activation", 0), ("weight", 0), ("bias", 0)}


def test_an_update_follows_its_gradient_on_the_gradients_stream():
    lanes = streams(network(3)).lanes()
    # The update of w3 has to wait for dA3 as well, which reads it; dW2 waits for just that.
    assert lanes["weight", 0] == ["dW3", "dW2", "uW3", "dW1", "uW1", "uW2"]
    assert lanes["bias", 0] == ["dB3", "uB3", "dB2", "uB2", "dB1", "uB1"]
    late = streams(network(3), updates_last=True).lanes()
    assert late["weight", 0] == ["dW3", "dW2", "dW1", "uW1", "uW2", "uW3"]


def test_each_layer_path_has_streams_of_its_own():
    graph, durations = branching()
    found = streams(graph, durations)
    assert found.num_paths == 3
    lanes = found.lanes()
    assert lanes["activation", 0] == ["fork", "p0.0", "p0.1", "merge"]
    assert lanes["activation", 1] == ["p1.0", "p1.1"]
    assert lanes["activation", 2] == ["p2.0"]
    assert lanes["weight", 1] == ["dWp1.0", "dWp1.1"]
    assert lanes["weight", 0][-2:] == ["dWmerge", "u"]


@pytest.mark.parametrize("max_streams", range(1, MAX_STREAMS + 1))
def test_never_more_streams_than_allowed_and_one_for_each_task_at_least(max_streams):
    graph, durations = branching(tuple((float(n),) for n in range(12, 1, -1)))
    lanes = streams(graph, durations, max_streams=max_streams).lanes()
    assert len(lanes) == max_streams
    assert sorted(op for ops in lanes.values() for op in ops) == sorted(graph.by_name)
    assert {task for task, _ in lanes} == ({"activation", "weight"} if max_streams > 1 else {"activation"})


def test_a_momentum_that_decays_goes_where_its_update_goes():
    graph, durations = branching()
    more = Graph(
        (*graph.ops, Op("decay", role="update"), Op("apply", role="update")),
        (*graph.edges, Edge("decay", "apply"), Edge("dWp1.0", "apply")),
    )
    found = streams(more, durations)
    assert found.stream_of["apply"] == found.stream_of["decay"] == ("weight", 1)


@pytest.mark.parametrize("paths", range(1, 6))
def test_no_gradient_of_a_parameter_comes_before_an_activation_gradient(paths):
    graph, durations = branching(tuple((float(n),) for n in range(12, 12 - paths, -1)))
    found = streams(graph, durations)
    ranks = range(max(paths, 2))
    by_task = {task: [found.priority((task, rank)) for rank in ranks] for task in TASKS}
    assert all(mine == sorted(mine, reverse=True) for mine in by_task.values())
    assert max(by_task["weight"]) < min(by_task["activation"])
    assert [mine[0] for mine in by_task.values()] == [paths, 0, -1]


@given(graph=graphs(), updates_last=st.booleans())
def test_the_order_respects_every_edge_and_leaves_out_transfers(graph, updates_last):
    found = streams(graph, updates_last=updates_last)
    order = step_order(graph, found.backbone.ops, updates_last=updates_last)
    assert order == found.order
    place = {op: at for at, op in enumerate(order)}
    assert place.keys() == {op.name for op in graph.ops if op.role not in ("send", "recv")}
    for edge in graph.edges:
        if edge.src in place and edge.dst in place:
            assert place[edge.src] < place[edge.dst]


@given(graph=graphs(), levels=st.integers(1, 5), method=st.sampled_from(METHODS), data=st.data())
def test_plans_of_any_graph_are_legal_and_keep_the_order_they_name(graph, levels, method, data):
    graph = Graph(tuple(op for op in graph.ops if op.role not in ("send", "recv")))
    graph = Graph(graph.ops, tuple(e for e in data.draw(graphs()).edges if {e.src, e.dst} <= set(graph.by_name)))
    durations = {op.name: data.draw(st.floats(0, 50)) for op in graph.ops}
    found = streams_of(graph, durations, data.draw(st.integers(1, 8)))
    made, order = stream_plan(graph, found, "gpu0", levels, method)
    check(graph, made)
    check(graph, Plan((Lane("all", order),), made.after))
    for lane in made.lanes:
        assert list(lane.ops) == [op for op in order if made.lane_of[op] is lane]
        assert 0 <= lane.priority < levels


def test_a_path_that_takes_next_to_nothing_gets_no_stream_of_its_own():
    graph, durations = branching(((50.0,), (1.0,), (0.02,)))
    lanes = streams(graph, durations).lanes()
    assert set(lanes["activation", 1]) == {"p1.0", "p2.0"}
    assert ("activation", 2) not in lanes
    graph, durations = branching(((50.0,), (0.02,)))
    assert {rank for _, rank in streams(graph, durations).lanes()} == {0}


WANTED = st.integers(1, 5).flatmap(
    lambda paths: st.builds(
        lambda alpha: {
            (task, rank): paths - rank if task == "activation" else min(paths - rank - alpha - (task == "bias"), 0)
            for task in ("activation", "weight", "bias")
            for rank in range(paths)
        },
        st.integers(0, 5),
    )
)


@given(wanted=WANTED, levels=st.integers(1, 20))
def test_levels_exist_and_never_turn_two_priorities_round(wanted, levels):
    found = hardware_levels(wanted, levels)
    assert set(found.values()) <= set(range(levels))
    for one, more in wanted.items():
        for other, less in wanted.items():
            if more >= less:
                assert found[one] >= found[other]
    if len(set(wanted.values())) <= levels:
        assert len(set(found.values())) == len(set(wanted.values()))
    elif levels > 1:
        assert min(v for (task, _), v in found.items() if task == "activation") > 0


def lanes_by(method: str, levels: int = 2):
    graph, durations = branching()
    streams = streams_of(graph, durations)
    made, _ = stream_plan(graph, streams, "gpu0", levels, method)
    return {lane.name.partition(".")[2]: lane for lane in made.lanes}, made


def test_plain_shares_a_level_and_flat_knows_one():
    lanes, made = lanes_by("plain")
    assert {name: lane.priority for name, lane in lanes.items()} == {
        **{f"activation{rank}": 1 for rank in range(3)},
        **{f"weight{rank}": 0 for rank in range(3)},
    }
    assert not made.after
    assert {lane.priority for lane in lanes_by("flat")[0].values()} == {0}


def test_order_puts_paths_of_one_level_into_one_queue_the_critical_one_first():
    lanes, made = lanes_by("order")
    assert list(lanes) == ["activation0", "weight0", "weight1", "weight2"]
    assert lanes["activation0"].ops == ("fork", "p0.0", "p0.1", "p1.0", "p1.1", "p2.0", "merge")
    assert not made.after
    assert list(lanes_by("order", 3)[0]) == ["activation0", "activation1", "weight0", "weight1", "weight2"]


def test_waits_keep_a_path_back_until_the_better_one_has_begun():
    lanes, made = lanes_by("waits")
    assert len(lanes) == 6
    assert made.after == {"p1.0": ("p0.0",), "p2.0": ("p1.0",)}
    assert lanes_by("waits", 3)[1].after == {"p2.0": ("p1.0",)}
