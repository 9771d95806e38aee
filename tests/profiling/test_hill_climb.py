"""Climbing: what it ends at, that it loses no measurement, and what it says about widths it never saw."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import InputError
from hocket.ir import Costs, Op
from hocket.profiling.hill_climb import Climb, HillClimb, Setting, accuracy, climb

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


@given(curves(), curves(), INTERVALS, st.integers(1, 4), st.floats(0, 0.2))
def test_step_by_step_finds_what_one_call_finds(
    compact: list[float], scatter: list[float], interval: int, cores_per_cache: int, tolerance: float
) -> None:
    cores = min(len(compact), len(scatter))

    def time_us(width: int, affinity: str) -> float:
        return (scatter if affinity == "scatter" else compact)[width - 1]

    options = {"cores_per_cache": cores_per_cache, "tolerance": tolerance}
    search = HillClimb([Op("a"), Op("b", "other")], cores, interval, **options)
    asked = 0
    while not search.done:
        settings = search.next_settings()
        assert search.next_widths() == {op: setting.width for op, setting in settings.items()}
        for op, setting in settings.items():
            search.record(op, setting.width, time_us(*setting), setting.affinity)
        asked += 1
    found = climb(time_us, cores, interval, **options)
    assert search.climbs() == {"a": found, "b": found}
    assert asked == search.num_steps == found.num_steps <= 2 * (math.ceil(cores / interval) + 3)


@given(curves(), INTERVALS, st.data())
def test_every_record_counts_asked_for_or_not(times: list[float], interval: int, data: st.DataObject) -> None:
    cores = len(times)
    search = HillClimb([Op("a")], cores, interval)
    extra = data.draw(st.dictionaries(st.integers(1, cores), TIMES, max_size=5))
    for width, time_us in extra.items():
        search.record("a", width, time_us)
    recorded = {width: [time_us] for width, time_us in extra.items()}
    while not search.done:
        ((_, width),) = search.next_widths().items()
        search.record("a", width, times[width - 1])
        recorded.setdefault(width, []).append(times[width - 1])
    found = search.climbs()["a"]
    assert found.times_us == {width: min(values) for width, values in recorded.items()}
    assert found.num_steps == len(recorded)
    assert not any(width in extra and len(values) > 1 for width, values in recorded.items()), "measured twice"


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
    assert accuracy(found, actual) == pytest.approx(1 - (0 / 9 + 1 / 5 + 0 / 4 + 0 / 5) / 4)
    assert accuracy(found, actual, [3]) == pytest.approx(0.8)
    assert math.isnan(accuracy(found, actual, [1, 4]))


def test_ops_climb_side_by_side_and_rest_at_their_best() -> None:
    times = {"wide": [100.0 / w for w in range(1, 10)], "narrow": [10.0 + w for w in range(1, 10)]}
    search = HillClimb([Op("wide", "w"), Op("narrow", "n")], 9, 2, also=())
    widths = []
    while not search.done:
        widths.append(search.next_widths())
        for op, width in widths[-1].items():
            search.record(op, width, times[op][width - 1])
    assert [step["wide"] for step in widths] == [1, 3, 5, 7, 9]
    assert [step["narrow"] for step in widths] == [1, 3, 1, 1, 1]
    assert search.next_widths() == {"wide": 9, "narrow": 1}


def test_ops_of_one_kind_climb_together_and_the_shortest_time_counts() -> None:
    ops = [Op("a", "mm", flops=8.0), Op("b", "mm", flops=8.0), Op("c", "mm", flops=9.0)]
    search = HillClimb(ops, 2, 1)
    search.record("a", 1, 30.0)
    assert search.next_widths() == {"a": 2, "b": 2, "c": 1}
    search.record("b", 1, 20.0)
    search.record("a", 2, 25.0)
    search.record("b", 2, 24.0)
    found = search.climbs()
    assert found["a"] == found["b"]
    assert found["a"].times_us == {1: 20.0, 2: 24.0}
    assert found["a"].spread_us == {1: 5.0, 2: 0.5}
    assert "c" not in found
    assert not search.done


def test_each_width_is_measured_in_both_affinities_while_there_are_caches() -> None:
    def time_us(width: int, affinity: str) -> float:
        return 100.0 / width + (0.0 if affinity == "scatter" else 5.0) + width

    found = climb(time_us, 8, 3, cores_per_cache=2, also=(2,))
    assert found.times_us == {1: 106.0, 2: 52.0, 4: 29.0, 7: pytest.approx(100 / 7 + 12), 8: 25.5}
    assert found.affinities == {1: "compact", 2: "scatter", 4: "scatter", 7: "compact", 8: "compact"}
    assert found.num_steps == 7, "1, 7 and 8 once; 2 and 4 twice, since 8 cores have 4 caches"
    assert (found.best_width, found.best_affinity) == (8, "compact")
    asked = HillClimb([Op("a")], 8, 3, cores_per_cache=2)
    asked.record("a", 1, 106.0)
    assert asked.next_settings() == {"a": Setting(4, "compact")}


def test_hardware_threads_are_climbed_only_when_asked_for() -> None:
    def falling(width: int, affinity: str) -> float:
        return 1.0 / width

    assert climb(falling, 68, 16).best_width == 68
    assert climb(falling, 68, 16, smt=4).best_width == 272


def test_a_tolerance_carries_a_climb_over_a_bump() -> None:
    bumpy = oracle([10.0, 5.0, 5.1, 3.0, 4.0])
    assert climb(bumpy, 5, 1, also=()).best_width == 2
    assert climb(bumpy, 5, 1, also=(), tolerance=0.05).best_width == 4


def test_the_narrowest_of_equals_is_best() -> None:
    assert climb(oracle([5.0, 3.0, 3.0, 3.0]), 4, 1).best_width == 2


def test_costs_are_what_was_measured(tmp_path) -> None:
    search = HillClimb([Op("a", "x"), Op("b", "y")], 6, 2)
    search.run(lambda op, width, affinity: (30.0 if op == "a" else 60.0) / width + 2 * width)
    costs = search.costs()
    for op, found in search.climbs().items():
        assert isinstance(found, Climb)
        assert costs.durations_us[op] == found.durations_us
        for width in range(1, 7):
            assert costs.duration_us(op, width=width) == found.predict_us(width)
        assert costs.lookup(op, width=found.best_width).source == "measured"
    assert "steps of 2" in costs.note
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs


def test_costs_have_one_placement_that_of_the_step_as_a_whole() -> None:
    def time_us(op: str, width: int, affinity: str) -> float:
        apart = {"a": -3.0, "b": 1.0}[op] if affinity == "scatter" else 0.0
        return 100.0 / width + width + apart

    search = HillClimb([Op("a", "x"), Op("b", "y")], 8, 3, cores_per_cache=2).run(time_us)
    costs = search.costs()
    assert search.placement == costs.placement == "scatter", "`a` gains more than `b` loses"
    assert costs.durations_us["b"]["4"] == 100.0 / 4 + 4 + 1.0
    assert costs.durations_us["b"]["7"] == 100.0 / 7 + 7, "wider than there are caches: no other way"
    assert HillClimb([Op("b", "y")], 8, 3, cores_per_cache=2).run(time_us).costs().placement == "compact"


def test_what_is_wanted_next_is_told_by_setting() -> None:
    search = HillClimb([Op("a", "x"), Op("b", "y")], 4, 3, also=())
    assert search.wanted == {Setting(1): ("a", "b")}
    search.record("a", 1, 5.0)
    assert search.wanted == {Setting(1): ("b",), Setting(4): ("a",)}
    search.record("b", 1, 5.0)
    search.record("a", 4, 2.0)
    search.record("b", 4, 9.0)
    assert search.wanted == {}


def test_no_ops_are_done_at_once() -> None:
    search = HillClimb([], 4)
    assert search.done
    assert search.num_steps == 0
    assert search.climbs() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cores": 0}, "cores to be a whole number"),
        ({"interval": 0}, "interval to be a whole number"),
        ({"interval": 2.5}, "interval to be a whole number"),
        ({"smt": True}, "smt to be a whole number"),
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
    assert search.climbs() == {}


def test_an_op_named_twice_is_refused() -> None:
    with pytest.raises(InputError, match="op 'a' is named twice"):
        HillClimb([Op("a"), Op("a", "other")], 4)
