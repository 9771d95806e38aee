"""Calls that go to a listener: of its thread alone, and torch's own methods are back afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as library

from hocket.fusion.module_calls import calls_given, without_checkpoints


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


def calls_of(use_reentrant: bool) -> int:
    """Count how often a checkpoint calls its function, forward and backward."""
    calls = []

    def function(x):
        calls.append(x)
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    library.checkpoint(function, x, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(x.grad, torch.ones(2).cos())
    return len(calls)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_one_within_another_leaves_torch_as_it_was(use_reentrant):
    before = library._checkpoint_without_reentrant_generator
    with without_checkpoints():
        with without_checkpoints():
            assert calls_of(use_reentrant) == 1
        assert calls_of(use_reentrant) == 1
    assert calls_of(use_reentrant) == 2
    assert library._checkpoint_without_reentrant_generator is before
    assert "apply" not in vars(library.CheckpointFunction)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_of_two_threads_each_has_its_own(use_reentrant):
    inside, done = threading.Event(), threading.Event()

    def stay():
        with without_checkpoints():
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        assert inside.wait(30)
        assert calls_of(use_reentrant) == 2, "another thread's"
        with without_checkpoints():
            done.set()
            thread.join(30)
            assert calls_of(use_reentrant) == 1, "the other one has left"
    finally:
        done.set()
        thread.join(30)
    assert calls_of(use_reentrant) == 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_error_of_the_function_is_its_own(use_reentrant):
    def function(x):
        raise KeyError("of the function")

    with without_checkpoints(), pytest.raises(KeyError, match="of the function"):
        library.checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=use_reentrant)
    assert calls_of(use_reentrant) == 2
