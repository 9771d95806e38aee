"""Bad input is refused with a message that restates it."""

import numpy as np
import pytest
import torch

from hocket import lr_scheduler, optim
from optim.twins import fused_parameters
from support.refusals import refused

CLASSES = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta")


@pytest.mark.parametrize("name", CLASSES)
def test_rates(name):
    make = getattr(optim, name)
    params = fused_parameters(3)
    refused(
        r"lr: expected 3 numbers, one for each model, or one for all, got 2: \[0.1, 0.2\]", make, params, lr=[0.1, 0.2]
    )
    refused(r"lr: expected numbers >= 0, got -0.1$", make, params, lr=-0.1)
    refused(r"lr: expected numbers >= 0, got -0.2 for model 1 in \[0.1, -0.2, 0.3\]", make, params, lr=[0.1, -0.2, 0.3])
    refused(r"lr: expected numbers >= 0, got nan", make, params, lr=float("nan"))
    refused(r"lr: expected a number, or 3 in a list, one for each model, got 'fast'", make, params, lr="fast")
    refused(r"lr: expected numbers >= 0, got None for model 2", make, params, lr=[0.1, 0.2, None])
    refused(r"got 0:", make, params, lr=[])
    refused(r"maximize: expected True or False, the same for all", make, params, maximize=[True, False, True])
    refused(r"nonfinite: expected one of step, skip, freeze, got 'stop'", make, params, nonfinite="stop")


@pytest.mark.parametrize("name", CLASSES)
def test_every_number_is_checked_for_its_length_and_its_bounds(name):
    make = getattr(optim, name)
    for key, bound in make.bounds.items():
        for short in ([0.5, 0.5], torch.tensor([0.5, 0.5])):
            value = (short, 0.9) if key == "betas" else short
            refused(rf"{key}.*expected 3 numbers", make, fused_parameters(3), **{key: value})
        if bound.low > float("-inf"):
            value = (0.9, -0.5) if key == "betas" else [0.5, -0.5, 0.5]
            refused(rf"{key}.*got -0.5", make, fused_parameters(3), **{key: value})
        if bound.high < float("inf"):
            value = (0.9, 1.5) if key == "betas" else [0.5, 1.5, 0.5]
            refused(rf"{key}.*got 1.5", make, fused_parameters(3), **{key: value})


def test_betas():
    params = fused_parameters(2)
    refused(r"betas: expected a pair, each one number or 2 in a list, got 0.9", optim.Adam, params, betas=0.9)
    refused(r"betas: expected 2 pairs, one for each model, got 1", optim.Adam, params, betas=[(0.9, 0.99)])
    refused(r"betas\[1\]: expected numbers >= 0 and < 1, got 1.0", optim.Adam, params, betas=(0.9, 1.0))
    pairs = optim.Adam(params, betas=[(0.9, 0.99), (0.8, 0.999)]).param_groups[0]["betas"]
    rows = optim.Adam(params, betas=([0.9, 0.8], [0.99, 0.999])).param_groups[0]["betas"]
    assert [beta.tolist() for beta in pairs] == [beta.tolist() for beta in rows] == [[0.9, 0.8], [0.99, 0.999]]


def test_nesterov():
    params = fused_parameters(2)
    refused(
        r"nesterov: expected a momentum > 0 and no dampening for every model, got momentum \[0.9, 0.0\]",
        optim.SGD,
        params,
        momentum=[0.9, 0],
        nesterov=True,
    )
    refused("nesterov", optim.SGD, params, momentum=0.9, dampening=[0.0, 0.1], nesterov=True)
    refused("nesterov", optim.SGD, params, nesterov=True)


def test_parameters():
    refused("params: expected at least one parameter, got an empty list", optim.SGD, [], lr=0.1)
    refused("params: none of them is a fused parameter", optim.SGD, [torch.ones(3, 4)], lr=0.1)
    refused("params: expected parameters in a list", optim.SGD, torch.ones(3, 4), lr=0.1)
    refused("parameter 1: expected a tensor, got str", optim.SGD, [torch.ones(3), "b"], num_models=3)
    refused(
        "expected all of one array, got parameters of 2 and 3 models",
        optim.SGD,
        fused_parameters(3) + fused_parameters(2),
    )
    refused("expected parameters of 4 models, got some of 3", optim.SGD, fused_parameters(3), num_models=4)
    refused("params: expected group 1 to be a dict with 'params'", optim.SGD, [{"params": fused_parameters(2)}, {}])
    empty = torch.nn.Parameter(torch.zeros(0, 4))
    empty._hocket_models = 0
    refused("params: expected an array of at least 1 model, got 0", optim.SGD, [empty])
    refused("num_models: expected a whole number >= 1, got 0", optim.SGD, [empty], num_models=0)
    stray = torch.nn.Parameter(torch.zeros(5))
    refused(
        r"parameter 4 has shape \(5,\): expected a fused one, \(3, ...\) for 3 models",
        optim.SGD,
        [*fused_parameters(3), stray],
    )
    stray._hocket_model = 3
    refused(r"parameter 4 belongs to model 3: expected one of 0 \.\.\. 2", optim.SGD, [*fused_parameters(3), stray])


