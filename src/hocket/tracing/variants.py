"""Modules that compute the same in more than one form, of which a captured step takes one.

B fused models are such a module: by rules, as few large ops; or model by model, as B times as many small ones, which
lanes may run side by side. Timed eagerly, the second pays for every op's way through Python and the dispatcher, which a
planned step does not. So each form is captured, verified against an eager step of the same form (forms agree within
rounding, and no closer), and plans of all of them are tried.

A module that has forms says so by a method ``_hocket_forms``, which names them, the likeliest first; while its
attribute ``_hocket_form`` names one, that is how it computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hocket.tracing.state import Inventory

__all__ = ["forms_of", "in_form"]


def forms_of(places: Inventory) -> tuple[str, ...]:
    """The forms that the modules of a step can take, the likeliest first; one without a name where there are none."""
    named = [form for module in _with_forms(places) for form in module._hocket_forms()]
    return tuple(dict.fromkeys(named)) or ("",)


@contextmanager
def in_form(places: Inventory, form: str) -> Iterator[None]:
    """Every module that has forms takes this one, or its likeliest if it does not have this one."""
    modules = _with_forms(places)
    before = [module._hocket_form for module in modules]
    for module in modules:
        forms = module._hocket_forms()
        module._hocket_form = form if form in forms else forms[0]
    try:
        yield
    finally:
        for module, usual in zip(modules, before, strict=True):
            module._hocket_form = usual


def _with_forms(places: Inventory) -> list[Any]:
    return [module for module in places.modules if callable(getattr(type(module), "_hocket_forms", None))]
