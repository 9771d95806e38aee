"""A change of one model leaves every other model's bits alone."""

import pytest
import torch

from hocket import optim
from optim.twins import CASES, EACH, Twins, fused_parameters, options_of, same_bits, set_gradients, snapshot, trained
from quick import covering
from support.refusals import refused


@pytest.mark.parametrize(("case", "nan_from", "nonfinite"), covering(CASES, [0, 2], ["step", "skip", "freeze"]))
def test_gradients_that_are_not_finite_reach_no_neighbour(case, nan_from, nonfinite):
    clean = trained(case, 5, nonfinite=nonfinite)
    spoilt = trained(case, 5, nan_from, nonfinite=nonfinite)
    for model in (0, 2):
        same_bits(snapshot(*clean, model), snapshot(*spoilt, model))
    if nonfinite == "step":
        assert any(bool(p[1].isnan().any()) for p in spoilt[0])


@pytest.mark.parametrize(("case", "nan_from", "nonfinite"), covering(CASES, [0, 2], ["skip", "freeze"]))
def test_a_model_that_rests_keeps_every_bit(case, nonfinite, nan_from):
    before = trained(case, nan_from, nonfinite=nonfinite)
    after = trained(case, 5, nan_from, nonfinite=nonfinite)
    for p, q in zip(before[0], after[0], strict=True):
        assert torch.equal(p[1], q[1])
    if nan_from:
        same_bits(snapshot(*before, 1), snapshot(*after, 1))
    assert after[1].frozen == (False, nonfinite == "freeze", False)


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_rested_goes_on_as_if_it_had_not_been_asked(case):
    """Frozen in steps 0, 1 and 6, by hand: as a torch optimizer that is not stepped then."""
    twins = Twins(case, 3)
    for step in range(12):
        resting = step in (0, 1, 6)
        (twins.fused.freeze if resting else twins.fused.unfreeze)(1)
        set_gradients(twins.params, step, range(3))
        twins.fused.step()
        for slot in range(3):
            if not (resting and slot == 1):
                twins.step_single(slot, slot)
        twins.steps += 1
    twins.check(1e-11)


@pytest.mark.parametrize("case", CASES)
def test_freezing_reaches_no_neighbour(case):
    clean = trained(case, 6)
    params, optimizer = trained(case, 3)
    optimizer.freeze(1)
    for step in range(3, 6):
        set_gradients(params, step, range(3))
        optimizer.step()
    for model in (0, 2):
        same_bits(snapshot(*clean, model), snapshot(params, optimizer, model))


@pytest.mark.parametrize("case", EACH)
def test_when_all_models_rest_nothing_changes(case):
    params, optimizer = trained(case, 2)
    for model in range(3):
        optimizer.freeze(model)
    before = [snapshot(params, optimizer, model) for model in range(3)]
    set_gradients(params, 2, range(3))
    optimizer.step()
    for model in range(3):
        same_bits(before[model], snapshot(params, optimizer, model))


@pytest.mark.parametrize("case", EACH)
def test_single_parameters_of_a_frozen_model_rest_too(case):
    name, _ = CASES[case]
    params = fused_parameters(3)
    alone = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    alone._hocket_model = 1
    optimizer = getattr(optim, name)([*params, alone], **options_of(case, 3), nonfinite="skip")
    for step in range(3):
        set_gradients(params, step, range(3))
        alone.grad = torch.full_like(alone, float("inf") if step == 1 else 1.0)
        kept = [p[1].detach().clone() for p in params], alone.detach().clone()
        optimizer.step()
        assert all(torch.equal(p[1], was) for p, was in zip(params, kept[0], strict=True)) == (step == 1)
        assert torch.equal(alone, kept[1]) == (step == 1)
    assert bool(torch.isfinite(alone).all())


@pytest.mark.parametrize("case", CASES)
def test_permuting_models_permutes_results(case):
    name, _ = CASES[case]
    order = [3, 0, 2, 1]

    def permuted(value):
        if isinstance(value, tuple):
            return tuple(permuted(part) for part in value)
        return [value[model] for model in order] if isinstance(value, list) else value

    options = options_of(case, 4)
    straight, mixed = fused_parameters(4), fused_parameters(4)
    for p in mixed:
        p.data = p.data[order].clone()
    first = getattr(optim, name)(straight, **options)
    second = getattr(optim, name)(mixed, **{key: permuted(value) for key, value in options.items()})
    for step in range(5):
        set_gradients(straight, step, range(4))
        set_gradients(mixed, step, order)
        first.step()
        second.step()
    for p, q in zip(straight, mixed, strict=True):
        torch.testing.assert_close(p[order], q, rtol=1e-14, atol=0)


def test_models_that_are_not_there_cannot_be_frozen():
    optimizer = optim.SGD(fused_parameters(3), lr=0.1)
    for wrong in (3, -1, "1", True):
        refused(r"model: expected one of 0 \.\.\. 2", optimizer.freeze, wrong)
