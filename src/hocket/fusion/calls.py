r"""Calling B models: record each kind of call once, choose a plan, run it.

arguments --which are of each model--> leaves --first call: the plain models, recorded--> output, and a program
                                              \--later calls: program --by some plan--> output
                                              \--no graph can stand for the models: one after another--> output

All that is known of a kind of call is kept by what it depends on: the arguments' shapes, types and devices, the loss
function, grad mode, autocast, the default dtype, training or evaluation, who watches, and the state that the forwards
read (`hocket.fusion.programs`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import InputError
from hocket.fusion.contest import FAILURES, Choice, ContestedCall, ExecutionPlan, Intervals, plans_for
from hocket.fusion.executor import SingleExecutor, has_images
from hocket.fusion.gradients import GradientMemory
from hocket.fusion.kinds import CallSpec, Kind, autocast, modes, repeated
from hocket.fusion.known_functions import NOTHING
from hocket.fusion.loss import buffers_in, kind_of, per_model_loss
from hocket.fusion.one_by_one import one_by_one
from hocket.fusion.program import FusedProgram, Settings, warn_without_rule
from hocket.fusion.programs import MAX_PROGRAMS, Bounded, Programs, Unfused, World
from hocket.fusion.rules.base import is_watched
from hocket.fusion.stacked import Stacked, as_tensors, unwrap
from hocket.fusion.store import Snapshot, Store, restored

NEAR = 3.0  # times the fastest: what lanes can win back on models one by one
CLOSE = 2.0  # times the fastest: what counts as such while calls are still to tell plans apart
LIKE = 4.0  # times as many numbers in the arguments: calls for which the same plan is the fastest
RECORDING = 4.0  # times as long as a forward alone takes one that is recorded, at most


@dataclass(frozen=True)
class KnownCall:
    """Arguments and run of one kind of call."""

    own: tuple[bool, ...]  # for each leaf of the arguments, whether it is of each model
    run: Callable[..., Any]  # the output from the leaves; or losses from loss function, leaves and targets
    program: Any  # that runs; None where the plain models do

    def values(self, leaves: list[Any]) -> list[Any]:
        """The leaves, `Stacked` where they are of each model."""
        return _stacked(leaves, self.own)


class Calls:
    """The calls of an array: recorded, planned and run."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self.settings = settings
        self.store = store
        self.choices: list[Choice] = []  # for the last kinds of calls
        self.form: str | None = None  # how to compute while somebody captures or verifies a step; see `forms`
        self.forget()

    def forget(self) -> None:
        """Let go of everything that was made from the models as they were."""
        self.store.link()
        self.store.memory = GradientMemory()
        self.programs = Programs(self.store, self.settings)
        self._losses: Bounded[str] = Bounded(MAX_PROGRAMS)  # see `per_model_loss`
        self.why_unfused = ""  # for the last kind of calls without a program
        self._intervals = Intervals()
        self._recorded_s = math.inf  # how long the forwards of all models took at least, one after another
        for choice in self.choices:
            choice.is_current = False

    def __getstate__(self) -> dict[str, Any]:
        choices = [replace(choice, kind=choice.kind[0]) for choice in self.choices]  # a loss function's code stays here
        return {"settings": self.settings, "store": self.store, "choices": choices}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, form=None)  # it was asked of this array, for a while
        self.forget()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs of all models, the models first."""
        world = self.programs.world()
        key, leaves = self._read(world, "forward", args, kwargs)
        call = world.calls.get(key)
        # A program reads the stacked tensors, the plain models their parts, which may have to be made anew.
        if call is not None and call.program is None and not self._is_transformed() and self._has_moved():
            world, call = self.programs.world(), None
        if call is not None:
            return as_tensors(call.run(call.values(leaves)), self.store.num_models)
        return as_tensors(self._new_forward(world, args, kwargs), self.store.num_models)

    def losses(
        self,
        forward: Callable[..., Any],
        fn: Callable[..., Any],
        inputs: Any,
        targets: tuple[Any, ...],
        is_hooked: bool,
    ) -> Tensor:
        """The loss of each model, ``(B,)``."""
        args, kwargs = _arguments(inputs)
        if is_hooked or not self._may_choose() or not torch.is_grad_enabled():
            return self.loss(fn, forward(*args, **kwargs), targets)
        world = self.programs.world()
        kind = kind_of(fn)
        key, leaves = self._read(world, ("losses", kind), args, kwargs, targets)
        call = world.calls.get(key)
        if call is not None:
            return call.run(fn, call.values(leaves), targets)
        call = self._new_losses(world, kind, args, kwargs, targets)
        if call is None:
            return self.loss(fn, forward(*args, **kwargs), targets)
        values = call.values(leaves)
        unless_failed = partial(restored, self._written(call.program) + buffers_in(fn), self.store.generators)
        try:
            with unless_failed():
                losses: Tensor = call.run(fn, values, targets)
        except InputError as error:  # of an op that only plain models compute, a loss that trains too, or a mistake
            try:
                with unless_failed():
                    return self.loss(fn, forward(*args, **kwargs), targets)
            except FAILURES:
                raise error from None
        world.calls[key] = call
        return losses

    def loss(self, fn: Callable[..., Any], out: Any, targets: tuple[Any, ...]) -> Tensor:
        """The loss of each model from the array's output."""
        return per_model_loss(fn, out, targets, self.store.num_models, self.settings.model_axis, self._losses)

    def forms(self) -> tuple[str, ...]:
        """The forms in which to capture a step, fastest first: "rule", and "loop" if lanes may win back its lag."""
        if self.settings.backend != "auto" or self.store.seeds is not None:
            return ("rule",)
        # Its time over the fastest one's, in its best choice.
        behind: dict[str, float] = {}
        for choice in self.choices:
            for plan, times in choice.behind().items():
                form = "loop" if plan.group_size == 1 else "rule"
                behind[form] = min(behind.get(form, NEAR), times if choice.is_settled else min(times, CLOSE))
        return tuple(sorted([form for form in behind if behind[form] < NEAR], key=behind.__getitem__)) or ("rule",)

    def report(self) -> str:
        """One line in all, one for each op of the last program that ran, then reasons of unfused calls and blocks."""
        programs, num_models = self.programs.made(), self.store.num_models
        lines = []
        ran = [each for each in programs if any(step.used for step in each.steps)]
        if not ran and (self.settings.backend == "loop" or self.why_unfused):
            lines.append(f"{num_models} models, one by one" + (self.why_unfused and f": {self.why_unfused}"))
        elif not programs:
            lines.append(f"{num_models} models, not recorded yet")
        elif not ran and programs[0].steps and not any(choice.is_current for choice in self.choices):
            lines.append(f"{num_models} models, recorded; the next such call runs by the graph")
        else:
            steps = [step for step in (ran or programs)[0].steps if step.used or not ran]
            counts = Counter(step.used or "model" for step in steps)
            by = ", ".join(f"{count} by {used}" for used, count in counts.most_common())
            lines.append(f"{num_models} models, {len(steps)} ops: {by}" if steps else f"{num_models} models")
            if self.choices:
                choice = self.choices[-1]
                times = ", ".join(f"{plan} {us:,.0f} us" for plan, us in choice.times_us.items())
                lines[0] += f"; chosen: {choice.winner} ({times})"
            layer_width = max((len(step.layer) for step in steps), default=0)
            op_width = max((len(step.op) for step in steps), default=0)
            lines += [f"{step.layer:{layer_width}}  {step.op:{op_width}}  {step.used or 'model'}" for step in steps]
            lines += [f"some calls one by one: {self.why_unfused}"] if self.why_unfused else []
        lines += [f"separate: {name} ({reason})" for name, reason in self.store.reasons.items()]
        return "\n".join(lines)

    def _may_choose(self) -> bool:
        return self.settings.backend == "auto" and self.form is None and not self._is_transformed()

    def _has_moved(self) -> bool:
        """Follow the stacked tensors to where they are now. Returns True if that made new templates."""
        if not self.store.link():
            return False
        self.forget()
        return True

    def _is_transformed(self) -> bool:
        return is_watched() or torch._C._are_functorch_transforms_active() or torch.is_inference_mode_enabled()

    def _read(
        self, world: World, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...] = ()
    ) -> tuple[Any, list[Any]]:
        """The key of a call, and the leaves of its arguments."""
        mode: tuple[Any, ...] = (self.store.templates[0].training, self.form, self._is_transformed(), modes())
        if world.asks:
            mode = (*mode, self._kind(world, args, kwargs)[0].answers)
        if world.sees_layout:
            mode = (*mode, *(leaf.stride() for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)))
        if not kwargs and set(map(type, (*args, *targets))) <= {Tensor}:
            return (what, len(args), _kinds((*args, *targets)), mode), list(args)
        call, leaves = CallSpec.of(args, kwargs)
        given, spec = pytree.tree_flatten(targets)
        return (what, call, spec, _kinds((*leaves, *given)), mode), leaves

    def _kind(self, world: World, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kind, list[Any]]:
        """The key of a program for these arguments, and the leaves, `Stacked` where they are of each model."""
        call, leaves = CallSpec.of(args, kwargs)
        own = self.settings.model_axis.inputs(self.store, leaves, call.spec)
        values = _stacked(leaves, own)
        return world.answered(Kind(call, own, leaves, self.store.templates[0].training), values), values

    def _new_forward(self, world: World, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the output of a kind of call that is new, and note how to compute later ones."""
        # In the place of parameters, `torch.func.functional_call` puts tensors that no template can hold.
        is_seen = self._is_transformed() or not all(param.is_leaf for param in self.store.parameters())
        if not is_seen and self._has_moved():
            world = self.programs.world()
        key, _ = self._read(world, "forward", args, kwargs)
        kind, values = self._kind(world, args, kwargs)
        found = world.find(kind)
        if self.settings.backend == "loop" or self.form == "loop":
            found = Unfused("")
        elif self.programs.given_up and not isinstance(found, FusedProgram):
            found = Unfused(self.programs.given_up)
        if found is None and is_seen:
            return one_by_one(self.store, kind.call.spec, values)
        if found is None:
            snapshot = Snapshot(self.store.buffers(), self.store.generators)
            start = perf_counter()
            out, kind = self.programs.record(world, kind, values)
            self._recorded_s = min(self._recorded_s, (perf_counter() - start) / RECORDING)
            found = world.find(kind)
            is_auto = self.settings.backend == "auto" and self.form is None
            if isinstance(found, Unfused):
                self._say(found)
            if is_auto or not isinstance(found, FusedProgram) or found.writes_inputs or found.writes_parameters:
                return out
            snapshot.put_back()  # the user asked for another way
            key, _ = self._read(world, "forward", args, kwargs)
        failed: InputError | None = None
        plain = partial(one_by_one, self.store, kind.call.spec, asks_leaves=self.programs.asks_leaves())
        if isinstance(found, FusedProgram):
            may_choose = self._may_choose() and not found.writes_inputs
            run = self._chosen(world, ("forward", kind.key(0)), found, values) if may_choose else found.run
            run = self._checked(found, run, plain)
            try:
                with nullcontext() if is_seen else restored(self._written(found), self.store.generators):
                    out = run(values)
                world.calls[key] = KnownCall(kind.own, run, found)
                return out
            except InputError as error:
                if self.settings.strict or is_seen:
                    raise
                found, failed = Unfused(str(error)), error
        try:
            out = plain(values) if is_seen else self.programs.checked(kind, values)
        except FAILURES:
            if failed is None:
                raise
            raise failed from None  # it names the layer
        if failed is not None:
            world.keep(kind, NOTHING, found)
        self._say(found)
        world.calls[key] = KnownCall(kind.own, plain, None)
        return out

    def _say(self, found: Unfused) -> None:
        self.why_unfused = found.reason
        if found.reason and not is_watched():
            warn_without_rule(self.settings, "", type(self.store.templates[0]).__name__, found.reason)

    def _new_losses(
        self, world: World, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]
    ) -> KnownCall | None:
        """Make the `KnownCall` for losses, or None if nothing is recorded yet or other tensors need gradients too."""
        params = self.store.parameters()
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs, targets)) if isinstance(leaf, Tensor)]
        trains_more = kind[-1] or any(leaf.requires_grad for leaf in given) or self.store.separate_index
        # Half precision needs a scaled loss before the backward, not scaled gradients after it.
        half = any(param.dtype == torch.float16 for param in params)
        half = half or any(enabled and dtype == torch.float16 for enabled, dtype in autocast())
        if trains_more or half or not any(p.requires_grad for p in params) or not all(p.is_leaf for p in params):
            return None
        if self._has_moved():
            return None
        call, values = self._kind(world, args, kwargs)
        program = world.find(call)
        if not isinstance(program, FusedProgram) or program.writes_inputs:
            return None
        plain = partial(self._losses_of_all, partial(one_by_one, self.store, call.call.spec))
        run = self._checked(program, self._chosen(world, ("losses", kind), program, values), plain)
        return KnownCall(call.own, run, program)

    def _chosen(self, world: World, kind: Any, program: FusedProgram, values: list[Any]) -> Callable[..., Any]:
        """The run for calls of this kind: by the plan that most similar calls run by, else by turns."""
        with_losses, total = kind[0] == "losses", self.store.num_models
        size = sum(unwrap(value).numel() for value in values if isinstance(value, (Stacked, Tensor)))
        alike = [
            choice
            for choice in self.choices
            if choice.is_current and choice.kind == kind and max(size, choice.size) <= LIKE * min(size, choice.size)
        ]
        if alike:
            settled = Counter(choice.winner for choice in alike if choice.is_settled)
            plan = settled.most_common(1)[0][0] if settled else alike[0].winner
            return self._by(program, plan, with_losses)
        plans = plans_for(total, with_losses=with_losses, has_images=has_images(program))
        choice = Choice(kind, plans[0], {}, len(plans) == 1, size)
        self.choices.append(choice)
        del self.choices[:-MAX_PROGRAMS]
        if len(plans) == 1:
            return self._by(program, plans[0], with_losses)
        runs = {plan: partial(self._by, program, plan, with_losses) for plan in plans}
        at_least_s = {plan: self._recorded_s for plan in plans if plan.group_size < total}
        guard = partial(restored, self._written(program), self.store.generators)
        return ContestedCall(runs, choice, self._intervals, at_least_s, guard)

    def _by(self, program: FusedProgram, plan: ExecutionPlan, with_losses: bool) -> Callable[..., Any]:
        if plan.group_size == self.store.num_models > 1:
            return partial(self._losses_of_all, program.run) if with_losses else program.run
        executor = SingleExecutor(program, plan)
        return executor.losses if with_losses else executor.forward

    def _losses_of_all(
        self, run: Callable[..., Any], fn: Callable[..., Any], values: list[Any], targets: tuple[Any, ...]
    ) -> Tensor:
        return self.loss(fn, as_tensors(run(values), self.store.num_models), targets)

    def _checked(self, program: FusedProgram, run: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        """A run that leaves calls to the plain models in which a check fails: these raise, or go another way."""

        def checked(*given: Any) -> Any:
            try:
                with nullcontext() if is_watched() else restored(self._written(program), self.store.generators):
                    return run(*given)
            except AssertionError:
                return plain(*given)

        return checked if program.has_checks else run

    def _written(self, program: FusedProgram) -> list[Tensor]:
        """The tensors that a program may write into."""
        named = [self.store.whole(name) for name in program.written_names]
        return list({id(tensor): tensor for tensor in (*self.store.buffers(), *named)}.values())


def _kinds(leaves: Any) -> tuple[Any, ...]:
    return repeated(leaves) + tuple(
        [
            (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, Tensor) else None
            for leaf in leaves
        ]
    )


def _stacked(leaves: list[Any], own: tuple[bool, ...]) -> list[Any]:
    """Wrap the leaves that have one value per model in `Stacked`. A tensor that stands twice is wrapped once."""
    made = {id(leaf): Stacked(leaf) for leaf, each in zip(leaves, own, strict=True) if each}
    return [made[id(leaf)] if each else leaf for leaf, each in zip(leaves, own, strict=True)]


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