def test_a_group_that_is_refused_is_not_added():
    params = fused_parameters(3)
    optimizer = optim.SGD(params[:2], lr=0.1)
    refused("lr: expected 3 numbers", optimizer.add_param_group, {"params": params[2:], "lr": [0.1]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": params[2:], "lr": [0.1, 0.2, 0.3]})
    assert optimizer.param_groups[1]["lr"].tolist() == [0.1, 0.2, 0.3]


def test_sparse_gradients():
    table = torch.nn.Parameter(torch.ones(2, 3))
    table.grad = torch.ones(2, 3).to_sparse()
    refused(r"shape \(2, 3\) has a sparse gradient", optim.Adam([table], num_models=2).step)


def test_numbers_written_between_steps_are_checked_too():
    params = fused_parameters(3)
    optimizer = optim.SGD(params, lr=0.1)
    optimizer.param_groups[0]["lr"] = [0.1, 0.2]
    for p in params:
        p.grad = torch.ones_like(p)
    refused(r"lr: expected 3 numbers", optimizer.step)


@pytest.mark.parametrize("value", [float("nan"), -1.0, np.float64("nan"), torch.tensor(float("inf")), "fast", None])
def test_one_number_written_between_steps_is_checked_too(value):
    params = fused_parameters(3)
    optimizer = optim.Adam(params, lr=0.1)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.param_groups[0]["lr"] = value
    refused("lr: expected ", optimizer.step)
    assert all(map(torch.equal, params, before))
    optimizer.param_groups[0]["lr"] = np.float32(0.5)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("make", [np.array, lambda rates: torch.tensor(rates, dtype=torch.float64), list, tuple])
def test_numbers_written_between_steps_are_there_at_once(make):
    """For a scheduler, a plain state and a refill, without a step before."""
    optimizer, value = optim.SGD(fused_parameters(3), lr=1.0), make([0.1, 0.2, 0.3])
    optimizer.param_groups[0]["lr"] = value
    assert [state["param_groups"][0]["lr"] for state in optimizer.unfuse()] == [0.1, 0.2, 0.3]
    optimizer.param_groups[0]["lr"] = value
    optimizer.refill(1, lr=0.5)
    assert optimizer.param_groups[0]["lr"].tolist() == [0.1, 0.5, 0.3]
    optimizer.param_groups[0]["lr"] = value
    scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    optimizer.param_groups[0]["lr"] = value
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"].tolist() == [0.05, 0.1, 0.15]


def test_numbers_of_torch_and_numpy():
    params = fused_parameters(3)
    rows = [[0.1, 0.2, 0.3], np.array([0.1, 0.2, 0.3]), torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)]
    rows += [[np.float64(0.1), torch.tensor(0.2, dtype=torch.float64), 0.3], (0.1, 0.2, 0.3)]
    for value in rows:
        assert optim.Adam(params, lr=value).param_groups[0]["lr"].tolist() == [0.1, 0.2, 0.3]
    for value in (0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5)):
        found = optim.Adam(params, lr=value).param_groups[0]["lr"]
        assert (type(found), found) == (float, 0.5)
    for value in (np.array([0.1, np.nan, 0.2]), torch.tensor([0.1, float("nan"), 0.2]), [0.1, float("nan"), 0.2]):
        refused(r"lr: expected numbers >= 0, got nan for model 1", optim.Adam, params, lr=value)
    for value in (np.float64("nan"), torch.tensor(float("nan")), np.array(float("inf"))):
        refused(r"lr: expected numbers >= 0, got", optim.Adam, params, lr=value)
    for value in (True, np.bool_(True), torch.tensor(True), 1j, torch.tensor(1j), np.ones((3, 1)), torch.ones(3, 1)):
        refused(r"lr: expected a number, or 3 in a list", optim.Adam, params, lr=value)
    optimizer = optim.Adam(params, lr=0.1)
    optimizer.param_groups[0]["lr"] = np.array([0.1, 0.2, 0.3])
    optimizer.step()
    assert optimizer.param_groups[0]["lr"].tolist() == [0.1, 0.2, 0.3]


def test_options_of_torchs_kernels():
    params = fused_parameters(3)
    for name in ("foreach", "fused", "capturable", "differentiable"):
        refused(
            rf"{name}: Adam of fused models has no such option, got True",
            lambda n=name: optim.Adam(params, **{n: True}),
        )
        optim.Adam(params, **{name: False})
    with pytest.raises(TypeError, match="unexpected keyword argument 'gama'"):
        optim.Adam(params, gama=0.5)
