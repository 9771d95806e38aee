import json
import math
from itertools import pairwise

import pytest
from hypothesis import given

from hocket.errors import FormatError
from hocket.ir import Edge, Graph, Op
from strategies import graphs
from support.refusals import fails

A, B, C = Op("a"), Op("b"), Op("c")


def write(tmp_path, **fields):
    path = tmp_path / "step.json"
    path.write_text(json.dumps({"format": "hocket-graph/1", **fields}))
    return path


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


@pytest.mark.parametrize("circle", ["acba", "aa"])
def test_a_cycle_is_named(tmp_path, circle):
    path = write(tmp_path, ops=[{"name": name} for name in "abc"], edges=list(map(list, pairwise(circle))))
    with pytest.raises(FormatError) as caught:
        Graph.load(path)
    before, _, named = str(caught.value).partition("cycle: ")
    assert before.startswith(f"{path}: ")
    assert sorted(named.split(" -> ")[1:]) == sorted(circle[1:])  # any op of the circle may be named first


def test_cycle_beside_sound_ops_names_only_the_cycle():
    with pytest.raises(FormatError, match="cycle: ") as caught:
        Graph((A, B, C, Op("d")), (Edge("a", "b"), Edge("b", "c"), Edge("c", "b"), Edge("c", "d")))
    named = str(caught.value).split("cycle: ")[1].split(" -> ")
    assert set(named) == {"b", "c"}
    assert named[0] == named[-1]


@pytest.mark.parametrize("size", [-1.0, math.nan, math.inf])
def test_sizes_are_checked_in_memory_too(size):
    fails(FormatError, r"op 'a'.*flops|flops.*op 'a'", Graph, (Op("a", flops=size),))
    fails(FormatError, r"edges\[0\].*'a' -> 'b'", Graph, (A, B), (Edge("a", "b", size),))


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
