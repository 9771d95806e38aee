"""The traced models of an array: one program for each kind of call, made from the graphs of all models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import InputError
from hocket.fusion import trace
from hocket.fusion.bounded import Bounded
from hocket.fusion.call_spec import CallSpec, modes
from hocket.fusion.merge import is_alike, merged
from hocket.fusion.model_slice import ModelSlice
from hocket.fusion.program import FusedProgram
from hocket.fusion.python_state import Globals, attributes, has_own_code
from hocket.fusion.random_sources import default_sources, restored_sources
from hocket.fusion.record import recorded
from hocket.fusion.rules.base import is_watched
from hocket.fusion.stacked import Stacked, unwatched
from hocket.fusion.store import Store

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

    @property
    def random_sources(self) -> list[Any]:
        """Generators that the traced forwards may draw from, torch's, Python's and numpy's own included."""
        return default_sources() if self._globals is None else self._globals.random_sources

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
            self._kept[key] = self._made(partial(self._recorded, known), values, call.spec, has_gradients, known)
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

    def _recorded(self, known: Globals, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[trace.Traced]:
        store = self._models.store
        separate = frozenset(store.separate_index)
        with restored_sources(known.random_sources):
            _fill_caches(store, args, kwargs)
        known.put_back()
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
        if known.iterator is not None:  # which a trace would go on in
            return None
        try:
            with unwatched(), torch.set_grad_enabled(has_gradients), restored_sources(known.random_sources) as is_drawn:
                args, kwargs = _sample(values, spec)
                program = FusedProgram(self._models, merged(trace_all(args, kwargs)))
                # Numbers that are drawn where no op is recorded would be constants.
                is_sound = not is_drawn() and known.changed() is None
        except InputError as error:
            raise InputError(f"{error}{self._hint()}") from error
        except (torch.fx.proxy.TraceError, *trace.FAILURES):
            return None
        finally:
            known.put_back()
        if not is_sound:
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


def _fill_caches(store: Store, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call a copy of the first model once: what its forward keeps from call to call outside of the model is there then.

    A table in a ``functools.lru_cache``, say. If it were made while a forward is recorded, it would have no data, and
    every later call of any such model would get it.
    """
    args, kwargs = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))
    store.plain(0)(*args, **kwargs)


def _sample(values: list[Any], spec: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as the first model sees them."""
    first = [value.tensor[0].detach() if isinstance(value, Stacked) else value for value in values]
    args, kwargs = pytree.tree_unflatten(first, spec)
    return args, kwargs
