from __future__ import annotations

from hypothesis import given

from hocket.planning.critical_path.backbone import Backbone, backbone_of
from hocket.planning.critical_path.blocks import START, Block, blocks_of, dominators
from planning.critical_path.examples import as_backbone, branching, dags, network, series_parallel


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


@given(backbone=dags())
def test_every_op_is_on_all_ways_or_in_one_block_between_two_such_ops(backbone):
    check_blocks(backbone)


@given(backbone=series_parallel())
def test_blocks_of_series_parallel_graphs(backbone):
    check_blocks(backbone)


def test_a_chain_has_no_blocks():
    assert blocks_of(backbone_of(network(4))) == []
    assert blocks_of(as_backbone([])) == []


def test_a_fork_and_its_merge():
    graph, _ = branching()
    backbone = backbone_of(graph)
    (block,) = blocks_of(backbone)
    assert (backbone.ops[block.fork], backbone.ops[block.merge]) == ("fork", "merge")
    assert {backbone.ops[op] for op in block.ops} == {"p0.0", "p0.1", "p1.0", "p1.1", "p2.0"}


def test_two_starts_and_two_ends_are_a_block_without_fork_and_merge():
    assert blocks_of(as_backbone([[], [], [0, 1], [2], [2]])) == [Block(None, 2, (0, 1)), Block(2, None, (3, 4))]
