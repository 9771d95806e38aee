"""Everything that one call of a graph leaves behind, computed on copies: the proof that two callables agree.

The copies keep which inputs share memory. Gradients are taken with `torch.autograd.grad` for random gradients of the
outputs, so that no hook of the user's runs (those of saved tensors are left out, too) and no ``.grad`` is written.
Tensors that the graph holds itself (an optimizer's parameters and state) get their content back, and so does the random
state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from hocket.autotune.verification import distance, largest, ulp_of
from hocket.errors import CaptureError
from hocket.profiling.exact_widths import same_bits
from hocket.tracing.saved_state import copies_of

_NOISE = 1e-3  # what is smaller, such as the gradient of a bias before a norm, may be all rounding
_MAX_ULPS = 16  # units in the last place that floats may differ by, too: in half precision they are more than the share
_COPIED = (torch.Tensor, torch.nn.Parameter)


def difference(
    expected: Callable[..., Any],
    other: Callable[..., Any],
    args: Sequence[Any],
    held: Iterable[torch.Tensor],
    tolerance: float = 0.0,
) -> str:
    """Name the first value that differs between two callables on copies of `args`. Empty if there is none.

    Both use the tensors in `held` beside their arguments. With a `tolerance`, floats may differ by this share of the
    largest magnitude in their tensor, and by a thousandth of it of the largest one in all results, or all gradients.
    Without one, in no bit. An error of `expected` is raised. A `CaptureError` says that `other` raises, an argument
    cannot be copied, or a result is not dense.
    """
    kept = [(tensor, tensor.detach().clone()) for tensor in held]
    random_state = torch.get_rng_state()
    is_hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    try:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor) if is_hooked else nullcontext():
            first = _outcome(expected, args, kept)
            torch.set_rng_state(random_state)
            try:
                second = _outcome(other, args, kept)
            except Exception as error:
                raise CaptureError(f"{type(error).__name__}: {error}") from error
    finally:
        torch.set_rng_state(random_state)
    if first.keys() != second.keys():
        return min(first.keys() ^ second.keys())
    scales: dict[str, float] = {}
    for name, value in first.items() if tolerance else ():
        kind = name.partition("(")[0]
        scales[kind] = max(scales.get(kind, 0.0), _magnitude(value))
    for name, value in first.items():
        scale = max(_magnitude(value), _NOISE * scales[name.partition("(")[0]]) if tolerance else 0.0
        if not _alike(value, second[name], scale * max(tolerance, _MAX_ULPS * ulp_of(value))):
            return name
    return ""


def _outcome(
    run: Callable[..., Any], args: Sequence[Any], kept: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, Any]:
    """Results, gradients, changed arguments, changed held tensors and the random state after one call."""
    copies, leaves = _copied(args)
    try:
        result = tree_leaves(run(*copies))
        outputs = [value for value in result if isinstance(value, torch.Tensor) and value.requires_grad]
        gradients = _gradients(outputs, leaves) if outputs and leaves else []
        found = {"an output": result, "a gradient": gradients, "an argument": copies}
        named = {f"{name} ({at})": _plain(value) for name, values in found.items() for at, value in enumerate(values)}
        named |= {f"a held tensor ({at})": tensor.detach().clone() for at, (tensor, _) in enumerate(kept)}
        return {**named, "the random state": torch.get_rng_state()}
    finally:
        with torch.no_grad():
            for tensor, content in kept:
                if not same_bits(tensor.detach(), content):
                    tensor.copy_(content)


def _gradients(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.rand(tuple(output.shape), dtype=torch.float64, generator=generator).to(output.dtype) for output in outputs
    ]
    found: tuple[Any, ...] = ()
    if torch._C._is_any_autocast_enabled():  # where a call is, but hardly its backward
        with torch._C._DisableAutocast():
            found = torch.autograd.grad(outputs, leaves, given, allow_unused=True, retain_graph=True)
    return found + torch.autograd.grad(outputs, leaves, given, allow_unused=True)


def _copied(args: Sequence[Any]) -> tuple[list[Any], list[torch.Tensor]]:
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    for value in tensors:
        if type(value) not in _COPIED or value.layout is not torch.strided or value.is_complex() or value.is_neg():
            raise CaptureError(f"an argument is a {type(value).__name__} that is not copied")
    made = iter(copies_of(tensors))
    copies: list[Any] = []
    leaves = []
    for value in args:
        if not isinstance(value, torch.Tensor):
            copies.append(value)
            continue
        copy = next(made)
        if isinstance(value, torch.nn.Parameter):  # what is recorded of the copies stands for the arguments
            copy = torch.nn.Parameter(copy, requires_grad=False)
        if value.requires_grad:
            leaves.append(copy.requires_grad_())
            # The graph may write in place what it could not write in a leaf.
            copy = copy if value.is_leaf else copy.clone()
        copies.append(copy)
    return copies, leaves


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        raise CaptureError("a result or a gradient is not dense")
    return value.detach() if isinstance(value, torch.Tensor) else value


def _magnitude(value: Any) -> float:
    return largest(value) if ulp_of(value) else 0.0


def _alike(one: Any, other: Any, allowed: float) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    return same_bits(one, other) or (allowed > 0 and one.dtype == other.dtype and distance(one, other)[0] <= allowed)
