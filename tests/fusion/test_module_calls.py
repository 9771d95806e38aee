"""Calls that go to a listener: of its thread alone, and torch's own methods are back afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hocket.fusion.module_calls import calls_given


class Heard:
    def __init__(self) -> None:
        self.names: list[str] = []

    def layer(self, module: nn.Module, usual: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(type(module).__name__)
        return usual(module, *args, **kwargs)

    def function(self, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append("apply")
        return apply(*args, **kwargs)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def test_each_thread_has_its_own_listener_and_the_last_puts_torch_back() -> None:
    usual = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    x, own, other = torch.ones(2), Heard(), Heard()
    begun, over = threading.Event(), threading.Event()

    def listens() -> None:
        with calls_given(other):
            begun.set()
            over.wait()  # the block of the main thread ends within this one
            nn.ReLU()(x)

    thread = threading.Thread(target=listens)
    with calls_given(own):
        thread.start()
        begun.wait()
        nn.Tanh()(x)
        Twice.apply(x)
    nn.Sigmoid()(x)
    over.set()
    thread.join()
    assert own.names == ["Tanh", "apply"]
    assert other.names == ["ReLU"]
    assert usual == (nn.Module.__call__, torch.autograd.Function.__dict__["apply"])
