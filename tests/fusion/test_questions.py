"""Forwards that look at values of their inputs: each way is fused, and taken where the models would take it."""

from __future__ import annotations

import re

import pytest
import torch
from tests.fusion.forwards import D, Layer
from tests.fusion.oracle import assert_each, made

import hocket
from hocket import optim

generator = torch.Generator().manual_seed(0)
POSITIVE, NEGATIVE = (sign * (torch.rand(5, 4, dtype=D, generator=generator) + 0.1) for sign in (1, -1))


def branches(m, x):
    return m.a(x) if x.sum() > 0 else m.b(x).relu()


def branches_twice(m, x):
    h = m.a(x) if x.min() > 0 else m.b(x)
    return h * 2 if x[0, 0].item() < -0.5 else h


def asks_for_a_length(m, x):
    return m.a(x[: int((x > 0).all(1).sum())])


def compares(m, x):
    return m.a(x) if torch.equal(x, x.abs()) else m.b(x)


def asks_a_buffer(m, x):
    return m.a(x) if m.mean.sum() > 1000 * x[0, 0] else m.b(x)  # as the input decides, for each model's mean


def writes_elsewhere_first(m, x):
    mask = x.new_zeros(x.shape)
    mask[0] = 1.0
    return m.a(x + mask) if x.sum() > 0 else m.b(x)


def asks_what_it_has_written(m, x):
    h = x.clone()
    h[0] = 1.0
    h.t()[1].mul_(2.0)
    return m.a(h) if h.sum() > 0 else m.b(h)


def asks_one_thing_and_writes_it(m, x):
    mask = x > 0
    h = m.a(x) if mask.any() else m.b(x)
    mask[0] = False
    return h * mask


def finds_in_much(m, x):
    tokens = (x * 1000).long().repeat(300, 1)
    return m.a(x) if 0 in tokens or torch.equal(tokens, tokens.abs()) else m.b(x)


def lists(m, x):
    return m.a(x) * (1 if x[0].tolist()[1] > 0 else 2)


def in_a_cond(m, x):
    return torch.cond(x[0, 0] > 0, m.a, m.b, (x,))


def of_a_compiled_function(m, x):
    return torch.compile(lambda y: m.a(y).sin(), backend="eager", fullgraph=True)(x)


def mixed(rows):
    """Inputs whose first rows are positive, the others not."""
    return torch.cat((POSITIVE[:rows], NEGATIVE[rows:]))


ASKING = [branches, branches_twice, asks_for_a_length, compares, asks_a_buffer, writes_elsewhere_first, lists]
ASKING += [finds_in_much, asks_what_it_has_written, asks_one_thing_and_writes_it, in_a_cond, of_a_compiled_function]


@pytest.mark.parametrize("backend", ["rule", "auto"])
@pytest.mark.parametrize("act", ASKING, ids=lambda act: act.__name__)
def test_each_way_is_fused_and_taken_where_a_model_takes_it_alone(act, backend, recwarn):
    models = made(lambda: Layer(act), 3)
    array = hocket.fuse(models, backend=backend, shared=True)
    alone = array.unfuse()
    for x in [POSITIVE, mixed(3), NEGATIVE] * 3:
        assert_each(array(x), [model(x) for model in alone])
        assert_each(array(2 * x), [model(2 * x) for model in alone])
    said = [str(each.message) for each in recwarn]
    assert not [each for each in said if "one after another" in each]
    assert "one by one" not in array.report()


@pytest.mark.filterwarnings("ignore:hocket.fuse")
def test_models_that_take_other_ways_are_run_one_by_one_and_fused_again_when_they_agree():
    array = hocket.fuse(made(lambda: Layer(branches), 2), backend="rule", shared=False)
    alone = array.unfuse()
    for _ in range(5):
        for pair in ((POSITIVE, POSITIVE), (POSITIVE, NEGATIVE), (NEGATIVE, NEGATIVE)):
            assert_each(array(torch.stack(pair)), [model(x) for model, x in zip(alone, pair, strict=True)])
    assert "2 models, 2 ops" in array.report()
    assert "some calls one by one: models differ" in array.report()


def test_gradients_and_updates_of_both_ways():
    models = made(lambda: Layer(branches), 3)
    array = hocket.fuse(models, shared=True)
    alone = array.unfuse()
    optimizer = optim.SGD(array.parameters(), lr=0.1, momentum=0.9)
    own = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in alone]
    for number in range(12):
        x = (POSITIVE, NEGATIVE)[number % 3 == 0]
        optimizer.zero_grad()
        array.losses(lambda out, y: (out - y).square().mean(), x, x).sum().backward()
        optimizer.step()
        for model, each in zip(alone, own, strict=True):
            each.zero_grad()
            (model(x) - x).square().mean().backward()
            each.step()
    assert_each(array(POSITIVE), [model(POSITIVE) for model in alone])
    assert_each(array(NEGATIVE), [model(NEGATIVE) for model in alone])


