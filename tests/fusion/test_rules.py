"""Every rule against independent modules: odd shapes, strides, groups, padding, train and eval."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.fusion.oracle import SIZES, assert_close, check, made
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import hocket
from hocket.fusion.rules import base, conv
from hocket.fusion.stacked import Stacked
from quick import covering


class Apply(nn.Module):
    """A function between two layers of parameters, so that gradients flow through it on both sides."""

    def __init__(self, function, width: int = 4) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return self.function(x * self.scale)


BY_RULE = {"rule", "shared"}

# name -> (make, shape of one model's input)
MODULES = {
    "linear": (partial(nn.Linear, 4, 3), (5, 4)),
    "linear without bias": (partial(nn.Linear, 4, 3, bias=False), (5, 4)),
    "linear, three axes": (partial(nn.Linear, 4, 3), (2, 5, 4)),
    "linear, five axes": (partial(nn.Linear, 4, 3), (2, 1, 3, 2, 4)),
    "linear, a vector": (partial(nn.Linear, 4, 3), (4,)),
    "linear, one output": (partial(nn.Linear, 4, 1), (1, 4)),
    "conv1d": (partial(nn.Conv1d, 4, 6, 3, stride=2, padding=1, dilation=2, groups=2), (3, 4, 11)),
    "conv1d, same": (partial(nn.Conv1d, 4, 6, 3, padding="same", dilation=2), (3, 4, 11)),
    "conv1d, reflect": (partial(nn.Conv1d, 4, 6, 3, padding=2, padding_mode="reflect"), (3, 4, 11)),
    "conv2d": (partial(nn.Conv2d, 4, 6, (3, 2), stride=(2, 1), padding=(1, 0)), (3, 4, 7, 5)),
    "conv2d, one element": (partial(nn.Conv2d, 4, 5, 1), (3, 4, 7, 5)),
    "conv2d, depthwise": (partial(nn.Conv2d, 4, 8, 3, groups=4, bias=False), (1, 4, 5, 6)),
    "conv2d, circular": (partial(nn.Conv2d, 4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 5, 6)),
    "conv2d, replicate": (partial(nn.Conv2d, 4, 6, 3, padding=1, padding_mode="replicate"), (2, 4, 5, 6)),
    "conv2d, valid": (partial(nn.Conv2d, 4, 6, (2, 3), padding="valid", groups=2, dilation=(1, 2)), (2, 4, 7, 9)),
    "conv3d, strides": (partial(nn.Conv3d, 2, 3, 2, stride=(2, 1, 3), padding=1, dilation=(1, 2, 1)), (1, 2, 5, 4, 6)),
    "conv3d": (partial(nn.Conv3d, 2, 4, (1, 2, 3), groups=2, padding=(0, 1, 1)), (2, 2, 3, 4, 5)),
    "conv_transpose1d": (partial(nn.ConvTranspose1d, 4, 6, 3, stride=2, output_padding=1, groups=2), (3, 4, 6)),
    "conv_transpose2d": (partial(nn.ConvTranspose2d, 4, 3, (3, 2), stride=(2, 1), padding=1, dilation=2), (2, 4, 5, 6)),
    "conv_transpose2d, groups": (
        partial(nn.ConvTranspose2d, 4, 6, 3, stride=3, groups=2, output_padding=(1, 2), bias=False),
        (2, 4, 3, 5),
    ),
    "conv_transpose3d, strides": (
        partial(
            nn.ConvTranspose3d, 2, 4, (2, 3, 1), stride=(2, 1, 3), groups=2, padding=(0, 1, 0), output_padding=(1, 0, 2)
        ),
        (1, 2, 3, 4, 3),
    ),
    "conv_transpose3d": (partial(nn.ConvTranspose3d, 2, 4, 2, bias=False), (2, 2, 3, 4, 3)),
    "batch_norm1d": (partial(nn.BatchNorm1d, 4), (5, 4)),
    "batch_norm1d, three axes": (partial(nn.BatchNorm1d, 4, momentum=0.3), (5, 4, 3)),
    "batch_norm2d": (partial(nn.BatchNorm2d, 4, eps=1e-3), (3, 4, 5, 2)),
    "batch_norm2d, plain": (partial(nn.BatchNorm2d, 4, affine=False), (3, 4, 5, 2)),
    "batch_norm2d, no statistics": (partial(nn.BatchNorm2d, 4, track_running_stats=False), (3, 4, 5, 2)),
    "batch_norm3d": (partial(nn.BatchNorm3d, 2), (2, 2, 3, 2, 4)),
    "layer_norm": (partial(nn.LayerNorm, 4), (2, 3, 4)),
    "layer_norm, two axes": (partial(nn.LayerNorm, (3, 4)), (2, 3, 4)),
    "layer_norm, plain": (partial(nn.LayerNorm, 4, elementwise_affine=False), (3, 4)),
    "layer_norm, no bias": (partial(nn.LayerNorm, 4, bias=False), (3, 4)),
    "rms_norm": (partial(nn.RMSNorm, 4), (2, 3, 4)),
    "group_norm": (partial(nn.GroupNorm, 2, 4), (3, 4, 5)),
    "group_norm, images": (partial(nn.GroupNorm, 4, 4), (3, 4, 5, 2)),
    "group_norm, plain": (partial(nn.GroupNorm, 2, 4, affine=False), (3, 4, 5)),
    "instance_norm1d": (partial(nn.InstanceNorm1d, 4), (3, 4, 5)),
    "instance_norm2d": (partial(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True), (3, 4, 5, 2)),
    "instance_norm3d": (partial(nn.InstanceNorm3d, 2, affine=True), (2, 2, 3, 2, 4)),
    "local_response_norm": (partial(nn.LocalResponseNorm, 3), (2, 4, 5, 3)),
    "prelu": (nn.PReLU, (3, 4, 2)),
    "prelu, channels": (partial(nn.PReLU, 4), (3, 4, 2)),
    "prelu, two axes": (partial(nn.PReLU, 4), (3, 4)),
    "upsample": (partial(nn.Upsample, scale_factor=2), (2, 3, 4)),
    "upsample, bilinear": (partial(nn.Upsample, scale_factor=2, mode="bilinear"), (2, 3, 4, 5)),
    "upsample, size": (partial(nn.Upsample, size=(7, 3), mode="bicubic", align_corners=True), (2, 3, 4, 5)),
    "pixel_shuffle": (partial(nn.PixelShuffle, 2), (2, 8, 3, 4)),
    "pixel_unshuffle": (partial(nn.PixelUnshuffle, 2), (2, 2, 4, 6)),
    "channel_shuffle": (partial(nn.ChannelShuffle, 2), (2, 4, 3, 2)),
    "upsample, nearest-exact": (partial(nn.Upsample, scale_factor=(1.5, 2), mode="nearest-exact"), (2, 3, 4, 5)),
    "upsample, trilinear": (partial(nn.Upsample, scale_factor=2, mode="trilinear"), (1, 2, 2, 3, 2)),
    "flatten": (nn.Flatten, (2, 3, 4)),
    "flatten from 0": (partial(nn.Flatten, 0), (2, 3, 4)),
    "flatten, negative": (partial(nn.Flatten, -2, -1), (2, 3, 4)),
    "unflatten": (partial(nn.Unflatten, 1, (2, 2)), (3, 4)),
    "softmax": (partial(nn.Softmax, 1), (3, 4, 2)),
    "log_softmax": (partial(nn.LogSoftmax, -1), (3, 4)),
    "softmin": (partial(nn.Softmin, 0), (3, 4)),
    "softmax2d": (nn.Softmax2d, (2, 3, 4, 2)),
    "zero_pad": (partial(nn.ZeroPad2d, (1, 0, 2, 1)), (2, 3, 4, 5)),
    "reflection_pad": (partial(nn.ReflectionPad2d, 1), (2, 3, 4, 5)),
    "unfold": (partial(nn.Unfold, (2, 2)), (2, 3, 4, 5)),
    "fold": (partial(nn.Fold, (3, 4), (2, 2)), (2, 8, 6)),
    "glu": (partial(nn.GLU, 1), (3, 4)),
    "max_pool1d": (partial(nn.MaxPool1d, 2, padding=1), (2, 3, 7)),
    "max_pool2d": (partial(nn.MaxPool2d, 3, stride=2, ceil_mode=True), (2, 3, 6, 7)),
    "max_pool2d, indices": (partial(nn.MaxPool2d, 2, return_indices=True), (2, 3, 6, 7)),
    "max_pool3d": (partial(nn.MaxPool3d, 2), (2, 3, 4, 4, 5)),
    "avg_pool1d": (partial(nn.AvgPool1d, 2), (2, 3, 7)),
    "avg_pool2d": (partial(nn.AvgPool2d, 3, padding=1, count_include_pad=False), (2, 3, 6, 7)),
    "avg_pool3d": (partial(nn.AvgPool3d, 2), (2, 3, 4, 4, 5)),
    "adaptive_avg_pool1d": (partial(nn.AdaptiveAvgPool1d, 3), (2, 3, 7)),
    "adaptive_avg_pool2d": (partial(nn.AdaptiveAvgPool2d, (2, None)), (2, 3, 6, 7)),
    "adaptive_avg_pool3d": (partial(nn.AdaptiveAvgPool3d, 2), (2, 3, 4, 4, 5)),
    "adaptive_max_pool1d": (partial(nn.AdaptiveMaxPool1d, 3), (2, 3, 7)),
    "adaptive_max_pool2d": (partial(nn.AdaptiveMaxPool2d, 2), (2, 3, 6, 7)),
    "adaptive_max_pool3d": (partial(nn.AdaptiveMaxPool3d, (2, 1, 3)), (2, 3, 4, 4, 5)),
    "max_pool1d, dilated": (partial(nn.MaxPool1d, 3, stride=1, dilation=2), (2, 3, 9)),
    "avg_pool2d, divisor": (partial(nn.AvgPool2d, 2, ceil_mode=True, divisor_override=3), (2, 3, 5, 7)),
    "lp_pool1d": (partial(nn.LPPool1d, 3, 2), (2, 3, 7)),
    "lp_pool2d": (partial(nn.LPPool2d, 2, 2), (2, 3, 6, 7)),
}


@pytest.mark.parametrize(("name", "num_models", "shared"), covering(MODULES, SIZES, [False, True]))
def test_modules(name, num_models, shared):
    make, shape = MODULES[name]
    x = torch.randn(shape if shared else (num_models, *shape), dtype=torch.float64)
    check(made(make, num_models), x, shared=shared, expect=BY_RULE, strict=True)


DROPOUT = {name: (getattr(nn, name), (2, 4, 3, 3)) for name in ("Dropout", "Dropout2d", "AlphaDropout")}


@pytest.mark.parametrize("name", [*MODULES, *DROPOUT])
def test_modules_in_eval(name):
    make, shape = (MODULES | DROPOUT)[name]
    x = torch.randn((3, *shape), dtype=torch.float64)
    check(made(make, 3, training=False), x, shared=False, expect=BY_RULE, strict=True)


@pytest.mark.parametrize(("name", "shared"), covering(MODULES, [False, True]))
def test_modules_take_inputs_of_any_strides(name, shared):
    """Elements with gaps between them, and axes in reverse order in memory."""
    make, shape = MODULES[name]
    whole = shape if shared else (3, *shape)
    gaps = torch.randn((*whole, 2), dtype=torch.float64)[..., 0]
    backwards = torch.randn(whole[::-1], dtype=torch.float64).permute(*reversed(range(len(whole))))
    for x in (gaps, backwards):
        check(made(make, 3), x, shared=shared, steps=1, strict=True)


@pytest.mark.parametrize("name", MODULES)
def test_the_oracle_sees_any_rule_that_is_broken(name, monkeypatch):
    """The last model's output a billionth too large, whichever rules the module takes."""

    def broken(right):
        def rule(site, *args, **kwargs):
            out = right(site, *args, **kwargs)
            if out is not NotImplemented:
                for each in pytree.tree_leaves(out):
                    if isinstance(each, Stacked) and each.tensor.is_floating_point():
                        each.tensor.data[-1] *= 1 + 1e-9
            return out

        return rule

    for rules in (base._OPS, base._MODULES):
        for key, right in rules.items():
            monkeypatch.setitem(rules, key, broken(right))
    make, shape = MODULES[name]
    with pytest.raises(AssertionError, match="model 2"):
        check(made(make, 3), torch.randn((3, *shape), dtype=torch.float64), shared=False)


