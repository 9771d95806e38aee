"""B models one after another, each as the user wrote it, on its part of the stacked tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.fusion import fallback
from hocket.fusion.gradients import SaidOfLeaves, absent, note_absent
from hocket.fusion.module_calls import without_checkpoints
from hocket.fusion.rules.base import is_watched
from hocket.fusion.rules.random import drawing
from hocket.fusion.shared_objects import named_tensors
from hocket.fusion.stacked import Stacked, part
from hocket.fusion.store import Store

IS_LEAF = attrgetter("is_leaf")


def one_by_one(
    store: Store, spec: Any, values: list[Any], call: Callable[..., Any] | None = None, *, asks_leaves: bool = False
) -> Any:
    """Run the plain models one after another. The output is `Stacked` where models differ, and so are the `values`.

    `call` takes the place of the model itself. `asks_leaves`: forwards read attributes such as `grad` of parameters.
    """
    args, kwargs = pytree.tree_unflatten(values, spec)
    wholes = store.all_tensors()
    is_plain = not (is_watched() or torch._C._are_functorch_transforms_active()) and all(map(IS_LEAF, wholes.values()))
    targets: list[Callable[..., Any]] = list(store.templates) if is_plain else _functional(store, wholes)
    if is_plain and call is not None:
        targets = [partial(call, template) for template in targets]
    if store.seeds is not None:
        first = next(iter(wholes.values()), None)
        generators = store.generators_on(torch.device("cpu") if first is None else first.device)
        targets = list(map(drawing, targets, generators))
    try:
        with SaidOfLeaves() if asks_leaves else nullcontext():
            out = _stacked_outputs(targets, args, kwargs)
    finally:
        if is_plain:
            store.settle()
    fail_after_updates(out, list(wholes.values()))
    return out


def _stacked_outputs(targets: list[Callable[..., Any]], args: Any, kwargs: Any) -> Any:
    """The outputs of all models, each of which reads shared tensors as they came, even if another writes over them."""
    leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda value: isinstance(value, Stacked))
    kept = [leaf.clone() if isinstance(leaf, Tensor) and len(targets) > 1 else leaf for leaf in leaves]
    outs = []
    for index, target in enumerate(targets):
        own_args, own_kwargs = pytree.tree_unflatten(part(leaves, index), spec)
        before = fallback.versions(leaves)
        outs.append(target(*own_args, **own_kwargs))
        if index + 1 < len(targets) and before != fallback.versions(leaves):
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in kept]
    return fallback.stack_parts(outs, "the model itself")


def fail_after_updates(out: Any, wholes: list[Tensor]) -> None:
    """Let the backward of an output fail where parameters are updated before it, as it does for a plain model."""
    trained = [whole for whole in wholes if whole.requires_grad]
    if not trained or torch.is_inference_mode_enabled():
        return
    versions = [whole._version for whole in trained]

    def check(_: Any) -> None:
        if versions != [whole._version for whole in trained]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                "parameters of fused models were updated between forward and backward"
            )

    for leaf in pytree.tree_leaves(out, is_leaf=lambda value: isinstance(value, Stacked)):
        tensor = leaf.tensor if isinstance(leaf, Stacked) else leaf
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(check)


def _functional(store: Store, wholes: dict[str, Tensor]) -> list[Callable[..., Any]]:
    """The templates on views of what stands for the stacked tensors, in a transform or while a step is captured."""
    parts: dict[int, tuple[Tensor, ...]] = {}
    tensors = {name: parts.setdefault(id(whole), _unbound(whole)) for name, whole in wholes.items()}
    targets: list[Callable[..., Any]] = []
    for index, template in enumerate(store.templates):
        own = {name: each[index] for name, each in tensors.items()}
        for block in store.separate_index:
            own |= {f"{block}.{name}": each for name, each in named_tensors(template.get_submodule(block))}
        targets.append(partial(_called_with, template, own))
    return targets


def _unbound(whole: Tensor) -> tuple[Tensor, ...]:
    parts = whole.unbind(0)
    if parts[0].grad_fn is not None and not torch._C._are_functorch_transforms_active():
        parts[0].grad_fn.register_prehook(lambda grads: note_absent(whole, absent(grads)))
    return parts


def _called_with(template: nn.Module, tensors: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call a template with these tensors. A buffer that its forward assigns anew is written into its tensor."""

    def write_back(module: nn.Module, _: Any, __: Any) -> None:
        for name, value in module.named_buffers(remove_duplicate=False):
            if name in tensors and value is not tensors[name]:
                tensors[name].copy_(value)

    handle = template.register_forward_hook(write_back)
    try:
        with without_checkpoints():
            return torch.func.functional_call(template, tensors, args, kwargs)
    finally:
        handle.remove()
