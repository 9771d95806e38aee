"""Costs of a captured step: measured without touching it, estimated where nothing was measured."""

from types import SimpleNamespace

import pytest
import torch

import hocket
from execution.probe import KINDS
from hocket import zoo
from hocket.errors import InputError
from hocket.ir import Costs, Graph, Op, Span, Timeline
from hocket.profiling import tracer
from hocket.profiling.analytic import estimate, measure_rates
from hocket.profiling.hill_climb import climbing
from hocket.profiling.tracer import costs_of, default_widths


def captured():
    job = zoo.load("mlp", depth=2, width=16, batch_size=4, optimizer="adam")
    return job, hocket.capture(job.step, job.model, job.optimizer, job.batch(0))


def test_every_op_is_measured_at_every_width_and_nothing_changes() -> None:
    job, step = captured()
    (model,), (optimizer,) = job.models, job.optimizers
    before = [p.detach().clone() for p in model.parameters()]
    random = torch.get_rng_state()
    costs = hocket.profile(step, widths=[1, 2], runs=2, machine=hocket.Machine.of(cores=2))
    for op in step.graph.ops:
        assert set(costs.durations_us[op.name]) == {"1", "2"}
        assert costs.lookup(op.name, width=2).source == "measured"
        assert costs.spread_us[op.name]["1"] >= 0
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state, "an optimizer that had no state has none afterwards"


@pytest.mark.parametrize(("step_us", "counted"), [(1e3, 3), (3e5, 2), (2e6, 1)])
def test_few_long_steps_are_a_profile(step_us, counted) -> None:
    timeline = Timeline((Span("op", "lane", 0.0, step_us),), ("lane",))
    lanes = SimpleNamespace(timeline=lambda: timeline, close=lambda: None)
    steps = tracer.steps_of(lanes, runs=3, warm_up=1)  # type: ignore[arg-type]
    assert sum(1 for _ in steps) == 1 + counted


def test_many_cores_are_profiled_by_a_hill_climb(monkeypatch) -> None:
    monkeypatch.setattr(tracer, "FEW_CORES", 1)
    job, step = captured()
    before = [p.detach().clone() for p in job.model.parameters()]
    costs = hocket.profile(step, runs=1, machine=hocket.Machine.of(cores=2))
    assert costs.durations_us.keys() == step.graph.by_name.keys()
    assert all(set(row) == {"1", "2"} for row in costs.durations_us.values())
    assert costs.note == "hill climbing in steps of 4 up to 2 threads"
    assert all(torch.equal(p, old) for p, old in zip(job.model.parameters(), before, strict=True))


def test_a_climb_takes_each_setting_once_and_counts_every_run_of_it() -> None:
    taken = []

    def timed(width: int, affinity: str) -> list[Timeline]:
        taken.append((width, affinity))
        times_us = (80.0 / width + 4.0 * width + more - (affinity == "scatter") for more in (3.0, 0.0, 1.0))
        return [Timeline((Span("a", "main", 0.0, us),), ("main",), "measured") for us in times_us]

    device = hocket.Machine.of(cores=8, cores_per_cache=4).devices[0]
    costs = tracer._climbed(climbing([Op("a", "aten.mm")], device), timed)
    assert taken == [(1, "compact"), (5, "compact"), (8, "compact"), (2, "compact"), (2, "scatter")]
    assert costs.placement == "scatter"
    assert costs.durations_us["a"] == {"1": 84.0, "2": 47.0, "5": 36.0, "8": 42.0}
    assert costs.spread_us["a"]["5"] == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_draw_are_measured_by_each_executor_and_draw_nothing_of_the_users(kind: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    step = hocket.capture(lambda batch: model(batch).sum(), model, [], torch.ones(3, 4))
    random = torch.get_rng_state()
    costs = hocket.profile(step, widths=[1], runs=3, machine=hocket.Machine.of(cores=1), executor=kind)
    assert costs.durations_us.keys() == step.graph.by_name.keys()
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(("widths", "runs"), [([0], 1), ([3], 1), ([], 1), ([1], 0)])
def test_widths_and_runs_out_of_range_are_named(widths: list[int], runs: int) -> None:
    _, step = captured()
    with pytest.raises(InputError, match="profile: expected"):
        hocket.profile(step, widths=widths, runs=runs, machine=hocket.Machine.of(cores=2))


def test_the_minimum_counts_and_the_spread_is_kept() -> None:
    def timeline(end_us: float) -> Timeline:
        return Timeline((Span("a", "main", 0.0, end_us),), ("main",), "measured")

    costs = costs_of({1: [timeline(30.0), timeline(10.0), timeline(12.0)], 2: [timeline(7.0)]})
    assert costs == Costs({"a": {"1": 10.0, "2": 7.0}}, {"a": {"1": 2.0, "2": 0.0}})


def test_default_widths_double_up_to_all_cores() -> None:
    assert [default_widths(cores) for cores in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_estimates_follow_flops_and_bytes() -> None:
    machine = hocket.Machine.of(cores=4, flops_per_s=1e9, bytes_per_s=1e9)
    graph = Graph((Op("busy", flops=4e6), Op("wide", size_bytes=8e6)))
    costs = estimate(graph, machine)
    assert costs.duration_us("busy", width=1) == pytest.approx(16_003)
    assert costs.duration_us("busy", width=4) == pytest.approx(4_003)
    assert costs.duration_us("wide", width=1) == costs.duration_us("wide", width=4) == pytest.approx(8_003)
    assert costs.lookup("busy").source == "analytic"
    with pytest.raises(InputError, match="no flops_per_s"):
        estimate(graph, hocket.Machine.of(cores=4))


def test_measured_rates_are_of_this_world() -> None:
    device = measure_rates(hocket.Machine.here()).devices[0]
    assert device.flops_per_s is not None
    assert device.bytes_per_s is not None
    assert 1e8 < device.flops_per_s < 1e15
    assert 1e7 < device.bytes_per_s < 1e13
