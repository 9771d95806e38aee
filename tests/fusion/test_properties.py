"""Properties of any fused models: isolation, permutation, fuse and unfuse, slots, states, the oracle itself."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from tests.fusion.nets import NETS, VANISHING, Residual
from tests.fusion.oracle import SIZES, check, made
from torch import nn

import hocket
from hocket.fusion.rules import base
from hocket.fusion.stacked import Stacked


def check_net(name, num_models, shared, **options):
    make, given = NETS[name]
    x = given() if shared else torch.stack([given() for _ in range(num_models)])
    options |= {"steps": 3, "vanishing": VANISHING.get(name, frozenset())}
    return check(made(make, num_models), x, shared=shared, **options)


@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_nets_are_right(name, num_models, shared):
    check_net(name, num_models, shared, strict=True)


@pytest.mark.filterwarnings("ignore:hocket.fuse")
@pytest.mark.parametrize(("num_models", "backend"), [(3, "vmap"), (3, "loop"), (3, "auto"), (1, "auto")])
@pytest.mark.parametrize("name", NETS)
def test_nets_are_right_by_every_backend(name, num_models, backend):
    array = check_net(name, num_models, shared=False, backend=backend)
    if num_models == 1:
        winner = array.choices[-1].winner  # by time, where images have two layouts
        assert (winner.group_size, winner.per_group_backward) == (1, False)


@pytest.mark.parametrize("name", NETS)
def test_fuse_then_unfuse_is_the_identity(name):
    make, given = NETS[name]
    models = made(make, 3)
    states = [copy.deepcopy(model.state_dict()) for model in models]
    back = hocket.fuse(models).unfuse()
    x = given()
    for model, other, state in zip(models, back, states, strict=True):
        assert type(other) is type(model)
        assert list(other.state_dict()) == list(state)
        for key, tensor in state.items():
            assert torch.equal(other.state_dict()[key], tensor), key
            assert torch.equal(model.state_dict()[key], tensor), f"{key}: the user's model must not change"
        assert len(list(other.parameters())) == len(list(model.parameters())), "tied weights stay tied"
        assert torch.equal(other.eval()(x), model.eval()(x))
        assert not ({id(each) for each in other.parameters()} & {id(each) for each in model.parameters()})


def test_a_rule_whose_gradient_is_broken_is_caught(monkeypatch):
    right = base._OPS["linear"]

    def broken(site, *args, **kwargs):
        out = right(site, *args, **kwargs).tensor
        return Stacked(torch.cat((out[:-1], out[-1:] * 0.5 + 0.5 * out[-1:].detach())))

    monkeypatch.setitem(base._OPS, "linear", broken)
    with pytest.raises(AssertionError, match="gradient of input 0, model 2"):
        check(made(lambda: nn.Linear(4, 3), 3), torch.randn(3, 5, 4).double(), shared=False)


def test_a_rule_that_forgets_the_running_statistics_of_a_model_is_caught(monkeypatch):
    right = base._OPS["batch_norm"]

    def broken(site, input, mean, *args, **kwargs):
        before = mean.tensor[1].clone()
        out = right(site, input, mean, *args, **kwargs)
        mean.tensor.data[1] = before
        return out

    monkeypatch.setitem(base._OPS, "batch_norm", broken)
    with pytest.raises(AssertionError, match=r"1\.running_mean"):
        check(made(lambda: nn.BatchNorm1d(4), 3), torch.randn(3, 5, 4).double(), shared=False)


def test_parameters_have_the_models_first_and_say_so():
    array = hocket.fuse(made(Residual, 3))
    for parameter in array.parameters():
        assert isinstance(parameter, nn.Parameter)
        assert parameter._hocket_models == 3
        assert parameter.shape[0] == 3
        assert parameter.is_contiguous()
    assert array.get_parameter("fused.stem.weight").shape == (3, 4, 3, 3, 3)


def test_states_are_those_of_plain_modules_and_load_back():
    models, others = made(Residual, 2), made(Residual, 2)
    array = hocket.fuse(models)
    state = array.state_dict()
    plain = nn.ModuleList(models).state_dict()
    assert list(state) == list(plain)
    assert all(torch.equal(state[name], plain[name]) for name in plain)
    made(Residual, 1)[0].load_state_dict(array.state_dict(model=1))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    target = hocket.fuse(others)
    for parameter in target.parameters():
        parameter.data.zero_()
    kept = [id(parameter) for parameter in target.parameters()]
    target.load_state_dict(torch.load(file))
    assert kept == [id(parameter) for parameter in target.parameters()]
    assert all(torch.equal(target.state_dict()[name], plain[name]) for name in plain)
    holder, empty = nn.Sequential(array), nn.Sequential(hocket.fuse(made(Residual, 2)))
    for parameter in empty.parameters():
        parameter.data.zero_()
    empty.load_state_dict(holder.state_dict())
    assert all(torch.equal(empty[0].state_dict()[name], plain[name]) for name in plain)


def test_a_state_that_does_not_fit_is_refused_and_named():
    array = hocket.fuse([nn.Linear(2, 2)])
    with pytest.raises(RuntimeError, match=r"missing: 0\.bias; unexpected: 0\.other"):
        array.load_state_dict({"0.weight": torch.ones(2, 2), "0.other": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"0\.weight: expected shape \(2, 2\), got \(3, 2\)"):
        array.load_state_dict({"0.weight": torch.ones(3, 2), "0.bias": torch.ones(2)})


def test_a_slot_can_be_refilled():
    models, new = made(Residual, 3), made(Residual, 1)[0]
    array = hocket.fuse(models, backend="rule")
    x = torch.randn(4, 3, 6, 6).double()
    out = array(x)
    kept = [id(parameter) for parameter in array.parameters()]
    old = array.refill(1, new)
    assert kept == [id(parameter) for parameter in array.parameters()]
    for model in models:
        model(x)
    assert all(torch.allclose(old.state_dict()[name], tensor) for name, tensor in models[1].state_dict().items())
    after = array(x)
    assert torch.equal(after[[0, 2]], out[[0, 2]])
    assert torch.allclose(after[1], new(x), rtol=1e-12)
    with pytest.raises(hocket.errors.InputError, match="stem"):
        array.refill(0, Residual(6).double())
    with pytest.raises(hocket.errors.InputError, match="slot from 0 to 2"):
        array.drop(3)
    array.drop(0)
    assert torch.allclose(array(x), after[1:], rtol=1e-12)
    assert array.get_buffer("fused.norm.num_batches_tracked").tolist() == [2, 3]


def test_moves_between_types_and_copies():
    models = made(Residual, 2)
    array = hocket.fuse(models, backend="rule")
    x = torch.randn(4, 3, 6, 6).double()
    expected = array(x)
    twin = copy.deepcopy(array)
    single = array.float()
    assert single(x.float()).dtype == torch.float32
    assert all(parameter._hocket_models == 2 for parameter in single.parameters())
    assert next(single.unfuse()[0].parameters()).dtype == torch.float32
    assert torch.equal(twin(x).detach(), twin(x).detach())
    assert torch.allclose(twin(x), expected, rtol=1e-9)


def test_a_frozen_layer_stays_frozen():
    models = made(Residual, 2)
    for model in models:
        model.norm.eval()
        model.stem.requires_grad_(False)
    x = torch.randn(2, 4, 3, 6, 6).double()
    array = check(models, x, shared=False)
    assert not array.get_parameter("fused.stem.weight").requires_grad
    assert array.get_buffer("fused.norm.num_batches_tracked").tolist() == [0, 0]
