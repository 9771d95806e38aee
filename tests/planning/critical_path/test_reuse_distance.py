from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from hocket.ir import Carried, Edge, Graph, Op
from hocket.planning.critical_path import dependency_distance
from hocket.planning.critical_path.backbone import backbone_of
from hocket.planning.critical_path.reuse_distance import levels
from planning.critical_path.examples import network
from strategies import graphs


def test_the_example_of_the_drawing():
    roles = {
        "conv1": "forward",
        "conv2": "forward",
        "conv3": "forward",
        "dA3": "activation_grad",
        "dA2": "activation_grad",
    }
    roles |= {f"dW{n}": "weight_grad" for n in (3, 2, 1)} | {f"u{n}": "update" for n in (3, 2, 1)}
    pairs = ["conv1 conv2", "conv2 conv3", "conv3 dA3", "dA3 dA2", "dA2 dW1", "dA3 dW2", "conv3 dW3"]
    pairs += [f"dW{n} u{n}" for n in (1, 2, 3)]
    graph = Graph(
        tuple(Op(name, role=role) for name, role in roles.items()),
        tuple(Edge(*pair.split()) for pair in pairs),
        tuple(Carried(f"u{n}", f"conv{n}") for n in (1, 2, 3)),
    )
    distance = dependency_distance(graph)
    assert {op: distance[op] for op in ("dA3", "dW1", "dW2", "dW3")} == {"dA3": 1, "dW1": 2, "dW2": 4, "dW3": 6}


def test_activation_gradients_are_wanted_at_once_and_early_layers_gradients_before_late_ones():
    layers = 6
    distance = dependency_distance(network(layers))
    assert all(distance[f"dA{n}"] == 1 for n in range(3, layers + 1))
    weights = [distance[f"dW{n}"] for n in range(1, layers + 1)]
    assert weights == sorted(weights)
    assert len(set(weights)) > layers - 2
    assert min(weights) > 1


def test_an_output_that_nobody_reads_is_infinitely_far():
    assert dependency_distance(Graph((Op("a"), Op("b")), (Edge("a", "b"),))) == {"a": 1, "b": math.inf}


def brute_force(graph: Graph, uses: set[str]) -> dict[str, float]:
    """All ways from an op, over at most three steps, that end at their first use."""
    level = levels(graph)
    length = max(level.values()) + 1

    def shortest(op: str, step: int) -> float:
        best = math.inf
        after = [(edge.dst, step) for edge in graph.edges if edge.src == op]
        after += [(dst, step + 1) for src, dst in graph.carried if src == op and step < 3]
        for other, when in after:
            here = when * length + level[other]
            best = min(best, here if other in uses else shortest(other, when))
        return best

    return {op.name: shortest(op.name, 0) - level[op.name] for op in graph.ops}


@given(data=st.data())
def test_agrees_with_all_ways(data):
    graph = data.draw(graphs(max_ops=6))
    uses = set(backbone_of(graph).ops) & set(data.draw(st.lists(st.sampled_from(sorted(graph.by_name)))))
    expected = brute_force(graph, uses)
    found = dependency_distance(graph, uses)
    for op, distance in found.items():
        if expected[op] < math.inf:
            assert distance == expected[op]
        else:  # a way over more than three steps
            assert distance > 2 * max(levels(graph).values())
