"""State: to B plain optimizers and back, saved and loaded, copied and pickled."""

import copy
import io
import pickle

import pytest
import torch

from hocket import optim
from hocket.errors import InputError
from optim.twins import CASES, EACH, Twins, fused_parameters, options_of, same_bits, same_state, set_gradients, trained
from quick import covering
from support.refusals import refused


def begun(case, params):
    """A new optimizer of a case, over parameters with these values."""
    others, other = trained(case, steps=0)
    for p, q in zip(params, others, strict=True):
        q.data = p.data.clone()
    return others, other


def go_on(params, optimizer, steps=3):
    for step in range(100, 100 + steps):
        set_gradients(params, step, range(optimizer.num_models))
        optimizer.step()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize(("case", "num_models"), covering(CASES, [1, 3]))
def test_torch_goes_on_where_the_fused_optimizer_stopped(case, num_models):
    """Unfuse in mid-training, load into torch.optim, and train both on: they stay together."""
    twins = Twins(case, num_models)
    twins.step(3)
    for slot, state in enumerate(twins.fused.unfuse()):
        fresh = type(twins.torch[slot])(twins.singles[slot], lr=123.0)
        fresh.load_state_dict(state)
        same_state(fresh.state_dict(), state)
        twins.torch[slot] = fresh
    twins.step(10)
    twins.check(1e-11)


@pytest.mark.parametrize("case", CASES)
def test_the_fused_optimizer_goes_on_where_torch_stopped(case):
    """Train singles (for other numbers of steps each), load them into a fused optimizer with other options."""
    twins = Twins(case, 3)
    for slot in range(3):
        for step in range(2 + slot):
            twins.steps = step
            twins.step_single(slot, slot)
    for place, p in enumerate(twins.params):
        p.data = torch.stack([own[place].detach() for own in twins.singles])
    flags = {key: value for key, value in options_of(case, 3).items() if isinstance(value, bool)}
    extra = {"momentum": 0.5} if flags.get("nesterov") else {}
    twins.fused = getattr(optim, CASES[case][0])(twins.params, lr=0.5, **flags, **extra)
    twins.fused.load_unfused([other.state_dict() for other in twins.torch])
    twins.check(0.0)
    twins.steps = 7
    twins.step(10)
    twins.check(1e-11)


@pytest.mark.parametrize("case", CASES)
def test_a_round_trip_keeps_every_bit(case):
    params, optimizer = trained(case)
    states = optimizer.unfuse()
    other_params, other = begun(case, params)
    other.load_unfused(states)
    for state, again in zip(states, other.unfuse(), strict=True):
        same_state(again, state)
    same_bits(go_on(params, optimizer), go_on(other_params, other))


@pytest.mark.parametrize("nonfinite", ["step", "skip"])
def test_groups_that_are_loaded_count_a_step_once(nonfinite):
    params = fused_parameters(2)
    optimizer = optim.Adam([{"params": params[:1]}, {"params": params[1:]}], nonfinite=nonfinite)
    for _ in range(2):
        set_gradients(params, 0, range(2))
        optimizer.step()
        optimizer.load_unfused(optimizer.unfuse())
    assert [float(optimizer.unfuse()[1]["state"][place]["step"]) for place in range(len(params))] == [2.0] * len(params)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("case", EACH)
def test_saved_and_loaded(case, frozen):
    params, optimizer = trained(case)
    if frozen:
        optimizer.freeze(1)
        set_gradients(params, 50, range(3))
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other_params, other = begun(case, params)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.frozen == optimizer.frozen
    for state, again in zip(optimizer.unfuse(), other.unfuse(), strict=True):
        same_state(again, state)
    same_bits(go_on(params, optimizer), go_on(other_params, other))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("case", EACH)
def test_copied_and_pickled(case, copied):
    params, optimizer = trained(case)
    optimizer.freeze(2)
    other_params, other = copied((params, optimizer))
    assert other.frozen == (False, False, True)
    same_bits(go_on(params, optimizer), go_on(other_params, other))
    assert all(p is not q for p, q in zip(params, other_params, strict=True))


@pytest.mark.parametrize("case", EACH)
def test_a_plain_state_shares_no_memory(case):
    params, optimizer = trained(case)
    before = [p.detach().clone() for p in params]
    for state in optimizer.unfuse():
        for entries in state["state"].values():
            for value in entries.values():
                value.fill_(float("nan"))
    after = go_on(params, optimizer)
    assert all(bool(torch.isfinite(p).all()) for p in after)
    assert any(not torch.equal(p, q) for p, q in zip(before, after, strict=True))


def test_names_of_parameters_travel():
    params = fused_parameters(2)
    alone = torch.nn.Parameter(torch.ones(3))
    alone._hocket_model = 1
    named = [*((f"p{place}", p) for place, p in enumerate(params)), ("alone", alone)]
    optimizer = optim.SGD(named, lr=[0.1, 0.2])
    first, second = (state["param_groups"][0] for state in optimizer.unfuse())
    assert first["param_names"] == ["p0", "p1", "p2", "p3"]
    assert second["param_names"] == ["p0", "p1", "p2", "p3", "alone"]


