"""Plain models one by one, as they are and with convolutions' images channels last, against torch in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fusion.nets import NETS, VANISHING, Residual
from tests.fusion.oracle import assert_close, assert_each, check, made
from tests.fusion.prefer import prefer, winner
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.fusion import calls, executor
from hocket.fusion.executor import CHANNELS_LAST
from quick import covering

D = torch.float64
NONE: frozenset[str] = frozenset()


class Keyword(nn.Module):
    """Convolutions whose arguments are all named."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.back = nn.Parameter(torch.randn(4, 2, 3, 3))

    def forward(self, x):
        x = F.conv2d(weight=self.weight, input=x, stride=2, padding=1)
        return F.conv_transpose2d(input=x, weight=self.back).relu()


class Shapes(nn.Module):
    """Reads of an image after a convolution: a reshape, a permutation, a slice, a sum, an argmax, a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        x = self.conv(x)
        y = x.reshape(x.size(0), 2, -1)
        z = x.permute(0, 2, 3, 1).flatten(1)
        best = x.argmax(1, keepdim=True).to(x.dtype)
        return y, z, x[:, 1:, ::2], x.sum((2, 3)), best, x


def seq(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[layer() for layer in layers])


conv = nn.Conv2d
# name -> (make, one model's input)
IMAGES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv2d": (lambda: conv(3, 4, 3), (2, 3, 6, 5)),
    "of one channel": (lambda: conv(1, 4, 3), (2, 1, 6, 5)),
    "one wide": (lambda: conv(3, 4, 1), (2, 3, 6, 5)),
    "images of one pixel": (lambda: conv(3, 4, 3, padding=1), (2, 3, 1, 1)),
    "a batch of one": (seq(lambda: conv(3, 4, 3), nn.ReLU, lambda: conv(4, 2, 2)), (1, 3, 6, 5)),
    "an empty batch": (lambda: conv(3, 4, 3), (0, 3, 6, 5)),
    "conv3d": (seq(lambda: nn.Conv3d(2, 4, 2), nn.ReLU, lambda: nn.Conv3d(4, 2, 2)), (2, 2, 4, 5, 6)),
    "conv1d beside": (seq(lambda: conv(3, 4, 3), lambda: nn.Flatten(2), lambda: nn.Conv1d(4, 2, 3)), (2, 3, 6, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), (2, 3, 4, 5)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), (2, 2, 3, 4, 3)),
    "grouped": (seq(lambda: conv(4, 6, 3, groups=2), nn.ReLU, lambda: conv(6, 4, 1)), (2, 4, 6, 5)),
    "depthwise": (seq(lambda: conv(4, 4, 3, groups=4), lambda: conv(4, 8, 3, groups=4)), (2, 4, 7, 6)),
    "transposed, grouped": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 4, 5)),
    "strided, dilated, reflecting": (lambda: conv(3, 4, 3, 2, 2, 2, padding_mode="reflect"), (2, 3, 8, 7)),
    "without a batch": (seq(lambda: conv(3, 4, 3), nn.ReLU, lambda: conv(4, 2, 2)), (3, 6, 5)),
    "flatten": (seq(lambda: conv(3, 4, 3), nn.Flatten, lambda: nn.Linear(48, 3)), (2, 3, 6, 5)),
    "relu in place": (seq(lambda: conv(3, 4, 3), lambda: nn.ReLU(inplace=True), lambda: conv(4, 2, 2)), (2, 3, 6, 5)),
    "norms": (
        seq(
            lambda: conv(3, 4, 3), lambda: nn.BatchNorm2d(4), nn.ReLU, lambda: nn.GroupNorm(2, 4), lambda: conv(4, 2, 2)
        ),
        (3, 3, 6, 5),
    ),
    "pools": (
        seq(lambda: conv(3, 4, 3), lambda: nn.MaxPool2d(2), nn.GELU, lambda: conv(4, 4, 1), lambda: nn.AvgPool2d(2)),
        (2, 3, 8, 7),
    ),
    "resized and shuffled": (
        seq(
            lambda: conv(3, 4, 3),
            lambda: nn.Upsample(scale_factor=2),
            lambda: nn.PixelShuffle(2),
            lambda: conv(1, 2, 3),
        ),
        (2, 3, 6, 5),
    ),
    "keywords": (Keyword, (2, 3, 6, 5)),
    "what looks at shapes": (Shapes, (2, 3, 6, 5)),
}
WAYS = ["1 at a time", "1 at a time, channels last"]


@pytest.mark.filterwarnings("ignore:hocket.fuse")  # a convolution without a batch has no rule
@pytest.mark.parametrize(
    ("name", "num_models", "shared", "way"),
    [*covering(IMAGES, [3], [False, True], WAYS), *((name, 1, False, WAYS[1]) for name in IMAGES)],
)
def test_convolutions(name, num_models, shared, way, monkeypatch):
    prefer(monkeypatch, forward=way)
    make, shape = IMAGES[name]
    x = torch.randn(*(() if shared else (num_models,)), *shape, dtype=D)
    array = check(made(make, num_models), x, shared=shared, backend="auto")
    assert winner(array) == way


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("num_models", [2, 4])
def test_a_net_with_running_statistics(num_models, training, way, monkeypatch):
    prefer(monkeypatch, forward=way)
    models = made(Residual, num_models, training=training)
    vanishing = VANISHING["residual"] if training else NONE
    x = torch.randn(num_models, 4, 3, 6, 6, dtype=D)
    array = check(models, x, shared=False, backend="auto", steps=3, vanishing=vanishing)
    assert winner(array) == way


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strides", ["transposed", "sliced", "expanded", "channels last"])
def test_inputs_that_lie_otherwise(strides, way, monkeypatch):
    prefer(monkeypatch, forward=way)
    x = {
        "transposed": lambda: torch.randn(2, 3, 5, 6, dtype=D).transpose(2, 3),
        "sliced": lambda: torch.randn(4, 6, 12, 10, dtype=D)[::2, 1::2, ::2, ::2],
        "expanded": lambda: torch.randn(2, 1, 6, 5, dtype=D).expand(2, 3, 6, 5),
        "channels last": lambda: torch.randn(2, 3, 6, 5, dtype=D).to(memory_format=torch.channels_last),
    }[strides]()
    assert not x.is_contiguous()
    models = made(IMAGES["relu in place"][0], 3)
    array = hocket.fuse(copy.deepcopy(models), shared=True)
    for _ in range(2):
        out = array(x)
    assert winner(array) == way
    assert_each(out, [model(x) for model in models])


@pytest.mark.parametrize("name", [name for name in NETS if name != "residual"])
def test_nets_without_images_have_no_such_contender(name, monkeypatch):
    prefer(monkeypatch, forward="1 at a time, channels last")
    make, given = NETS[name]
    array = check(made(make, 3), given(), shared=True, backend="auto", vanishing=VANISHING.get(name, NONE))
    assert not any(plan.channels_last for choice in array.choices for plan in choice.times_us)
    assert winner(array) != "1 at a time, channels last"


class Views(nn.Module):
    """Its view needs an image that lies plane by plane."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(48, 5)

    def forward(self, x):
        x = self.conv(x)
        return self.head(x.view(x.size(0), -1))


