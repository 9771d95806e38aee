"""Slots that are dropped, permuted and refilled in mid-training."""

import pytest
import torch

from hocket import optim
from hocket.errors import InputError
from optim.twins import CASES, EACH, Twins, fused_parameters, of_model, options_of, same_bits, snapshot
from quick import covering
from support.refusals import refused


def taken(twins, models):
    """The twins with only these models, over new parameters."""
    new = [torch.nn.Parameter(p.detach()[models].clone()) for p in twins.params]
    twins.fused.select_models(models, new)
    twins.params = new
    twins.singles = [twins.singles[model] for model in models]
    twins.torch = [twins.torch[model] for model in models]
    twins.models = [twins.models[model] for model in models]


@pytest.mark.parametrize(("case", "models"), covering(CASES, [[0, 2], [2, 0, 1], [1]]))
def test_the_models_that_are_kept_go_on(case, models):
    twins = Twins(case, 3)
    twins.step(3)
    taken(twins, models)
    assert twins.fused.num_models == len(models)
    twins.step(5)
    twins.check(1e-11)


@pytest.mark.parametrize("case", EACH)
def test_dropped_in_place(case):
    """The array shrinks its own parameters; the optimizer gets the number of the model that went."""
    twins = Twins(case, 3)
    twins.step(3)
    for p in twins.params:
        p.data = p.data[[0, 2]].clone()
        p.grad = None
        p._hocket_models = 2
    twins.fused.drop(1)
    for own in (twins.singles, twins.torch, twins.models):
        del own[1]
    twins.step(5)
    twins.check(1e-11)


@pytest.mark.parametrize("case", CASES)
def test_a_refilled_slot_begins_anew_and_its_neighbours_never_know(case):
    twins, untouched = Twins(case, 3), Twins(case, 3)
    twins.step(3)
    untouched.step(3)
    name, _ = CASES[case]
    fresh = fused_parameters(3, seed=5)
    options = {key: of_model(value, 1) for key, value in options_of(case, 3).items()}
    options["lr"] = 0.012
    for p, new, single in zip(twins.params, fresh, twins.singles[1], strict=True):
        p.data[1] = new.data[1]
        single.data.copy_(new.data[1])
    twins.torch[1] = getattr(torch.optim, name)(twins.singles[1], **options)
    twins.fused.refill(1, lr=0.012)
    twins.step(6)
    untouched.step(6)
    twins.check(1e-11)
    for model in (0, 2):
        same_bits(snapshot(twins.params, twins.fused, model), snapshot(untouched.params, untouched.fused, model))


@pytest.mark.parametrize(("case", "begun"), covering(CASES, [False, True]))
def test_refilled_with_a_model_that_has_a_state(case, begun):
    """A model that trained elsewhere moves in, with its options."""
    twins = Twins(case, 3)
    if begun:
        twins.step(2)
    elsewhere = Twins(case, 7)
    elsewhere.step(4)
    moved = elsewhere.fused.unfuse()[6]
    for p, single, other in zip(twins.params, twins.singles[1], elsewhere.singles[6], strict=True):
        p.data[1] = other.data
        single.data.copy_(other.data)
    twins.torch[1] = type(twins.torch[1])(twins.singles[1], lr=1.0)
    twins.torch[1].load_state_dict(moved)
    twins.fused.freeze(1)
    twins.fused.refill(1, moved)
    assert not twins.fused.frozen[1]
    twins.steps = 4
    twins.step(6)
    twins.check(1e-11)


def test_refilled_and_dropped_where_blocks_did_not_fuse():
    params = fused_parameters(3)
    alone = {model: torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for model in (1, 2)}
    for model, p in alone.items():
        p._hocket_model = model
    optimizer = optim.Adam([*params, alone[1], alone[2]], lr=[0.1, 0.2, 0.3])

    def step():
        for p in (*params, *alone.values()):
            p.grad = torch.ones_like(p)
        optimizer.step()

    step()
    optimizer.refill(1)
    assert optimizer.unfuse()[1]["state"].keys() == {0, 1, 2, 3}
    step()
    counts = [[float(entries["step"]) for entries in state["state"].values()] for state in optimizer.unfuse()]
    assert counts == [[2] * 4, [1] * 5, [2] * 5]
    for p in params:
        p.data, p.grad = p.data[1:].clone(), None
    optimizer.drop(0)
    before = [p.detach().clone() for p in (*params, *alone.values())]
    step()
    moved = [was - p.detach() for was, p in zip(before, (*params, *alone.values()), strict=True)]
    for change in moved[:4]:
        torch.testing.assert_close(change[0], torch.full_like(change[0], 0.2))
    torch.testing.assert_close(moved[4], torch.full_like(moved[4], 0.2))
    torch.testing.assert_close(moved[5], torch.full_like(moved[5], 0.3))


@pytest.mark.parametrize("num_models", [1, 3])
def test_a_refill_of_values_leaves_what_was_captured(num_models):
    twins = Twins("adam-all", num_models)
    twins.step()
    twins.fused.refill(0)
    version, tensors = twins.fused._hocket_version, [dict(state) for state in twins.fused.state.values()]
    for state in (None, twins.fused.unfuse()[0]):
        twins.step()
        twins.fused.refill(0, state, lr=0.02)
        assert twins.fused._hocket_version == version
        for now, was in zip(twins.fused.state.values(), tensors, strict=True):
            assert all(now[key] is was[key] for key in was)


def test_bad_slots():
    twins = Twins("adam-all", 3)
    twins.step()
    fused = twins.fused
    refused("models: expected at least one model to keep, got none", fused.select_models, [])
    refused(r"models: expected each model at most once, got \[1, 1\]", fused.select_models, [1, 1])
    refused(r"model: expected one of 0 \.\.\. 2, got 3", fused.select_models, [0, 3])
    refused(r"params: expected parameter 0 to have shape \(2, 4, 5\), got \(3, 4, 5\)", fused.select_models, [0, 1])
    refused(r"params: expected 4 parameters for models \[0\], got 1", fused.select_models, [0], [torch.ones(1, 4, 5)])
    refused(r"refill: expected options among lr, betas, eps, weight_decay, got gama=1", fused.refill, 0, gama=1)
    refused("lr: expected numbers >= 0, got -1", fused.refill, 0, lr=-1)
    refused(r"refill: lr: expected the number of one model, got \[1, 2, 3\]", fused.refill, 0, lr=[1, 2, 3])
    with pytest.raises(InputError, match=r"state: expected groups of \[4\] parameters, got groups of \[1\]"):
        fused.refill(0, torch.optim.Adam([torch.ones(1)]).state_dict())
    twins.step(2)
    twins.check(1e-12)
