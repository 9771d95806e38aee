"""Signatures: the lines on which trials agree if they train as one fused model.

    train(params) --> Training --signature--> lines such as  "model.0.weight: (32, 8) float32"
                                                             "optimizer: torch.optim.adam.Adam"
                                                             "batch: inputs (32, 8) float32, target (32,) int64"

Two trials with the same lines can be fused. The first line in which they differ is what an error or a report names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hocket import optim
from hocket.errors import InputError
from hocket.search.data import epoch_batches
from hocket.search.training import Training

__all__ = ["Signature", "difference", "fused_class", "is_on_meta", "options_of", "signature"]

Signature = tuple[tuple[str, str], ...]


def signature(training: Training) -> Signature:
    """The lines that trials of one group have in common, each with its name.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> training = Training(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss,
        ...     [(torch.ones(4, 2), torch.ones(4, 1))], metric=torch.nn.functional.mse_loss,
        ... )
        >>> dict(signature(training))["model.weight"]
        '(1, 2) torch.float32, trained'
    """
    lines = [(f"layer {name or 'itself'}", _named(type(module))) for name, module in training.model.named_modules()]
    lines += [(f"model.{name}", _described(tensor)) for name, tensor in _tensors(training.model)]
    lines.append(("optimizer", _named(type(training.optimizer))))
    names = {id(parameter): name for name, parameter in training.model.named_parameters()}
    for number, group in enumerate(training.optimizer.param_groups):
        trained = ", ".join(names.get(id(parameter), "one that is not the model's") for parameter in group["params"])
        lines.append((f"optimizer group {number}", trained))
        lines += [
            (f"optimizer {key}", str(value)) for key, value in group.items() if isinstance(value, bool) or value is None
        ]
    same = ("accumulate", "autocast", "scheduler_interval", "metric_interval")
    lines += [(name, str(getattr(training, name))) for name in same]
    lines.append(("batch", _batch(training)))
    length = getattr(training.batches, "__len__", None)
    lines.append(("batches", str(length()) if length is not None else "unknown"))
    return tuple(lines)


def difference(first: Signature, second: Signature) -> str:
    """The first thing in which two signatures differ, in words; empty where they agree.

    Example:
        >>> difference((("model.weight", "(1, 2)"),), (("model.weight", "(1, 3)"),))
        'model.weight: (1, 2) and (1, 3)'
    """
    if first == second:
        return ""
    mine, its = dict(first), dict(second)
    for name in (*mine, *its):
        if mine.get(name) != its.get(name):
            return f"{name}: {mine.get(name, 'none')} and {its.get(name, 'none')}"
    return ""


def fused_class(optimizer: torch.optim.Optimizer) -> type[optim.FusedOptimizer] | None:
    """The class of `hocket.optim` that trains B models as `optimizer` trains one; None if there is none."""
    for name in optim.__all__:
        found: Any = getattr(optim, name)
        if getattr(found, "torch_class", None) is type(optimizer):
            return found
    return None


def options_of(training: Training) -> list[dict[str, Any]]:
    """For each parameter group the numbers of its optimizer that may differ between fused models."""
    kind = fused_class(training.optimizer)
    bounds: Mapping[str, Any] = {} if kind is None else kind.bounds
    return [
        {
            key: tuple(map(float, group[key])) if isinstance(group[key], tuple) else float(group[key])
            for key in bounds
            if key in group
        }
        for group in training.optimizer.param_groups
    ]


def is_on_meta(training: Training) -> bool:
    """True if a tensor of the model is on the meta device, where there are shapes and no data."""
    return any(tensor.is_meta for _, tensor in _tensors(training.model))


def _batch(training: Training) -> str:
    inputs, target = next(iter(epoch_batches(training.batches, 0, 0)))
    return f"inputs {_tree(inputs)}, target {_tree(target)}"


def _tree(tree: Any) -> str:
    leaves, spec = pytree.tree_flatten(tree)
    shown = [f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    return shown[0] if len(shown) == 1 else f"{spec} of {', '.join(shown)}"


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if torch.nn.parameter.is_lazy(tensor):
            raise InputError(f"Training.model: {name} has no shape yet; call the model once on a batch first")
    return named


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}{', trained' if tensor.requires_grad else ''}"


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