def random_branch(m, x):
    return m.a(x) if torch.rand(()) > 0.5 else m.b(x)


def learnt_branch(m, x):
    return m.a(x) if m.a(x).sum() > 0 else m.b(x)


def counts(m, x):
    m.mean += 1.0
    return m.a(x) if m.mean.sum() > 4.0 else m.b(x)


@pytest.mark.parametrize("act", [random_branch, learnt_branch, counts], ids=lambda act: act.__name__)
def test_a_look_that_cannot_be_asked_ahead_goes_model_by_model(act):
    array = hocket.fuse(made(lambda: Layer(act), 2), shared=True)
    alone = array.unfuse()

    def check(x):
        torch.manual_seed(1)
        out = array(x)
        torch.manual_seed(1)
        assert_each(out, [model(x) for model in alone])

    with pytest.warns(UserWarning, match=r"looks at values, by __bool__ \(.*test_questions.py:\d+"):
        check(POSITIVE)
    check(NEGATIVE)
    check(POSITIVE)


def of_a_distribution(m, x):
    # By default they check nothing once Dynamo was at work in the process.
    return torch.distributions.Normal(m.a(x), m.b(x).exp(), validate_args=True).log_prob(x)


def of_a_program(m, x):
    h = m.a(x)
    if torch.isnan(h).any() or not (h.isfinite() & x.isfinite()).all():
        raise ValueError("not finite")
    return m.b(h)


def asserted(m, x):
    torch._assert((m.a(x).square() >= 0).all(), "no number")
    return m.b(x)


@pytest.mark.parametrize("way", ["outputs", "losses"])
@pytest.mark.parametrize("backend", ["rule", "auto"])
@pytest.mark.parametrize("act", [of_a_distribution, of_a_program, asserted], ids=lambda act: act.__name__)
def test_checks_of_values_are_fused_and_fail_as_in_the_plain_model(act, backend, way, recwarn):
    array = hocket.fuse(made(lambda: Layer(act), 3), backend=backend, shared=False)
    alone = array.unfuse()
    good = torch.stack([POSITIVE, NEGATIVE, POSITIVE])
    bad = good.clone()
    bad[1, 0, 0] = torch.nan

    def called(x):
        return array(x) if way == "outputs" else array.losses(lambda out, y: (out * y).sum(), x, x)

    with pytest.raises((ValueError, AssertionError)) as own:
        alone[1](bad[1])
    for number in range(12):
        if number % 4 == 3:
            with pytest.raises(own.type, match=re.escape(str(own.value)[:40])):
                called(bad)
        elif way == "outputs":
            assert_each(called(good), [model(x) for model, x in zip(alone, good, strict=True)])
        else:
            assert_each(called(good), [(model(x) * x).sum() for model, x in zip(alone, good, strict=True)])
    assert not [each for each in recwarn if "one after another" in str(each.message)]
    assert "one by one" not in array.report()


def test_answers_that_never_repeat_go_model_by_model_after_a_while():
    array = hocket.fuse(made(lambda: Layer(lambda m, x: m.a(x) * x[0, 0].item()), 2), shared=True)
    alone = array.unfuse()
    for number in range(8):
        assert_each(array(POSITIVE + number), [model(POSITIVE + number) for model in alone])
    with pytest.warns(UserWarning, match="goes another way in each call"):
        array(POSITIVE + 8)
    assert_each(array(POSITIVE), [model(POSITIVE) for model in alone])
    assert "one by one: the forward looks at values, and goes another way in each call" in array.report()


def test_a_scheduled_step_of_a_model_with_a_mask():
    class Masked(Layer):
        def forward(self, x, mask):
            h = self.a(x) if mask.all() else self.a(x * mask)
            return self.b(h.relu())

    def trained(schedule):
        torch.manual_seed(0)
        array = hocket.fuse([Masked(None) for _ in range(3)], shared=True)
        optimizer = optim.Adam(array.parameters(), lr=0.01)

        def step(batch):
            x, mask = batch
            optimizer.zero_grad()
            losses = array(x, mask).square().mean((1, 2))
            losses.sum().backward()
            optimizer.step()
            return losses.detach()

        step = hocket.schedule(step, array, optimizer, guard=False, cache=False) if schedule else step
        masks = [torch.ones(5, 4, dtype=torch.bool), POSITIVE > 0.5]
        losses = [step((POSITIVE, masks[number % 3 == 0])).clone() for number in range(80)]
        return losses, getattr(step, "verdict", None), getattr(step, "why", "")

    plain, planned = trained(False), trained(True)
    assert planned[1] == "planned", planned[2]
    for one, other in zip(plain[0], planned[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=0)
