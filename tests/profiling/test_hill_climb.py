"""Climbing: what it ends at, that it loses no measurement, and what it says about widths it never saw."""

import itertools
import math
from collections.abc import Callable
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.curves import for_graph
from benchmarks.knl import published_knl
from benchmarks.regression import climb
from hocket.errors import InputError
from hocket.ir import Costs, Device, Graph, Op, Span, Timeline
from hocket.profiling.hill_climb import MAX_WIDTHS, RUNS, HillClimb, Setting, climbing, interval_of

TIMES = st.floats(0.5, 1e6)
INTERVALS = st.sampled_from([1, 2, 3, 4, 8, 16])


@st.composite
def curves(draw, min_cores: int = 1) -> list[float]:
    """Any times at all, at 1, 2, 3, ... threads."""
    cores = draw(st.integers(min_cores, 80))
    return draw(st.lists(TIMES, min_size=cores, max_size=cores))


@st.composite
def unimodal_curves(draw) -> list[float]:
    """Times that fall and then rise; either part may be missing, and neighbours may be equal."""
    times = sorted(draw(st.lists(TIMES, min_size=1, max_size=80)))
    rises = draw(st.lists(st.booleans(), min_size=len(times), max_size=len(times)))
    left = [time for time, rise in zip(times, rises, strict=True) if not rise]
    return left[::-1] + [time for time, rise in zip(times, rises, strict=True) if rise]


def oracle(times: list[float]):
    return lambda width, affinity: times[width - 1]


def by_the_letter(times: list[float], interval: int) -> dict[int, float]:
    """The algorithm of section III-C as one would write it down on reading it."""
    width, measured = 1, {1: times[0]}
    while width < len(times):
        last, width = width, min(width + interval, len(times))
        measured[width] = times[width - 1]
        if measured[width] > measured[last]:
            break
    return measured


@given(curves(), INTERVALS)
def test_a_climb_is_the_papers(times: list[float], interval: int) -> None:
    found = climb(oracle(times), len(times), interval, also=())
    assert found.times_us == by_the_letter(times, interval)
    assert list(found.path) == sorted(found.times_us)
    assert found.num_steps == len(found.times_us)


@given(unimodal_curves(), INTERVALS)
def test_on_a_valley_no_width_an_interval_away_is_better(times: list[float], interval: int) -> None:
    flat = len(set(times)) < len(times)  # then 2 threads can be as good as the climb's end, and not its neighbour
    found = climb(oracle(times), len(times), interval, also=() if flat else None)
    assert found.best_us == min(found.times_us.values()) == times[found.best_width - 1]
    for neighbour in (found.best_width - interval, found.best_width + interval):
        if 1 <= neighbour <= len(times):
            assert times[neighbour - 1] >= found.best_us


@given(unimodal_curves())
def test_a_climb_one_by_one_finds_the_best_of_a_valley_without_flat_parts(times: list[float]) -> None:
    if len(set(times)) == len(times):
        assert climb(oracle(times), len(times), 1).best_us == min(times)


def durations(search: HillClimb, op: str) -> dict[int, float]:
    return {int(width): us for width, us in search.costs().durations_us.get(op, {}).items()}


@given(curves(), INTERVALS, st.data())
def test_every_record_counts_asked_for_or_not(times: list[float], interval: int, data: st.DataObject) -> None:
    cores = len(times)
    search = HillClimb([Op("a")], cores, interval)
    extra = data.draw(st.dictionaries(st.integers(1, cores), TIMES, max_size=5))
    for width, time_us in extra.items():
        search.record("a", width, time_us)
    recorded = dict(extra)
    while search.wanted:
        ((setting, _),) = search.wanted.items()
        assert setting.width not in recorded, "measured twice"
        recorded[setting.width] = times[setting.width - 1]
        search.record("a", setting.width, times[setting.width - 1])
    assert durations(search, "a") == recorded
    assert search.best_us() == {"a": min(recorded.values())}


@given(curves(), INTERVALS, st.data())
def test_predictions_are_exact_where_measured_and_linear_between(
    times: list[float], interval: int, data: st.DataObject
) -> None:
    found = climb(oracle(times), len(times), interval)
    known = sorted(found.times_us)
    for width in known:
        assert found.predict_us(width) == times[width - 1]
    width = data.draw(st.integers(1, len(times)))
    low = max(w for w in known if w <= width)
    high = min(w for w in known if w >= width)
    share = (width - low) / (high - low) if high > low else 0.0
    expected = times[low - 1] + share * (times[high - 1] - times[low - 1])
    assert found.predict_us(width) == pytest.approx(expected)