# fmt: off
ACTIVATIONS = [
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid",
    "Mish", "ReLU", "ReLU6", "SELU", "Sigmoid", "SiLU", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink",
]
# fmt: on


@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, num_models):
    models = made(lambda: nn.Sequential(nn.Linear(4, 3), getattr(nn, name)()), num_models)
    x = torch.randn(num_models, 5, 4, dtype=torch.float64)
    check(models, x, shared=False, expect=BY_RULE, strict=True)


FUNCTIONS = {
    "add a tensor of lower rank": lambda x: x + x[0],
    "add its own scale": lambda x: x + x.mean(0) * 2,
    "shared on the left": lambda x: torch.arange(4, dtype=x.dtype) - x,
    "shared of higher rank": lambda x: torch.ones(2, 1, 1, dtype=x.dtype) * x,
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
    "pad": lambda x: F.pad(x, (1, 2)),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2),
    "max_pool": lambda x: F.max_pool2d(x[None, None], 2),
    "avg_pool": lambda x: F.avg_pool1d(x[None], 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x[None, None], 1),
    "one_of_two": lambda x: x if x.dim() == 2 else x[0],
    "functional linear": lambda x: F.linear(x, torch.ones(2, 4, dtype=x.dtype)),
}
WITHOUT_A_RULE = {
    "outer of vectors": lambda x: torch.outer(x[0], x[1]),
    "advanced index": lambda x: x[:, [0, 2]],
    "boolean diagonal": lambda x: torch.tril(x),
    "norm of all": lambda x: x.norm(),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "matrix and vector": lambda x: x @ x[0],
    "roll": lambda x: x.roll(1, 0),
    "einsum without arrow": lambda x: torch.einsum("ij,jk", x, x.t()),
}


