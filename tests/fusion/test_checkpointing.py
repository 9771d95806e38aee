"""Checkpoints that call their function once, in one thread, for a while."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils import checkpoint as library

from hocket.fusion.checkpointing import without_checkpoints


def calls_of(use_reentrant: bool) -> int:
    """How often a checkpoint calls its function, forward and backward."""
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
