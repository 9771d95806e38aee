"""Which inputs are one batch for each model ``(B, N, ...)`` and which are one for all ``(N, ...)``.

Only an input whose first axis is B can be the former. Whether it is shows when the model runs on tensors without data
(the meta device), once on the input as it stands and once on its first part. Where both work, as they do for a linear
layer and any number of axes, an input of three axes and more counts as one batch for each model, one of fewer counts as
shared; ``fuse(..., shared=True)`` or ``False`` settles it.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import InputError

__all__ = ["is_per_model"]

MAX_COMBINATIONS = 64
BATCHED = {
    **dict.fromkeys((nn.Conv1d, nn.ConvTranspose1d, nn.MaxPool1d, nn.AvgPool1d, nn.LSTM, nn.GRU, nn.RNN), 3),
    **dict.fromkeys((nn.Conv2d, nn.ConvTranspose2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d), 4),
    **dict.fromkeys((nn.Conv3d, nn.ConvTranspose3d, nn.MaxPool3d, nn.AvgPool3d), 5),
    nn.MultiheadAttention: 3,
    nn.TransformerEncoderLayer: 3,
    nn.TransformerDecoderLayer: 3,
}


def is_per_model(
    template: nn.Module, leaves: list[Any], spec: Any, num_models: int, shared: bool | None
) -> tuple[bool, ...]:
    """For each leaf of the arguments, whether its first axis is the models'.

    Args:
        template: a model whose tensors are on the meta device.
        leaves: all leaves of the arguments.
        spec: the tree they come from.
        num_models: B.
        shared: what the user said, or None.

    Raises:
        InputError: `shared` is False and an input's first axis is not B.
    """
    tensors = [isinstance(leaf, Tensor) for leaf in leaves]
    fits = [
        tensor and leaf.ndim > 0 and leaf.shape[0] == num_models for leaf, tensor in zip(leaves, tensors, strict=True)
    ]
    if shared is True or not any(tensors):
        return tuple(False for _ in leaves)
    if shared is False:
        for leaf, tensor, fit in zip(leaves, tensors, fits, strict=True):
            if tensor and not fit:
                raise InputError(
                    f"input: expected {num_models} models in the first axis, got shape {tuple(leaf.shape)}"
                )
        return tuple(tensors)
    if not any(fits):
        return tuple(False for _ in leaves)
    choices = [(True, False) if fit else (False,) for fit in fits]
    works = []
    for number, choice in enumerate(product(*choices)):
        if number >= MAX_COMBINATIONS:
            break
        if _works(template, leaves, spec, choice):
            works.append(choice)
    likely = [
        choice for choice in works if all(not own or leaf.ndim >= 3 for own, leaf in zip(choice, leaves, strict=True))
    ]
    if likely or works:
        return (likely or works)[0]
    return tuple(fit and leaf.ndim >= 3 for fit, leaf in zip(fits, leaves, strict=True))


def _works(template: nn.Module, leaves: list[Any], spec: Any, choice: tuple[bool, ...]) -> bool:
    """Whether the model takes these inputs, with a batch axis where a layer has one."""
    filled = [
        torch.empty(leaf.shape[1:] if own else leaf.shape, dtype=leaf.dtype, device="meta")
        if isinstance(leaf, Tensor)
        else leaf
        for leaf, own in zip(leaves, choice, strict=True)
    ]
    args, kwargs = pytree.tree_unflatten(filled, spec)
    hooks = [module.register_forward_pre_hook(_needs_batch) for module in template.modules() if type(module) in BATCHED]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            template(*args, **kwargs)
    except _Unbatched:
        return False
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError):
        return False
    finally:
        for hook in hooks:
            hook.remove()
    return True


class _Unbatched(Exception):  # noqa: N818  (a signal, not an error)
    """A layer was given an example without a batch."""


def _needs_batch(module: nn.Module, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], Tensor) and args[0].ndim != BATCHED[type(module)]:
        raise _Unbatched
