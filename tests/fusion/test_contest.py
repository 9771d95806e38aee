"""Plans in turns: by steps that count, and by the time from one call of an array to the next."""

from __future__ import annotations

import math

import pytest
import torch
from tests.fusion.oracle import assert_close, made
from tests.fusion.prefer import winner
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.fusion import choose, contest
from hocket.fusion.contest import Choice
from hocket.fusion.contest import CALL_RATIOS, ContestedCall, Intervals, PlanContest, contestants
from hocket.fusion.plan import ExecutionPlan

CALL_ROUNDS = len(CALL_RATIOS)
ALL, ONE = ExecutionPlan(4), ExecutionPlan(1, per_group_backward=True)
X, Y = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])


@pytest.mark.parametrize("place", range(3))
def test_the_plan_that_takes_the_least_time_is_found_by_steps_that_count(place):
    plans = contestants(nn.Sequential(nn.Conv2d(1, 1, 1)), 8, with_losses=True)
    assert [plan.group_size for plan in plans] == [8, 1, 1]
    among = PlanContest(plans)
    taken = []
    while not among.is_over:
        assert math.isinf(among.step_s) is (len(taken) < 6)
        taken.append(among.plan)
        late = 10.0 * (taken.count(among.plan) % 2)  # the first step of a turn takes longer
        among.took(late + (1.0 if among.plan is plans[place] else 1.1 + 0.5 * plans.index(among.plan)))
    assert among.plan is among.leader is plans[place]
    assert among.step_s == 1.0
    assert len(taken) <= 16  # what is far behind after one round gets no more steps


@pytest.mark.parametrize(("faster", "wins"), [(1.04, False), (1.06, True)])
def test_a_layout_has_to_win_clearly(faster, wins):
    usual, last = ExecutionPlan(1), ExecutionPlan(1, channels_last=True)
    among = PlanContest([usual, last])
    while not among.is_over:
        among.took(1.0 if among.plan is last else faster)
    assert (among.plan is last) is wins


@pytest.mark.parametrize(
    ("times_us", "finalists"),
    [
        ({ONE: 1.0, ALL: 1.1}, [ONE, ALL]),
        ({ONE: 1.1, ALL: 1.0}, [ALL]),  # behind in passes, so calls need not be tried
        ({ONE: 1.0, ALL: 7.9}, [ONE, ALL]),  # as while a neighbour has the other core
        ({ONE: 1.0, ALL: 8.1}, [ONE]),
    ],
)
def test_other_plans_than_the_usual_one_have_to_be_ahead_in_passes_too(times_us, finalists):
    assert Choice(("losses",), ONE, times_us).finalists == finalists


@pytest.mark.parametrize(("faster", "wins"), [(1.04, False), (1.06, True)])
def test_models_one_at_a_time_have_to_be_clearly_faster_than_all_at_once(faster, wins):
    among = PlanContest([ONE, ALL], CALL_RATIOS)
    while not among.is_over:
        among.took(1.0 if among.plan is ONE else faster)
    assert (among.plan is ONE) is wins


class Clock:
    """A time of day that calls of a plan and what follows them take."""

    def __init__(self, monkeypatch):
        self.now_s = 0.0
        monkeypatch.setattr(contest, "perf_counter", lambda: self.now_s)

    def taking(self, seconds, log, name):
        def run(*args):
            log.append(name)
            self.now_s += seconds
            return (name, *args)

        return run


@pytest.mark.parametrize("faster", [ALL, ONE])
def test_calls_run_by_each_plan_in_turns_and_then_by_the_faster_one(faster, monkeypatch):
    clock, log, won = Clock(monkeypatch), [], []
    runs = {plan: clock.taking(1.0 if plan is faster else 1.18, log, plan) for plan in (ONE, ALL)}
    call = ContestedCall(runs, won.append, Intervals())
    for number in range(8 * CALL_ROUNDS):
        assert call(number)[1] == number, "each call runs once, whoever's turn it is"
        clock.now_s += 100.0 * (number % 7 == 3)  # now and then somebody evaluates the models
    assert won == [faster]
    others = [number for number, plan in enumerate(log) if plan is not faster]
    assert 2 <= len(others) <= 2 * CALL_ROUNDS
    assert max(others) < 4 * CALL_ROUNDS, "the winner alone from then on"


def test_calls_of_two_kinds_are_each_judged_by_their_own_time(monkeypatch):
    """In a step with both, by the whole step neither plan of the short call would be 5% ahead."""
    clock, won, intervals = Clock(monkeypatch), {}, Intervals()
    runs = {
        "long": {ALL: clock.taking(100.0, [], ALL), ONE: clock.taking(120.0, [], ONE)},
        "short": {ALL: clock.taking(2.0, [], ALL), ONE: clock.taking(1.0, [], ONE)},
    }
    calls = {
        name: ContestedCall(own, lambda plan, name=name: won.setdefault(name, plan), intervals)
        for name, own in runs.items()
    }
    for _ in range(4 * CALL_ROUNDS):
        for call in calls.values():
            call()
    assert won == {"long": ALL, "short": ONE}


def test_a_loser_is_let_go_of(monkeypatch):
    clock = Clock(monkeypatch)
    call = ContestedCall(
        {ONE: clock.taking(2.0, [], ONE), ALL: clock.taking(1.0, [], ALL)}, lambda plan: None, Intervals()
    )
    for _ in range(4 * CALL_ROUNDS):
        call()
    assert not call._runs


def linears():
    return made(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), 4)


def test_training_while_plans_have_their_turns_is_that_of_plain_models(monkeypatch):
    """Plans that are equally fast in passes take real steps, and all of them are right."""
    monkeypatch.setattr(choose, "_in_turns", lambda racing, *_: dict.fromkeys(racing, 1.0))
    models = linears()
    array = hocket.fuse(linears(), shared=True)
    optimizer = hocket.optim.SGD(array.parameters(), lr=0.1, momentum=0.9)
    own = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    ran = set()
    for name in ("_losses_of_all", "_by"):
        usual = getattr(hocket.fusion.calls.Calls, name)
        monkeypatch.setattr(
            hocket.fusion.calls.Calls, name, lambda *given, usual=usual, name=name: ran.add(name) or usual(*given)
        )
    for _ in range(4 * CALL_ROUNDS + 4):
        optimizer.zero_grad()
        losses = array.losses(F.cross_entropy, X, Y)
        losses.backward()
        optimizer.step()
        for index, (model, each) in enumerate(zip(models, own, strict=True)):
            each.zero_grad()
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            each.step()
            assert_close(losses[index].detach().as_subclass(torch.Tensor), loss.detach(), "loss")
    assert ran == {"_losses_of_all", "_by"}
    assert len(array.choices) == 1
    assert winner(array) in ("all", "1 at a time with backward")
    for index, model in enumerate(models):
        for name, parameter in model.named_parameters():
            assert_close(array.unfuse()[index].get_parameter(name), parameter, name)


def test_a_loss_that_trains_more_is_found_before_the_second_plan_has_its_turn(monkeypatch):
    """One whose gradients lead elsewhere cannot go in one go, not in any later call either."""
    monkeypatch.setattr(choose, "_in_turns", lambda racing, *_: dict.fromkeys(racing, 1.0))
    array = hocket.fuse(linears(), shared=True)
    head = {"weight": torch.ones(2, dtype=torch.float64, requires_grad=True)}

    def loss(out, y):
        return F.cross_entropy(out * head["weight"], y)

    for number in range(4):
        array.losses(loss, X, Y).sum().backward()
        assert head["weight"].grad is not None, number
        head["weight"].grad = None
