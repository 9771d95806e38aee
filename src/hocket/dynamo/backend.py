"""The backend: Dynamo's graph goes through AOTAutograd, and each graph that comes out becomes a region.

Graphs are cut as eager works: the forward keeps for the backward what eager's autograd would keep (the default
partition), nothing is recomputed, and no op is decomposed that has a kernel of its own, so that the ops are eager's.
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
from torch._functorch.partitioners import default_partition

from hocket.autotune.options import NUMERICS
from hocket.autotune.remembered import about_step
from hocket.autotune.store import DecisionStore
from hocket.dynamo.contest import Contest
from hocket.dynamo.graphs import digest, foreign_call, held_tensors, unchanged
from hocket.dynamo.region import Region, region_of
from hocket.errors import InputError
from hocket.ir import Machine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BackendOptions:
    """Options of this backend, as given by ``torch.compile(..., options=...)``.

    Attributes:
        numerics: as for `hocket.schedule`.
        cache: remember decisions: in the user's folder, in this folder, or not at all.

    Raises `InputError` at construction for any other value.
    """

    numerics: str = "bitwise"
    cache: bool | str | os.PathLike[str] = False

    def __post_init__(self) -> None:
        if self.numerics not in NUMERICS:
            raise InputError(f"options: numerics: expected one of {', '.join(NUMERICS)}, got {self.numerics!r}")
        if not isinstance(self.cache, (bool, str, os.PathLike)):
            raise InputError(f"options: cache: expected True, False or a folder, got {type(self.cache).__name__}")

    @staticmethod
    def of(options: Mapping[str, Any] | None, mode: str | None = None) -> BackendOptions:
        """The options in a mapping.

        Raises:
            InputError: it has other names or values, or there is a ``mode``.
        """
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

    Args:
        graph: Dynamo's.
        example_inputs: of its first call.
        asked: the options.
        takes_turns: compare the compiled graph with the graph as it stands. Without, it stays if any region has a plan.
    """
    if name := foreign_call(graph):
        return _as_it_stands(graph, f"it calls {name}, whose effects are not known")
    held = held_tensors(graph)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in held):
        return _as_it_stands(graph, "it holds weights of its own")
    store = DecisionStore.of(asked.cache)
    about = _about(graph, asked.numerics)
    known = store.find(about)
    if known is not None and known.kind == "eager":
        return _as_it_stands(graph, f"{known.reason}; remembered")
    original = unchanged(graph)
    made: list[Region] = []
    compiler = partial(_compiled, options=asked, made=made)
    backend = aot_autograd(
        fw_compiler=partial(compiler, kind="forward"),
        bw_compiler=partial(compiler, kind="backward"),
        inference_compiler=partial(compiler, kind="inference"),
        partition_fn=default_partition,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = backend(graph, example_inputs)
    if not made:
        return _as_it_stands(graph, "no part of it can be planned")
    return Contest(
        original,
        compiled,
        made,
        held,
        needs_equal_bits=asked.numerics == "bitwise",
        is_known=known is not None,
        keep=partial(store.keep, about),
        seed=str(about["graphs"]) if takes_turns else "",
    )


def _as_it_stands(graph: fx.GraphModule, reason: str) -> Callable[..., Any]:
    log.info("hocket: a graph runs as it stands: %s", reason)
    forward: Callable[..., Any] = graph.forward
    return forward


def _about(graph: fx.GraphModule, numerics: str) -> dict[str, Any]:
    """All that decides whether the graph or its regions are faster."""
    fingerprints = {"dynamo": digest(graph)}
    return about_step(fingerprints, Machine.here(), planner="contest", guard=True, executor="auto", numerics=numerics)


def _compiled(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, options: BackendOptions, kind: str, made: list[Region]
) -> Callable[[list[Any]], Any]:
    region, call = region_of(graph, kind, numerics=options.numerics, cache=options.cache)
    if region is not None:
        made.append(region)
    return call
