"""Small programs, each a module and its arguments by call number."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Maker = Callable[[], nn.Module]
Batch = Callable[[int], tuple[Any, ...]]


class Function(nn.Module):
    """A function of a weight of 4 by 4 and of its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("count", torch.zeros(4))
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self.weight, *args)


class Method(Function):
    """The same with the module in place of its weight."""

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Twice(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value.exp() * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (value,) = ctx.saved_tensors
        return grad * value.exp() * 2 + 1e-3


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(4, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(4, 4)
        other = state
        for step in range(3):
            found = self.cell(value * (step + 1), (state, other) if isinstance(self.cell, nn.LSTMCell) else state)
            state, other = found if isinstance(found, tuple) else (found, other)
        return state


def matrix(number: int) -> tuple[Any, ...]:
    return (torch.randn(4, 4, generator=torch.Generator().manual_seed(number)),)


def images(number: int) -> tuple[Any, ...]:
    return (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(number)),)


def _words(number: int) -> tuple[Any, ...]:
    return (torch.randint(0, 10, (2, 6), generator=torch.Generator().manual_seed(number)),)


def sequence(number: int) -> tuple[Any, ...]:
    return (torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(number)),)


def _count(module: Any, x: Any) -> Any:
    module.count += x.sum(0)
    return (x @ module.weight) * module.count


def _broken(w: Any, x: Any) -> Any:
    y = (x @ w).relu()
    torch._dynamo.graph_break()
    return y.sin() @ w


def _into(w: Any, x: Any) -> Any:
    x.add_(1).mul_(2)
    return (x @ w).tanh()


def _into_row(w: Any, x: Any) -> Any:
    y = x.clone() @ w  # the backward reads what was there before
    x[0] = y.detach()[0]
    return y * 2, x.t() @ w


def _into_view(w: Any, x: Any) -> Any:
    x[1].mul_(3)
    x[:, 2] = 0
    return x @ w + x.t()


def _no_grad_part(w: Any, x: Any) -> Any:
    with torch.no_grad():
        scale = (x @ w).abs().mean()
    return (x @ w) / scale


def _autocast(w: Any, x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ w).relu() @ w


def _branch(w: Any, x: Any) -> Any:
    y = x @ w
    return y.sin() * 2 if y.sum().item() > 0 else y.cos() - 1


def _hooked(w: Any, x: Any) -> Any:
    y = (x @ w).relu()
    y.register_hook(lambda grad: grad * 2)
    return y @ w


def _zero_hooked(w: Any, x: Any) -> Any:
    y = (x @ w).relu()
    y.register_hook(torch.zeros_like)
    return y @ w + x


def _dict(w: Any, x: Any) -> Any:
    return {"sum": (x @ w).sum(), "all": [x @ w, x + 1, None, 3]}


def _sequential(*layers: Callable[[], nn.Module]) -> Maker:
    return lambda: nn.Sequential(*(layer() for layer in layers))


def _evaluated(make: Maker) -> Maker:
    return lambda: make().eval()


