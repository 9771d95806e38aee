"""The traced models of an array: one program for each kind of call, made from the graphs of all models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hocket.errors import InputError
from hocket.fusion import trace
from hocket.fusion.bounded import Bounded
from hocket.fusion.call_spec import CallSpec, modes
from hocket.fusion.merge import is_alike, merged
from hocket.fusion.model_slice import ModelSlice
from hocket.fusion.program import FusedProgram
from hocket.fusion.python_state import Globals, attributes, has_own_code
from hocket.fusion.record import recorded
from hocket.fusion.rules.base import is_watched
from hocket.fusion.stacked import Stacked, unwatched

__all__ = ["Programs"]

MAX_PROGRAMS = 32


class Programs:
    """Traces models, and keeps what was made of them.

    Args:
        models: all of them.
    """

    def __init__(self, models: ModelSlice) -> None:
        self._models = models
        self._kept: Bounded[FusedProgram | None] = Bounded(MAX_PROGRAMS)
        self._globals: Globals | None = None  # what the traced forwards read outside of the models

    def made(self) -> list[FusedProgram]:
        """Those that are kept, the one that was used last first."""
        return [program for program in reversed(self._kept.values()) if program is not None]

    def are_outdated(self) -> bool:
        """Whether what the traced forwards read outside of the models has changed."""
        return self._globals is not None and self._globals.changed() is not None

    def of(self, call: CallSpec, values: list[Any], kinds: Any) -> FusedProgram | None:
        """The program for a kind of call, or None where nothing can trace it.

        Args:
            call: the tree of arguments, and the constants in it.
            values: the leaves at hand, `Stacked` where models have their own.
            kinds: shapes and types of the leaves, and which are of each model: a recorded graph holds for these.

        Raises:
            InputError: the models' graphs differ.
        """
        has_gradients = torch.is_grad_enabled()
        key: Any = (call, self._models.store.templates[0].training, modes())
        known = None
        if key not in self._kept:
            known = Globals(self._models.store.templates)
            self._kept[key] = self._made(self._symbolic, values, call.spec, has_gradients, known)
        program = self._kept.get(key)
        if program is not None:
            return program
        key = (*key, kinds)
        if key not in self._kept and not is_watched():
            if known is None or known.changed() is not None:
                known = Globals(self._models.store.templates)
            self._kept[key] = self._made(self._recorded, values, call.spec, has_gradients, known)
        return self._kept.get(key)

    def _symbolic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[trace.Traced]:
        store = self._models.store
        separate = frozenset(store.separate_index)
        traces: list[trace.Traced] = []
        for template in self._different():
            model = copy.deepcopy(template)
            traces.append(trace.symbolic(model, args, kwargs, separate))
            if traces[-1].keeps_values and not is_alike(traces[-1], trace.symbolic(model, args, kwargs, separate)):
                raise torch.fx.proxy.TraceError("the forward reads what an earlier call left behind")
        return traces

    def _recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[trace.Traced]:
        store = self._models.store
        separate = frozenset(store.separate_index)
        return [
            recorded(template, store.tensors_of(index), args, kwargs, separate)
            for index, template in enumerate(self._different())
        ]

    def _different(self) -> list[nn.Module]:
        """The models that may have a graph of their own.

        What only torch's own layers compute is the same for the same layers, which `compare` has seen to.
        """
        templates = self._models.store.templates
        return templates if any(map(has_own_code, templates)) else templates[:1]

    def _made(
        self,
        trace_all: Callable[..., list[trace.Traced]],
        values: list[Any],
        spec: Any,
        has_gradients: bool,
        known: Globals,
    ) -> FusedProgram | None:
        """A program from traces of all models, or None where these fail, or change what was known before."""
        try:
            with unwatched(), torch.set_grad_enabled(has_gradients):
                program = FusedProgram(self._models, merged(trace_all(*_sample(values, spec))))
            if (path := known.changed()) is not None:
                raise torch.fx.proxy.TraceError(f"the forward changes {path}")
        except InputError as error:
            raise InputError(f"{error}{self._hint()}") from error
        except (torch.fx.proxy.TraceError, *trace.FAILURES):
            return None
        self._globals = known
        return program

    def _hint(self) -> str:
        """Attributes in which models differ, which may be why their graphs do."""
        templates = self._models.store.templates
        known = {path: value for _, path, value in attributes(templates[0])}
        for index, template in enumerate(templates[1:], 1):
            for _, path, value in attributes(template):
                if isinstance(value, (bool, int, float, str)) and known.get(path) != value:
                    return f" ({path}: {known.get(path)!r} in model 0, {value!r} in model {index})"
        return ""


def _sample(values: list[Any], spec: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as the first model sees them."""
    first = [value.tensor[0].detach() if isinstance(value, Stacked) else value for value in values]
    args, kwargs = pytree.tree_unflatten(first, spec)
    return args, kwargs
