import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.errors import FormatError
from hocket.ir import Costs
from strategies import any_costs
from support.refusals import refused


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
    refused("no duration for op 'b'", costs.lookup, "b")
    refused(r"op 'a' has no duration for device 'cpu0', only for gpu0", costs.lookup, "a", device="cpu0")


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
