"""Models and optimizers of a step, which run by plan while the step runs, and are plain before and after it.

A model's call goes through Dynamo and the backend of this package; the update of an optimizer is a step of its own,
captured and planned as any other (`hocket.autotune.pool`), so that rates and counts are live numbers. Both are put in
where torch itself asks for them: ``_compiled_call_impl`` of a module, which `torch.nn.Module.compile` sets and pickles
and copies leave out, and ``step`` of an optimizer, which schedulers set. Both go when the step ends, however it ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import nn

from hocket.autotune.candidate import TunerConfig
from hocket.autotune.pool import VariantPool
from hocket.dynamo.backend import BackendOptions, compiled_graph
from hocket.dynamo.contest import Contest
from hocket.pystate.watch import PurityWatch
from hocket.tracing.state import inventory
from hocket.tracing.switches import obstacle

# Steps without a call that anything still waits for; graphs of the first calls are often not called again.
MAX_IDLE = 10
_CONFIG: Any = torch._dynamo.config
# Where torch's own compiler says that it has given up a function.
_CONVERTING = logging.getLogger("torch._dynamo.convert_frame")
# Dynamo's settings: it gives up what it cannot compile, respects hooks, decomposes no op, and translates neither numpy
# nor assertions to ops, which would give other bits or errors than the forward itself. A number that a forward counts
# is no reason to compile it again.
_SETTINGS = {
    "allow_unspec_int_on_nn_module": True,
    "suppress_errors": True,
    "skip_nnmodule_hook_guards": False,
    "enable_dynamo_decompositions": False,
    "trace_numpy": False,
    "rewrite_assert_with_torch_assert": False,
}
# The attribute that Dynamo sets on parameters. Pickles of a parameter would contain it.
_MARK = "_dynamo_static_input_type"
_NONE = object()
_Exchange = tuple[dict[str, Any], str, Any]


class PlannedParts:
    """The models and optimizers of one step."""

    def __init__(self, config: TunerConfig) -> None:
        self.called: dict[nn.Module, None] = {}  # outermost modules that were called while looked on
        self.failure = ""  # why Dynamo has given up a model. Empty if it has not.
        self._config = config
        self._thread = threading.get_ident()
        self._is_on = False
        self._depth = self._num_undecided = self._num_idle = 0
        self._parts: list[_PlannedModel | _PlannedUpdate] = [
            _PlannedUpdate(one, config) for one in config.places.optimizers
        ]

    @property
    def is_decided(self) -> bool:
        """True if no part is searched for any more."""
        return self._num_idle >= MAX_IDLE

    @property
    def is_planned(self) -> bool:
        return any(part.is_planned for part in self._parts)

    @contextmanager
    def looked_on(self) -> Iterator[None]:
        """Note which modules a plain step calls."""
        modules = self._config.places.modules
        with _exchanged([(vars(one), "_compiled_call_impl", self._noting(one)) for one in modules]):
            yield

    def begin(self) -> None:
        """Plan the modules that were called, and the updates, from now on."""
        self._parts += [_PlannedModel(one, number, self._config) for number, one in enumerate(self.called)]

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Run a step with all parts, which may be compiled in it."""
        tensors = [tensor for part in self._parts for tensor in part.tensors if not hasattr(tensor, _MARK)]
        _CONVERTING.addFilter(self._note_failure)
        try:
            with (
                _CONFIG.patch({name: each for name, each in _SETTINGS.items() if hasattr(_CONFIG, name)}),
                self.planned(),
            ):
                yield
        finally:
            _CONVERTING.removeFilter(self._note_failure)
            for tensor in tensors:
                vars(tensor).pop(_MARK, None)
            before, self._num_undecided = self._num_undecided, sum(part.num_undecided for part in self._parts)
            self._num_idle = self._num_idle + 1 if self._num_undecided == before else 0

    def freeze(self) -> None:
        """Compile nothing any more, and leave parts plain that have no plan."""
        self._drop(lambda part: not part.is_planned)
        for part in self._parts:
            part.freeze()

    def leave_models_plain(self) -> bool:
        """Return True if there were planned models, and there are updates besides."""
        models = [part for part in self._parts if isinstance(part, _PlannedModel)]
        self._drop(lambda part: part in models and len(models) < len(self._parts))
        return bool(models) and models != self._parts

    @contextmanager
    def planned(self) -> Iterator[None]:
        """Run a step with the parts in their places."""
        self._is_on = True
        try:
            with _exchanged([part.exchange(self._is_here) for part in self._parts if part.fits]):
                yield
        finally:
            self._is_on = False

    def close(self) -> None:
        self._drop(lambda part: True)

    def _drop(self, is_dropped: Callable[[_PlannedModel | _PlannedUpdate], bool]) -> None:
        left = [part for part in self._parts if not is_dropped(part)]
        for part in self._parts:
            if part not in left:
                part.close()
        self._parts = left

    def _is_here(self) -> bool:
        return self._is_on and threading.get_ident() == self._thread and not obstacle()

    def _noting(self, module: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return module._call_impl(*args, **kwargs)
            if not self._depth:
                self.called[module] = None
            self._depth += 1
            try:
                return module._call_impl(*args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def _note_failure(self, record: logging.LogRecord) -> bool:
        """Take note of what Dynamo warns of, which the user has not asked to hear."""
        if record.levelno >= logging.WARNING:
            self.failure = self.failure or record.getMessage().strip().partition("\n")[0]
        return record.levelno < logging.WARNING


class _PlannedModel:
    """A module whose calls Dynamo compiles, with the contests of its graphs."""

    def __init__(self, module: nn.Module, number: int, config: TunerConfig) -> None:
        self._module = module
        self._contests: list[Contest] = []
        asked = BackendOptions(config.numerics, config.store.folder or False)

        def plain(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            made = compiled_graph(graph, inputs, asked, takes_turns=False)
            self._contests += [made] if isinstance(made, Contest) else []
            return made

        # Dynamo counts what it compiles by code object.
        plain.__code__ = plain.__code__.replace(co_name=f"{type(module).__name__}_{number}")
        self._plain: Callable[..., Any] = plain
        self._call: Callable[..., Any] = torch.compile(plain, backend=backend)

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        return (*self._module.parameters(), *self._module.buffers())

    @property
    def fits(self) -> bool:
        """True if the module was not compiled by anyone else meanwhile."""
        return self._module._compiled_call_impl is None

    @property
    def num_undecided(self) -> int:
        """Calls before it was clear how graphs run."""
        return sum(contest.num_undecided for contest in self._contests)

    @property
    def is_planned(self) -> bool:
        return any(contest.is_compiled for contest in self._contests)

    def exchange(self, is_here: Callable[[], bool]) -> _Exchange:
        def call(*args: Any, **kwargs: Any) -> Any:
            return (self._call if is_here() else self._plain)(*args, **kwargs)

        return vars(self._module), "_compiled_call_impl", call

    def freeze(self) -> None:
        self._call = torch._dynamo.run(self._plain)

    def close(self) -> None:
        for contest in self._contests:
            contest.close()


class _PlannedUpdate:
    """The update of an optimizer as a step of its own."""

    tensors: tuple[torch.Tensor, ...] = ()

    def __init__(self, optimizer: torch.optim.Optimizer, config: TunerConfig) -> None:
        self.num_undecided = 0
        self._optimizer = optimizer
        self._plain = plain = optimizer.step
        places = inventory([], optimizer)

        def update(batch: Any) -> Any:
            return plain()

        watch = PurityWatch(update, places.optimizers)
        config = replace(config, step=update, model=[], optimizer=optimizer, places=places, watch=watch, leaves={})
        self._pool = VariantPool(replace(config, is_tentative=True, on_progress=None), lambda: None)

    @property
    def fits(self) -> bool:
        """True if the optimizer updates as it did: no scheduler has set its step anew."""
        return bool(self._optimizer.step == self._plain)

    @property
    def is_planned(self) -> bool:
        return self._pool.current.decision.best is not None and self.fits

    def exchange(self, is_here: Callable[[], bool]) -> _Exchange:
        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if args or kwargs or not is_here():
                return self._plain(*args, **kwargs)
            self.num_undecided += not self._pool.current.settled
            return self._pool(())

        update_wrapper(step, self._plain)
        return vars(self._optimizer), "step", MethodType(step, self._optimizer)

    def freeze(self) -> None:
        """Nothing is compiled for it."""

    def close(self) -> None:
        self._pool.close()


@contextmanager
def _exchanged(entries: Sequence[_Exchange]) -> Iterator[None]:
    """Let these entries of dicts have other values within. What is set meanwhile by anyone else stays."""
    before = [table.get(key, _NONE) for table, key, _ in entries]
    try:
        for table, key, value in entries:
            table[key] = value
        yield
    finally:
        for (table, key, value), old in zip(entries, before, strict=True):
            if table.get(key) is value:
                del table[key]
                table |= {} if old is _NONE else {key: old}
