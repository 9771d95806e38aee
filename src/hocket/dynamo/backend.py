"""The backend: Dynamo's graph goes through AOTAutograd, and each graph that comes out becomes a region.

Graphs are cut as eager works (`hocket.dynamo.graphs.partitioned`), and no op is decomposed that has a kernel of its
own, so that the ops are eager's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException

from hocket.autotune.options import NUMERICS
from hocket.autotune.store import DecisionStore, about_step
from hocket.dynamo.contest import Contest
from hocket.dynamo.gradients import Boxed, Differentiable, differentiable, num_trained, split_sums
from hocket.dynamo.graphs import (
    averages,
    boxed,
    copied,
    digest,
    fills_in_zeros,
    foreign_call,
    held_tensors,
    keeping_versions,
    partitioned,
    unchanged,
)
from hocket.dynamo.region import Region, region_of
from hocket.errors import InputError
from hocket.ir import Machine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BackendOptions:
    """Options of this backend, as given by ``torch.compile(..., options=...)``.

    Raises `InputError` at construction for any other value.
    """

    numerics: str = "bitwise"  # as for `hocket.schedule`
    # remember decisions: in the user's folder, in this folder, or not at all
    cache: bool | str | os.PathLike[str] = False

    def __post_init__(self) -> None:
        if self.numerics not in NUMERICS:
            raise InputError(f"options: numerics: expected one of {', '.join(NUMERICS)}, got {self.numerics!r}")
        if not isinstance(self.cache, (bool, str, os.PathLike)):
            raise InputError(f"options: cache: expected True, False or a folder, got {type(self.cache).__name__}")

    @staticmethod
    def of(options: Mapping[str, Any] | None, mode: str | None = None) -> BackendOptions:
        """The options in a mapping, or an `InputError` for other names, other values and a ``mode``."""
        if mode is not None:
            raise InputError(f"backend='hocket' has no modes, got mode={mode!r}; use options={{'numerics': ...}}")
        known = set(BackendOptions.__dataclass_fields__)
        for name in options or {}:
            if name not in known:
                raise InputError(f"options: unknown {name!r}; available: {', '.join(sorted(known))}")
        return BackendOptions(**(options or {}))


def hocket(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's: ``torch.compile(model, backend="hocket", options={"numerics": "close"})``.

    Raises:
        InputError: the options are not this backend's; torch shows it as the cause of its own error.
    """
    return compiled_graph(graph, example_inputs, BackendOptions.of(options, mode))


def compiled_graph(
    graph: fx.GraphModule, example_inputs: Sequence[Any], asked: BackendOptions, *, takes_turns: bool = True
) -> Callable[..., Any]:
    """A graph of Dynamo's as a `Contest`, or as it stands where no part of it can be planned.

    Without turns with the graph as it stands, the compiled one stays if any region has a plan.
    """
    if name := foreign_call(graph):
        return _as_it_stands(graph, f"it calls {name}, whose effects are not known")
    if any(isinstance(value, list) for value in example_inputs):
        return _as_it_stands(graph, "it takes lists and empties them, as graphs of compiled autograd do")
    held = held_tensors(graph)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in held):
        return _as_it_stands(graph, "it holds weights of its own")
    store = DecisionStore.of(asked.cache)
    about = _about(graph, asked.numerics)
    known = store.find(about)
    if known is not None and known.kind == "eager":
        return _as_it_stands(graph, f"{known.reason}; remembered")
    original, written = unchanged(graph), averages(graph)
    parts = _Parts(asked)
    backend = aot_autograd(
        fw_compiler=partial(parts.compiled, kind="forward"),
        bw_compiler=partial(parts.compiled, kind="backward"),
        inference_compiler=partial(parts.compiled, kind="inference"),
        partition_fn=partial(partitioned, lays_out=asked.numerics == "close"),
        keep_inference_input_mutations=True,
    )
    # Both graphs now, and none that gives up what it has saved: a backward may run twice, as in eager.
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True, donated_buffer=False):
        try:
            traced: Callable[..., Any] = backend(graph, example_inputs)
        except TorchDynamoException:  # says how Dynamo goes on
            raise
        except Exception as error:  # noqa: BLE001  # of the user's, who gets it from the call
            return _as_it_stands(graph, f"AOTAutograd cannot trace it ({type(error).__name__}: {error})", parts.regions)
    compiled = parts.differentiable(original, len(example_inputs)) or traced
    if not parts.regions:
        return _as_it_stands(graph, "no part of it can be planned")
    is_exact = compiled is not traced and not fills_in_zeros(graph)
    if not is_exact and parts.meta is not None and num_trained(parts.meta) > 1:
        reason = "AOTAutograd would compute with zeros where an output gets no gradient"
        return _as_it_stands(graph, reason, parts.regions)

    def watched(*args: Any) -> Any:
        return contest.watched(traced(*args))

    contest = Contest(
        original,
        keeping_versions(compiled if isinstance(compiled, Differentiable) else watched, written),
        parts.regions,
        held,
        needs_equal_bits=asked.numerics == "bitwise",
        is_known=known is not None,
        keep=partial(store.keep, about),
        seed=str(about["graphs"]) if takes_turns else "",
        traced=traced,
    )
    if isinstance(compiled, Differentiable):
        compiled.on_twice = contest.differentiated_twice
    return contest


