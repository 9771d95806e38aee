"""Every rule against independent modules: odd shapes, strides, groups, padding, train and eval."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.fusion.oracle import SIZES, assert_close, check, made
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils import _pytree as pytree

from fusion.rules.layers import BY_RULE, MODULES, Attend
from hocket.fusion.rules import base, conv
from hocket.fusion.stacked import Stacked
from quick import covering


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


class Doubled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.scale


normed = parametrizations.weight_norm
PARAMETRIZED = {
    "weight norm": lambda: normed(nn.Linear(4, 3)),
    "weight norm of all": lambda: normed(nn.Linear(4, 3), dim=None),
    "weight norm of images": lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), normed(nn.Conv2d(1, 3, 2))),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "own": lambda: parametrize.register_parametrization(nn.Linear(4, 3), "bias", Doubled()),
}


@pytest.mark.filterwarnings("ignore:hocket.fuse")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_layers(name, shared):
    def make():
        return nn.Sequential(PARAMETRIZED[name]())

    x = torch.randn((5, 4) if shared else (3, 5, 4), dtype=torch.float64)
    array, new = check(made(make, 3), x, shared=shared), made(make, 2, training=False)[1]
    array.eval().refill(1, new)
    assert_close(array(x)[1].detach(), new(x if shared else x[1]).detach(), "a model that comes into a slot")


class Norm(nn.BatchNorm1d): ...


class Attention(nn.MultiheadAttention): ...


class Recurrent(nn.GRU): ...


class Own(nn.Module):
    """Subclasses of torch's layers, and the function behind one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(4)
        self.attention = Attention(4, 2, batch_first=True)
        self.recurrent = Recurrent(4, 3)

    def forward(self, x):
        x = self.norm(functional.instance_norm(x)).transpose(1, 2)
        return self.recurrent(self.attention(x, x, x)[0])[0]


@pytest.mark.parametrize("shared", [False, True])
def test_subclasses_and_functions_fuse_as_layers_do(shared):
    x = torch.randn((5, 4, 6) if shared else (3, 5, 4, 6), dtype=torch.float64)
    check(made(Own, 3), x, shared=shared, strict=True, expect=BY_RULE)


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

    for key, right in base._OPS.items():
        monkeypatch.setitem(base._OPS, key, broken(right))
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
