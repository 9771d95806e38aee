"""Ranked layer paths, against the paper's Algorithm 1 by its letter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hocket.planning.critical_path.backbone import Backbone, backbone_of
from hocket.planning.critical_path.blocks import blocks_of
from hocket.planning.critical_path.paths import in_ns, ranked_paths
from planning.critical_path.examples import as_backbone, branching, dags, listed_paths, series_parallel


def agree(backbone: Backbone, durations_ns: list[int]) -> None:
    for block in blocks_of(backbone):
        ranked, listed = ranked_paths(backbone, block, durations_ns), listed_paths(backbone, block, durations_ns)
        assert ranked == listed
        assert sorted(op for path in ranked for op in path.ops) == list(block.ops)


@given(backbone=series_parallel(), data=st.data())
def test_agrees_with_algorithm_1_on_series_parallel_graphs(backbone, data):
    # Powers of two: no two sets of ops take equally long, so that every tie is decided.
    powers = data.draw(st.permutations(range(len(backbone))))
    agree(backbone, [1 << power for power in powers])


@given(backbone=dags(), data=st.data())
def test_agrees_with_algorithm_1_on_any_graph(backbone, data):
    powers = data.draw(st.permutations(range(len(backbone))))
    agree(backbone, [1 << power for power in powers])


@given(backbone=st.one_of(series_parallel(), dags()), data=st.data())
def test_with_ties_every_op_has_a_path_as_long_as_by_algorithm_1(backbone, data):
    durations_ns = data.draw(st.lists(st.integers(0, 3), min_size=len(backbone), max_size=len(backbone)))
    for block in blocks_of(backbone):
        lengths = []
        for paths in (ranked_paths(backbone, block, durations_ns), listed_paths(backbone, block, durations_ns)):
            assert [path.length_ns for path in paths] == sorted((path.length_ns for path in paths), reverse=True)
            lengths.append({op: path.length_ns for path in paths for op in path.ops})
        assert lengths[0] == lengths[1]


def test_the_example_of_the_drawing():
    graph, durations = branching()
    backbone = backbone_of(graph)
    (block,) = blocks_of(backbone)
    paths = ranked_paths(backbone, block, in_ns([durations[op] for op in backbone.ops]))
    assert [path.length_ns for path in paths] == [9000, 7000, 6000]
    assert [[backbone.ops[op] for op in path.ops] for path in paths] == [["p0.0", "p0.1"], ["p1.0", "p1.1"], ["p2.0"]]


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
