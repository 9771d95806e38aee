"""A fused step in several forms (by rules, model by model, by losses), each compared with eager of its own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fusion.prefer import prefer, winner
from torch import nn

import hocket
from equivalence.compare import Planned, assert_same, everything, named_leaves
from equivalence.fused_jobs import LONG, RATES, Net, job, planned
from equivalence.test_fused_changes import Plain
from execution.probe import KINDS
from hocket import trial
from hocket.autotune import runner
from hocket.fusion.contest import Choice, ExecutionPlan
from hocket.job import Job
from hocket.session import Schedule
from hocket.tracing.captured import Captured
from quick import some

pytestmark = pytest.mark.usefixtures("one_thread")


def stateless(parameters: Any) -> Any:
    """Can be captured before it has taken a step."""
    return hocket.optim.SGD(parameters, lr=RATES)


@pytest.fixture
def by_losses(monkeypatch):
    """Makes jobs that step by `array.losses`, in one go wherever no trace is made."""
    prefer(monkeypatch, "1 at a time with backward")

    def make(state: dict[str, Any], net: Callable[[], nn.Module]) -> Job:
        made = job(stateless, net, backend="auto")

        def step(batch):
            made.optimizer.zero_grad()
            losses = made.model.losses(nn.functional.cross_entropy, batch[0], batch[1])
            losses.backward()
            made.optimizer.step()
            return losses.detach()

        for _ in range(2):  # recorded, and chosen
            made.model.losses(nn.functional.cross_entropy, *made.batch(0))
        assert winner(made.model) == "1 at a time with backward"
        made.model.load_state_dict(state)
        return Job(step, made.model, made.optimizer, made.batches)

    return make


def test_captured_losses_have_the_bits_of_the_ordinary_way(by_losses):
    eager = job(stateless)
    made = by_losses(eager.model.state_dict(), Net)
    run = Planned(made)
    for number in range(5):
        batch = eager.batch(number)
        results = []
        for step in (eager.step, run):
            torch.manual_seed(100 + number)
            results.append(step(batch))
        where = f"after step {number}"
        assert_same(named_leaves("returned", results[0]), named_leaves("returned", results[1]), where)
        assert_same(everything(eager), everything(made), where)
    assert run.captures == 1


@pytest.mark.parametrize("kind", KINDS)
def test_losses_in_one_go_can_be_scheduled(kind, by_losses):
    """A schedule also steps eagerly, and then in one go: not the same bits."""
    eager = job(stateless, Plain)
    made = by_losses(eager.model.state_dict(), Plain)
    fast = planned(made, kind)
    for number in range(LONG):
        batch = eager.batch(number)
        results = [eager.step(batch), fast(batch)]
        where = f"after step {number}"
        assert_same(named_leaves("returned", results[0]), named_leaves("returned", results[1]), where, 1e-5)
        assert_same(everything(eager), everything(made), where, 1e-5)
    assert fast.verdict == "planned", fast.why
    fast.close()


def formed(fn: Callable[[Job], None] | None = None) -> Job:
    """A job whose array has been timed: by rules and one by one alike, so that both forms are worth a try."""
    made = job(stateless, Plain, backend="auto")
    made.model(made.batch(0)[0])
    plans = {ExecutionPlan(made.model.num_models): 1.0, ExecutionPlan(1): 1.5}
    made.model.choices[:] = [Choice(("forward", True), next(iter(plans)), plans)]
    if fn:
        fn(made)
    return made


def forms_of_verdict(fast: Schedule) -> dict[str, Captured]:
    """The forms that came to the only verdict there is."""
    (settled,) = [
        variant for variants in fast._pool.active._variants.values() for variant in variants if variant.settled
    ]
    return settled.forms


@pytest.mark.parametrize("kind", some(KINDS[::-1]))
def test_a_schedule_tries_rules_and_models_one_by_one(kind):
    eager, made = formed(), formed()
    made.model.load_state_dict(eager.model.state_dict())
    fast = hocket.schedule(made.step, made.model, made.optimizer, executor=kind, strict=True)
    number = 0
    while not fast.decided or number < LONG:
        batch = eager.batch(number)
        results = [eager.step(batch), fast(batch)]
        where = f"after step {number}"
        assert_same(named_leaves("returned", results[0]), named_leaves("returned", results[1]), where, 1e-5)
        assert_same(everything(eager), everything(made), where, 1e-5)
        number += 1
        assert number < 1000
    assert "by 'rule'" in fast.why or "by 'loop'" in fast.why, fast.why
    graphs = {form: captured.graph for form, captured in forms_of_verdict(fast).items()}
    assert list(graphs) == ["rule", "loop"]
    assert len(graphs["loop"]) > len(graphs["rule"]), "one op for each model, not one for all"
    assert made.model._hocket_form is None
    fast.close()


def refuse_form(form: str) -> Callable[[Job], None]:
    """Make a form that no recorder can capture: it looks at a value."""

    def refuse(made: Job) -> None:
        usual = made.model.forward

        def forward(x):
            out = usual(x)
            if made.model._hocket_form == form and int(out.sum()) > -(10**30):
                out = out * 1.0
            return out

        made.model.forward = forward

    return refuse


@pytest.mark.parametrize("refused", ["rule", "loop"])
def test_a_form_that_cannot_be_captured_leaves_the_other(refused):
    made = formed(refuse_form(refused))
    fast = planned(made, "python")
    for number in range(LONG):
        fast(made.batch(number))
    assert fast.verdict == "planned", fast.why
    assert list(forms_of_verdict(fast)) == [{"rule": "loop", "loop": "rule"}[refused]]
    fast.close()


def test_a_form_whose_capture_differs_from_its_own_eager_step_is_left_out(monkeypatch):
    usual = runner.verify

    def verify(captured, run, batches, **options):
        found, results = usual(captured, run, batches, **options)
        if made.model._hocket_form == "loop":
            found = dataclasses.replace(found, bitwise=False, relative=1.0)
        return found, results

    made = formed()
    monkeypatch.setattr(runner, "verify", verify)
    fast = planned(made, "python")
    for number in range(LONG):
        fast(made.batch(number))
    assert fast.verdict == "planned", fast.why
    assert list(forms_of_verdict(fast)) == ["rule"]
    assert fast.difference.equal
    fast.close()


def test_a_trial_compares_a_plan_with_eager_of_its_own_form(monkeypatch):
    """Among them are tensors of rounding noise, which differ from form to form."""
    seen = []
    usual = trial.verify

    def verify(captured, run, batches, **options):
        seen.append(made.model._hocket_form)
        return usual(captured, run, batches, **options)

    made = formed()
    monkeypatch.setattr(trial, "verify", verify)
    result = trial.try_out(made, planner="serial", runs=2, strict=True)
    assert seen
    assert set(seen) == {result.fast.candidate.form}
    assert seen[0] in ("rule", "loop")
    assert made.model._hocket_form is None
    result.fast.close()
