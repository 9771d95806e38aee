"""Values that cross the borders of a division, ops that share a rank, and the joined plan of all ranks."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from distributed.stages.trained import mixed, scattered
from execution.parted import batches, captured_of, training
from hocket.checking import check, hazards
from hocket.distributed.job import captured_for
from hocket.distributed.stages.crossings import Borders, joined_graph, joined_plan, plan_of_rank
from hocket.errors import PlanError
from hocket.ir import Graph, Plan
from support.refusals import fails, refused

RANKS = 3


@pytest.fixture(scope="module")
def whole():
    work = mixed("sgd")
    return work, captured_for(work.step, work.model, work.optimizer, work.batches[0])


def divided(whole, seed):
    work, captured = whole
    borders, rank_of = Borders(captured), scattered(work, RANKS, seed)
    crossings = borders.crossings(rank_of, RANKS)
    parts = [borders.part(rank_of, crossings, rank) for rank in range(RANKS)]
    return rank_of, crossings, parts, joined_plan(captured.graph, captured.graph.order, rank_of, crossings, 1)


@pytest.mark.parametrize("seed", range(8))
def test_every_division_is_legal_and_free_of_hazards(whole, seed):
    rank_of, crossings, parts, plan = divided(whole, seed)
    graph = joined_graph(parts, crossings)
    check(graph, plan)
    hazards(graph, plan)
    assert len({(each.buffer, each.to) for each in crossings}) == len(crossings)
    assert all(each.home != each.to for each in crossings)
    for rank, part in enumerate(parts):
        check(part.graph, plan_of_rank(plan, rank))
        computing = [op.name for op in part.graph.ops if op.role not in ("recv", "send")]
        assert computing == [name for name in whole[1].graph.order if rank_of[name] == rank]


def test_what_is_returned_goes_to_every_rank_and_what_outlives_the_step_is_for_the_next(whole):
    rank_of, crossings, _, _ = divided(whole, 1)
    (loss,) = [name for name in rank_of if name == "mse_loss"]
    reached = {each.to for each in crossings if each.buffer == f"{loss}:0"} | {rank_of[loss]}
    assert reached == set(range(RANKS))
    lasting = {buffer.name for buffer in whole[1].graph.buffers if buffer.life == "lasting"}
    assert any(each.lasts for each in crossings)
    assert all(each.lasts == (each.buffer in lasting) for each in crossings)


def test_without_the_order_between_readers_of_copies_and_the_next_ones_the_checker_names_a_copy():
    of = training()
    of.step(batches(1)[0])
    captured = captured_of(of, batches(1)[0])
    borders, rank_of = Borders(captured), {op.name: int(op.role != "update") for op in captured.graph.ops}
    crossings = borders.crossings(rank_of, 2)
    graph = joined_graph([borders.part(rank_of, crossings, rank) for rank in range(2)], crossings)
    plan = joined_plan(captured.graph, captured.graph.order, rank_of, crossings, 1)
    assert all((each.send, each.recv) in graph.carried for each in crossings if each.lasts)
    hazards(graph, plan)
    received = {each.recv for each in crossings if each.lasts}
    assert len(received) == 4
    carried = tuple(pair for pair in graph.carried if pair.dst not in received)
    with pytest.raises(PlanError, match="of the next step writes it") as raised:
        hazards(Graph(graph.ops, graph.edges, carried, graph.buffers), plan)
    assert raised.value.op in received


def test_lanes_that_wait_for_each_other_are_refused(whole):
    _, crossings, parts, plan = divided(whole, 1)
    lanes = [replace(lane, ops=lane.ops[::-1]) if lane.name == "rank0" else lane for lane in plan.lanes]
    fails(PlanError, "deadlock", check, joined_graph(parts, crossings), Plan(tuple(lanes)))


def test_writers_and_whoever_sees_what_they_write_in_between_share_a_rank():
    def step(batch):
        hidden = model(batch)
        before = hidden * 2.0
        hidden += 1.0
        return (hidden * before).sum()

    model = nn.Linear(3, 3)
    with torch.no_grad():
        captured = captured_for(step, model, [], torch.ones(2, 3))
    (ops,) = [set(ops) for ops, why in Borders(captured).together if "one home" in why]
    assert len(ops) == 3
    assert captured.graph.order[-1] not in ops


def test_places_that_share_memory_are_refused():
    of = training()
    with torch.no_grad():
        of.model[2].weight.set_(of.model[0].weight.untyped_storage(), 0, (2, 5), (5, 1))
    captured = captured_of(of, batches(1)[0])
    refused("share memory", Borders(captured).check, dict.fromkeys(captured.graph.by_name, 0), 1)


def test_a_value_travels_with_its_strides(whole):
    borders = Borders(whole[1])
    graph = whole[1].graph
    maker = next(name for name in graph.order if graph[name].target == "aten.tanh")
    rank_of = {name: int(name != maker) for name in graph.by_name}
    crossings = [each for each in borders.crossings(rank_of, 2) if each.buffer == f"{maker}:0"]
    assert [each.to for each in crossings] == [1]
    part = borders.part(rank_of, borders.crossings(rank_of, 2), 1)
    shape, strides, *_ = part.program.by_name[crossings[0].recv].transfer.new
    assert (shape, strides) == ((24, 6), (1, 24))
