"""Plans on streams compute what the serial plan computes, whatever order the device finds among what it may run."""

import copy
import random
from dataclasses import replace

import pytest
import torch

from equivalence.compare import assert_same, everything, named_leaves, serial
from equivalence.test_lanes import JOBS, captured_twins
from execution.streams.deferred import Deferred
from hocket.checking import check as check_plan
from hocket.errors import ExecutionError
from hocket.execution import executor
from hocket.execution.streams import CudaDevice, GraphedLanes, StreamLanes, as_launched
from hocket.execution.streams.graph_parts import graph_parts
from hocket.execution.threads import ThreadLanes
from hocket.ir import Lane, Plan, synchronisation
from quick import covering
from support.random_plans import on_lanes, on_streams, random_order
from support.refusals import fails

STEPS = 5

pytestmark = pytest.mark.usefixtures("one_thread")


def check(name: str, make, lanes: int = 3, split: bool = True) -> None:
    pair, first, second = captured_twins(JOBS[name], split)
    chance = random.Random(f"{name} {lanes}")
    reference = ThreadLanes(first, serial(first))
    plan = on_streams(on_lanes(random_order(second.graph, chance), lanes, chance))
    planned = make(second, plan, Deferred(chance.randrange(1000)))
    for number in range(STEPS):
        torch.manual_seed(number)
        expected = reference(pair.eager.batch(number))
        torch.manual_seed(number)
        found = planned(pair.planned.batch(number))
        where = f"step {number}"
        assert_same(named_leaves("returned", expected), named_leaves("returned", found), where)
        assert_same(everything(pair.eager), everything(pair.planned), where)
        for scheduler in pair.schedulers:
            scheduler.step()
    planned.close()


@pytest.mark.parametrize(("name", "lanes"), covering(JOBS, [1, 3]))
def test_launched_op_by_op(name, lanes):
    check(name, lambda captured, plan, device: StreamLanes(captured, plan, device=device), lanes)


@pytest.mark.parametrize("name", JOBS)
def test_captured_as_a_graph(name):
    check(name, lambda captured, plan, device: GraphedLanes(captured, plan, device=device))


def test_an_event_only_where_an_edge_crosses_streams_and_no_other_implies_it():
    pair, _, captured = captured_twins(JOBS["small net"], True)
    plan = on_streams(Plan((Lane("main", captured.graph.order),)))
    device = Deferred(0)
    planned = StreamLanes(captured, plan, device=device)
    planned(pair.planned.batch(0))
    assert device.waits == 2, "the lane for the caller's stream, and the caller's stream for the lane"
    chance = random.Random(4)
    plan = on_streams(on_lanes(random_order(captured.graph, chance), 3, chance))
    device = Deferred(0)
    planned = StreamLanes(captured, plan, device=device)
    planned(pair.planned.batch(0))
    needed = sum(map(len, synchronisation(captured.graph, plan).waits.values()))
    assert device.waits == needed + 2 * 3


def test_updates_with_numbers_of_their_step_stay_outside_the_graph():
    _, _, captured = captured_twins(JOBS["small net"], True)
    outside = graph_parts(captured, Deferred(0)).after
    roles = {captured.graph[op].role for op in outside}
    assert "update" in roles
    assert not roles & {"activation_grad", "weight_grad"}


def test_a_plan_as_a_graph_launches_it_is_one_for_the_same_step():
    _, _, captured = captured_twins(JOBS["small net"], True)
    chance = random.Random(5)
    order, outside = random_order(captured.graph, chance), graph_parts(captured, Deferred(0)).after
    # As a limit on memory may ask: an op of the graph waits for one that stays outside of it.
    first = next(op for op in order if op in outside)
    last = [op for op in order[order.index(first) :] if op not in outside][-1]
    plan = replace(on_streams(on_lanes(order, 3, chance)), after={last: (first,)})
    check_plan(captured.graph, plan)
    made, found = as_launched(captured, plan, Deferred(0))
    assert found == outside
    check_plan(captured.graph, made)
    sync = synchronisation(captured.graph, made)
    for late in outside:
        assert all(sync.before(op, late) for op in captured.graph.order if op not in outside)


def test_a_timeline_of_a_timed_step():
    pair, _, captured = captured_twins(JOBS["small net"], True)
    chance = random.Random(2)
    plan = on_streams(on_lanes(random_order(captured.graph, chance), 2, chance))
    planned = StreamLanes(captured, plan, device=Deferred(1), timed=True)
    fails(ExecutionError, "no step has been timed", planned.timeline)
    planned(pair.planned.batch(0))
    spans = planned.timeline().by_op
    assert len(spans) == len(captured.graph)
    for edge in captured.graph.edges:
        assert spans[edge.src].end_us <= spans[edge.dst].start_us


def test_a_graph_is_timed_in_a_step_on_copies_of_everything():
    pair, _, captured = captured_twins(JOBS["transformer"], True)
    chance = random.Random(2)
    plan = on_streams(on_lanes(random_order(captured.graph, chance), 3, chance))
    planned = GraphedLanes(captured, plan, device=Deferred(1))
    for number in range(3):
        planned(pair.planned.batch(number))
    before = copy.deepcopy(list(everything(pair.planned)))
    drawn = torch.get_rng_state()
    spans = planned.timeline().by_op
    assert_same(before, everything(pair.planned))
    assert torch.equal(drawn, torch.get_rng_state()), "dropout of the next step is what it would have been"
    assert spans.keys() == set(captured.graph.order)
    assert max(span.end_us for span in spans.values()) == len(captured.graph), "on this device each op takes 1 us"
    for edge in captured.graph.edges:
        assert spans[edge.src].end_us <= spans[edge.dst].start_us


def test_an_error_names_op_and_layer():
    pair, _, captured = captured_twins(JOBS["transformer"], True)
    planned = StreamLanes(captured, on_streams(serial(captured)), device=Immediate(0))
    broken = torch.full_like(pair.planned.batch(0)[0], 10_000)
    with pytest.raises(IndexError) as caught:
        planned((broken, *pair.planned.batch(0)[1:]))
    assert caught.value.__notes__ == ["in op 'embedding/embedding' of layer 'embedding' of the planned step"]


class Immediate(Deferred):
    """Ops run when they are launched, as a real launch fails when its arguments are wrong."""

    def launch(self, stream, work):
        work()


def test_other_lanes_and_other_machines_are_refused_by_name():
    _, _, captured = captured_twins(JOBS["small net"], True)
    with pytest.raises(ExecutionError, match="lane 'main' is a lane of cores; stream lanes run streams only"):
        StreamLanes(captured, serial(captured), device=Deferred(0))
    if not torch.cuda.is_available():
        fails(ExecutionError, "need a CUDA device, and torch sees none here", CudaDevice)
        fails(ExecutionError, "need a CUDA device", executor, captured, on_streams(serial(captured)))
