r"""Calling B models: trace once for each kind of call, choose what runs, run it.

arguments --which are of each model--> leaves --trace--> graph --rules--> program --choose--> what runs from now on
    \--nothing can trace it--> the whole model by vmap, else the plain models one after another
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import InputError
from hocket.fusion import fallback, trace
from hocket.fusion.choose import CHANNELS_LAST, Choice, as_before, choose, put_back
from hocket.fusion.compare import Blocks
from hocket.fusion.inputs import ModelAxis
from hocket.fusion.merge import is_alike, merged
from hocket.fusion.program import FusedProgram, make_program
from hocket.fusion.python_state import Globals, attributes, has_own_code
from hocket.fusion.rules.base import is_watched
from hocket.fusion.shares import GradientMemory
from hocket.fusion.stacked import Stacked, unwatched, unwrap, with_model_dim
from hocket.fusion.state import StatefulStore
from hocket.fusion.steps import Step, warn_without_rule
from hocket.fusion.store import mark
from hocket.fusion.unfused_copy import UnfusedCopy

__all__ = ["MAX_KINDS", "Dispatcher", "autocast_state"]

MAX_PROGRAMS = 32
MAX_KINDS = 256  # of calls whose choice is remembered
MAX_TIMED = 8  # of such that are timed: sequences of ever other lengths would be timed for ever
NEAR = 3.0  # times the fastest: what lanes can win back on models one by one
FORMS = {"rule": "rule", "mixed": "rule", "loop": "loop", "1 in one go": "loop", "single": "loop"}


class Dispatcher(StatefulStore):
    """A store that can be called as a module, with an axis of models in front.

    Args:
        models: as of `Store`.
        blocks: as of `Store`.
        seeds: as of `Store`.
        backend: what computes, "auto", "rule", "vmap" or "loop".
        strict: whether an op without a rule is an error.
        shared: whether inputs are for all models; None where their shapes say so.
    """

    def __init__(
        self,
        models: list[nn.Module],
        blocks: Blocks,
        seeds: Sequence[int] | None,
        *,
        backend: str,
        strict: bool,
        shared: bool | Mapping[str, bool] | None,
    ) -> None:
        super().__init__(models, blocks, seeds)
        self.backend = backend
        self.strict = strict
        self.model_axis = ModelAxis(shared)
        self.choices: list[Choice] = []
        self.warned: set[tuple[str, str]] = set()
        self.gradient_memory = GradientMemory()
        self._programs: dict[Any, FusedProgram | None] = {}
        self._chosen: dict[Any, Callable[[list[Any]], Any]] = {}
        self._ready: dict[Any, tuple[tuple[bool, ...], Callable[[list[Any]], Any]]] = {}
        self._won: dict[Any, list[str]] = {}
        self._globals: Globals | None = None  # what the traced forwards read outside of the models
        self._per_model: dict[Any, tuple[bool, ...]] = {}
        self._version = 0
        self._hocket_form: str | None = None  # which of `_hocket_forms` is wanted

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of all models, the models first.

        Args:
            args: what one model takes; tensors ``(B, N, ...)``, or ``(N, ...)`` for all models.
            kwargs: the same.

        Raises:
            InputError: an op fails, or the input fits no model; names the layer.
        """
        self._follow_globals()
        known = self._known(args) if not kwargs else None
        if known in self._ready:
            own, run = self._ready[known]
            return self._out(run([Stacked(arg) if each else arg for arg, each in zip(args, own, strict=True)]))
        call, values, shapes, own = self._prepared(args, kwargs)
        if self.backend == "loop" or self._hocket_form == "loop":
            return self._out(self._one_by_one(values, call.spec))
        program = self._program(call, values, shapes, own)
        if program is None:
            return self._out(self._whole(values, call.spec))
        if self.backend == "auto" and self._hocket_form is None and not is_watched():
            key = (id(program), shapes, own, torch.is_grad_enabled(), autocast_state(), *_devices(values))
            if key not in self._chosen:
                self._chosen[key] = self._choose(program, values)
            if known is not None:
                self._ready[known] = own, self._chosen[key]
            return self._out(self._chosen[key](values))
        return self._out(program.run(values))

    def _choose(self, program: FusedProgram, values: list[Any]) -> Callable[[list[Any]], Any]:
        """What runs for arguments of this kind: by timing, or, after many kinds, as most of them."""
        if len(self._chosen) >= MAX_KINDS:
            self._chosen.clear()
            self._ready.clear()
            self._per_model.clear()
        call = ("forward", torch.is_grad_enabled())
        winner = self._most_often(call)
        if winner is not None:
            return as_before(program, winner)
        choice, run = choose(program, values, self._put_back)
        self._won.setdefault(call, []).append(choice.winner)
        self.choices.append(choice)
        return run

    def _most_often(self, call: Any) -> str | None:
        """Who won most often for such calls, once they were timed for many kinds of arguments."""
        winners = self._won.get(call, [])
        return Counter(winners).most_common(1)[0][0] if len(winners) >= MAX_TIMED else None

    def _prepared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[trace.CallSpec, list[Any], Any, tuple[bool, ...]]:
        """The kind of call, the leaves of its arguments, their shapes, and which are of each model."""
        call, leaves = trace.CallSpec.of(args, kwargs)
        shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves)
        own = self._own_leaves(call, leaves, shapes)
        return call, [Stacked(leaf) if each else leaf for leaf, each in zip(leaves, own, strict=True)], shapes, own

    def _known(self, args: tuple[Any, ...]) -> Any:
        """What a choice depends on, where all arguments are tensors; else None."""
        if self.backend != "auto" or self._hocket_form or not all(type(arg) is Tensor for arg in args) or is_watched():
            return None
        kinds = tuple([(arg.shape, arg.dtype, arg.device) for arg in args])
        return (kinds, self._version, torch.is_grad_enabled(), autocast_state())

    def _own_leaves(self, call: trace.CallSpec, leaves: list[Any], shapes: Any) -> tuple[bool, ...]:
        key = (call.spec, shapes, self._version)
        if key not in self._per_model:
            self._per_model[key] = self.model_axis.inputs(self._templates[0], leaves, call.spec, self.num_models)
        return self._per_model[key]

    def _hocket_forms(self) -> tuple[str, ...]:
        """In which forms a step is worth capturing, the one that was faster so far first; `_hocket_form` asks for one.

        "rule", or "loop", the models one by one: for what was timed, that is slower by the time that passes around so
        many small ops, or on one of two cores. Lanes may win that back, but not everything.
        """
        if self.backend != "auto" or self._seeds is not None:
            return ("rule",)
        behind: dict[str, float] = {}  # how many times the fastest, in the choice where it fared best
        for choice in self.choices:
            fastest_us = min(choice.whole_us.values(), default=1.0)
            for name, time_us in choice.whole_us.items():
                form = FORMS.get(name.removesuffix(CHANNELS_LAST))
                if form is not None:
                    behind[form] = min(behind.get(form, NEAR), time_us / fastest_us)
        return tuple(sorted([form for form in behind if behind[form] < NEAR], key=behind.__getitem__)) or ("rule",)

    def _put_back(self) -> AbstractContextManager[None]:
        return put_back(self, self._generators)

    def _program(
        self, call: trace.CallSpec, values: list[Any], shapes: Any, own: tuple[bool, ...]
    ) -> FusedProgram | None:
        """The program for this kind of call, or None where nothing can trace it."""
        key: Any = (call.spec, call.constants, self._version)
        if key not in self._programs:
            self._make_room()
            with unwatched():
                self._programs[key] = self._traced_symbolically(values, call.spec)
        program = self._programs[key]
        if program is not None:
            return program
        key = (key, shapes, own)
        if key not in self._programs:
            self._make_room()
            self._programs[key] = None if is_watched() else self._traced_by_export(values, call.spec)
        return self._programs[key]

    def _make_room(self) -> None:
        if len(self._programs) >= MAX_PROGRAMS:
            self._programs.clear()
            self._chosen.clear()
            self._ready.clear()

    def _sample(self, values: list[Any], spec: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the first model sees them."""
        first = [value.tensor[0].detach() if isinstance(value, Stacked) else value for value in values]
        args, kwargs = pytree.tree_unflatten(first, spec)
        return args, kwargs

    def _traced_symbolically(self, values: list[Any], spec: Any) -> FusedProgram | None:
        args, kwargs = self._sample(values, spec)
        separate = frozenset(self._separate_index)
        known = Globals(self._templates)
        traces: list[trace.Traced] = []
        # What only torch's own layers compute is the same for the same layers, which `compare` has seen to.
        models = self._templates if any(map(has_own_code, self._templates)) else self._templates[:1]
        try:
            for template in models:
                model = copy.deepcopy(template)
                traces.append(trace.symbolic(model, args, kwargs, separate))
                if traces[-1].keeps_values and not is_alike(traces[-1], trace.symbolic(model, args, kwargs, separate)):
                    raise torch.fx.proxy.TraceError("the forward reads what an earlier call left behind")
            if (path := known.changed()) is not None:
                raise torch.fx.proxy.TraceError(f"the forward changes {path}")
            program = make_program(self, merged(traces))
        except InputError as error:
            raise InputError(f"{error}{self._hint()}") from error
        except (torch.fx.proxy.TraceError, *trace.FAILURES) as error:
            self._why_not = f"{type(error).__name__}: {error}"
            return None
        self._globals = known
        return program

    def _traced_by_export(self, values: list[Any], spec: Any) -> FusedProgram | None:
        if self._separate_index:
            raise InputError(
                "blocks stay separate, and torch.fx cannot trace the model around them: "
                f"{self._why_not.splitlines()[0]}; use backend='loop', or models that agree in every layer"
            )
        args, kwargs = self._sample(values, spec)
        known = Globals(self._templates)
        traces: list[trace.Traced] = []
        try:
            for index in range(self.num_models):
                with self._put_back():
                    traces.append(trace.exported(self._plain(index), args, kwargs))
            if (path := known.changed()) is not None:
                raise ValueError(f"the forward changes {path}")
            program = make_program(self, merged(traces))
        except InputError as error:
            raise InputError(f"{error}{self._hint()}") from error
        except (torch._dynamo.exc.TorchDynamoException, *trace.FAILURES) as error:
            self._why_not += f"; {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return None
        self._globals = known
        return program

    def _hint(self) -> str:
        """Attributes in which models differ, which may be why their graphs do."""
        known = {path: value for _, path, value in attributes(self._templates[0])}
        for index, template in enumerate(self._templates[1:], 1):
            for _, path, value in attributes(template):
                if isinstance(value, (bool, int, float, str)) and known.get(path) != value:
                    return f" ({path}: {known.get(path)!r} in model 0, {value!r} in model {index})"
        return ""

    def _whole(self, values: list[Any], spec: Any) -> Any:
        """Where no tracer can follow, nobody knows what the models have in common: each runs as it is."""
        if not is_watched():
            step = Step(0, "", type(self._templates[0]).__name__, _no_rule, (), {}, ["rule"])
            warn_without_rule(self, step)
        return self._one_by_one(values, spec)

    def _one_by_one(self, values: list[Any], spec: Any) -> Any:
        """The plain models one after another, on views of the stacked tensors."""
        args, kwargs = pytree.tree_unflatten(values, spec)
        parts: dict[int, tuple[Tensor, ...]] = {}
        tensors: dict[str, tuple[Tensor, ...]] = {}
        for name in self._places:
            whole = self.tensor(name).tensor
            tensors[name] = parts.setdefault(id(whole), whole.unbind(0))
        targets: list[Callable[..., Any]] = []
        for index, template in enumerate(self._templates):
            own = {name: each[index] for name, each in tensors.items()}
            for block, place in self._separate_index.items():
                module = self._group(place)[index]
                own |= {f"{block}.{name}": each for name, each in module.named_parameters(remove_duplicate=False)}
                own |= {f"{block}.{name}": each for name, each in module.named_buffers(remove_duplicate=False)}
            targets.append(UnfusedCopy(self, template, own, index))
        return fallback.loop(targets, args, kwargs, "the model itself")

    def _out(self, tree: Any) -> Any:
        """Tensors of all models; one that all models share is repeated."""
        if isinstance(tree, Stacked):
            return tree.tensor
        return pytree.tree_map(
            lambda leaf: with_model_dim(leaf, self.num_models) if isinstance(leaf, (Stacked, Tensor)) else leaf,
            tree,
            is_leaf=lambda leaf: isinstance(leaf, Stacked),
        )

    def train(self, mode: bool = True) -> Self:
        """Set all models to training, or to evaluation."""
        super().train(mode)
        for template in self._templates:
            template.train(mode)
        self._version = 1 if mode else 2
        return self

    def _follow_globals(self) -> None:
        """Let go of the graphs where what the forwards read outside of the models has changed."""
        if self._globals is not None and self._globals.changed() is not None:
            self._forget()

    def _forget(self) -> None:
        super()._forget()
        self._globals = None
        self._programs.clear()
        self._chosen.clear()
        self._ready.clear()
        self._won.clear()
        self._per_model.clear()
        self.gradient_memory = GradientMemory()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state |= {name: {} for name in ("_programs", "_chosen", "_ready", "_won", "_per_model")}
        state |= {"gradient_memory": GradientMemory(), "_globals": None}
        state["_hocket_form"] = None  # it was asked of this array, for as long as somebody captures it
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for parameter in self.fused.parameters():  # a copied parameter does not take its marks along
            parameter._hocket_models = self.num_models  # type: ignore[attr-defined]
        for group in self.separate:
            mark(list(group.children()))


def _no_rule(backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return NotImplemented


def autocast_state() -> tuple[tuple[bool, torch.dtype], ...]:
    """Whether autocast is on, and to which dtype, on the CPU and on CUDA."""
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def _devices(values: list[Any]) -> tuple[str, ...]:
    return tuple(str(unwrap(value).device) for value in values if isinstance(value, (Stacked, Tensor)))