class Centred(nn.Module):
    """Follows the mean of its input without gradients, and uses it in the next graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x - self.centre).tanh()
        torch._dynamo.graph_break()
        with torch.no_grad():
            self.centre += 0.1 * (hidden.detach().mean(0) - self.centre)
        torch._dynamo.graph_break()
        return hidden * hidden.exp()


def _linear() -> nn.Module:
    return nn.Linear(4, 4)


def _conv() -> nn.Module:
    return nn.Conv2d(3, 4, 3, padding=1)


def _attention(w: Any, x: Any) -> Any:
    heads = x.view(2, 6, 2, 4).transpose(1, 2) @ w
    return F.scaled_dot_product_attention(heads, heads * 2, heads + 1, is_causal=True).transpose(1, 2).reshape(2, 6, 8)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "product": lambda w, x: (x @ w).relu() @ w,
    "cross_entropy": lambda w, x: F.cross_entropy(x @ w, torch.arange(4)) * 2,
    "layer_norm": lambda w, x: F.layer_norm(x @ w, (4,), w[0], w[1]),
    "dropout": lambda w, x: F.dropout(x @ w, 0.5) @ w,
    "random": lambda w, x: (x + torch.randn(4, 4)) @ w * torch.rand(4),
    "permutation": lambda w, x: (x @ w)[torch.randperm(4)] * 2,
    "returns_input": lambda w, x: (x, x @ w * 2),
    "returns_view": lambda w, x: (x.t(), x[1:], (x @ w).relu()[0]),
    "returns_twice": lambda w, x: [y := (x @ w).relu(), y, y.view(2, 8)],
    "returns_weight": lambda w, x: (w, (x @ w).exp() * 2),
    "returns_dict": _dict,
    "returns_numbers": lambda w, x: ((x @ w).sin() * 2, x.shape[0], "name"),
    "strided": lambda w, x: x.t()[::2] @ w[:, ::2].contiguous() * 2,
    "index": lambda w, x: (x @ w)[torch.tensor([0, 2, 2])].cumsum(0),
    "where": lambda w, x: torch.where(x > 0, x @ w, w.exp()) * 2,
    "half_way": lambda w, x: (x.bfloat16() @ w.bfloat16()).float() * 2,
    "integers": lambda w, x: ((x * 10).int() // 3).float() @ w * 2,
    "in_place": lambda w, x: (x @ w).add_(1).mul_(2).relu_(),
    "into_input": _into,
    "into_row": _into_row,
    "one_hot": lambda w, x: F.one_hot(torch.tensor([0, 2, 1, 1]), 4).float() @ (x @ w).trunc(),
    "into_view": _into_view,
    "detached": lambda w, x: (x @ w).detach() * w + (x @ w.detach()).sum(),
    "no_grad_part": _no_grad_part,
    "autocast": _autocast,
    "graph_break": _broken,
    "branch": _branch,
    "hook": _hooked,
    "hook_zero": _zero_hooked,
    "custom": lambda w, x: Twice.apply(x @ w) + w,
    "checkpoint": lambda w, x: checkpoint(lambda a: (a @ w).relu() @ w, x, use_reentrant=False),
    "print_free": lambda w, x: (x @ w if w.requires_grad else x).sinh() * len(x),
    "checked": lambda w, x: torch.linalg.inv(x @ w + torch.eye(4)) @ w * 2,
    "complex": lambda w, x: torch.fft.fft(x @ w).abs() * 2,
    "loop": lambda w, x: [x := (x @ w).tanh() for _ in range(4)][-1],
}

_MODELS: dict[str, tuple[Maker, Batch]] = {
    "mlp": (_sequential(_linear, nn.ReLU, _linear, nn.Tanh, _linear), matrix),
    "batch_norm": (_sequential(_linear, lambda: nn.BatchNorm1d(4), nn.ReLU, _linear), matrix),
    "batch_norm_eval": (_evaluated(_sequential(_linear, lambda: nn.BatchNorm1d(4), _linear)), matrix),
    "conv": (_sequential(_conv, lambda: nn.BatchNorm2d(4), nn.ReLU, lambda: nn.MaxPool2d(2)), images),
    "conv_dropout": (_sequential(_conv, lambda: nn.Dropout2d(0.3), nn.Flatten, lambda: nn.Linear(256, 3)), images),
    "embedding": (_sequential(lambda: nn.Embedding(10, 8), lambda: nn.LayerNorm(8), lambda: nn.Linear(8, 4)), _words),
    "lstm_cell": (lambda: Recurrent(nn.LSTMCell), matrix),
    "gru_cell": (lambda: Recurrent(nn.GRUCell), matrix),
    "rnn_cell": (lambda: Recurrent(nn.RNNCell), matrix),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), sequence),
    "attention": (lambda: Function(_attention), sequence),
    "centred": (Centred, matrix),
    "counter": (lambda: Method(_count), matrix),
    "frozen": (lambda: _sequential(_linear, nn.ReLU, _linear)().requires_grad_(False), matrix),
    "none": (_sequential(nn.Identity, nn.Identity), matrix),
}

PROGRAMS: dict[str, tuple[Maker, Batch]] = {
    **{name: (partial(Function, function), matrix) for name, function in _FUNCTIONS.items()},
    **_MODELS,
}
