"""The backend: Dynamo's graph goes through AOTAutograd, and each graph that comes out becomes a region.

Graphs are cut as eager works: the forward keeps for the backward what eager's autograd would keep (the default
partition), nothing is recomputed, and no op is decomposed that has a kernel of its own, so that the ops are eager's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition

from hocket.autotune.options import NUMERICS
from hocket.dynamo.region import region_of
from hocket.errors import InputError

__all__ = ["BackendOptions", "hocket"]


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
    asked = BackendOptions.of(options, mode)
    compiler = partial(_compiled, options=asked)
    backend = aot_autograd(
        fw_compiler=partial(compiler, kind="forward"),
        bw_compiler=partial(compiler, kind="backward"),
        inference_compiler=partial(compiler, kind="inference"),
        partition_fn=default_partition,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = backend(graph, example_inputs)
    return compiled


def _compiled(graph: fx.GraphModule, example_inputs: Sequence[Any], *, options: BackendOptions, kind: str) -> Any:
    return region_of(graph, kind, numerics=options.numerics, cache=options.cache)
