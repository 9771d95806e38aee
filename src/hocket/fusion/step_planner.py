r"""Losses from inputs: of all models at once, or of a few at a time that go on to the end of their backward.

inputs, targets --may go?--> benchmark: all forward, loss, all backward | k at a time --> what runs from now on
    \--no: somebody traces, or gradients go further than the parameters--> array.loss(fn, array(inputs), targets)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _pytree as pytree

from hocket.errors import InputError
from hocket.fusion.benchmark import Copies, benchmark, make_pass, those_that_run, took_s
from hocket.fusion.choose import CHANNELS_LAST, Choice, put_back
from hocket.fusion.dispatcher import MAX_KINDS, Dispatcher, autocast_state
from hocket.fusion.loss import per_model_loss
from hocket.fusion.per_group_backward import Alone, PerGroupBackward
from hocket.fusion.program import FusedProgram
from hocket.fusion.rules.base import is_watched
from hocket.fusion.single_model import has_images
from hocket.fusion.stacked import Stacked

__all__ = ["StepPlanner"]

HANDICAP = 1.05  # of channels last, which has to win clearly
LARGE_S = 0.2  # forward, loss and backward of a model on a CPU, from which models are not fused
Run = Callable[[Callable[..., Any], list[Any], tuple[Any, ...]], Tensor]

DEPTH = 4  # of functions that hold functions


class StepPlanner(Dispatcher):
    """Models that can be called, and that know how a step of training goes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plans: dict[Any, Run | None] = {}  # None: all models forward, then loss, then backward
        self._ready_plans: dict[Any, tuple[bool, Run | None]] = {}

    def losses(self, fn: Callable[..., Any], inputs: Any, *targets: Any) -> Tensor:
        """The loss of each model, ``(B,)``, from its inputs: `loss` of what the models give for them.

        With ``backend="auto"``, where it is faster, a few models at a time go forward, through their loss and backward
        before the next ones begin: one model's activations are in memory, not all. Their gradients are there before
        ``losses.backward()``, which hands them over; so call it once, and where no gradients are wanted, say
        ``torch.no_grad()``.

        Args:
            fn: any loss function or module of one model's output and targets.
            inputs: what one model takes: a tensor, a tuple of arguments, or a dict of named ones; tensors
                ``(B, N, ...)``, or ``(N, ...)`` for all models.
            targets: more arguments of `fn`: ``(B, N, ...)``, or ``(N, ...)`` for all models.

        Raises:
            InputError: an op or `fn` fails, or a shape fits no model; names the layer.

        Example:
            >>> array = hocket.fuse([nn.Linear(3, 2), nn.Linear(3, 2)])
            >>> losses = array.losses(nn.functional.mse_loss, torch.ones(5, 3), torch.zeros(5, 2))
            >>> losses.shape
            torch.Size([2])
            >>> losses.backward()
        """
        self._follow_globals()
        known = self._known_go(fn, inputs, targets)
        if known is not None and known in self._ready_plans:
            is_own, ready = self._ready_plans[known]
            if ready is not None:
                return ready(fn, [Stacked(inputs) if is_own else inputs], targets)
            return per_model_loss(fn, self(inputs), targets, self.num_models, self.model_axis)
        args, kwargs = _arguments(inputs)
        if not self._may_go(args, kwargs, targets):
            return per_model_loss(fn, self(*args, **kwargs), targets, self.num_models, self.model_axis)
        key = self._kind(fn, args, kwargs, targets)
        if key not in self._plans:
            if len(self._plans) >= MAX_KINDS:
                self._plans.clear()
                self._ready_plans.clear()
            self._plans[key] = self._choose_plan(fn, args, kwargs, targets)
        run = self._plans[key]
        _, values, _, own = self._prepared(args, kwargs)
        if known is not None:
            self._ready_plans[known] = own[0], run
        if run is not None:
            return run(fn, values, targets)
        return per_model_loss(fn, self(*args, **kwargs), targets, self.num_models, self.model_axis)

    def _known_go(self, fn: Callable[..., Any], inputs: Any, targets: tuple[Any, ...]) -> Any:
        """What a choice depends on, where all is tensors and nobody watches; else None."""
        if self._hocket_form or set(map(type, (inputs, *targets))) != {Tensor}:
            return None
        if is_watched() or torch._C._are_functorch_transforms_active() or torch.is_inference_mode_enabled():
            return None
        if self._is_hooked():
            return None
        kinds = tuple([(each.shape, each.dtype, each.device, each.requires_grad) for each in (inputs, *targets)])
        return (_kind_of(fn), kinds, self._version, torch.is_grad_enabled(), autocast_state())

    def _may_go(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]) -> bool:
        """Whether gradients may be taken at once: nobody watches, and they end at stacked parameters."""
        if self.backend != "auto" or self._hocket_form or self._separate_index or not torch.is_grad_enabled():
            return False
        if is_watched() or torch._C._are_functorch_transforms_active() or torch.is_inference_mode_enabled():
            return False
        if self._is_hooked():
            return False
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs, targets)) if isinstance(leaf, Tensor)]
        if any(leaf.requires_grad for leaf in given):
            return False
        params = self.all_parameters()
        # Half precision needs a scaled loss before the backward, not scaled gradients after it.
        half = any(param.dtype == torch.float16 for param in params)
        for enabled, dtype in autocast_state():
            half = half or (enabled and dtype == torch.float16)
        return not half and any(param.requires_grad for param in params)

    def _is_hooked(self) -> bool:
        """Whether hooks belong to a call of the array."""
        own = self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks
        return bool(own) or _has_any_global_hook()

    def _kind(self, fn: Callable[..., Any], args: Any, kwargs: Any, targets: Any) -> Any:
        """What a choice depends on."""
        leaves, spec = pytree.tree_flatten((args, kwargs, targets))
        kinds = tuple([(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else None for leaf in leaves])
        numbers: tuple[Any, ...] = ()
        if None in kinds:  # a trace holds for these numbers only; those of targets go to `fn` as they are
            numbers = tuple([leaf for leaf in pytree.tree_leaves((args, kwargs)) if not isinstance(leaf, Tensor)])
        try:
            hash(numbers)
        except TypeError:
            numbers = (repr(numbers),)
        return (_kind_of(fn), kinds, numbers, spec, self._version, autocast_state())

    def _no_trace(self, fn: Callable[..., Any]) -> AbstractContextManager[Any]:
        """Buffers, also of modules in `fn`, and random numbers are afterwards what they were before."""
        stack = ExitStack()
        stack.enter_context(self._put_back())
        for each in _held(fn):
            if isinstance(each, nn.Module):
                stack.enter_context(put_back(each, {}))
        return stack

    def _choose_plan(self, fn: Callable[..., Any], args: Any, kwargs: Any, targets: Any) -> Run | None:
        """What runs for calls of this kind: by timing, or, after many kinds with this loss, as most of them."""
        given, spec = pytree.tree_flatten((args, kwargs))
        copies = Copies(given)
        args, kwargs = pytree.tree_unflatten(copies.leaves, spec)
        call, values, shapes, own = self._prepared(args, kwargs)
        program, with_loss = self._program(call, values, shapes, own), ("losses", _kind_of(fn))
        winner = self._most_often(with_loss)
        if winner is not None and program is not None:
            return self._runs(program).get(winner)
        won = self._won.setdefault(with_loss, [])
        large = self._choose_for_large(fn, program, values, targets, copies)
        if large is not None:
            won.append(self.choices[-1].winner)
            return large
        with self._no_trace(fn):
            # A user's error shows here.
            losses = per_model_loss(fn, self(*args, **kwargs), targets, self.num_models, self.model_axis)
        program = self._program(call, values, shapes, own)  # the call above may have found that there is none
        params = [param for param in self.all_parameters() if param.requires_grad]
        if program is None or not _end_at(losses, params) or copies.are_written():
            return None
        del losses
        runs = self._runs(program)
        with self._no_trace(fn):
            contenders = {
                "whole": make_pass(
                    lambda: per_model_loss(fn, self(*args, **kwargs), targets, self.num_models, self.model_axis), params
                )
            }
            contenders |= those_that_run(
                {name: make_pass(partial(run, fn, values, targets), params) for name, run in runs.items()}
            )
            times_us = benchmark(contenders)
        winner = _fastest(times_us)
        self.choices.append(Choice(winner, times_us))
        won.append(winner)
        return runs.get(winner)

    def _choose_for_large(
        self, fn: Callable[..., Any], program: FusedProgram | None, values: list[Any], targets: Any, copies: Copies
    ) -> Run | None:
        """How models go that are too large to fuse, without ever running all of them at once; None if they are not.

        What fusing saves is the time around ops, and nothing of that is left to save in an op of many milliseconds. But
        the activations of all models would be in memory, only to find that out.
        """
        on_cpu = all(param.device.type == "cpu" for param in self.all_parameters())
        if program is None or self.num_models == 1 or not on_cpu:
            return None
        runs = {name: run for name, run in self._runs(program).items() if name.startswith("1 in one go")}
        params = [param for param in self.all_parameters() if param.requires_grad]
        with self._no_trace(fn):
            contenders = those_that_run(
                {name: make_pass(partial(run, fn, values, targets), params) for name, run in runs.items()}
            )
            if "1 in one go" not in contenders or copies.are_written():
                return None
            # The fastest of a few: neighbours can hold up any one of them.
            if not all(took_s(contenders["1 in one go"]) / self.num_models >= LARGE_S for _ in range(3)):
                return None
            times_us = benchmark(contenders)
        winner = _fastest(times_us)
        self.choices.append(Choice(winner, times_us))
        return runs[winner]

    def _runs(self, program: FusedProgram) -> dict[str, Run]:
        if self.num_models == 1:
            runs: dict[str, Run] = {"alone": Alone(self, program.traced).run}
            if has_images(program):
                runs[f"alone{CHANNELS_LAST}"] = Alone(self, program.traced, channels_last=True).run
            return runs
        sizes = [size for size in range(self.num_models - 1, 0, -1) if self.num_models % size == 0]
        runs = {f"{size} in one go": PerGroupBackward(self, program.traced, size).run for size in sizes}
        if has_images(program):
            runs[f"1 in one go{CHANNELS_LAST}"] = PerGroupBackward(self, program.traced, 1, channels_last=True).run
        return runs

    def _forget(self) -> None:
        super()._forget()
        self._plans.clear()
        self._ready_plans.clear()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_plans": {}, "_ready_plans": {}}


def _fastest(times_us: dict[str, float]) -> str:
    return min(times_us, key=lambda name: times_us[name] * (HANDICAP if name.endswith(CHANNELS_LAST) else 1.0))


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    raise InputError(
        f"losses: inputs: expected a tensor, a tuple of arguments, or a dict of named ones, got {type(inputs).__name__}"
    )


def _kind_of(fn: Callable[..., Any]) -> Any:
    """What tells loss functions apart, and is the same for one that is written anew in each step."""
    return (_code_of(fn), any(map(_trains, _held(fn))))


def _code_of(fn: Any) -> Any:
    if isinstance(fn, partial):
        return (_code_of(fn.func), *[_code_of(arg) for arg in fn.args if callable(arg)])
    return getattr(fn, "__code__", None) or type(fn)


def _held(fn: Any, depth: int = DEPTH) -> Iterator[Tensor | nn.Module]:
    """Tensors and modules that a loss function brings along, as far as can be seen."""
    if isinstance(fn, (Tensor, nn.Module)):
        yield fn
        return
    if not callable(fn) or not depth:
        return
    held: list[Any] = [getattr(fn, "__self__", None)]
    if isinstance(fn, partial):
        held += [fn.func, *fn.args, *fn.keywords.values()]
    held += getattr(fn, "__defaults__", None) or ()
    held += (getattr(fn, "__kwdefaults__", None) or {}).values()
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    for each in held:
        if isinstance(each, (Tensor, nn.Module)):
            yield each
        elif callable(each):
            yield from _held(each, depth - 1)


def _trains(held: Tensor | nn.Module) -> bool:
    if isinstance(held, Tensor):
        return held.requires_grad
    return any(param.requires_grad for param in held.parameters())


def _end_at(losses: Tensor, params: list[Tensor]) -> bool:
    """Whether the gradients of losses go to these parameters and nowhere else."""
    known = set(map(id, params))
    nodes, seen = [losses.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) not in known and hasattr(node, "variable"):
            return False
        nodes += [each for each, _ in node.next_functions]
    return losses.grad_fn is not None