@pytest.mark.parametrize("num_models", [1, 3])
def test_a_view_that_cannot_be_leaves_the_contest_and_not_the_call(num_models, monkeypatch):
    monkeypatch.setattr(calls, "RECORDING", math.inf)  # so that all have a turn
    tried, right = [], executor._channels_last
    monkeypatch.setattr(executor, "_channels_last", lambda *given: tried.append(given) or right(*given))
    models = made(Views, num_models)
    x, y = torch.randn(num_models, 4, 3, 6, 5, dtype=D), torch.randint(0, 5, (4,))
    array = check(models, x, shared=False, backend="auto", steps=10)
    assert {str(plan) for plan in array.choices[-1].times_us} == {"1 at a time", f"{num_models} at a time"}
    assert tried
    if num_models > 1:
        for _ in range(10):
            array.zero_grad()
            array.losses(F.cross_entropy, x, y).backward()
        assert {str(plan) for plan in array.choices[-1].times_us} == {"3 at a time", "1 at a time with backward"}
        for index, model in enumerate(models):
            model.zero_grad()
            F.cross_entropy(model(x[index]), y).backward()
            assert_close(array._store.tensor("conv.weight").tensor.grad[index], model.conv.weight.grad, "conv.weight")


def test_a_model_that_is_faster_than_it_was_recorded_keeps_its_usual_plan(monkeypatch):
    monkeypatch.setattr(calls, "RECORDING", 1e-9)  # so that any call is
    array = check(made(Views, 1), torch.randn(1, 4, 3, 6, 5, dtype=D), shared=False, backend="auto", steps=10)
    assert str(array.choices[-1].winner) == "1 at a time"
    assert array.report().startswith("1 models, 3 ops: 3 by model; chosen: 1 at a time")