def test_the_example_of_the_paper() -> None:
    """One and four threads were measured, in steps of three: two and three lie on the line between."""
    found = climb(oracle([12.0, 9.0, 5.0, 3.0, 4.0, 5.0, 6.0]), 7, 3, also=())
    assert found.times_us == {1: 12.0, 4: 3.0, 7: 6.0}
    assert [found.predict_us(width) for width in (2, 3)] == [9.0, 6.0]
    assert (found.best_width, found.best_us, found.path) == (4, 3.0, (1, 4, 7))
    actual = dict(enumerate([12.0, 9.0, 5.0, 3.0, 4.0, 5.0, 6.0], 1))
    assert found.accuracy(actual) == pytest.approx(1 - (0 / 9 + 1 / 5 + 0 / 4 + 0 / 5) / 4)
    assert found.accuracy(actual, [3]) == pytest.approx(0.8)
    assert math.isnan(found.accuracy(actual, [1, 4]))


def test_ops_climb_side_by_side_and_are_told_by_setting() -> None:
    times = {"wide": [100.0 / w for w in range(1, 10)], "narrow": [10.0 + w for w in range(1, 10)]}
    search = HillClimb([Op("wide", "w"), Op("narrow", "n")], 9, 2, also=())
    asked = []
    while wanted := search.wanted:
        asked.append({setting.width: ops for setting, ops in wanted.items()})
        for setting, ops in wanted.items():
            for op in ops:
                search.record(op, setting.width, times[op][setting.width - 1])
    assert asked == [{1: ("wide", "narrow")}, {3: ("wide", "narrow")}, {5: ("wide",)}, {7: ("wide",)}, {9: ("wide",)}]
    assert HillClimb([], 4).wanted == HillClimb([], 4).best_us() == {}


def test_ops_of_one_kind_climb_together_and_the_shortest_time_counts() -> None:
    ops = [Op("a", "mm", flops=8.0), Op("b", "mm", flops=8.0), Op("c", "mm", flops=9.0)]
    search = HillClimb(ops, 2, 1)
    search.record("a", 1, 30.0)
    assert search.wanted == {Setting(1): ("c",), Setting(2): ("a", "b")}
    for op, width, time_us in (("b", 1, 20.0), ("a", 2, 25.0), ("b", 2, 24.0)):
        search.record(op, width, time_us)
    costs = search.costs()
    assert costs.durations_us == {"a": {"1": 20.0, "2": 24.0}, "b": {"1": 20.0, "2": 24.0}}
    assert costs.spread_us["a"] == {"1": 5.0, "2": 0.5}
    assert search.wanted == {Setting(1): ("c",)}


def test_each_width_is_measured_in_both_affinities_while_there_are_caches() -> None:
    def time_us(width: int, affinity: str) -> float:
        return 100.0 / width + (0.0 if affinity == "scatter" else 5.0) + width

    found = climb(time_us, 8, 3, cores_per_cache=2, also=(2,))
    assert found.times_us == {1: 106.0, 2: 52.0, 4: 29.0, 7: pytest.approx(100 / 7 + 12), 8: 25.5}
    assert found.num_steps == 7, "1, 7 and 8 once; 2 and 4 twice, since 8 cores have 4 caches"
    assert found.best_width == 8
    asked = HillClimb([Op("a")], 8, 3, cores_per_cache=2)
    asked.record("a", 1, 106.0)
    assert asked.wanted == {Setting(4, "compact"): ("a",)}


def test_a_tolerance_carries_a_climb_over_a_bump() -> None:
    bumpy = oracle([10.0, 5.0, 5.1, 3.0, 4.0])
    assert climb(bumpy, 5, 1, also=()).best_width == 2
    assert climb(bumpy, 5, 1, also=(), tolerance=0.05).best_width == 4


def test_the_narrowest_of_equals_is_best() -> None:
    assert climb(oracle([5.0, 3.0, 3.0, 3.0]), 4, 1).best_width == 2


def climbed(ops: list[Op], cores: int, interval: int, time_us, **options) -> HillClimb:
    search = HillClimb(ops, cores, interval, **options)
    while wanted := search.wanted:
        for (width, affinity), names in wanted.items():
            for op in names:
                search.record(op, width, time_us(op, width, affinity), affinity)
    return search


