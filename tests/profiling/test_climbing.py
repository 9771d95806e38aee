"""Climbing on whole steps: how many it takes, what it knows afterwards, and which placement it finds."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.curves import for_graph
from benchmarks.knl import published_knl
from hocket.ir import Costs, Device, Graph, Op, Span, Timeline
from hocket.profiling.hill_climb import MAX_WIDTHS, RUNS, Setting, climbing, interval_of

Times = Callable[[str, Setting], float]


def climbed(ops: list[Op], device: Device, time_us: Times) -> tuple[Costs, list[Setting]]:
    """The climb of a step whose ops take so long, one after another, and what each of its steps ran at."""
    climb = climbing(ops, device)
    settings: list[Setting] = []
    try:
        settings.append(next(climb))
        while True:
            now_us, spans = 0.0, []
            for op in ops:
                end_us = now_us + time_us(op.name, settings[-1])
                spans.append(Span(op.name, "main", now_us, end_us))
                now_us = end_us
            settings.append(climb.send(Timeline(tuple(spans), ("main",), "simulated")))
    except StopIteration as end:
        return end.value, settings


def scaling(work_us: float, best: int, spawn_us: float = 1.0) -> Callable[[int], float]:
    return lambda width: work_us / min(width, best) + spawn_us * width


def knl_step(cores: int) -> tuple[list[Op], Costs]:
    """Ops of several types and sizes, on curves that are built from the paper's figures."""
    kinds = [("aten.convolution.default", "forward"), ("aten.convolution_backward.default", "activation_grad")]
    kinds += [("aten.mm.default", "forward"), ("aten.mul.Tensor", "other"), ("aten._log_softmax.default", "forward")]
    ops = [
        Op(f"{target}/{size:g}", target, role, flops=size * 1e6, size_bytes=size * 1e4)
        for target, role in kinds
        for size in (1, 30, 300, 3000)
    ]
    return ops, for_graph(Graph(tuple(ops)), published_knl(cores))


@pytest.mark.parametrize(
    ("cores", "cores_per_cache", "most", "every_width"), [(16, 1, 12, 16), (16, 2, 18, 23), (68, 2, 56, 101)]
)
def test_it_takes_a_bounded_number_of_steps_and_predicts_what_it_did_not_measure(
    cores, cores_per_cache, most, every_width
):
    ops, true = knl_step(cores)
    device = Device("cpu0", cores=cores, smt=4, cores_per_cache=cores_per_cache)
    costs, settings = climbed(ops, device, lambda op, at: true.duration_us(op, width=at.width))
    assert len(settings) <= most < RUNS * every_width
    assert all(settings.count(setting) == RUNS for setting in settings)
    errors = []
    for op in ops:
        known = costs.durations_us[op.name]
        assert {"1", "2", str(cores)} <= set(known)
        fastest_us = min(true.durations_us[op.name].values())
        assert min(known.values()) <= 1.05 * fastest_us, "the best width measured is nearly the best there is"
        for width in range(1, cores + 1):
            actual_us = true.duration_us(op.name, width=width)
            if str(width) not in known:
                assert costs.lookup(op.name, width=width).source == "interpolated"
                errors.append(abs(costs.duration_us(op.name, width=width) - actual_us) / actual_us)
            else:
                assert known[str(width)] == pytest.approx(actual_us)
    assert 1 - fmean(errors) > 0.94, "what the paper has for an interval of 4"


@given(
    cores=st.integers(5, 300),
    cores_per_cache=st.sampled_from([1, 2, 4]),
    bests=st.lists(st.integers(1, 300), min_size=1, max_size=4),
)
def test_the_number_of_steps_is_bounded_on_any_machine(cores, cores_per_cache, bests):
    ops = [Op(f"op{n}", f"kind{n}") for n in range(len(bests))]
    curves = {op.name: scaling(1000.0, best) for op, best in zip(ops, bests, strict=True)}
    device = Device("cpu0", cores=cores, cores_per_cache=cores_per_cache)
    costs, settings = climbed(ops, device, lambda op, at: curves[op](at.width))
    assert len(settings) <= RUNS * 2 * (MAX_WIDTHS + 1)
    assert math.ceil((cores - 1) / interval_of(cores)) + 1 <= MAX_WIDTHS
    assert all({"1", str(cores)} <= set(known) for known in costs.durations_us.values())


def test_a_climb_ends_where_the_ops_that_matter_get_slower():
    ops = [Op("conv", "conv"), Op("add", "add")]
    curves = {"conv": scaling(1000.0, 9, spawn_us=20.0), "add": scaling(0.1, 68, spawn_us=0.0)}
    _, settings = climbed(ops, Device("cpu0", cores=68), lambda op, at: curves[op](at.width))
    assert [at.width for at in settings[::RUNS]] == [1, 5, 9, 13, 2, 68], "`add` alone would have gone to the end"


def test_the_shortest_of_the_times_at_a_setting_counts():
    took = iter([9.0, 5.0] + [20.0] * 20)
    costs, _ = climbed([Op("a")], Device("cpu0", cores=5), lambda op, at: next(took))
    assert costs.durations_us["a"]["1"] == 5.0
    assert costs.spread_us["a"]["1"] == 2.0


@pytest.mark.parametrize(("apart", "placement"), [(0.8, "scatter"), (1.0, "compact"), (1.2, "compact")])
def test_both_placements_are_measured_and_the_better_one_is_told(apart, placement):
    def time_us(op: str, at: Setting) -> float:
        return scaling(1000.0, 16)(at.width) * (apart if at.affinity == "scatter" else 1.0)

    costs, settings = climbed([Op("a")], Device("cpu0", cores=16, cores_per_cache=2), time_us)
    both = {at.width for at in settings if at.affinity == "scatter"}
    assert both == {2, 5}, "eight caches; the other widths share some"
    assert costs.placement == placement
    for width in both:
        expected = scaling(1000.0, 16)(width) * min(apart, 1.0)
        assert costs.durations_us["a"][str(width)] == pytest.approx(expected)


def test_where_no_cores_share_a_cache_there_is_one_placement():
    _, settings = climbed([Op("a")], Device("cpu0", cores=16), lambda op, at: 1000.0 / at.width)
    assert {at.affinity for at in settings} == {"compact"}


def test_a_step_without_ops_needs_no_profile():
    costs, settings = climbed([], Device("cpu0", cores=8), lambda op, at: 1.0)
    assert settings == []
    assert costs.durations_us == {}
