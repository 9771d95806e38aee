"""Plans that are timed: which of them are left for calls that count."""

from __future__ import annotations

from functools import partial

import pytest

from hocket.fusion import choose
from hocket.fusion.plan import ExecutionPlan

ONE, ALL = ExecutionPlan(1, per_group_backward=True), ExecutionPlan(8)


@pytest.mark.parametrize("held_up", [0, 1])
def test_one_pass_that_is_held_up_does_not_decide(held_up, monkeypatch):
    """Of long passes there are two: the first one, and one more."""
    times_s = {ONE: [0.1, 0.1], ALL: [0.2, 0.2]}
    times_s[ONE][held_up] = 0.9
    monkeypatch.setattr(choose, "_took_s", lambda run: run())
    passes = {plan: partial(times_s[plan].pop, 0) for plan in times_s}
    found = choose.choose("losses", passes, choose.Copies([]), True, 8)
    assert found.times_us == {ONE: pytest.approx(1e5), ALL: pytest.approx(2e5)}
    assert found.finalists == [ONE, ALL]


def test_short_passes_are_timed_three_times(monkeypatch):
    times_s = {ONE: [0.009, 0.003, 0.002], ALL: [0.001, 0.004, 0.004]}
    monkeypatch.setattr(choose, "_took_s", lambda run: run())
    passes = {plan: partial(times_s[plan].pop, 0) for plan in times_s}
    found = choose.choose("losses", passes, choose.Copies([]), True, 8)
    assert found.times_us == {ONE: pytest.approx(2e3), ALL: pytest.approx(1e3)}
    assert not any(times_s.values())
    assert found.finalists == [ALL]