@pytest.mark.parametrize(("name", "num_models"), covering(FUNCTIONS, [1, 3, 5]))
def test_functions_and_methods(name, num_models):
    x = torch.randn(num_models, 5, 4, dtype=torch.float64)
    check(made(lambda: Apply(FUNCTIONS[name]), num_models), x, shared=False, expect=BY_RULE, strict=True)


@pytest.mark.parametrize("name", WITHOUT_A_RULE)
def test_what_has_no_rule_says_so_and_is_right(name):
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="has no rule"):
        check(made(lambda: Apply(WITHOUT_A_RULE[name]), 3), x, shared=False, expect={"rule", "shared", "vmap", "loop"})


# One example without a batch: the rules take batches.
ONE_EXAMPLE = {
    "conv2d": (partial(nn.Conv2d, 4, 6, 3), (4, 7, 5)),
    "conv_transpose1d": (partial(nn.ConvTranspose1d, 4, 6, 3, dilation=2, padding=1), (4, 6)),
    "instance_norm1d": (partial(nn.InstanceNorm1d, 4, affine=True), (4, 5)),
    "max_pool2d": (partial(nn.MaxPool2d, (3, 2), padding=(1, 0)), (3, 6, 7)),
    "lstm": (partial(nn.LSTM, 4, 3, num_layers=2, bidirectional=True), (6, 4)),
    "gru": (partial(nn.GRU, 4, 3, batch_first=True), (6, 4)),
    "attention": (lambda: Attend({}, lambda m, q, k: m(q, q, q)), (5, 8)),
}


