from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hocket.ir import Edge, Graph, Op
from hocket.planning.critical_path.backbone import backbone_of, reduced
from planning.critical_path.examples import ancestors, network
from strategies import graphs


def test_forwards_and_activation_gradients_are_waited_for_and_nothing_else():
    backbone = backbone_of(network(3))
    assert backbone.ops == ("f1", "f2", "f3", "loss", "dA3", "dA2")
    assert [list(map(backbone.ops.__getitem__, before)) for before in backbone.above] == [
        *([], ["f1"], ["f2"], ["f3"], ["loss"], ["dA3"])
    ]


def test_what_leads_nowhere_is_no_backbone():
    ops = (Op("count", role="forward"), Op("f", role="forward"), Op("dW", role="weight_grad"), Op("u", role="update"))
    assert backbone_of(Graph(ops, (Edge("f", "dW"), Edge("dW", "u")))).ops == ("f",)


def test_an_update_that_a_later_forward_reads_in_the_same_step_is_backbone():
    roles = {"f": "forward", "dW": "weight_grad", "u": "update", "f'": "forward", "dW'": "weight_grad", "u'": "update"}
    ops = tuple(Op(name, role=role) for name, role in roles.items())
    names = list(roles)
    graph = Graph(ops, tuple(Edge(a, b) for a, b in pairwise(names)))
    assert backbone_of(graph).ops == ("f", "dW", "u", "f'")


def test_transfers_are_no_backbone_and_a_graph_without_roles_is_all_backbone():
    ops = (Op("get", role="recv"), Op("f", role="forward"), Op("dW", role="weight_grad"), Op("put", role="send"))
    assert backbone_of(Graph(ops, (Edge("get", "f"), Edge("f", "dW"), Edge("dW", "put")))).ops == ("f",)
    assert backbone_of(Graph((Op("a"), Op("b"), Op("put", role="send")))).ops == ("a", "b")
    assert backbone_of(Graph(())).ops == ()


def test_without_gradients_every_forward_is_useful():
    assert backbone_of(Graph((Op("a", role="forward"), Op("b", role="forward")))).ops == ("a", "b")


@given(graph=graphs())
def test_the_backbone_keeps_every_order_of_its_ops_and_no_edge_too_many(graph):
    backbone = backbone_of(graph)
    place = {name: at for at, name in enumerate(backbone.ops)}
    full = [[place[b] for b in graph.predecessors[name] if b in place] for name in backbone.ops]
    assert ancestors(full) == ancestors(backbone.above)
    for op, before in enumerate(backbone.above):
        for other in before:
            assert op in backbone.below[other]
            fewer = [list(b) for b in backbone.above]
            fewer[op].remove(other)
            assert ancestors(fewer) != ancestors(backbone.above)
    for name in backbone.ops:
        for before in graph.predecessors[name]:
            assert before in place or graph[before].role in ("send", "recv")


@given(st.data())
def test_reduction_keeps_ancestors(data):
    count = data.draw(st.integers(1, 8))
    above = [data.draw(st.lists(st.integers(0, at - 1), max_size=4)) if at else [] for at in range(count)]
    assert ancestors(reduced(above)) == ancestors(above)
    assert reduced(reduced(above)) == reduced(above)
