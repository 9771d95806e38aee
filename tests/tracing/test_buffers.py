"""The memory that a captured graph says its ops touch: enough to prove any of its plans free of hazards."""

from __future__ import annotations

import functools
import random
from itertools import combinations

import pytest

from equivalence.compare import Twins
from equivalence.test_lanes import JOBS, captured_twins
from hocket.checking import events_of, hazards
from hocket.errors import PlanError
from hocket.tracing.captured import Captured
from support.events import all_but_one
from support.random_plans import on_lanes, random_order
from tracing.observe import observe

pytestmark = pytest.mark.usefixtures("one_thread")


def is_hazard(graph, plan, events) -> bool:
    try:
        hazards(graph, plan, events)
    except PlanError:
        return True
    return False


@functools.cache
def twins_of(name: str) -> tuple[Twins, Captured, Captured]:
    return captured_twins(JOBS[name], True)


@pytest.mark.parametrize("name", JOBS)
def test_what_the_buffers_demand_is_what_edges_and_carried_edges_keep(name):
    _, _, captured = twins_of(name)
    chance = random.Random(name)
    graph = captured.graph
    assert {buffer for op in graph.ops for buffer in (*op.reads, *op.writes)} == {b.name for b in graph.buffers}
    for lanes in (1, 2, 4):
        plan = on_lanes(random_order(graph, chance), lanes, chance)
        hazards(graph, plan)
    fewer = list(all_but_one(events_of(graph, plan)))
    assert sum(is_hazard(graph, plan, events) for events in chance.sample(fewer, min(30, len(fewer)))) >= 5


@pytest.mark.parametrize("name", JOBS)
def test_every_conflict_that_shows_when_ops_run_shows_in_their_buffers(name):
    _, _, captured = twins_of(name)
    graph, seen = captured.graph, observe(captured)
    for first, second in combinations(graph.order, 2):
        if seen[first].conflicts(seen[second]):
            one, other = graph[first], graph[second]
            assert set(one.writes) & {*other.reads, *other.writes} or set(one.reads) & set(other.writes), (
                first,
                second,
            )


@pytest.mark.parametrize("name", JOBS)
def test_lives_and_sizes(name):
    _, _, captured = twins_of(name)
    buffers = {buffer.name: buffer for buffer in captured.graph.buffers}
    for place, tensor in captured.state().items():
        if place in buffers:
            assert buffers[place].life == "lasting"
            assert buffers[place].size_bytes == tensor.numel() * tensor.element_size()
    assert {b.life for b in buffers.values() if b.name.startswith("batch[")} <= {"input"}
    written = {buffer for op in captured.graph.ops for buffer in op.writes}
    assert all(buffer in written for buffer, found in buffers.items() if found.life in ("step", "kept"))
    gradients = {buffer for op in captured.graph.ops if op.role == "weight_grad" for buffer in op.writes}
    assert {buffers[buffer].life for buffer in gradients} & {"kept", "lasting"}
