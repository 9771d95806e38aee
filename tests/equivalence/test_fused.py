"""Fused steps by plan: `hocket.schedule` computes what the eager fused step computes, and notices what changes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fusion.prefer import prefer, winner
from torch import nn

import hocket
from equivalence.compare import Planned, assert_same, check_twins, everything, named_leaves, twins
from hocket import trial
from hocket.autotune import runner
from hocket.fusion.choose import Choice
from hocket.fusion.plan import ExecutionPlan
from hocket.job import Job
from hocket.native import available
from hocket.session import Schedule
from hocket.tracing.captured import Captured
from quick import covering

RATES = [0.01, 0.03, 0.002]
KINDS = [
    "python",
    pytest.param("native", marks=pytest.mark.skipif(not available(), reason="native lanes cannot be built here")),
]
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: hocket.optim.SGD(p, lr=RATES, momentum=[0.9, 0.0, 0.5], nesterov=False),
    "adam": lambda p: hocket.optim.Adam(p, lr=RATES, betas=([0.9, 0.8, 0.5], 0.99)),
    "adamw": lambda p: hocket.optim.AdamW(p, lr=RATES, weight_decay=[0.0, 0.1, 0.01], amsgrad=True),
    "rmsprop": lambda p: hocket.optim.RMSprop(p, lr=RATES, alpha=[0.9, 0.99, 0.5], centered=True),
    "adagrad": lambda p: hocket.optim.Adagrad(p, lr=RATES, lr_decay=[0.0, 0.1, 0.01]),
    "adadelta": lambda p: hocket.optim.Adadelta(p, lr=[1.0, 0.5, 0.1], rho=[0.9, 0.5, 0.99]),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: hocket.lr_scheduler.StepLR(o, step_size=[3, 5, 7], gamma=[0.5, 0.9, 0.1]),
    "multi-step": lambda o: hocket.lr_scheduler.MultiStepLR(o, milestones=[[2, 9], [4], [1, 5]], gamma=0.5),
    "exponential": lambda o: hocket.lr_scheduler.ExponentialLR(o, gamma=[0.9, 0.99, 0.8]),
    "cosine": lambda o: hocket.lr_scheduler.CosineAnnealingLR(o, T_max=[5, 10, 20]),
    "lambda": lambda o: hocket.lr_scheduler.LambdaLR(o, [lambda t, m=m: 1 / (1 + m * t) for m in range(3)]),
    "one-cycle": lambda o: hocket.lr_scheduler.OneCycleLR(
        o, max_lr=[0.1, 0.2, 0.3], total_steps=[60, 70, 80], cycle_momentum=False
    ),
}
# `step` is told the losses of the last training step.
PLATEAUS: dict[str, Callable[[Any], Any]] = {
    "plateau": lambda o: hocket.lr_scheduler.ReduceLROnPlateau(o, patience=[0, 1, 2], factor=[0.5, 0.1, 0.9]),
    "plateau of one number": lambda o: hocket.lr_scheduler.ReduceLROnPlateau(o, patience=0, cooldown=2),
}
LONG = 30  # steps until a schedule that compares nothing has long decided


@pytest.fixture(autouse=True)
def _one_thread():
    """Eager and the serial plan are one thread wide: then they take the same kernels."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(nn.Module):
    """Convolution, running statistics, a residual add and dropout, as small as they get."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.head(self.drop(x + self.second(x)).flatten(1))


def job(
    make_optimizer: Callable[[Any], Any], make: Callable[[], nn.Module] = Net, num_models: int = 3, **options: Any
) -> Job:
    array = hocket.fuse([make() for _ in range(num_models)], shared=True, **({"backend": "rule"} | options))
    optimizer = make_optimizer(array.parameters())
    batches = [(torch.randn(4, 1, 4, 4), torch.randint(0, 3, (4,))) for _ in range(3)]

    def step(batch):
        optimizer.zero_grad()
        loss = array.loss(nn.functional.cross_entropy, array(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(step, array, optimizer, batches)


def planned(made: Job, kind: str) -> Schedule:
    one = hocket.Machine.of(cores=1)
    options = {"planner": "serial", "guard": False, "strict": True, "machine": one, "executor": kind}
    return hocket.schedule(made.step, made.model, made.optimizer, **options)


def check(
    make: Callable[[], Job],
    kind: str,
    *,
    scheduler: Callable[[Any], Any] = lambda optimizer: None,
    changes: dict[int, Callable[[Job], Any]] | None = None,
    steps: int = LONG,
) -> Schedule:
    """Twins, one eager and one scheduled, with the same bits after every step; `changes` befall both before a step."""
    pair = twins(make, scheduler)
    fast = planned(pair.planned, kind)
    for number in range(steps):
        if changes and number in changes:
            if number > min(changes):
                assert fast.decided, "a change in the middle of a search would prove little"
            for each in pair.both():
                torch.manual_seed(number)
                changes[number](each)
        results = []
        for run, each in ((pair.eager.step, pair.eager), (fast, pair.planned)):
            torch.manual_seed(100 + number)
            results.append(run(each.batch(number)))
        where = f"after step {number}"
        assert_same(named_leaves("returned", results[0]), named_leaves("returned", results[1]), where)
        assert_same(everything(pair.eager), everything(pair.planned), where)
        for one, losses in zip(pair.schedulers, results, strict=True):
            if isinstance(one, hocket.lr_scheduler.ReduceLROnPlateau):
                one.step(losses)
            elif one is not None:
                one.step()
    assert fast.verdict == "planned", fast.why
    fast.close()
    return fast


@pytest.mark.parametrize(("optimizer", "scheduler"), covering(OPTIMIZERS, SCHEDULERS))
def test_captured_steps_follow_every_number_of_every_model(optimizer, scheduler):
    check_twins(functools.partial(job, OPTIMIZERS[optimizer]), scheduler=SCHEDULERS[scheduler])


@pytest.mark.parametrize(("optimizer", "kind"), covering(OPTIMIZERS, KINDS))
def test_a_schedule_computes_the_bits_of_the_fused_step(optimizer, kind):
    check(functools.partial(job, OPTIMIZERS[optimizer]), kind, scheduler=SCHEDULERS["cosine"])


ALONE: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: hocket.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain sgd": lambda p: hocket.optim.SGD(p, lr=0.1),
    "adam": lambda p: hocket.optim.Adam(p, lr=0.01, betas=(0.8, 0.9), amsgrad=True),
    "adamw": lambda p: hocket.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: hocket.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize(("optimizer", "kind"), covering(ALONE, KINDS))
def test_one_model_alone_whose_rate_falls(optimizer, kind):
    alone = functools.partial(job, ALONE[optimizer], num_models=1)
    check(alone, kind, scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.9))


@pytest.mark.parametrize(("scheduler", "kind"), covering(PLATEAUS, KINDS))
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_schedule_follows_rates_that_fall_when_a_loss_stands_still(optimizer, scheduler, kind):
    made = []
    fell = PLATEAUS[scheduler]
    check(functools.partial(job, OPTIMIZERS[optimizer]), kind, scheduler=lambda o: made.append(fell(o)) or made[-1])
    rates = [each.get_last_lr()[0].tolist() for each in made]
    assert rates[0] == rates[1]
    assert sum(rate < first for rate, first in zip(rates[0], RATES, strict=True)) >= 1, "some rate has to fall"


@pytest.mark.parametrize(("backend", "kind"), covering(["vmap", "loop"], KINDS))
def test_whatever_computes_the_ops(backend, kind):
    # vmap draws dropout its own way: no random numbers here.
    plain = functools.partial(job, OPTIMIZERS["adam"], Plain, backend=backend)
    check(plain, kind, scheduler=SCHEDULERS["step"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_backend_chosen_by_timing_agrees_within_rounding(kind):
    # Twins may choose differently in their eager steps, and backends agree within rounding only.
    pair = twins(functools.partial(job, OPTIMIZERS["adam"], Plain, backend="auto"), SCHEDULERS["step"])
    fast = planned(pair.planned, kind)
    for number in range(LONG):
        first, second = pair.eager.step(pair.eager.batch(number)), fast(pair.planned.batch(number))
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
    assert fast.verdict == "planned"


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def rates(value: Any) -> Callable[[Job], None]:
    def change(made: Job) -> None:
        made.optimizer.param_groups[0]["lr"] = value

    return change


def widened(made: Job) -> None:
    hocket.lr_scheduler.StepLR(made.optimizer, step_size=[1, 2, 3], gamma=0.5)


# What befalls a captured step, and the optimizer that it befalls.
CHANGES = {
    "a rate becomes rates": (lambda p: hocket.optim.Adam(p, lr=0.01), rates(RATES)),
    "a rate becomes a tensor of rates": (lambda p: hocket.optim.SGD(p, lr=0.01), rates(torch.tensor(RATES))),
    "rates become one": (OPTIMIZERS["adam"], rates(0.05)),
    "rates become others": (OPTIMIZERS["adamw"], rates([0.1, 0.2, 0.3])),
    "a pair becomes pairs": (
        lambda p: hocket.optim.Adam(p, lr=0.01),
        lambda made: made.optimizer.param_groups[0].update(betas=([0.9, 0.5, 0.1], 0.99)),
    ),
    "a list of pairs": (
        lambda p: hocket.optim.Adam(p, lr=RATES),
        lambda made: made.optimizer.param_groups[0].update(betas=[(0.9, 0.99), (0.5, 0.9), (0.1, 0.95)]),
    ),
    "a scheduler of rates comes": (lambda p: hocket.optim.RMSprop(p, lr=0.01), widened),
    "a rate of one model": (
        lambda p: hocket.optim.Adagrad(p, lr=0.01),
        lambda made: made.optimizer.set_for_model(made.optimizer.param_groups[0], "lr", 1, 0.5),
    ),
    "a model is frozen": (OPTIMIZERS["sgd"], lambda made: made.optimizer.freeze(1)),
}


@pytest.mark.parametrize(("what", "kind"), covering(CHANGES, KINDS))
def test_changes_after_the_capture_are_noticed(what, kind):
    optimizer, change = CHANGES[what]
    check(functools.partial(job, optimizer, Plain), kind, changes={LONG // 2: change})


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_again(kind):
    make = functools.partial(job, lambda p: hocket.optim.Adam(p, lr=0.01), Plain)
    changes = {15: rates(RATES), 30: rates(0.02), 45: rates([0.01, 0.02, 0.03])}
    check(make, kind, changes=changes, steps=60)


@pytest.mark.parametrize(("optimizer", "kind"), covering(["sgd", "adam"], KINDS))
@pytest.mark.parametrize("separate", [(), ("3",)], ids=["all fused", "partly fused"])
def test_models_that_leave_and_come(separate, optimizer, kind):
    def drop(made: Job) -> None:
        hocket.optim.ModelSlots(made.model, made.optimizer).drop(1)

    def refill(made: Job) -> None:
        hocket.optim.ModelSlots(made.model, made.optimizer).refill(0, Plain(), lr=0.005)

    make = functools.partial(job, OPTIMIZERS[optimizer], Plain, separate=separate)
    check(make, kind, changes={15: drop, 30: refill}, steps=45)


@pytest.mark.parametrize(("optimizer", "kind"), covering(["adam", "adamw", "adagrad"], KINDS))
def test_models_that_rest_and_count_their_steps_apart(optimizer, kind):
    changes = {15: lambda made: made.optimizer.freeze(1), 30: lambda made: made.optimizer.unfreeze(1)}
    check(functools.partial(job, OPTIMIZERS[optimizer], Plain), kind, changes=changes, steps=45)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_refilled_by_values_leaves_the_captured_step_as_it_is(kind):
    """Once models have counts and rates of their own, another model in a slot is other values in the same tensors."""

    def refill(made: Job) -> None:
        hocket.optim.ModelSlots(made.model, made.optimizer).refill(2, Plain(), lr=0.02)

    make = functools.partial(job, OPTIMIZERS["adam"], Plain)
    captures = []

    def count(made: Job) -> None:
        captures.append((made.model._hocket_version, made.optimizer._hocket_version))
        refill(made)
        captures.append((made.model._hocket_version, made.optimizer._hocket_version))

    check(make, kind, changes={12: refill, 30: count}, steps=45)
    assert captures[0] == captures[1] == captures[2] == captures[3]


def stateless(parameters: Any) -> Any:
    """Can be captured before it has taken a step."""
    return hocket.optim.SGD(parameters, lr=RATES)


@pytest.fixture
def by_losses(monkeypatch):
    """Makes jobs that step by `array.losses`, in one go wherever nobody traces."""
    prefer(monkeypatch, "1 at a time with backward")

    def make(state: dict[str, Any], net: Callable[[], nn.Module]) -> Job:
        made = job(stateless, net, backend="auto")

        def step(batch):
            made.optimizer.zero_grad()
            losses = made.model.losses(nn.functional.cross_entropy, batch[0], batch[1])
            losses.backward()
            made.optimizer.step()
            return losses.detach()

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
    (settled,) = [variant for variants in fast._pool._variants.values() for variant in variants if variant.settled]
    return settled.forms


@pytest.mark.parametrize("kind", KINDS)
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
    """Nobody can capture this form: it looks at a value."""

    def refuse(made: Job) -> None:
        usual = made.model.forward

        def forward(x):
            out = usual(x)
            if made.model._hocket_form == form and out.sum() > -1e30:
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