@pytest.mark.filterwarnings("ignore:hocket.fuse")
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ONE_EXAMPLE)
def test_one_example_without_a_batch(name, shared):
    make, shape = ONE_EXAMPLE[name]
    x = torch.randn(shape if shared else (3, *shape)).double()
    check(made(make, 3), *([x, x] if name == "attention" else [x]), shared=shared)


def test_what_has_no_rule_says_so_once():
    models = made(lambda: Apply(lambda x: torch.roll(x, 1, 0)), 2)
    array = hocket.fuse(models, backend="rule", shared=False)
    with pytest.warns(UserWarning, match="hocket.fuse: .*roll has no rule") as told:
        array(torch.randn(2, 5, 4).double())
    assert len(told) == 1
    array(torch.randn(2, 5, 4).double())
    array(torch.randn(2, 6, 4).double())  # a warning would be an error here


@pytest.mark.parametrize("backend", ["vmap", "loop", "auto"])
@pytest.mark.parametrize("name", ["linear", "conv2d", "batch_norm2d", "layer_norm", "max_pool2d", "prelu"])
def test_other_backends(name, backend):
    make, shape = MODULES[name]
    x = torch.randn((3, *shape), dtype=torch.float64)
    check(made(make, 3), x, shared=False, backend=backend)


class Pair(nn.Module):
    """A module of two inputs."""

    def __init__(self, module) -> None:
        super().__init__()
        self.module = module

    def forward(self, a, b):
        return self.module(a, b)