@pytest.mark.parametrize("num_models", [1, 3])
@pytest.mark.parametrize(("layer", "size"), [(nn.Conv2d, (6, 5)), (nn.Conv3d, (6, 5, 4))])
def test_what_comes_out_lies_as_usual(layer, size, num_models, monkeypatch):
    """Or a loss function's view would fail, which one that was there when both were timed did not have."""
    prefer(monkeypatch, "1 at a time with backward, channels last", "1 at a time, channels last")
    models = made(seq(lambda: layer(3, 4, 3), nn.ReLU), num_models)
    array = hocket.fuse(copy.deepcopy(models), shared=True)
    x = torch.randn(2, 3, *size, dtype=D)
    for _ in range(2):
        out = array(x)
    assert winner(array) == "1 at a time, channels last"
    assert out.is_contiguous()
    if num_models == 1:
        return
    views = [False]

    def fn(out):
        out = out.view(-1) if views[0] else out
        return out.square().sum()

    array.losses(fn, x)
    assert winner(array) == "1 at a time with backward, channels last"
    views[0] = True
    assert_each(array.losses(fn, x), [fn(model(x)) for model in models])


@pytest.mark.parametrize("op", CHANNELS_LAST)
def test_the_images_are_channels_last_and_a_fault_is_caught(op, monkeypatch):
    """The op sees what it is promised; and what it computes counts, or these tests would see nothing."""
    dims = 4 if op.endswith("2d") else 5
    seen = []
    right = executor._channels_last

    def watching(function, layout):
        def watched(input, *args, **kwargs):
            seen.append(input.is_contiguous(memory_format=layout))
            return function(input, *args, **kwargs) * (1 + 1e-9)

        return right(watched, layout)

    monkeypatch.setattr(executor, "_channels_last", watching)
    prefer(monkeypatch, forward="1 at a time, channels last")
    layer: Any = {"conv2d": nn.Conv2d, "conv3d": nn.Conv3d}.get(
        op, nn.ConvTranspose2d if dims == 4 else nn.ConvTranspose3d
    )
    with pytest.raises(AssertionError, match="output 0 of model 0"):
        check(
            made(lambda: layer(3, 4, 2), 2), torch.randn(2, 3, *[4] * (dims - 2), dtype=D), shared=True, backend="auto"
        )
    assert seen
    assert all(seen)


class Tokens(nn.Module):
    """An image of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, tokens):
        return self.conv(self.table(tokens).permute(0, 3, 1, 2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_models", [1, 3])
def test_errors_name_the_layer(num_models, way, monkeypatch):
    prefer(monkeypatch, forward=way)
    array = hocket.fuse(made(Tokens, num_models), shared=True)
    tokens = torch.randint(0, 5, (2, 6, 5))
    for _ in range(3):
        array(tokens)
    assert winner(array) == way
    with pytest.raises(hocket.errors.InputError, match="layer table: embedding: index out of range"):
        array(tokens + 3)


@pytest.mark.parametrize("shape", [(2, 1, 6, 5), (2, 3, 1, 1)], ids=["one channel", "one pixel"])
def test_images_that_lie_both_ways_go_on_channels_last(shape):
    """An image of one channel is contiguous in either layout; what came out of a convolution was in the wrong one."""
    weight = torch.randn(shape[1], 4, 3, 3)
    out = executor._channels_last(F.conv_transpose2d, torch.channels_last)(torch.randn(shape), weight)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert not out.is_contiguous()
