r"""Calling B models: trace once for each kind of call, choose a plan, run it.

arguments --which are of each model--> leaves --trace--> program --choose--> plan --> what runs from now on
    \--nothing can trace it--> the plain models one after another

One cache holds all that is known of a kind of call, by what it depends on: the arguments' shapes, types and devices,
the loss function, grad mode, autocast, the default dtype, training or evaluation, and who watches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import InputError
from hocket.fusion.bounded import Bounded
from hocket.fusion.call_spec import CallSpec, autocast, modes
from hocket.fusion.choose import CLOSE, FAILURES, Choice, Copies, choose, make_pass, restored
from hocket.fusion.contest import ContestedCall, Intervals
from hocket.fusion.executor import LeadsElsewhereError, SingleExecutor
from hocket.fusion.gradients import GradientMemory
from hocket.fusion.loss import per_model_loss, stand_in
from hocket.fusion.loss_kind import buffers_in, kind_of
from hocket.fusion.model_slice import ModelSlice, Settings
from hocket.fusion.plan import ExecutionPlan, plans_for
from hocket.fusion.program import FusedProgram
from hocket.fusion.programs import Programs
from hocket.fusion.random_sources import restored_sources
from hocket.fusion.rules.base import is_watched
from hocket.fusion.single_model import has_images
from hocket.fusion.stacked import Stacked, as_tensors
from hocket.fusion.steps import warn_without_rule
from hocket.fusion.store import Store
from hocket.fusion.unfused_copy import one_by_one

__all__ = ["Calls", "run_by"]

MAX_CALLS = 256  # kinds that are remembered
MAX_TIMED = 8  # of such that are timed: sequences of ever other lengths would be timed for ever
NEAR = 3.0  # times the fastest: what lanes can win back on models one by one


@dataclass(frozen=True)
class KnownCall:
    """What is known of one kind of call.

    Attributes:
        own: for each leaf of the arguments, whether it is of each model.
        run: the output from the leaves; or losses from loss function, leaves and targets.
    """

    own: tuple[bool, ...]
    run: Callable[..., Any]

    def values(self, leaves: list[Any]) -> list[Any]:
        """The leaves, `Stacked` where they are of each model."""
        return [Stacked(leaf) if each else leaf for leaf, each in zip(leaves, self.own, strict=True)]


class Calls:
    """What an array computes.

    Args:
        store: of the models.
        settings: what the user asked for.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self.settings = settings
        self.store = store
        self.choices: list[Choice] = []
        self.form: str | None = None  # how to compute while somebody captures or verifies a step; see `forms`
        self.plan: ExecutionPlan | None = None  # what calls run by, untimed; see `run_by`
        self.forget()

    def forget(self) -> None:
        """Let go of everything that was made from the models as they were."""
        self.memory = GradientMemory()
        self.models = ModelSlice(self.store, self.settings, self.memory)
        self.programs = Programs(self.models)
        self._calls: Bounded[KnownCall] = Bounded(MAX_CALLS)
        self._intervals = Intervals()
        self._counted_from = len(self.choices)  # earlier choices say nothing of later calls

    def __getstate__(self) -> dict[str, Any]:
        choices = [replace(choice, kind=choice.kind[0]) for choice in self.choices]  # a loss function's code stays here
        return {"settings": self.settings, "store": self.store, "choices": choices}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, form=None, plan=None)  # those were asked of this array, for a while
        self.forget()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs of all models, the models first.

        Raises:
            InputError: an op fails, or the input fits no model; names the layer.
        """
        self._follow_globals()
        key, leaves = self._read("forward", args, kwargs)
        call = self._calls.get(key)
        if call is not None:
            return as_tensors(call.run(call.values(leaves)), self.store.num_models)
        call = self._new_forward(args, kwargs)
        out = as_tensors(call.run(call.values(leaves)), self.store.num_models)
        self._calls[key] = call
        return out

    def losses(
        self,
        forward: Callable[..., Any],
        fn: Callable[..., Any],
        inputs: Any,
        targets: tuple[Any, ...],
        is_hooked: bool,
    ) -> Tensor:
        """The loss of each model, ``(B,)``.

        Args:
            forward: a call of the array, for when its output is wanted after all.
            fn: the loss function.
            inputs: what one model takes.
            targets: more arguments of `fn`.
            is_hooked: whether somebody wants to see the array's output.

        Raises:
            InputError: an op or `fn` fails, or a shape fits no model; names the layer.
        """
        self._follow_globals()
        args, kwargs = _arguments(inputs)
        if is_hooked or not self._may_choose() or not torch.is_grad_enabled():
            return self.loss(fn, forward(*args, **kwargs), targets)
        kind = kind_of(fn)
        key, leaves = self._read(("losses", kind), args, kwargs, targets)
        call = self._calls.get(key)
        if call is not None:
            return call.run(fn, call.values(leaves), targets)
        call = self._new_losses(kind, args, kwargs, targets)
        if call is None:
            return self.loss(fn, forward(*args, **kwargs), targets)
        try:
            with restored(self.store.buffers() + buffers_in(fn), self.store.generators, only_after_errors=True):
                losses: Tensor = call.run(fn, call.values(leaves), targets)
        except LeadsElsewhereError:
            program, *_ = self._program(args, kwargs)
            assert program is not None  # the executor has been made from it
            call = KnownCall(call.own, partial(self._losses_of_all, program))
            losses = call.run(fn, call.values(leaves), targets)
        self._calls[key] = call
        return losses

    def loss(self, fn: Callable[..., Any], out: Any, targets: tuple[Any, ...]) -> Tensor:
        """The loss of each model from the array's output."""
        return per_model_loss(fn, out, targets, self.store.num_models, self.settings.model_axis)

    def forms(self) -> tuple[str, ...]:
        """In which forms a step is worth capturing, the one that was faster so far first; `form` asks for one.

        "rule", or "loop", the models one by one: for what was timed, that is slower by the time that passes around so
        many small ops, or on one of two cores. Lanes may win that back, but not everything.
        """
        if self.settings.backend != "auto" or self.store.seeds is not None:
            return ("rule",)
        # How many times the fastest, in the choice where it fared best. What calls are still to tell apart counts as
        # close, and what has won by them as ahead: a neighbour may have held up its passes.
        behind: dict[str, float] = {}
        for choice in self.choices:
            times_us = choice.times_us or {choice.winner: 1.0}
            for plan, time_us in times_us.items():
                form = "loop" if plan.group_size == 1 else "rule"
                times = 0.0 if plan == choice.winner else time_us / min(times_us.values())
                if not choice.is_settled and plan in choice.finalists:
                    times = min(times, CLOSE)
                behind[form] = min(behind.get(form, NEAR), times)
        return tuple(sorted([form for form in behind if behind[form] < NEAR], key=behind.__getitem__)) or ("rule",)

    def _follow_globals(self) -> None:
        """Let go of the graphs where what the forwards read outside of the models has changed."""
        if self.programs.are_outdated():
            self.forget()

    def _may_choose(self) -> bool:
        if self.settings.backend != "auto" or self.form is not None or is_watched():
            return False
        return not torch._C._are_functorch_transforms_active() and not torch.is_inference_mode_enabled()

    def _read(
        self, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...] = ()
    ) -> tuple[Any, list[Any]]:
        """What decides how a call goes, and the leaves of its arguments."""
        asked = (self.form, self.plan)
        mode = (self.store.templates[0].training, asked, is_watched(), modes())
        if not kwargs and set(map(type, (*args, *targets))) <= {Tensor}:
            return (what, len(args), _kinds((*args, *targets)), mode), list(args)
        call, leaves = CallSpec.of(args, kwargs)
        given, spec = pytree.tree_flatten(targets)
        return (what, call, spec, _kinds((*leaves, *given)), mode), leaves

    def _program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[FusedProgram | None, tuple[bool, ...], list[Any], Any]:
        """The program for these arguments, or None; which leaves are of each model; the leaves, and their tree."""
        call, leaves = CallSpec.of(args, kwargs)
        own = self.settings.model_axis.inputs(self.store.templates[0], leaves, call.spec, self.store.num_models)
        values = KnownCall(own, len).values(leaves)
        if self.settings.backend == "loop" or self.form == "loop":
            return None, own, values, call.spec
        return self.programs.of(call, values, (_kinds(leaves), own)), own, values, call.spec

    def _new_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KnownCall:
        program, own, values, spec = self._program(args, kwargs)
        if program is None:
            if self.settings.backend != "loop" and self.form != "loop" and not is_watched():
                # Nobody knows what the models have in common, so each runs as it is.
                warn_without_rule(self.settings, "", type(self.store.templates[0]).__name__)
            return KnownCall(own, partial(one_by_one, self.store, spec))
        if self.settings.backend != "auto" or self.form is not None or is_watched():
            return KnownCall(own, program.run)
        return KnownCall(own, self._chosen(("forward", torch.is_grad_enabled()), program, values))

    def _new_losses(
        self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]
    ) -> KnownCall | None:
        """How losses are computed, or None where gradients go further than to the stacked parameters."""
        params = self.store.parameters()
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs, targets)) if isinstance(leaf, Tensor)]
        trains_more = kind[-1] or any(leaf.requires_grad for leaf in given) or self.store.separate_index
        # Half precision needs a scaled loss before the backward, not scaled gradients after it.
        half = any(param.dtype == torch.float16 for param in params)
        half = half or any(enabled and dtype == torch.float16 for enabled, dtype in autocast())
        if trains_more or half or not any(p.requires_grad for p in params) or not all(p.is_leaf for p in params):
            return None
        program, own, values, _ = self._program(args, kwargs)
        return None if program is None else KnownCall(own, self._chosen(("losses", kind), program, values))

    def _chosen(self, kind: Any, program: FusedProgram, values: list[Any]) -> Callable[..., Any]:
        """What runs for calls of this kind: by timing, or, after many of its sort, as most of them."""
        with_losses, total = kind[0] == "losses", self.store.num_models
        if self.plan is not None:
            return self._asked(self.plan, program, values, with_losses)
        winners = [choice.winner for choice in self.choices[self._counted_from :] if choice.kind == kind]
        if len(winners) >= MAX_TIMED:
            return self._by(program, Counter(winners).most_common(1)[0][0], with_losses)
        plans = plans_for(total, with_losses=with_losses, has_images=has_images(program))
        runs = {plan: self._by(program, plan, with_losses) for plan in plans}
        if len(plans) == 1:
            self.choices.append(Choice(kind, plans[0], {}))
            return runs[plans[0]]
        copies = Copies(values)
        params = [param for param in self.store.parameters() if param.requires_grad]
        given = (stand_in, copies.leaves, ()) if with_losses else (copies.leaves,)
        passes = {plan: make_pass(partial(run, *given), params) for plan, run in runs.items()}
        on_cpu = all(param.device.type == "cpu" for param in params)
        with restored(self.store.buffers(), self.store.generators), restored_sources(self.programs.random_sources):
            choice = choose(kind, passes, copies, on_cpu, total)
        if choice is None:  # no plan ran: what is wrong shows when it is run without being timed
            return self._by(program, plans[-1], with_losses)
        finalists = choice.finalists
        self.choices.append(replace(choice, is_settled=len(finalists) == 1))
        if len(finalists) == 1:
            return runs[choice.winner]
        won = partial(self._won, len(self.choices) - 1)
        return ContestedCall({plan: runs[plan] for plan in finalists}, won, self._intervals)

    def _won(self, number: int, plan: ExecutionPlan) -> None:
        """Real calls have shown which plan is the fastest for those of this choice."""
        self.choices[number] = replace(self.choices[number], winner=plan, is_settled=True)

    def _asked(
        self, plan: ExecutionPlan, program: FusedProgram, values: list[Any], with_losses: bool
    ) -> Callable[..., Any]:
        """What runs by a plan, if a forward of the first model shows that they can; else all of them at once."""
        whole = ExecutionPlan(self.store.num_models)
        if not with_losses:  # groups that wait for each other are of one model, or of all
            plan = replace(plan, per_group_backward=False) if plan.group_size == 1 else whole
        if plan.group_size == whole.group_size and not plan.channels_last:
            return self._by(program, whole, with_losses)
        executor = SingleExecutor(program, plan)
        copies = Copies(values)
        try:
            with restored(self.store.buffers(), self.store.generators), restored_sources(self.programs.random_sources):
                executor.forward_of_first(copies.leaves)
        except FAILURES:  # a forward that sees strides may fail in another layout
            return self._by(program, whole, with_losses)
        if copies.are_written():  # then models cannot read one input in turn
            return self._by(program, whole, with_losses)
        return executor.losses if with_losses else executor.forward

    def _by(self, program: FusedProgram, plan: ExecutionPlan, with_losses: bool) -> Callable[..., Any]:
        if plan.group_size == self.store.num_models > 1:
            return partial(self._losses_of_all, program) if with_losses else program.run
        executor = SingleExecutor(program, plan)
        return executor.losses if with_losses else executor.forward

    def _losses_of_all(
        self, program: FusedProgram, fn: Callable[..., Any], values: list[Any], targets: tuple[Any, ...]
    ) -> Tensor:
        return self.loss(fn, as_tensors(program.run(values), self.store.num_models), targets)


def run_by(array: Any, plan: ExecutionPlan | None) -> None:
    """Let the calls of an array run by a plan from now on, without being timed.

    Who times whole steps can choose by steps that count, in place of passes that only take time.

    Args:
        array: of ``backend="auto"``.
        plan: one of `plans_for` so many models; calls that cannot run by it run all models at once. None for the
            fastest one of each kind of call, which is timed.
    """
    array._calls.plan = plan


def _kinds(leaves: Any) -> tuple[Any, ...]:
    return tuple(
        [
            (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, Tensor) else None
            for leaf in leaves
        ]
    )


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
