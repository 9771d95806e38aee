"""Functions, methods and operators between two layers of parameters, and what has no rule."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.fusion.oracle import check, made
from torch import nn
from torch.nn import functional as F

import hocket
from fusion.rules.layers import BY_RULE, Apply
from hocket.errors import InputError
from quick import covering
from support.refusals import refused

FUNCTIONS = {
    "add a tensor of lower rank": lambda x: x + x[0],
    "add its own scale": lambda x: x + x.mean(0) * 2,
    "shared on the left": lambda x: torch.arange(4, dtype=x.dtype) - x,
    "shared of higher rank": lambda x: torch.ones(2, 1, 1, dtype=x.dtype) * x,
    "shared, of its type": lambda x: torch.arange(40).view(2, 5, 4).to(x).sum(0) + torch.ones(2, 3, 1).to(x)[0, 0] * x,
    "shared, of its type by name": lambda x: torch.arange(40).view(2, 5, 4).type_as(x).sum(0) * x,
    "of a shared type": lambda x: x.to(torch.ones(2, 5, 4, dtype=torch.float32)).double(),
    "reverse operators": lambda x: 1 - 2 / (3 + x * x) ** 2,
    "power of a number": lambda x: 2**x,
    "relu_": lambda x: (x * 1).relu_(),
    "in place": lambda x: (x * 2).add_(1).mul_(x),
    "view": lambda x: x.view(x.size(0), -1, 2).sum(1),
    "view by shape": lambda x: x.view(x.shape[0], x.shape[1] * 1),
    "reshape, tuple": lambda x: x.reshape((-1, 2)),
    "transpose": lambda x: x.transpose(0, 1).contiguous(),
    "T": lambda x: x.T @ x,
    "t": lambda x: x.t().mm(x),
    "permute": lambda x: x.unsqueeze(-1).permute(2, 0, -2),
    "permute, function": lambda x: torch.permute(x, (1, 0)),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(),
    "squeeze one": lambda x: x.unsqueeze(0).squeeze(0),
    "unsqueeze to the front": lambda x: x.unsqueeze(-3),
    "chunk": lambda x: torch.cat(x.chunk(2, dim=1)[::-1], dim=1),
    "chunk by 0": lambda x: x.chunk(2)[0],
    "split": lambda x: x.split([1, 3], -1)[1],
    "split, function": lambda x: torch.split(x, 2, dim=1)[1] * 2,
    "unbind": lambda x: x.unbind(1)[2],
    "stack": lambda x: torch.stack([x, 2 * x], dim=1),
    "stack, last": lambda x: torch.stack([x, 2 * x], -1),
    "cat with shared": lambda x: torch.cat([x, torch.ones(5, 1, dtype=x.dtype)], 1),
    "cat, batch": lambda x: torch.cat((x, x)),
    "expand": lambda x: x[:, None].expand(-1, 3, -1),
    "expand, new axis": lambda x: x.expand(2, 5, 4),
    "expand_as": lambda x: x[:1].expand_as(x),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "flip": lambda x: x.flip(0) + x.flip((0, 1)),
    "getitem": lambda x: x[1:, ::2],
    "getitem, ellipsis": lambda x: x[..., 0],
    "getitem, none": lambda x: x[None, :, 1],
    "getitem, number": lambda x: x[2],
    "select": lambda x: x.select(1, -1),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "sum": lambda x: x.sum(),
    "sum over axes": lambda x: x.sum((0, 1)),
    "sum, keepdim": lambda x: x.sum(-1, keepdim=True),
    "sum, axis": lambda x: torch.sum(x, axis=0),
    "mean": lambda x: x.mean(dim=0) - x.mean(),
    "max over axis": lambda x: x.max(1)[0],
    "max, keepdim": lambda x: torch.max(x, 1, keepdim=True)[0],
    "max over all": lambda x: x.max(),
    "max of two": lambda x: torch.max(x, 0 * x),
    "amax": lambda x: x.amax((0, 1)) + x.amin(0),
    "prod": lambda x: x.prod(1),
    "var": lambda x: x.var(0) + x.std(1).sum(),
    "var over all": lambda x: x.var(),
    "logsumexp": lambda x: torch.logsumexp(x, 1),
    "norm": lambda x: x.norm(2, 1),
    "normalize": lambda x: F.normalize(x, dim=1),
    "cumsum": lambda x: x.cumsum(0),
    "topk": lambda x: x.topk(2)[0],
    "sort": lambda x: x.sort(0)[0],
    "argmax": lambda x: x.argmax(1),
    "gather": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "where": lambda x: torch.where(x > 0, x, x.mean(0)),
    "clamp": lambda x: x.clamp(min=-0.5) + torch.clamp(x, -1, 1),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.5),
    "matmul": lambda x: x @ x.transpose(0, 1),
    "bmm": lambda x: torch.bmm(x[None], x[None].transpose(1, 2)),
    "matmul by shared": lambda x: x @ torch.ones(4, 2, dtype=x.dtype),
    "shared by matmul": lambda x: torch.ones(2, 5, dtype=x.dtype) @ x,
    "einsum": lambda x: torch.einsum("ni,mi->nm", x, x),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None, :, :1], x[None, :1], beta=0.5, alpha=2),
    "addmm": lambda x: torch.addmm(x[0, :1], x, x.t()),
    "softmax": lambda x: F.softmax(x, dim=1) + torch.softmax(x, 0) + x.softmax(-1),
    "zeros_like": lambda x: torch.zeros_like(x) + x,
    "new_zeros": lambda x: torch.cat([x, x.new_zeros(1, 4)]),
    "type and device": lambda x: x.to(torch.float64).to(x.device).type_as(x),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "batch_norm by what lies apart": lambda x: F.batch_norm(x, None, None, x.t()[:, 0], x.t()[:, 1], True),
    "group_norm by what lies apart": lambda x: F.group_norm(x, 2, x.t()[:, 0], x.t()[:, 1]),
    "pad": lambda x: F.pad(x, (1, 2)),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2),
    "max_pool": lambda x: F.max_pool2d(x[None, None], 2),
    "avg_pool": lambda x: F.avg_pool1d(x[None], 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x[None, None], 1),
    "one_of_two": lambda x: x if x.dim() == 2 else x[0],
    "functional linear": lambda x: F.linear(x, torch.ones(2, 4, dtype=x.dtype)),
    "triangles": lambda x: torch.tril(x) + x.triu(1),
}
WITHOUT_A_RULE = {
    "outer of vectors": lambda x: torch.outer(x[0], x[1]),
    "advanced index": lambda x: x[:, [0, 2]],
    "norm of all": lambda x: x.norm(),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "matrix and vector": lambda x: x @ x[0],
    "roll": lambda x: x.roll(1, 0),
    "einsum without arrow": lambda x: torch.einsum("ij,jk", x, x.t()),
}


def written(x, name, *args):
    getattr(x, name)(*args)
    return x.sin()


class Table(nn.Module):
    """Running statistics that are rows or columns of one buffer."""

    def __init__(self, norm, dim):
        super().__init__()
        self.norm, self.dim = norm, dim
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_buffer("statistics", torch.ones((2, 4) if dim == 0 else (4, 2)))

    def forward(self, x):
        return self.norm(self.linear(x).transpose(-1, 1), *self.statistics.unbind(self.dim), momentum=0.3)


@pytest.mark.filterwarnings("ignore:hocket.fuse")
@pytest.mark.parametrize("backend", ["rule", "vmap", "auto"])
@pytest.mark.parametrize("norm", [partial(F.batch_norm, training=True), F.instance_norm], ids=["batch", "instance"])
@pytest.mark.parametrize("dim", [0, 1])
def test_running_statistics_that_are_parts_of_a_buffer_move(norm, dim, backend):
    x = torch.randn(3, 2, 5, 4, dtype=torch.float64)
    check(made(lambda: Table(norm, dim), 3), x, shared=False, backend=backend)


UNLIKE_ALONE_UNDER_VMAP = {
    "select_scatter": lambda x: torch.select_scatter(x, x[0] * 2, 0, -1),
    "select_scatter of a shared": lambda x: torch.select_scatter(torch.ones(5, 4).double(), x[:, 0], dim=-1, index=1),
    "as_strided_scatter": lambda x: torch.as_strided_scatter(x * 1, x[:2, :2], (2, 2), (6, 1), 1).sin(),
    "as_strided_scatter, named": lambda x: torch.as_strided_scatter(x, size=(4,), stride=(5,), src=x[0]).sin(),
    "as_strided": lambda x: x.as_strided((3, 2), (6, 1), 2) + torch.as_strided_copy(x, (3, 2), (2, 1)),
    "cumprod_": lambda x: written(x, "cumprod_", 1),
    "float_power_": lambda x: written(x.abs() + 1, "float_power_", x.abs()),
    "index_reduce_": lambda x: written(x, "index_reduce_", 0, torch.tensor([1, 1]), x[:2] * 2, "prod"),
    "index_reduce_ of a shared": lambda x: written(
        torch.ones(5, 4).double(), "index_reduce_", 0, torch.tensor([1, 1]), x[:2], "mean"
    ),
}


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
@pytest.mark.parametrize("backend", ["rule", "vmap", "auto"])
@pytest.mark.parametrize("name", UNLIKE_ALONE_UNDER_VMAP)
def test_gradients_that_torch_gets_wrong_under_vmap(name, backend):
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    models = made(lambda: Apply(UNLIKE_ALONE_UNDER_VMAP[name]), 3)
    check(models, x, shared=False, backend=backend)


UNLIKE_ALONE_IN_MEMORY = {
    "of another order": lambda x: x.t().as_strided((3, 2), (6, 1)),
    "beyond the tensor": lambda x: x[:2].as_strided((3, 4), (4, 1)),
    "in place": lambda x: (x * 1).as_strided_((3, 2), (6, 1), 1),
}


@pytest.mark.filterwarnings("ignore:hocket.fuse. Apply")
@pytest.mark.parametrize("name", UNLIKE_ALONE_IN_MEMORY)
def test_views_by_strides_that_depend_on_memory_go_model_by_model(name):
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    models = made(lambda: Apply(UNLIKE_ALONE_IN_MEMORY[name]), 3)
    check(models, x, shared=False)
    refused("counts elements of memory", hocket.fuse(models, shared=False, strict=True), x)


@pytest.mark.parametrize("backend", ["rule", "loop"])
def test_a_storage_offset_in_memory_that_models_have_in_common_is_refused(backend):
    class Offset(Apply):
        def forward(self, x):
            return x * self.scale.as_strided((2, 2), (1, 2), 0)

    models = made(lambda: Offset(None), 3)
    with pytest.raises(InputError, match="as_strided: storage_offset: counts from the beginning of a memory"):
        hocket.fuse(models, shared=True, backend=backend)(torch.ones(2, 2).double())
    check(made(lambda: Offset(None), 1), torch.ones(1, 2, 2).double(), shared=False)


@pytest.mark.parametrize(("name", "num_models"), covering(FUNCTIONS, [1, 3, 5]))
def test_functions_and_methods(name, num_models):
    x = torch.randn(num_models, 5, 4, dtype=torch.float64)
    check(made(lambda: Apply(FUNCTIONS[name]), num_models), x, shared=False, expect=BY_RULE, strict=True)


@pytest.mark.parametrize("name", WITHOUT_A_RULE)
def test_what_has_no_rule_says_so_and_is_right(name):
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="has no rule"):
        check(made(lambda: Apply(WITHOUT_A_RULE[name]), 3), x, shared=False, expect={"rule", "shared", "vmap", "loop"})


def test_what_has_no_rule_says_so_once():
    models = made(lambda: Apply(lambda x: torch.roll(x, 1, 0)), 2)
    array = hocket.fuse(models, backend="rule", shared=False)
    with pytest.warns(UserWarning, match="hocket.fuse: .*roll has no rule") as told:
        array(torch.randn(2, 5, 4).double())
    assert len(told) == 1
    array(torch.randn(2, 5, 4).double())
    array(torch.randn(2, 6, 4).double())  # a warning would be an error here
