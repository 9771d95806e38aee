"""Models without a gradient of a parameter that other models have one of, which a stacked gradient cannot tell.

    model 0's branch reads `a`        a.grad[0] is a gradient,  b.grad[0] zeros
    model 1's branch reads `b`        a.grad[1] zeros,          b.grad[1] a gradient

Alone, an optimizer would leave model 1's `a` as it is, where zeros let momentum and weight decay move it. So each
backward that joins the gradients of models that ran one after another notes whose it had to fill, and the optimizers of
`hocket.optim` ask for it. What has been noted holds for that very gradient, and as long as the models' parts are zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["absent", "models_without_gradient", "note_absent"]

_NOTED = WeakTensorKeyDictionary()  # for each stacked parameter its gradient, and the models without one
_PENDING = WeakTensorKeyDictionary()  # the same models, while a backward goes on


def absent(grads: Sequence[Tensor | None]) -> frozenset[int]:
    """The models whose gradient is None."""
    return frozenset([model for model, grad in enumerate(grads) if grad is None])


def note_absent(whole: Tensor, models: frozenset[int]) -> None:
    """Note in a backward which models give a stacked parameter no gradient."""
    if not (models or _NOTED or _PENDING) or not whole.is_leaf:
        return
    if whole in _PENDING:  # another call of the models in the same backward
        _PENDING[whole] &= models
        return
    before = whole.grad
    _PENDING[whole] = models if before is None else models & _noted(whole, before)

    def note() -> None:
        found = _PENDING.pop(whole)
        _NOTED.pop(whole, None)
        if found and whole.grad is not None:
            _NOTED[whole] = weakref.ref(whole.grad), found

    torch.autograd.Variable._execution_engine.queue_callback(note)


def models_without_gradient(whole: Tensor) -> list[int]:
    """The models to which the gradient of a stacked parameter says nothing."""
    if not _NOTED or whole not in _NOTED or whole.grad is None:
        return []
    noted = sorted(_noted(whole, whole.grad))
    if torch._C._len_torch_dispatch_stack():  # of what is captured no values may be looked at
        return noted
    return [model for model in noted if not whole.grad[model].any()]


def _noted(whole: Tensor, grad: Tensor) -> frozenset[int]:
    of, models = _NOTED.get(whole, (None, frozenset()))
    return models if of is not None and of() is grad else frozenset()