def test_each_op_has_its_own_placement_beside_that_of_the_step_as_a_whole() -> None:
    def time_us(op: str, width: int, affinity: str) -> float:
        apart = {"a": -3.0, "b": 1.0}[op] if affinity == "scatter" else 0.0
        return 100.0 / width + width + apart

    search = climbed([Op("a", "x"), Op("b", "y")], 8, 3, time_us, cores_per_cache=2)
    costs = search.costs()
    assert "steps of 3" in costs.note
    assert search.placement == costs.placement == "scatter", "`a` gains more than `b` loses"
    assert costs.placements == {"b": "compact"}
    assert costs.durations_us["a"]["4"] == 100.0 / 4 + 4 - 3.0
    assert costs.durations_us["b"]["4"] == 100.0 / 4 + 4 + 1.0, "as long as it takes on the lanes of the plan"
    assert costs.durations_us["b"]["7"] == 100.0 / 7 + 7, "wider than there are caches: no other way"
    assert climbed([Op("b", "y")], 8, 3, time_us, cores_per_cache=2).costs().placement == "compact"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cores": 0}, "cores to be a whole number"),
        ({"interval": 0}, "interval to be a whole number"),
        ({"interval": 2.5}, "interval to be a whole number"),
        ({"interval": True}, "interval to be a whole number"),
        ({"cores_per_cache": -1}, "cores_per_cache to be a whole number"),
        ({"also": (5,)}, "widths from 1 to 4, got 5"),
        ({"tolerance": -0.1}, "tolerance >= 0"),
        ({"tolerance": math.nan}, "tolerance >= 0"),
    ],
)
def test_impossible_climbs_are_refused(options, message) -> None:
    with pytest.raises(InputError, match=message):
        HillClimb([Op("a")], **{"cores": 4, **options})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (("b", 1, 1.0), "no op 'b'"),
        (("a", 5, 1.0), "width from 1 to 4, got 5"),
        (("a", 0, 1.0), "width from 1 to 4, got 0"),
        (("a", 1, -1.0), "duration in microseconds"),
        (("a", 1, math.nan), "duration in microseconds"),
        (("a", 1, math.inf), "duration in microseconds"),
        (("a", 2, 1.0, "scatter"), "expected affinity compact at width 2, got 'scatter'"),
    ],
)
def test_impossible_records_are_refused(record, message) -> None:
    search = HillClimb([Op("a")], 4)
    with pytest.raises(InputError, match=message):
        search.record(*record)
    assert search.best_us() == {}


def test_an_op_named_twice_is_refused() -> None:
    with pytest.raises(InputError, match="op 'a' is named twice"):
        HillClimb([Op("a"), Op("a", "other")], 4)


Times = Callable[[str, Setting], float]


def climbed_steps(ops: list[Op], device: Device, time_us: Times) -> tuple[Costs, list[Setting]]:
    """The climb of a step whose ops take so long, one after another, and what each of its steps ran at."""
    climb = climbing(ops, device)
    settings: list[Setting] = []
    try:
        setting = next(climb)
        while True:
            timelines = []
            for _ in range(RUNS):
                settings.append(setting)
                ends_us = [0.0, *itertools.accumulate(time_us(op.name, setting) for op in ops)]
                rows = zip(ops, itertools.pairwise(ends_us), strict=True)
                spans = tuple(Span(op.name, "main", *row) for op, row in rows)
                timelines.append(Timeline(spans, ("main",), "simulated"))
            setting = climb.send(timelines)
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
    costs, settings = climbed_steps(ops, device, lambda op, at: true.duration_us(op, width=at.width))
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
    costs, settings = climbed_steps(ops, device, lambda op, at: curves[op](at.width))
    assert len(settings) <= RUNS * 2 * (MAX_WIDTHS + 1)
    assert math.ceil((cores - 1) / interval_of(cores)) + 1 <= MAX_WIDTHS
    assert all({"1", str(cores)} <= set(known) for known in costs.durations_us.values())


def test_a_climb_ends_where_the_ops_that_matter_get_slower():
    ops = [Op("conv", "conv"), Op("add", "add")]
    curves = {"conv": scaling(1000.0, 9, spawn_us=20.0), "add": scaling(0.1, 68, spawn_us=0.0)}
    _, settings = climbed_steps(ops, Device("cpu0", cores=68), lambda op, at: curves[op](at.width))
    assert [at.width for at in settings[::RUNS]] == [1, 5, 9, 13, 2, 68], "`add` alone would have gone to the end"


def test_the_shortest_of_the_times_at_a_setting_counts():
    took = iter([9.0, 5.0] + [20.0] * 20)
    costs, _ = climbed_steps([Op("a")], Device("cpu0", cores=5), lambda op, at: next(took))
    assert costs.durations_us["a"]["1"] == 5.0
    assert costs.spread_us["a"]["1"] == 2.0


@pytest.mark.parametrize(("apart", "placement"), [(0.8, "scatter"), (1.0, "compact"), (1.2, "compact")])
def test_both_placements_are_measured_and_the_better_one_is_told(apart, placement):
    def time_us(op: str, at: Setting) -> float:
        return scaling(1000.0, 16)(at.width) * (apart if at.affinity == "scatter" else 1.0)

    costs, settings = climbed_steps([Op("a")], Device("cpu0", cores=16, cores_per_cache=2), time_us)
    both = {at.width for at in settings if at.affinity == "scatter"}
    assert both == {2, 5}, "eight caches; the other widths share some"
    assert costs.placement == placement
    for width in both:
        expected = scaling(1000.0, 16)(width) * min(apart, 1.0)
        assert costs.durations_us["a"][str(width)] == pytest.approx(expected)


def test_where_no_cores_share_a_cache_there_is_one_placement():
    _, settings = climbed_steps([Op("a")], Device("cpu0", cores=16), lambda op, at: 1000.0 / at.width)
    assert {at.affinity for at in settings} == {"compact"}


def test_a_step_without_ops_needs_no_profile():
    costs, settings = climbed_steps([], Device("cpu0", cores=8), lambda op, at: 1.0)
    assert settings == []
    assert costs.durations_us == {}
