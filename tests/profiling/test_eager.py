"""An eager step as torch's profiler records it: every op of the graph, and the time between them, add up."""

import itertools

import pytest
import torch

import hocket
from hocket import zoo
from hocket.profiling.eager import DISPATCH, OPS, PYTHON, EagerRecord, record_eager


def recorded(step_us: float | None = None, cores: int = 2) -> tuple[EagerRecord, hocket.Graph]:
    job = zoo.load("mlp", depth=2, width=16, batch_size=4, optimizer="adam")
    for number in range(3):
        job.step(job.batch(number))
    graph = hocket.capture(job.step, job.model, job.optimizer, job.batch(3)).graph
    return record_eager(job.step, map(job.batch, itertools.count(3)), graph, cores=cores, step_us=step_us), graph


def test_every_op_of_the_graph_is_found_once() -> None:
    record, graph = recorded()
    of_graph = [span.op for span in record.timeline.by_lane[OPS] if span.op in graph.by_name]
    assert len(of_graph) == len(set(of_graph))
    missing = [op for op in graph.by_name if op not in of_graph]
    assert all(graph[op].target == "aten.full" for op in missing), "the gradient of the loss is made by another op"
    further = {op.name for op in record.ops}
    assert {span.op for span in record.timeline.spans} == further | set(of_graph)


def test_ops_dispatch_and_python_make_up_the_whole_step() -> None:
    record, _ = recorded(step_us=1000.0)
    assert record.timeline.makespan_us == pytest.approx(1000.0)
    assert record.timeline.lanes == (OPS, DISPATCH, PYTHON)
    assert sum(record.share(row) for row in record.timeline.lanes) == pytest.approx(1.0)
    assert all(record.share(row) > 0 for row in record.timeline.lanes)
    ends = sorted((span.start_us, span.end_us) for span in record.timeline.spans)
    assert all(before[1] <= after[0] + 1e-6 for before, after in itertools.pairwise(ends))


def test_roles_follow_the_phases_of_a_step() -> None:
    weight = torch.nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(_: object) -> None:
        weight.sinh().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(None)
    record = record_eager(step, itertools.repeat(None), hocket.Graph(()), cores=1)
    role_of = {op.target: op.role for op in record.ops}
    assert role_of["aten.sinh"] == "forward"
    assert role_of["aten.cosh"] == "activation_grad"
    assert "update" in role_of.values()
    assert record.others_busy is None, "there is one core"
