"""``backend="auto"``: time the plans that could run a kind of call, forward and backward, and leave out the slow ones.

Fusing can lose: on a CPU, a grouped convolution of wide channels takes longer than its parts, and so do activations
that leave the caches. What is timed is the model on the arguments at hand and a loss that stands in for the user's; it
leaves no trace: buffers and random numbers are put back, inputs are copies.

Neighbours on a shared machine only add time, and sometimes much: where a pass is parallel, a busy core makes it five to
ten times as long. Hence a plan counts by its fastest pass, and only what is far behind leaves here; the usual plan,
whose passes are the parallel ones, not before it is eight times as long. What is close is for steps that count to tell
apart (`contest`): they have the copies of gradients and the update in them, passes do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import HocketError
from hocket.fusion.plan import ExecutionPlan, usual_of
from hocket.fusion.stacked import Stacked, unwrap

__all__ = ["CLOSE", "FAILURES", "Choice", "Copies", "choose", "make_pass", "restored"]

BLOCK = 2  # counted passes of a plan, one if they take longer than this:
BLOCK_S = 0.03
CLOSE = 2.0  # times the fastest pass: what stays,
DISTURBED = 8.0  # and the usual plan: so much longer it seems while a neighbour has the other core
LARGE_S = 0.2  # a pass of one model on a CPU, from which models are not fused: nothing around its ops is left to save
FAILURES = (HocketError, RuntimeError, ValueError, TypeError, NotImplementedError)  # out of memory is a RuntimeError


@dataclass(frozen=True)
class Choice:
    """What was timed and what won.

    Attributes:
        kind: "forward" or "losses", and what else tells such calls apart but their arguments' shapes.
        winner: the plan that runs from now on; the fastest so far where it is not settled yet.
        times_us: one pass by each plan that ran, microseconds.
        is_settled: whether calls that count have shown which one of the `finalists` it is, or there was only one.
    """

    kind: Any
    winner: ExecutionPlan
    times_us: Mapping[ExecutionPlan, float]
    is_settled: bool = True

    @property
    def finalists(self) -> list[ExecutionPlan]:
        """The plans that are close, those that go to the end of each model's backward first.

        These see what a loss function brings along, which the first call by one of them has to find out. Others than
        the usual one have to be ahead of it here and then in calls: noise does that seldom twice.
        """
        if not self.times_us:
            return [self.winner]
        usual, fastest_us = usual_of(self.times_us), min(self.times_us.values())
        limit_us = min(CLOSE * fastest_us, self.times_us[usual])
        close = [plan for plan, time_us in self.times_us.items() if time_us <= limit_us]
        if limit_us < self.times_us[usual] <= DISTURBED * fastest_us:
            close.append(usual)
        return sorted(close, key=lambda plan: not plan.per_group_backward)


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
        outs = [unwrap(leaf) for leaf in pytree.tree_leaves(run(), is_leaf=lambda value: isinstance(value, Stacked))]
        outs = [out for out in outs if isinstance(out, Tensor) and out.requires_grad]
        if outs and wanted and torch.is_grad_enabled():
            ones = [torch.ones_like(out, memory_format=torch.contiguous_format) for out in outs]
            for param, grad in zip(wanted, torch.autograd.grad(outs, wanted, ones, allow_unused=True), strict=True):
                if grad is not None and grad.stride() != param.stride():
                    grad.contiguous()  # a `.grad` is laid out as its parameter, so another layout costs a copy

    return once


def choose(
    kind: Any, passes: Mapping[ExecutionPlan, Callable[[], None]], copies: Copies, on_cpu: bool, num_models: int
) -> Choice | None:
    """Time each plan.

    Args:
        kind: of the choice.
        passes: a pass by each plan, the plain models first and all at once last.
        copies: what they run on.
        on_cpu: whether models of `LARGE_S` are not fused.
        num_models: B.

    Returns:
        The choice (all at once if models write over their input), or None if no plan ran.
    """
    racing = dict(passes)
    firsts_s: dict[ExecutionPlan, float] = {}
    for plan in passes:
        if plan not in racing:
            continue
        try:
            first_s = _took_s(passes[plan])
        except FAILURES:  # a forward that sees strides may fail in another layout
            del racing[plan]
            continue
        if copies.are_written():  # then models cannot read one input in turn
            return Choice(kind, ExecutionPlan(num_models), {})
        firsts_s[plan] = first_s
        is_large = plan.group_size == 1 and on_cpu and num_models > 1 and first_s / num_models >= LARGE_S
        # The fastest of a few counts: neighbours can hold up any one of them.
        if is_large and all(_took_s(passes[plan]) / num_models >= LARGE_S for _ in range(2)):
            racing = {each: run for each, run in racing.items() if each.group_size == 1}
    if not racing:
        return None
    times_s = _in_turns(racing, firsts_s)
    winner = min(times_s, key=times_s.__getitem__)
    return Choice(kind, winner, {plan: took_s * 1e6 for plan, took_s in times_s.items()})


def _in_turns(
    racing: dict[ExecutionPlan, Callable[[], None]], firsts_s: dict[ExecutionPlan, float]
) -> dict[ExecutionPlan, float]:
    """Seconds of each plan's fastest pass, of a few.

    The first one finds the caches as another plan left them. It counts as well: of long passes there is but one more,
    and one that a neighbour holds up must not decide.
    """
    if len(racing) == 1:
        return {plan: firsts_s[plan] for plan in racing}
    block = max(1, min(BLOCK, int(BLOCK_S / min(firsts_s.values()))))
    return {plan: min(firsts_s[plan], *[_took_s(run) for _ in range(block)]) for plan, run in racing.items()}


def _took_s(run: Callable[[], None]) -> float:
    """How long a pass takes, to its end on the device."""
    _settle()
    start = perf_counter()
    run()
    _settle()
    return perf_counter() - start


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def restored(
    buffers: list[Tensor],
    generators: dict[torch.device, tuple[torch.Generator, ...]],
    *,
    only_after_errors: bool = False,
) -> Iterator[None]:
    """Buffers and random numbers are afterwards what they were before; generators made meanwhile are gone.

    Args:
        buffers: of models and of what a loss function holds.
        generators: of the models.
        only_after_errors: keep the changes of what runs without an error.
    """
    contents = [(buffer, buffer.clone()) for buffer in buffers]
    before = dict(generators)
    states = [(each, each.get_state()) for group in before.values() for each in group]
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def put_back() -> None:
        with torch.no_grad():
            for buffer, content in contents:
                buffer.copy_(content)
        generators.clear()
        generators.update(before)
        for generator, state in states:
            generator.set_state(state)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    try:
        yield
    except BaseException:
        put_back()
        raise
    if not only_after_errors:
        put_back()