def test_names_in_groups_are_saved_and_loaded():
    params = fused_parameters(2)
    named = [(f"p{place}", p) for place, p in enumerate(params)]
    optimizer = optim.Adam([{"params": named[:1], "lr": [0.1, 0.2]}, {"params": iter(named[1:])}], betas=(0.8, 0.9))
    set_gradients(params, 0, range(2))
    optimizer.step()
    saved = optimizer.state_dict()
    assert [group["param_names"] for group in saved["param_groups"]] == [["p0"], ["p1", "p2", "p3"]]
    again = optim.Adam([{"params": named[:1]}, {"params": named[1:]}])
    again.load_state_dict(saved)
    assert [group["param_names"] for group in again.param_groups] == [["p0"], ["p1", "p2", "p3"]]
    for state, was in zip(again.unfuse(), optimizer.unfuse(), strict=True):
        same_state(state, was)


@pytest.mark.parametrize(("one", "other"), [("SGD", "Adam"), ("Adam", "SGD"), ("RMSprop", "Adadelta")])
def test_a_state_of_another_optimizer_is_refused(one, other):
    params = fused_parameters(2)
    set_gradients(params, 0, range(2))
    optimizers = [getattr(optim, name)(params, lr=[0.1, 0.2]) for name in (one, other)]
    for optimizer in optimizers:
        optimizer.step()
    first, second = optimizers
    before = [copy.deepcopy(optimizer.unfuse()) for optimizer in optimizers]
    for load, what in (
        (lambda: first.load_state_dict(second.state_dict()), "state_dict"),
        (lambda: first.load_unfused(second.unfuse()), "state of model 0"),
        (lambda: first.refill(1, second.unfuse()[1]), "state"),
    ):
        refused(f"^{what}: expected the options of {one}, got group 0 without ", load)
    for optimizer, states in zip(optimizers, before, strict=True):
        for state, was in zip(optimizer.unfuse(), states, strict=True):
            same_state(state, was)


def test_entries_of_another_optimizer_and_other_flags_are_refused():
    _, adam = trained("adam-all")
    _, adamax = trained("adamax-all")
    refused(
        "state: exp_inf of parameter 0: expected the state of Adam: exp_avg, exp_avg_sq",
        adam.refill,
        1,
        adamax.unfuse()[1],
    )
    refused("state_dict: exp_inf of parameter 0: expected the state of Adam", adam.load_state_dict, adamax.state_dict())
    refused("state_dict: expected 'state' and 'param_groups', got nothing", adam.load_state_dict, {})
    other = adam.unfuse()[0]
    other["param_groups"][0]["maximize"] = True
    refused(r"maximize: expected the same for all .* got \[False, True, False\]", adam.refill, 1, other)


def test_a_state_of_another_dtype_is_cast_as_torch_casts_it():
    params, optimizer = trained("adam-all")
    halves = [torch.nn.Parameter(p.detach().float()) for p in params]
    other = optim.Adam(halves, num_models=3)
    for load in (
        lambda: other.load_state_dict(optimizer.state_dict()),
        lambda: other.load_unfused(optimizer.unfuse()),
        lambda: [other.refill(model, state) for model, state in enumerate(optimizer.unfuse())],
    ):
        load()
        for p, half in zip(params, halves, strict=True):
            found = other.state[half]["exp_avg"]
            assert found.dtype == torch.float32
            assert torch.equal(found, optimizer.state[p]["exp_avg"].float())
        other.state.clear()


def test_states_that_do_not_fit_change_nothing():
    _, optimizer = trained("adam-all")
    before = optimizer.unfuse()
    states = optimizer.unfuse()
    refused("states: expected 3, one for each model, got 2", optimizer.load_unfused, states[:2])
    spoilt = copy.deepcopy(states)
    spoilt[1]["state"][0]["exp_avg"] = torch.zeros(9)
    refused(
        r"state of model 1: exp_avg of parameter 0: expected shape \(4, 5\), got \(9,\)", optimizer.load_unfused, spoilt
    )
    spoilt = copy.deepcopy(states)
    spoilt[2]["param_groups"][0]["params"].pop()
    with pytest.raises(InputError, match=r"state of model 2: expected groups of \[4\] parameters, got groups of \[3\]"):
        optimizer.load_unfused(spoilt)
    spoilt = copy.deepcopy(states)
    spoilt[2]["param_groups"][0]["lr"] = -1.0
    refused(r"lr: expected numbers >= 0, got -1.0 for model 2", optimizer.load_unfused, spoilt)
    spoilt = copy.deepcopy(states)
    spoilt[0]["param_groups"][0]["amsgrad"] = True
    with pytest.raises(InputError, match=r"amsgrad: expected the same for all models of a group, got \[True, False, F"):
        optimizer.load_unfused(spoilt)
    _, smaller = trained("adam-all", num_models=2)
    refused("state_dict: expected one of 3 models, got one of 2", optimizer.load_state_dict, smaller.state_dict())
    for state, was in zip(optimizer.unfuse(), before, strict=True):
        same_state(state, was)
