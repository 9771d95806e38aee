"""The forms of a step: ways of computing it, of which a captured step takes one.

Some modules compute the same in more than one form. B fused models are such a module: by rules, as few large ops, or
model by model, as B times as many small ones, which lanes may run side by side. Timed eagerly, the second pays for
every op's way through Python and the dispatcher, which a planned step does not. So each form is captured, verified
against an eager step of the same form (forms agree within rounding, and no closer), and plans of all of them are tried.
A module that has forms says so by a method ``_hocket_forms``, which names them, the likeliest first. While its
attribute ``_hocket_form`` names one, that is how it computes.

With ``numerics="close"`` a recorded step may also be rewritten, model and optimizer staying as they are:

- ``channels-last``: images, and what convolutions make of them, have their channels last in memory, which is how oneDNN
  computes them. Parameters, gradients and optimizer state keep their layout.
- ``fused-norm``: a batch norm, the addition and the ReLU after it are one native op (``native/norms.cpp``).
- ``winograd``: convolutions of 3 x 3 take 16 products in place of 36, of 4 x 4 with stride 2 36 in place of 64
  (``native/winograd.cpp``).
- ``fused-update``: the optimizer makes its update by torch's own fused kernels (``fused=True``).
- ``compiled``: all but products, convolutions and random numbers are kernels that Inductor writes, called natively (see
  `hocket.tracing.compiling`). It is made of a step that was captured without it, and with fused updates, which are not
  compiled, where there are such.

A form is named by a text: the modules' form and the rewrites, ``rule+channels-last+fused-norm+winograd+fused-update``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import fx

from hocket import native
from hocket.tracing.captured import Captured
from hocket.tracing.lowering.lower import FUSED_NORM, NATIVE_OPS, WINOGRAD
from hocket.tracing.lowering.winograd import tiles_filters
from hocket.tracing.rerecording import CHANNELS_LAST, FILTERS, FUSED_UPDATE, has_fused_kernels, has_images
from hocket.tracing.state import Inventory

_Step = TypeVar("_Step")

COMPILED = "compiled"
_aten = torch.ops.aten


def forms_of(places: Inventory) -> tuple[str, ...]:
    """Return the forms of a step's modules, the likeliest first, or one without a name."""
    named = [form for module in _with_forms(places) for form in module._hocket_forms()]
    return tuple(dict.fromkeys(named)) or ("",)


def rewrites_of(form: str, captured: Captured) -> tuple[str, ...]:
    """The forms that a step in this one can be rewritten to, the one with fewer rewrites first."""
    update = f"+{FUSED_UPDATE}" if any(map(has_fused_kernels, captured.trace.places.optimizers)) else ""
    last = f"+{CHANNELS_LAST}" if has_images(captured) else ""
    ops = "".join(f"+{op}" for op in _native_ops(captured.trace.graph)) if last else ""
    return tuple(form + each for each in dict.fromkeys((update, last + update, last + ops + update)) if each)


def compiled_rewrites_of(form: str, captured: Captured) -> tuple[str, ...]:
    """The forms that a step in this one can be compiled to: as it stands, and where there are images, channels last."""
    last = (f"+{CHANNELS_LAST}+{COMPILED}",) if has_images(captured) else ()
    return tuple(form + each for each in (f"+{COMPILED}", *last))


def compiled_from(form: str, places: Inventory) -> tuple[str, ...]:
    """The forms of which a compiled one can be made, the one with the fewest ops first."""
    plain = form.removesuffix(f"+{COMPILED}")
    fused = (f"{plain}+{FUSED_UPDATE}",) if any(map(has_fused_kernels, places.optimizers)) else ()
    return (*fused, plain)


def plain_of(form: str) -> str:
    """The form without its rewrites."""
    return form.partition("+")[0]


def has_channels_last(form: str) -> bool:
    """Return True if a form computes images with their channels last."""
    return CHANNELS_LAST in form.split("+")


def reference_of(form: str, forms: Mapping[str, _Step]) -> _Step | None:
    """Return the plain form of a rewritten one, or None for a form that is not rewritten."""
    return None if plain_of(form) == form else forms[plain_of(form)]


def native_ops_of(form: str) -> tuple[str, ...]:
    """The native ops that the step is to be lowered with."""
    return tuple(rewrite for rewrite in form.split("+") if rewrite in NATIVE_OPS)


def rewrites_in(form: str) -> tuple[str, ...]:
    """The rewrites of a form that a step is recorded again for (see `hocket.tracing.rerecording`)."""
    return tuple(rewrite for rewrite in form.split("+")[1:] if rewrite in (CHANNELS_LAST, FUSED_UPDATE))


@contextmanager
def in_form(places: Inventory, form: str) -> Iterator[None]:
    """Every module that has forms takes this one, or its likeliest if it does not have this one."""
    modules, wanted = _with_forms(places), plain_of(form)
    before = [module._hocket_form for module in modules]
    for module in modules:
        forms = module._hocket_forms()
        module._hocket_form = wanted if wanted in forms else forms[0]
    try:
        yield
    finally:
        for module, usual in zip(modules, before, strict=True):
            module._hocket_form = usual


def _with_forms(places: Inventory) -> list[Any]:
    return [module for module in places.modules if callable(getattr(type(module), "_hocket_forms", None))]


def _native_ops(graph: fx.Graph) -> Iterator[str]:
    """The native ops that may have a place in a step of these ops."""
    if not native.available():
        return
    targets = {node.target for node in graph.nodes}
    if targets & {_aten.native_batch_norm.default, _aten.native_batch_norm_backward.default}:
        yield FUSED_NORM
    convolutions = [(n, FILTERS[n.target]) for n in graph.nodes if n.target in FILTERS]
    if any(tiles_filters(node.args[at].meta["val"].shape) for node, at in convolutions):
        yield WINOGRAD
