from __future__ import annotations

import json
import math

import pytest
from hypothesis import given

from hocket.errors import FormatError
from hocket.ir import Edge, Graph, Op
from strategies import any_graphs, graphs

A, B, C = Op("a"), Op("b"), Op("c")


def write(tmp_path, **fields):
    path = tmp_path / "step.json"
    path.write_text(json.dumps({"format": "hocket-graph/1", **fields}))
    return path


@given(graph=any_graphs())
def test_round_trip(tmp_path_factory, graph):
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    graph.save(path)
    assert Graph.load(path) == graph


@given(graph=graphs())
def test_order_is_topological_and_departs_from_program_order_only_where_it_must(graph):
    place = {op: at for at, op in enumerate(graph.order)}
    assert sorted(place) == sorted(op.name for op in graph.ops)
    assert all(place[edge.src] < place[edge.dst] for edge in graph.edges)
    if all(graph.index[edge.src] < graph.index[edge.dst] for edge in graph.edges):
        assert graph.order == tuple(op.name for op in graph.ops)


@given(graph=graphs())
def test_neighbours_mirror_the_edges(graph):
    pairs = {(edge.src, edge.dst) for edge in graph.edges}
    assert {(src, dst) for dst, sources in graph.predecessors.items() for src in sources} == pairs
    assert {(src, dst) for src, targets in graph.successors.items() for dst in targets} == pairs


def test_defaults_of_a_file(tmp_path):
    graph = Graph.load(write(tmp_path, ops=[{"name": "a"}, {"name": "b"}], edges=[["a", "b"]]))
    assert graph == Graph((A, B), (Edge("a", "b", 0.0),))


OP_PROBLEMS = {
    "duplicate op name 'a'": [{"name": "a"}, {"name": "a"}],
    "unknown role 'foreward'": [{"name": "a", "role": "foreward"}],
    "unknown field 'flop'": [{"name": "a", "flop": 3}],
    "missing field 'name'": [{"target": "aten.mm"}],
    "ops[0].flops: expected a finite number >= 0, got -1": [{"name": "a", "flops": -1}],
    "ops[0].bytes: expected a finite number >= 0, got nan": [{"name": "a", "bytes": math.nan}],
    "ops[0].bytes: expected a number, got True": [{"name": "a", "bytes": True}],
    "ops[0].stateless: expected true or false": [{"name": "a", "stateless": 1}],
    "ops[0].name: expected a name without white space, got 'a b'": [{"name": "a b"}],
    "ops[1]: expected an object, got the string 'b'": [{"name": "a"}, "b"],
    "ops[0].writes: expected a list, got the string 'x'": [{"name": "a", "writes": "x"}],
}


@pytest.mark.parametrize("problem", OP_PROBLEMS)
def test_bad_op_is_named_with_its_file(tmp_path, problem):
    path = write(tmp_path, ops=OP_PROBLEMS[problem])
    with pytest.raises(FormatError) as caught:
        Graph.load(path)
    assert str(caught.value).startswith(f"{path}: ops")
    assert problem in str(caught.value)


EDGE_PROBLEMS = {
    "'a' -> 'z' names a missing op 'z'": {"edges": [["a", "z", 1]]},
    "carried[0]: 'z' -> 'a' names a missing op 'z'": {"carried": [["z", "a"]]},
    "edges[0][2]: expected a finite number >= 0, got -4": {"edges": [["a", "b", -4]]},
    "edges[0]: expected [src, dst, bytes], got 1 elements": {"edges": [["a"]]},
    "carried[0]: expected 2 elements, got 3": {"carried": [["a", "b", 1]]},
    "edges: expected a list, got an object": {"edges": {}},
    "cycle: a -> c -> b -> a": {"edges": [["a", "c"], ["c", "b"], ["b", "a"]]},
    "cycle: a -> a": {"edges": [["a", "a"]]},
    "unknown field 'edge'": {"edge": []},
    "together[1]: names a missing op 'z'": {"together": [["a", "b"], ["a", "z"]]},
    "together[0][1]: expected a string, got 3": {"together": [["a", 3]]},
    "buffers[0].bytes: expected a finite number >= 0, got -1": {"buffers": [{"name": "x", "bytes": -1}]},
    "buffers[1].name: expected a name of its own, got 'x'": {"buffers": [{"name": "x"}, {"name": "x"}]},
    "buffer 'x': expected one of step, kept, lasting, input, got 'long'": {"buffers": [{"name": "x", "life": "long"}]},
    "buffers[0]: unknown field 'size'": {"buffers": [{"name": "x", "size": 1}]},
    "ops[3].reads: op 'd' reads a missing buffer 'y'": {"buffers": [{"name": "x"}]},
}


@pytest.mark.parametrize("problem", EDGE_PROBLEMS)
def test_bad_edge_is_named_with_its_file(tmp_path, problem):
    ops = [*({"name": name} for name in "abc"), {"name": "d", "reads": ["y"]}]
    path = write(tmp_path, ops=ops, **EDGE_PROBLEMS[problem])
    with pytest.raises(FormatError) as caught:
        Graph.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    if problem.startswith("cycle"):  # any op of the circle may be named first
        assert sorted(message.split("cycle: ")[1].split(" -> ")[1:]) == sorted(problem[7:].split(" -> ")[1:])
    else:
        assert problem in message


def test_cycle_beside_sound_ops_names_only_the_cycle():
    with pytest.raises(FormatError, match="cycle: ") as caught:
        Graph((A, B, C, Op("d")), (Edge("a", "b"), Edge("b", "c"), Edge("c", "b"), Edge("c", "d")))
    named = str(caught.value).split("cycle: ")[1].split(" -> ")
    assert set(named) == {"b", "c"}
    assert named[0] == named[-1]


@pytest.mark.parametrize("size", [-1.0, math.nan, math.inf])
def test_sizes_are_checked_in_memory_too(size):
    with pytest.raises(FormatError, match=r"op 'a'.*flops|flops.*op 'a'"):
        Graph((Op("a", flops=size),))
    with pytest.raises(FormatError, match=r"edges\[0\].*'a' -> 'b'"):
        Graph((A, B), (Edge("a", "b", size),))


def test_ops_that_are_together_stand_in_the_file(tmp_path):
    graph = Graph((A, B, C), together=[["a", "c"]])
    graph.save(tmp_path / "graph.json")
    assert Graph.load(tmp_path / "graph.json") == graph
    assert graph.together == (("a", "c"),)
    assert graph.fingerprint != Graph((A, B, C)).fingerprint


def test_a_graph_that_knows_no_buffers_is_written_as_ever(tmp_path):
    Graph((A,)).save(tmp_path / "graph.json")
    document = json.loads((tmp_path / "graph.json").read_text())
    assert set(document) == {"format", "ops", "edges", "carried"}
    assert set(document["ops"][0]) == {"name", "target", "role", "layer", "flops", "bytes", "stateless"}
