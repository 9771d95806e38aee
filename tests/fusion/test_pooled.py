"""A pointwise convolution, batch norm and the maximum over the points as one op; and what else makes groups fast."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.fusion.oracle import assert_close, check, made
from torch import nn

import hocket
from hocket.fusion.groups import LARGE_BYTES, Groups
from hocket.fusion.rules.pooled import Norm, pooled, pooled_plainly
from hocket.fusion.rules.reduction import amax
from hocket.fusion.shares import GradientMemory, shares

EXAMPLES, CHANNELS, POINTS, OUTPUTS = 3, 4, 6, 10


class Features(nn.Module):
    """As in PointNet; without a bias, whose gradient before a batch norm is nothing but rounding."""

    def __init__(self, rectified: bool) -> None:
        super().__init__()
        self.first = nn.Conv1d(CHANNELS, CHANNELS, 1, bias=False)
        self.conv = nn.Conv1d(CHANNELS, OUTPUTS, 1)
        self.conv.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(OUTPUTS)
        self.relu = nn.ReLU() if rectified else nn.Identity()
        self.out = nn.Linear(OUTPUTS, 2)

    def forward(self, points):
        return self.out(self.relu(self.norm(self.conv(self.first(points)))).amax(2))


def _given(gamma: torch.Tensor, *, ties: bool):
    torch.manual_seed(3)
    a = torch.randn(EXAMPLES, CHANNELS, POINTS).double()
    if ties:
        a[:, :, 1] = a[:, :, 4]
    weight, bias = torch.randn(OUTPUTS, CHANNELS, 1).double(), torch.randn(OUTPUTS).double()
    return [each.requires_grad_() for each in (a, weight, bias, gamma, torch.randn(OUTPUTS).double())]


@pytest.mark.parametrize("rectified", [True, False])
@pytest.mark.parametrize("ties", [True, False])
def test_pooled_is_what_torch_computes_op_by_op(rectified, ties):
    gamma = torch.linspace(-1, 1, OUTPUTS).double()
    given, norm = _given(gamma, ties=ties), Norm(0.1, 1e-5, rectified)
    mean, var = torch.zeros(OUTPUTS).double(), torch.ones(OUTPUTS).double()
    out, expected = pooled(*given, (mean, var), norm), pooled_plainly(*given, norm)
    assert_close(out, expected, "output")
    weight = torch.randn_like(out)
    own = torch.autograd.grad(out, given, weight)
    right = torch.autograd.grad(expected, given, weight)
    for name, mine, theirs in zip(("a", "weight", "bias", "gamma", "beta"), own, right, strict=True):
        if name == "bias":  # zero, but for rounding
            assert (mine - theirs).abs().max() < 1e-12
        else:
            assert_close(mine, theirs, name)
    batch_norm = nn.BatchNorm1d(OUTPUTS).double()
    batch_norm(nn.functional.conv1d(*given[:3]))
    assert_close(mean, batch_norm.running_mean, "running mean")
    assert_close(var, batch_norm.running_var, "running variance")


def test_pooled_can_be_differentiated_twice():
    given, norm = _given(torch.linspace(0.5, 1, OUTPUTS).double(), ties=False), Norm(0.1, 1e-5, True)
    found = []
    for out in (pooled(*given, None, norm), pooled_plainly(*given, norm)):
        (first,) = torch.autograd.grad(out.square().sum(), given[:1], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), given[1])[0])
    assert_close(*found, "second derivative")


@pytest.mark.parametrize("rectified", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("backend", ["rule", "auto", "loop"])
@pytest.mark.parametrize("num_models", [1, 2, 4])
def test_a_chain_is_right_in_models(rectified, shared, backend, num_models):
    x = torch.randn(*(() if shared else (num_models,)), EXAMPLES, CHANNELS, POINTS).double()
    array = check(made(lambda: Features(rectified), num_models), x, shared=shared, backend=backend)
    if backend == "rule":
        assert any("conv1d+BatchNorm1d" in step.op for each in array._programs.values() for step in each.steps)


def test_a_chain_goes_op_by_op_in_evaluation_and_where_a_scale_is_zero():
    x = torch.randn(EXAMPLES, CHANNELS, POINTS).double()
    check(made(lambda: Features(True), 2, training=False), x, shared=True)
    models = made(lambda: Features(True), 2)
    for model in models:
        model.norm.weight.data[0] = 0.0
    check(models, x, shared=True)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_groups_of_any_size_are_right(size):
    num_models = 6
    models = made(lambda: Features(True), num_models)
    array = hocket.fuse(copy.deepcopy(models), backend="rule")
    x = torch.randn(EXAMPLES, CHANNELS, POINTS).double()
    array(x)
    (program,) = array._programs.values()
    array.load_state_dict(hocket.fuse(copy.deepcopy(models), backend="rule").state_dict())
    groups = Groups(array, program.traced, size)
    from hocket.fusion.stacked import Stacked

    out = groups.run([x])
    assert isinstance(out, Stacked)
    out.tensor.square().sum().backward()
    for index, model in enumerate(models):
        expected = model(x)
        assert_close(out.tensor[index], expected, "output")
        expected.square().sum().backward()
        own = array.get_parameter("fused.first.weight").grad[index]
        assert_close(own, model.first.weight.grad, "gradient")
        assert_close(array.get_buffer("fused.norm.running_var")[index], model.norm.running_var, "statistics")


def test_large_parameters_gather_their_gradients_in_memory_that_is_used_again():
    whole = nn.Parameter(torch.randn(3, LARGE_BYTES // 32, 2).double())
    memory = GradientMemory()
    for _ in range(2):
        whole.grad = None
        parts = shares(whole, memory)
        (2 * parts[0] + parts[0] * parts[2]).sum().backward()  # the second has no gradient
        assert_close(whole.grad[0], 2 + whole.detach()[2], "first")
        assert whole.grad[1].count_nonzero() == 0
        assert_close(whole.grad[2], whole.detach()[0], "third")
    held = whole.grad[0]
    place = whole.grad.data_ptr()
    copied = held.clone()
    whole.grad = None
    sum(each.sum() for each in shares(whole, memory)).backward()
    assert whole.grad.data_ptr() != place  # somebody still looks at the first one
    assert torch.equal(held, copied)


def test_shares_can_be_differentiated_twice():
    whole = nn.Parameter(torch.randn(2, 3).double())
    first, second = shares(whole, GradientMemory())
    (grad,) = torch.autograd.grad((first**3 + second**2).sum(), whole, create_graph=True)
    (twice,) = torch.autograd.grad(grad.sum(), whole)
    assert_close(twice, torch.stack((6 * whole[0], torch.full((3,), 2.0).double())).detach(), "second derivative")


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("keepdim", [True, False])
def test_amax_shares_its_gradient_among_ties(axis, keepdim):
    x = torch.tensor([[1.0, 3.0, 3.0], [1.0, 0.0, 3.0]], dtype=torch.float64, requires_grad=True)
    out, expected = amax(x, axis, keepdim), torch.amax(x, axis, keepdim)
    assert torch.equal(out, expected)
    weight = torch.randn_like(out)
    assert_close(*(torch.autograd.grad(each, x, weight)[0] for each in (out, expected)), "gradient")