def _as_it_stands(graph: fx.GraphModule, reason: str, made: Sequence[Region] = ()) -> Callable[..., Any]:
    for region in made:
        region.give_up(reason)
    log.info("hocket: a graph runs as it stands: %s", reason)
    return unchanged(graph)


def _about(graph: fx.GraphModule, numerics: str) -> dict[str, Any]:
    """All that decides whether the graph or its regions are faster."""
    fingerprints = {"dynamo": digest(graph)}
    return about_step(fingerprints, Machine.here(), planner="contest", guard=True, executor="auto", numerics=numerics)


class _Parts:
    """The graphs that AOTAutograd makes of one of Dynamo's."""

    def __init__(self, options: BackendOptions) -> None:
        self.regions: list[Region] = []  # those that can be planned
        self.meta: Any = None  # AOTAutograd's notes on the graph. None unless there are gradients.
        self._options = options
        self._forward: tuple[fx.GraphModule, Boxed] | None = None
        self._backward: fx.GraphModule | None = None
        self._run_backward: Boxed | None = None  # for AOTAutograd

    def compiled(self, graph: fx.GraphModule, example_inputs: Sequence[Any], *, kind: str) -> Boxed:
        """A boxed function of one of the graphs. Which backward is planned is decided by `differentiable`."""
        own = fx.GraphModule(graph, copied(graph.graph))
        if kind == "backward":
            self._backward = own

            def late(inputs: list[Any]) -> Any:
                assert self._run_backward is not None
                return self._run_backward(inputs)

            late._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for this attribute
            return late
        call = self._region(graph, kind)
        self._forward = own, call
        context = torch._guards.TracingContext.try_get()
        if kind == "forward" and context is not None:
            self.meta = context.fw_metadata
            self.meta.bw_donated_idxs = []  # else it refuses a second backward, not knowing that nothing is given up
        return call

    def differentiable(self, original: Callable[..., Any], num_inputs: int) -> Differentiable | None:
        """The graph with its gradients. None where it has none, or AOTAutograd does more than to run two graphs."""
        backward, made = self._backward, None
        if backward is None:
            return None
        plan = partial(self._region, kind="backward")
        if self.meta is not None and self._forward is not None:
            is_split = self._options.numerics == "bitwise"
            split, repeated = split_sums(self._forward[0], backward) if is_split else (backward, [])
            made = differentiable(original, num_inputs, self._forward, split, self.meta, plan, repeated)
        self._run_backward = plan(backward) if made is None else boxed(backward)
        return made

    def _region(self, graph: fx.GraphModule, kind: str) -> Boxed:
        region, call = region_of(graph, kind, numerics=self._options.numerics, cache=self._options.cache)
        if region is not None:
            self.regions.append(region)
        return call