@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_bilinear(num_models, shared, bias):
    models = made(lambda: Pair(nn.Bilinear(3, 4, 2, bias=bias)), num_models)
    lead = () if shared else (num_models,)
    a, b = torch.randn(*lead, 5, 3).double(), torch.randn(*lead, 5, 4).double()
    check(models, a, b, shared=shared, strict=True)


@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}], ids=str
)
def test_embedding(num_models, shared, options):
    models = made(lambda: nn.Embedding(6, 3, **options), num_models)
    tokens = torch.randint(0, 6, (4, 5) if shared else (num_models, 4, 5))
    check(models, tokens, shared=shared, strict=True)


@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("shared", [False, True])
def test_embedding_bag(mode, shared, num_models):
    models = made(lambda: nn.EmbeddingBag(6, 3, mode=mode), num_models)
    tokens = torch.randint(0, 6, (4, 5) if shared else (num_models, 4, 5))
    check(models, tokens, shared=shared, strict=True)


class Bags(nn.Module):
    """Bags of other lengths, given by where they begin, or with weights."""

    def __init__(self, weighted: bool, **options) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 3, **options)
        self.weighted = weighted

    def forward(self, tokens):
        if self.weighted:
            return self.bag(tokens, per_sample_weights=self.bag.weight[tokens, 0])
        return self.bag(tokens.flatten(), torch.tensor([0, 2, 7]))


@pytest.mark.filterwarnings("ignore:hocket.fuse")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("weighted", "options"),
    [(True, {"mode": "sum"}), (False, {}), (False, {"mode": "max"}), (False, {"padding_idx": 1})],
    ids=str,
)
def test_bags_that_are_uneven_or_weighted(weighted, options, shared):
    tokens = torch.randint(0, 6, (4, 5) if shared else (3, 4, 5))
    check(made(lambda: Bags(weighted, **options), 3), tokens, shared=shared)


