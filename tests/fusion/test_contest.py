"""Plans in turns: by steps that count, and by the time from one call of an array to the next."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from tests.fusion.oracle import assert_each, assert_same_parameters, made
from tests.fusion.prefer import winner
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.fusion import calls, contest
from hocket.fusion.contest import RATIOS, Choice, ContestedCall, ExecutionPlan, Intervals, PlanContest, plans_for
from hocket.fusion.executor import SingleExecutor

CALL_ROUNDS = len(RATIOS)
ALL, ONE = ExecutionPlan(4), ExecutionPlan(1, per_group_backward=True)
X = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 1, 0, 1])


@pytest.mark.parametrize("place", range(3))
def test_the_plan_that_takes_the_least_time_is_found_by_steps_that_count(place):
    plans = plans_for(8, with_losses=True, has_images=True)
    assert [plan.group_size for plan in plans] == [8, 1, 1]
    among = PlanContest(plans)
    taken = []
    while not among.is_over:
        assert math.isinf(max(among.times_s.values())) is (len(taken) < 6)
        taken.append(among.plan)
        late = 10.0 * (taken.count(among.plan) % 2)  # the first step of a turn takes longer
        among.took(late + (1.0 if among.plan is plans[place] else 1.1 + 0.5 * plans.index(among.plan)))
    assert among.plan is among.leader is plans[place]
    assert among.step_s == 1.0
    slowest = max(plans, key=lambda plan: (plan is not plans[place]) * plans.index(plan))
    assert taken.count(slowest) <= 4  # what is far behind after two rounds gets no more steps


@pytest.mark.parametrize(("usual", "other"), [(ExecutionPlan(1), ExecutionPlan(1, channels_last=True)), (ALL, ONE)])
@pytest.mark.parametrize(("faster", "wins"), [(1.04, False), (1.06, True)])
def test_another_plan_than_the_usual_one_has_to_win_clearly(faster, wins, usual, other):
    among = PlanContest([usual, other])
    while not among.is_over:
        among.took(1.0 if among.plan is other else faster)
    assert (among.plan is other) is wins


def contested(runs, intervals=None, at_least_s=None):
    """A call by these plans, and the choice that it makes."""
    makes = {plan: (lambda run=run: run) for plan, run in runs.items()}
    choice = Choice("forward", next(iter(runs)), {}, is_settled=False)
    return ContestedCall(makes, choice, intervals or Intervals(), at_least_s or {}, nullcontext), choice


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
    clock, log = Clock(monkeypatch), []
    runs = {plan: clock.taking(1.0 if plan is faster else 1.18, log, plan) for plan in (ALL, ONE)}
    call, choice = contested(runs)
    for number in range(8 * CALL_ROUNDS):
        assert call(number)[1] == number, "each call runs once, whoever's turn it is"
        clock.now_s += 100.0 * (number % 7 == 3)  # now and then somebody evaluates the models
    assert choice.is_settled
    assert choice.winner is faster
    others = [number for number, plan in enumerate(log) if plan is not faster]
    assert 2 <= len(others) <= 2 * CALL_ROUNDS
    assert max(others) < 4 * CALL_ROUNDS, "the winner alone from then on"
    assert not call._runs, "a loser is let go of"


def test_calls_of_two_kinds_are_each_judged_by_their_own_time(monkeypatch):
    """In a step with both, by the whole step neither plan of the short call would be 5% ahead."""
    clock, intervals = Clock(monkeypatch), Intervals()
    runs = {
        "long": {ALL: clock.taking(100.0, [], ALL), ONE: clock.taking(120.0, [], ONE)},
        "short": {ALL: clock.taking(2.0, [], ALL), ONE: clock.taking(1.0, [], ONE)},
    }
    both = {name: contested(own, intervals) for name, own in runs.items()}
    for _ in range(4 * CALL_ROUNDS):
        for call, _ in both.values():
            call()
    assert {name: (choice.winner, choice.is_settled) for name, (_, choice) in both.items()} == {
        "long": (ALL, True),
        "short": (ONE, True),
    }


def test_models_one_at_a_time_have_no_turn_where_a_call_is_faster_than_they_are_at_least(monkeypatch):
    clock, log = Clock(monkeypatch), []
    runs = {ALL: clock.taking(1.0, log, ALL), ONE: clock.taking(9.0, log, ONE)}
    call, _ = contested(runs, at_least_s={ONE: 2.0})
    for _ in range(8):
        call()
    assert set(log) == {ALL}


@pytest.mark.parametrize("fails", [ALL, ONE])
def test_a_plan_that_cannot_run_has_no_other_turn_and_the_usual_one_raises(fails, monkeypatch):
    clock, log = Clock(monkeypatch), []

    def failing():
        log.append(fails)
        raise RuntimeError("by intent")

    runs = {plan: clock.taking(1.0, [], plan) for plan in (ALL, ONE)} | {fails: failing}
    call, _ = contested(runs)
    if fails is ALL:
        with pytest.raises(RuntimeError, match="by intent"):
            call()
        return
    assert {call() for _ in range(20)} == {(ALL,)}
    assert log == [ONE]


def linears():
    return made(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), 4)


def test_training_while_plans_have_their_turns_is_that_of_plain_models(monkeypatch):
    """Plans that take real steps are all of them right."""
    models = linears()
    array = hocket.fuse(linears(), shared=True)
    optimizer = hocket.optim.SGD(array.parameters(), lr=0.1, momentum=0.9)
    own = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    monkeypatch.setattr(calls, "RECORDING", math.inf)  # so that both have a turn
    ran = set()
    for kind, name in ((calls.Calls, "_losses_of_all"), (SingleExecutor, "losses")):
        usual = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *given, usual=usual, name=name: ran.add(name) or usual(*given))
    for _ in range(4 * CALL_ROUNDS + 4):
        optimizer.zero_grad()
        losses = array.losses(F.cross_entropy, X, Y)
        losses.backward()
        optimizer.step()
        alone = []
        for model, each in zip(models, own, strict=True):
            each.zero_grad()
            alone.append(F.cross_entropy(model(X), Y))
            alone[-1].backward()
            each.step()
        assert_each(losses, alone, "loss")
    assert ran == {"_losses_of_all", "losses"}
    assert len(array.choices) == 1
    assert winner(array) in ("all", "1 at a time with backward")
    assert_same_parameters(array, models)


def test_a_loss_that_trains_more_is_found_before_the_second_plan_has_its_turn():
    """One whose gradients lead elsewhere cannot go in one go, not in any later call either."""
    array = hocket.fuse(linears(), shared=True)
    head = {"weight": torch.ones(2, dtype=torch.float64, requires_grad=True)}

    def loss(out, y):
        return F.cross_entropy(out * head["weight"], y)

    for number in range(4):
        array.losses(loss, X, Y).sum().backward()
        assert head["weight"].grad is not None, number
        head["weight"].grad = None
