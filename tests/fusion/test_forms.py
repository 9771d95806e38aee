"""The forms that a captured step of an array may take: which are worth a try, and that they are what they say."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.fusion import calls, programs
from hocket.fusion.contest import Choice, ExecutionPlan

B = 3


def make(**options) -> hocket.fusion.model.Array:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)) for _ in range(B)]
    return hocket.fuse(models, shared=True, **options)


ALL, ONE, LAST = ExecutionPlan(B), ExecutionPlan(1), ExecutionPlan(1, channels_last=True)
GO = ExecutionPlan(1, per_group_backward=True)


def timed(times_us, winner=None, is_settled=True) -> Choice:
    return Choice(("forward", True), winner or min(times_us, key=times_us.get, default=ALL), times_us, is_settled)


@pytest.mark.parametrize(
    ("choices", "forms"),
    [
        ([timed({ALL: 1.0, ONE: 2.0})], ("rule", "loop")),
        ([timed({ALL: 2.0, LAST: 1.0})], ("loop", "rule")),
        ([timed({ALL: 1.0, ONE: 5.0})], ("rule",)),
        ([timed({ALL: 9.0, ONE: 1.0})], ("loop",)),
        ([timed({GO: 1.2})], ("loop",)),  # the other plan has had no turn
        ([timed({})], ("rule",)),
        ([timed({ALL: 1.0, ONE: 4.0}), timed({ALL: 1.5, ONE: 1.0})], ("rule", "loop")),  # the best of several counts
        ([timed({ONE: 1.0, ALL: 7.0}, ONE, is_settled=False)], ("loop", "rule")),  # rules nothing out
        ([timed({ONE: 1.0, ALL: 7.0}, ALL)], ("rule", "loop")),
        ([timed({ONE: 1.0, ALL: 7.0}, ONE)], ("loop",)),
    ],
)
def test_what_was_not_far_behind_is_worth_a_try(choices, forms):
    array = make(backend="auto")
    assert array._hocket_forms() == ("rule",)
    array.choices.extend(choices)
    assert array._hocket_forms() == forms


@pytest.mark.parametrize("options", [{"backend": "rule"}, {"backend": "loop"}, {"backend": "auto", "seeds": [1, 2, 3]}])
def test_who_decided_or_draws_by_model_has_one_form(options):
    array = make(**options)
    array.choices.append(timed({ALL: 1.0, ONE: 1.0}))
    assert array._hocket_forms() == ("rule",)


@pytest.mark.parametrize("form", ["rule", "loop"])
def test_a_form_has_the_bits_of_its_backend_and_nothing_is_chosen(form):
    array, other = make(backend="auto"), make(backend=form)
    x, y = torch.randn(4, 1, 4, 4), torch.randint(3, (4,))
    array._hocket_form = form
    for each in (array, other):
        each.losses(F.cross_entropy, x, y).backward()
    assert torch.equal(array(x), other(x))
    for one, two in zip(array.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    assert array.choices == []
    array._hocket_form = None
    for _ in range(2):
        array.losses(F.cross_entropy, x, y)
    assert array.choices, "from then on as ever"


def test_what_was_chosen_before_does_not_stand_in_the_way_of_a_form(monkeypatch):
    array = make(backend="auto")
    x, y = torch.randn(4, 1, 4, 4), torch.randint(3, (4,))
    for _ in range(2):
        array.losses(F.cross_entropy, x, y)
        array(x)
    chosen = len(array.choices)
    looped = []
    usual = calls.one_by_one
    for place in (calls, programs):  # which make the later calls, and the first one
        monkeypatch.setattr(place, "one_by_one", lambda *given, **named: looped.append(given) or usual(*given, **named))
    array._hocket_form = "loop"
    array.losses(F.cross_entropy, x, y)
    array(x)
    assert len(looped) == 2
    assert len(array.choices) == chosen


def test_a_copy_made_meanwhile_is_asked_for_no_form():
    array = make(backend="auto")
    array._hocket_form = "loop"
    assert copy.deepcopy(array)._hocket_form is None
    assert array._hocket_form == "loop"
