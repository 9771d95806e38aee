import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hocket.ir import Carried, Edge, Graph, Op
from hocket.planning.critical_path import dependency_distance
from hocket.planning.critical_path.backbone import (
    START,
    Backbone,
    backbone_of,
    blocks_of,
    dominators,
    levels,
    ranked_paths,
)
from planning.critical_path.examples import ancestors, as_backbone, dags, listed_paths, network, series_parallel
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


def ways(backbone: Backbone, op: int | None = None) -> list[tuple[int, ...]]:
    """All ways from a first op to a last one."""
    following = [o for o in range(len(backbone)) if not backbone.above[o]] if op is None else backbone.below[op]
    found = [() if op is None else (op,)] if not following else []
    return found + [(*(() if op is None else (op,)), *rest) for other in following for rest in ways(backbone, other)]


@given(backbone=dags())
def test_the_immediate_dominator_is_the_last_op_that_all_ways_lead_through(backbone):
    found = dominators(backbone.above)
    for op in range(len(backbone)):
        before = [set(way[: way.index(op)]) for way in ways(backbone) if op in way]
        common = set.intersection(*before)
        assert found[op] == max(common, default=START)


def check_blocks(backbone: Backbone) -> None:
    chain = set.intersection(*map(set, ways(backbone)))
    blocks = blocks_of(backbone)
    inside = [op for block in blocks for op in block.ops]
    assert sorted([*inside, *chain]) == list(range(len(backbone)))
    for block in blocks:
        assert {block.fork, block.merge} <= {None, *chain}
        through = {tuple(op for op in way if op in block.ops) for way in ways(backbone)}
        assert len(through) > 1, "one way only is no block"
        assert () not in through
        for op in block.ops:
            assert block.fork is None or all(block.fork in way for way in ways(backbone) if op in way)
            assert block.merge is None or all(block.merge in way for way in ways(backbone) if op in way)
        nearest = [op for op in chain if block.fork is None or op > block.fork]
        assert all(op >= (block.merge if block.merge is not None else len(backbone)) for op in nearest)


@given(backbone=st.one_of(series_parallel(), dags()))
def test_every_op_is_on_all_ways_or_in_one_block_between_two_such_ops(backbone):
    check_blocks(backbone)


def test_a_chain_has_no_blocks():
    assert blocks_of(backbone_of(network(4))) == []
    assert blocks_of(as_backbone([])) == []


@given(backbone=st.one_of(series_parallel(), dags()), data=st.data())
def test_with_ties_every_op_has_a_path_as_long_as_by_algorithm_1(backbone, data):
    durations_ns = data.draw(st.lists(st.integers(0, 3), min_size=len(backbone), max_size=len(backbone)))
    for block in blocks_of(backbone):
        lengths = []
        for paths in (ranked_paths(backbone, block, durations_ns), listed_paths(backbone, block, durations_ns)):
            assert [path.length_ns for path in paths] == sorted((path.length_ns for path in paths), reverse=True)
            lengths.append({op: path.length_ns for path in paths for op in path.ops})
        assert lengths[0] == lengths[1]


@given(backbone=st.one_of(series_parallel(), dags()), data=st.data())
def test_agrees_with_algorithm_1(backbone, data):
    # Powers of two: no two sets of ops take equally long, so that every tie is decided.
    durations_ns = [1 << power for power in data.draw(st.permutations(range(len(backbone))))]
    for block in blocks_of(backbone):
        ranked, listed = ranked_paths(backbone, block, durations_ns), listed_paths(backbone, block, durations_ns)
        assert ranked == listed
        assert sorted(op for path in ranked for op in path.ops) == list(block.ops)


def test_exponentially_many_ways_are_ranked_without_being_listed():
    layers, width = 60, 3  # 3 ** 60 ways
    above: list[list[int]] = [[]]
    for layer in range(layers):
        before = list(range(len(above) - (width if layer else 1), len(above)))
        above += [before] * width
    above.append(list(range(len(above) - width, len(above))))
    backbone = as_backbone(above)
    (block,) = blocks_of(backbone)
    durations_ns = [1 + at % width for at in range(len(backbone))]
    paths = ranked_paths(backbone, block, durations_ns)
    assert paths[0].length_ns == layers * width
    assert len(paths[0].ops) == layers
    assert sum(len(path.ops) for path in paths) == layers * width


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