def test_an_index_beyond_the_table_reads_no_neighbours_row():
    array = hocket.fuse([nn.Embedding(4, 2), nn.Embedding(4, 2)])
    with pytest.raises(hocket.errors.InputError, match="indices from 0 to 3"):
        array(torch.tensor([[0, 4]]))


RECURRENT = {
    "lstm": lambda: nn.LSTM(4, 3),
    "lstm, deep": lambda: nn.LSTM(4, 3, num_layers=2, batch_first=True),
    "lstm, both ways": lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True, bias=False),
    "lstm, projected": lambda: nn.LSTM(4, 5, proj_size=2, num_layers=2),
    "lstm, projected both ways": lambda: nn.LSTM(4, 5, proj_size=2, bidirectional=True, batch_first=True),
    "gru": lambda: nn.GRU(4, 3, batch_first=True),
    "gru, without bias": lambda: nn.GRU(4, 3, num_layers=3, bias=False),
    "gru, both ways": lambda: nn.GRU(4, 3, num_layers=2, bidirectional=True),
    "rnn": lambda: nn.RNN(4, 3),
    "rnn, relu": lambda: nn.RNN(4, 3, nonlinearity="relu", num_layers=2),
}


@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent(name, num_models, shared):
    x = torch.randn((6, 5, 4) if shared else (num_models, 6, 5, 4)).double()
    check(made(RECURRENT[name], num_models), x, shared=shared, strict=True, expect=BY_RULE)


class Started(nn.Module):
    """A recurrent layer that is given its first state."""

    def __init__(self, layer, pair: bool) -> None:
        super().__init__()
        self.layer, self.pair = layer, pair

    def forward(self, x, h, c):
        return self.layer(x, (h, c) if self.pair else h)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_with_a_first_state(kind):
    models = made(lambda: Started(kind(4, 3), kind is nn.LSTM), 2)
    x, h, c = (torch.randn(2, *shape).double() for shape in ((6, 5, 4), (1, 5, 3), (1, 5, 3)))
    check(models, x, h, c, shared=False, strict=True)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(cell):
    check(made(lambda: cell(4, 3), 3), torch.randn(3, 5, 4).double(), shared=False, strict=True, expect=BY_RULE)


class Attend(nn.Module):
    """Attention of one input to itself or of one to another."""

    def __init__(self, options, call) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(**{"embed_dim": 8, "num_heads": 2} | options)
        self.call = call

    def forward(self, query, memory):
        return self.call(self.attention, query, memory)


ATTENTION = {
    "to itself": ({}, lambda m, q, k: m(q, q, q)),
    "batch first": ({"batch_first": True}, lambda m, q, k: m(q, q, q, need_weights=False)[0]),
    "to another": ({"bias": False}, lambda m, q, k: m(q, k, k)),
    "other widths": ({"kdim": 6, "vdim": 6}, lambda m, q, k: m(q, k[..., :6], k[..., :6])),
    "a mask": (
        {},
        lambda m, q, k: m(q, q, q, attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1), need_weights=False)[0],
    ),
    "a mask to be added": ({}, lambda m, q, k: m(q, q, q, attn_mask=torch.arange(25.0).view(5, 5).double())),
    "padding": (
        {"batch_first": True},
        lambda m, q, k: m(q, k, k, key_padding_mask=torch.arange(12).view(2, 6) % 3 == 1, average_attn_weights=False),
    ),
}


@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, num_models):
    options, call = ATTENTION[name]
    first = options.get("batch_first", False)
    q = torch.randn(num_models, *((2, 5, 8) if first else (5, 2, 8))).double()
    k = torch.randn(num_models, *((2, 6, 8) if first else (6, 2, 8))).double()
    check(made(lambda: Attend(options, call), num_models), q, k, shared=False, strict=True, expect=BY_RULE)


