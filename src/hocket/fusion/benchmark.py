"""Timing what could do the same work: forward and backward of each contender, in turns, until one is left.

Neighbours on a shared machine only add time, and sometimes much: where a pass is parallel, a busy core makes it ten
times as long. Hence a contender counts by its faster passes; and nobody leaves for one slow pass, only when even its
fastest is too slow, ever more strictly.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import HocketError
from hocket.fusion.stacked import Stacked, unwrap

__all__ = ["Copies", "benchmark", "in_turns", "make_pass", "those_that_run", "took_s"]

OP_ROUNDS = 3
ROUNDS = 8  # of the benchmark of whole models
BLOCK = 8  # counted passes of each contender in a round,
BLOCK_US = 30_000.0  # fewer if they take longer than this
BENCHMARK_S = 10.0  # after which the round at hand is the last
ELIMINATION_RATIOS = (4.0, 2.0, 1.5, 1.3)  # times the fastest pass so far, in one round after another
FAILURES = (HocketError, RuntimeError, ValueError, TypeError, NotImplementedError)


class Copies:
    """The leaves of arguments to run a model on more than once: some models write over their inputs.

    Args:
        leaves: anything; tensors and `Stacked` are copied.
    """

    def __init__(self, leaves: list[Any]) -> None:
        self.leaves = [_copy(leaf) for leaf in leaves]
        self._versions = self._now()

    def are_written(self) -> bool:
        """Whether a model has written over any of them."""
        return self._now() != self._versions

    def _now(self) -> list[int]:
        tensors = [unwrap(leaf) for leaf in self.leaves if isinstance(leaf, (Stacked, Tensor))]
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]  # those count no versions


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, Stacked):
        return Stacked(leaf.tensor.clone())
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def make_pass(run: Callable[[], Any], wanted: list[Tensor]) -> Callable[[], None]:
    """A forward and, where gradients are wanted, a backward that leaves ``.grad`` alone."""

    def once() -> None:
        outs = []
        for leaf in pytree.tree_leaves(run(), is_leaf=lambda value: isinstance(value, Stacked)):
            tensor = leaf.tensor if isinstance(leaf, Stacked) else leaf
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                outs.append(tensor)
        if outs and wanted and torch.is_grad_enabled():
            ones = [torch.ones_like(out, memory_format=torch.contiguous_format) for out in outs]
            for param, grad in zip(wanted, torch.autograd.grad(outs, wanted, ones, allow_unused=True), strict=True):
                if grad is not None and grad.stride() != param.stride():
                    grad.contiguous()  # a `.grad` is laid out as its parameter, so another layout costs a copy

    return once


def benchmark(contenders: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Microseconds of each that ran to the end: of its passes' fastest quarter the middle one.

    Block after block, in turns. The first pass of a block finds the caches and the heap as another contender left them,
    and does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    racing = list(contenders)
    until = perf_counter() + BENCHMARK_S
    fastest = float("inf")
    for round_number in range(ROUNDS):
        block = max(2, min(BLOCK, int(BLOCK_US / fastest)))
        for name in racing:
            contenders[name]()
            times[name] += [_timed(contenders[name]) for _ in range(block)]
        fastest = min(min(times[name]) for name in racing)
        hopeless = ELIMINATION_RATIOS[min(round_number, len(ELIMINATION_RATIOS) - 1)]
        racing = [name for name in racing if min(times[name]) <= hopeless * fastest]
        if len(racing) == 1 or perf_counter() > until:
            break
    return {name: _low(times[name]) for name in contenders if name in racing}


def _low(times: list[float]) -> float:
    return sorted(times)[len(times) // 8]


def took_s(run: Callable[[], None]) -> float:
    """How long a pass takes, to its end on the device."""
    _settle()
    start = perf_counter()
    run()
    _settle()
    return perf_counter() - start


def _timed(run: Callable[[], None]) -> float:
    return took_s(run) * 1e6


def _lower_quartile(times: list[float]) -> float:
    return sorted(times)[len(times) // 4]


def in_turns(contenders: dict[str, Callable[[], None]], rounds: int = OP_ROUNDS) -> dict[str, float]:
    """Lower quartile of microseconds of each, one after another, round after round; the first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + 1):
        for name, run in contenders.items():
            took_us = _timed(run)
            if round_number:
                times[name].append(took_us)
    return {name: _lower_quartile(each) for name, each in times.items()}


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def those_that_run(contenders: dict[str, Callable[[], None]]) -> dict[str, Callable[[], None]]:
    """Without those that fail when they are tried."""
    found = {}
    for name, run in contenders.items():
        try:
            run()
        except FAILURES:  # out of memory is a RuntimeError, too
            continue
        found[name] = run
    return found
