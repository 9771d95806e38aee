from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.errors import FormatError, InputError
from hocket.ir import Costs
from strategies import any_costs


@given(costs=any_costs())
def test_round_trip(tmp_path_factory, costs):
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    costs.save(path)
    assert Costs.load(path) == costs


PROBLEMS = {
    "durations_us['a']['1']: expected a duration in microseconds, from 0 to 1e+24, got -2": {"a": {"1": -2}},
    "durations_us['a']['1']: expected a duration in microseconds, from 0 to 1e+24, got nan": {"a": {"1": math.nan}},
    "durations_us['a']['1']: expected a duration in microseconds, from 0 to 1e+24, got 'x'": {"a": {"1": "x"}},
    "durations_us['a']['1']: expected a duration in microseconds, from 0 to 1e+24, got True": {"a": {"1": True}},
    "durations_us['a']['1']: expected a duration in microseconds, from 0 to 1e+24, got 1e+300": {"a": {"1": 1e300}},
    "durations_us['a']: expected at least one width or device": {"a": {}},
    "durations_us['a']: expected a width >= 1 or a device name, got '0'": {"a": {"0": 1.0}},
    "durations_us['a']: expected a width >= 1 or a device name, got 'cpu0:0'": {"a": {"cpu0:0": 1.0}},
    "durations_us['a']: expected a width >= 1 or a device name, got ':2'": {"a": {":2": 1.0}},
    "durations_us['a']: expected an object": {"a": 3.0},
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_bad_duration_is_named_with_its_file(tmp_path, problem):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"format": "hocket-costs/1", "durations_us": PROBLEMS[problem]}))
    with pytest.raises(FormatError) as caught:
        Costs.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)


def test_unknown_source_and_missing_table(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(
        json.dumps({"format": "hocket-costs/1", "durations_us": {"a": {"1": 1}}, "sources": {"a": "guessed"}})
    )
    with pytest.raises(FormatError, match=r"sources\['a'\].*'guessed'"):
        Costs.load(path)
    path.write_text(json.dumps({"format": "hocket-costs/1", "durations_us": {"a": {"1": 1}}, "placement": "anywhere"}))
    with pytest.raises(FormatError, match=r"placement: expected compact or scatter, got 'anywhere'"):
        Costs.load(path)
    path.write_text('{"format": "hocket-costs/1"}')
    with pytest.raises(FormatError, match="missing field 'durations_us'"):
        Costs.load(path)


def test_lookup_prefers_the_narrower_key():
    costs = Costs({"a": {"2": 8.0, "cpu1": 5.0, "cpu1:2": 3.0}})
    assert costs.lookup("a", width=2, device="cpu1") == (3.0, "measured")
    assert costs.lookup("a", width=4, device="cpu1") == (5.0, "measured")
    assert costs.lookup("a", width=2, device="cpu0") == (8.0, "measured")


def test_lookup_between_and_beyond_what_was_measured():
    costs = Costs({"a": {"2": 8.0, "4": 4.0}}, sources={"a": "analytic"})
    assert costs.lookup("a", width=2) == (8.0, "analytic")
    assert costs.lookup("a", width=3) == (6.0, "interpolated")
    assert costs.lookup("a", width=1) == (8.0, "extrapolated")
    assert costs.lookup("a", width=9) == (4.0, "extrapolated")


def test_lookup_names_the_op_that_has_no_duration():
    costs = Costs({"a": {"gpu0": 1.0}})
    with pytest.raises(InputError, match="no duration for op 'b'"):
        costs.lookup("b")
    with pytest.raises(InputError, match=r"op 'a' has no duration for device 'cpu0', only for gpu0"):
        costs.lookup("a", device="cpu0")


@settings(max_examples=30)
@given(costs=any_costs(), other=any_costs(), data=st.data())
def test_merged_and_restricted(costs, other, data):
    both = costs.merged(other)
    for op, row in both.durations_us.items():
        assert row == {**costs.durations_us.get(op, {}), **other.durations_us.get(op, {})}
    keep = data.draw(st.sets(st.sampled_from(sorted(both.durations_us)))) if both.durations_us else set()
    assert set(both.restricted(keep).durations_us) == keep


def test_placements_are_written_and_stay_where_costs_are_added(tmp_path):
    costs = Costs({"a": {"1": 3.0}, "b": {"1": 2.0}}, placement="scatter", placements={"b": "compact"})
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs
    both = costs.merged(Costs({"a": {"2": 2.0}}))
    assert (both.placement, both.placements) == ("scatter", {"b": "compact"})
    assert both.restricted({"a"}).placements == {}
    with pytest.raises(FormatError, match=r"placements\['a'\]: expected compact or scatter, got 'near'"):
        Costs({"a": {"1": 1.0}}, placements={"a": "near"})
