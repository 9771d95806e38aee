"""Guards the table of undeclared writes: every captured op is run, and nothing but what it declares may change.

And the orders of the graph are held against what the ops were seen to do: of two ops of which one changes what the
other reads or changes, the earlier one comes before the later one on some path. The memory that the graph says its ops
touch is enough to prove any of its plans free of hazards.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from equivalence.test_lanes import JOBS as LANE_JOBS
from equivalence.test_lanes import captured_twins, small_net
from equivalence.test_layers import LAYERS, layer_job
from equivalence.test_places import Counting
from equivalence.test_steps import mse, simple
from equivalence.test_zoo import load
from hocket.checking import hazards
from hocket.errors import PlanError
from hocket.execution.base import below_autograd
from hocket.ir import synchronisation
from hocket.job import Job
from hocket.tracing.captured import Captured
from hocket.tracing.program import Slot, map_leaves
from hocket.tracing.recording.op_arguments import written_arguments
from hocket.tracing.scalars.tape import TapeRef
from support.captures import captured_job, run_action
from support.random_plans import on_lanes, random_order
from tracing.observe import content, observe, storages

WRITING = ["batch norm in both modes", "instance norm", "spectral and weight norm", "embedding with a largest norm"]
OTHERS = ["random relu", "lstm, deep and both ways", "bag max", "attention with dropout", "in-place relu"]
JOBS = {
    "small net": small_net,
    "buffers": lambda: simple(mse, Counting(exchanged=False)),
    **{name: lambda name=name: load(name, "sgd") for name in ("lenet", "lstm-cells", "lstm-lm")},
    **{name: lambda name=name: load(name, "adam") for name in ("digits-cnn", "dcgan", "transformer", "bert-tiny")},
    **{name: lambda name=name: layer_job(*LAYERS[name]) for name in WRITING + OTHERS},
    "foreach": lambda: with_optimizer(lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True)),
    "fused": lambda: with_optimizer(lambda p: torch.optim.Adam(p, fused=True)),
    "adagrad": lambda: with_optimizer(lambda p: torch.optim.Adagrad(p, fused=True)),
}


def with_optimizer(make) -> Job:
    job = simple(mse)
    return simple(mse, job.model, optimizer=make(job.model.parameters()))


@pytest.fixture(params=JOBS, scope="module")
def captured(request) -> Captured:
    torch.manual_seed(0)
    job = JOBS[request.param]()
    return captured_job(job)


def test_nothing_changes_but_what_an_op_declares(captured):
    frame = captured.rehearse()
    values, numbers = frame.values, frame.numbers

    def real(leaf):
        """An argument of a call as the op gets it."""
        if isinstance(leaf, Slot):
            return values[leaf.index]
        return numbers[leaf.index] if isinstance(leaf, TapeRef) else leaf

    with below_autograd(), torch.random.fork_rng([]):
        for action in captured.program.actions:
            for call in action.calls:
                args, options = map_leaves((call.args, call.kwargs), real)
                declared = storages(list(written_arguments(call.func, args, options)))
                given = storages([values[slot] for slot in call.reads])
                before = {key: content(tensor) for key, tensor in given.items()}
                versions = {key: tensor._version for key, tensor in given.items()}
                run_action(replace(action, calls=(call,)), values, numbers)
                for key, tensor in given.items():
                    changed = not torch.equal(before[key], content(tensor))
                    assert key in declared or not changed, f"{action.name}: {call.func} changes an argument"
                    assert key in declared or tensor._version == versions[key], f"{action.name}: {call.func}"


def test_only_ops_that_change_something_lasting_or_draw_numbers_are_not_stateless(captured):
    for name, seen in observe(captured).items():
        if captured.graph[name].stateless:
            assert not seen.changed, f"{name} changes what it is given"
            assert not seen.random, f"{name} draws random numbers"


def test_every_two_ops_that_would_notice_an_exchange_are_ordered(captured):
    seen = observe(captured)
    above: dict[str, set[str]] = {}
    for name in captured.graph.order:
        direct = captured.graph.predecessors[name]
        above[name] = {other for before in direct for other in (before, *above[before])}
    for before, after in combinations([action.name for action in captured.program.actions], 2):
        if seen[before].conflicts(seen[after]):
            assert before in above[after], f"{before} and {after} are not ordered"
            one, other = captured.graph[before], captured.graph[after]
            shared = set(one.writes) & {*other.reads, *other.writes} or set(one.reads) & set(other.writes)
            assert shared, f"{before} and {after} have no buffer in common"


def is_hazard(graph, plan) -> bool:
    try:
        hazards(graph, plan)
    except PlanError:
        return True
    return False


def test_what_the_buffers_demand_is_what_edges_and_carried_edges_keep(captured):
    chance, graph = random.Random(0), captured.graph
    assert {buffer for op in graph.ops for buffer in (*op.reads, *op.writes)} == {b.name for b in graph.buffers}
    for lanes in (1, 2, 4):
        plan = on_lanes(random_order(graph, chance), lanes, chance)
        hazards(graph, plan)


@pytest.mark.parametrize("name", LANE_JOBS)
def test_orders_that_are_dropped_show_as_hazards(name):
    graph, chance = captured_twins(LANE_JOBS[name], True)[2].graph, random.Random(name)
    plan = on_lanes(random_order(graph, chance), 4, chance)
    waits = synchronisation(graph, plan).waits
    needed = [edge for edge in graph.edges if edge.src in waits.get(edge.dst, ())]
    dropped = chance.sample(needed, min(30, len(needed)))
    fewer = [replace(graph, edges=tuple(edge for edge in graph.edges if edge[:2] != one[:2])) for one in dropped]
    assert sum(is_hazard(each, plan) for each in fewer) >= 5


def test_lives_and_sizes(captured):
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