@pytest.mark.filterwarnings("ignore:hocket.fuse")
def test_attention_with_keys_and_values_of_its_own():
    options, x = {"add_bias_kv": True, "add_zero_attn": True}, torch.randn(3, 5, 2, 8).double()
    check(made(lambda: Attend(options, lambda m, q, k: m(q, k, k)), 3), x, x, shared=False)


@pytest.mark.filterwarnings("ignore:hocket.fuse")
def test_a_hint_of_causal_attention_without_a_mask_is_refused_as_by_torch():
    array = hocket.fuse(made(lambda: Attend({}, lambda m, q, k: m(q, k, k, is_causal=True)), 2), shared=True)
    with pytest.raises(hocket.errors.InputError, match=r"layer attention.*Need attn_mask"):
        array(torch.ones(5, 2, 8).double(), torch.ones(5, 2, 8).double())


class Scaled(nn.Module):
    """Scaled dot-product attention as a function."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.options = options
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, q, k):
        return F.scaled_dot_product_attention(q * self.scale, k, k * self.scale, **self.options)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()}],
    ids=["plain", "causal", "scale", "mask"],
)
@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("shape", [(2, 5, 4), (2, 3, 5, 4)])
def test_scaled_dot_product_attention(options, shape, num_models):
    q, k = torch.randn(num_models, *shape).double(), torch.randn(num_models, *shape).double()
    check(made(lambda: Scaled(**options), num_models), q, k, shared=False, strict=True)


TRANSFORMERS = {
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0),
    "encoder layer, norm first": lambda: nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.0, norm_first=True, activation="gelu", batch_first=True
    ),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0), 2, norm=nn.LayerNorm(8), enable_nested_tensor=False
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformer_encoders(name, num_models, training):
    models = made(TRANSFORMERS[name], num_models, training=training)
    check(models, torch.randn(num_models, 5, 2, 8).double(), shared=False, strict=True, expect=BY_RULE)


DECODERS = {
    "layer": lambda: nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0),
    "layer, norm first": lambda: nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, norm_first=True, bias=False),
    "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0), 2),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize(("name", "training"), covering(DECODERS, [True, False]))
@pytest.mark.parametrize("num_models", SIZES)
def test_transformer_decoders(name, num_models, training):
    tgt, memory = torch.randn(num_models, 5, 3, 8).double(), torch.randn(num_models, 5, 3, 8).double()
    models = made(DECODERS[name], num_models, training=training)
    check(models, tgt, memory, shared=False, strict=True, expect=BY_RULE)


class Masked(nn.Module):
    """A decoder as language models call it: a causal mask, and padded memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, tgt, memory):
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=tgt.dtype)
        padding = torch.arange(memory.shape[1]).expand(memory.shape[0], -1) >= 3
        return self.layer(tgt, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding)


def test_a_decoder_with_masks():
    tgt, memory = torch.randn(3, 2, 5, 8).double(), torch.randn(3, 2, 4, 8).double()
    check(made(Masked, 3), tgt, memory, shared=False, strict=True)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_convolution_one_element_wide_as_a_product(shared, bias):
    """Single precision goes this way; here it is compared in double precision, op against op."""
    torch.manual_seed(0)
    x = torch.randn(*(() if shared else (3,)), 2, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 7, 4, 1, 1, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(3, 7, dtype=torch.float64, requires_grad=True) if bias else None
    given = [x, weight, *([offset] if bias else [])]
    out = conv._product(3, x if shared else Stacked(x), Stacked(weight), Stacked(offset) if bias else None).tensor
    plain = torch.stack(
        [
            torch.nn.functional.conv2d(x if shared else x[i], weight[i], None if offset is None else offset[i])
            for i in range(3)
        ]
    )
    assert_close(out, plain, "output")
    by = torch.randn_like(plain)
    for one, two in zip(torch.autograd.grad(out, given, by), torch.autograd.grad(plain, given, by), strict=True):
        assert_close(one, two, "gradient")
