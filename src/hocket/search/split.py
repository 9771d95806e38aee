"""Hyper-parameters that may differ between fused models, separated from those that may not.

HFHT (Wang et al., MLSys 2021, Appendix E) calls them fusible and infusible, and asks the user. Here they are found: the
user's function is called with one parameter changed at a time, on the meta device, where tensors have shapes and no
data, and the signatures are compared::

    base    lr 0.1   width 32   -->  0.weight (32, 8), ...
    lr      lr 0.3   width 32   -->  the same: fusible
    width   lr 0.1   width 64   -->  0.weight (64, 8), ...: infusible

A parameter may also matter only beside another one (the width of a layer that is there for depth 2). So every trial is
compared with its group again when it is built. This here only says how to form groups.

A signature is the lines on which trials of one fused model agree::

    train(params) --> Training --signature--> lines such as  "model.0.weight: (32, 8) float32"
                                                             "optimizer: torch.optim.adam.Adam"
                                                             "batch: inputs (32, 8) float32, target (32,) int64"

Two trials with the same lines can be fused. Errors and reports name the first line in which they differ.

``train`` is called for each trial and often makes its loss anew: a lambda, a partial, a module. Two losses are the same
where their code and all that it reads besides globals are equal. Otherwise each model's loss is called by itself.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hocket import optim
from hocket.errors import InputError
from hocket.fusion.compare import differing_graph, differing_layers
from hocket.fusion.shared_objects import held_by, inside
from hocket.fusion.stacked import is_same
from hocket.search.data import RandomState, epoch_batches
from hocket.search.training import Hyperparameters, Training

Signature = tuple[tuple[str, str], ...]
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def signature(training: Training) -> Signature:
    """The lines that trials of one group have in common, each with its name."""
    lines = [(f"layer {name or 'itself'}", _named(type(module))) for name, module in training.model.named_modules()]
    lines += [(f"model.{name}", _described(tensor)) for name, tensor in _tensors(training.model)]
    lines.append(("optimizer", _named(type(training.optimizer))))
    names = {id(parameter): name for name, parameter in training.model.named_parameters()}
    for number, group in enumerate(training.optimizer.param_groups):
        trained = ", ".join(names.get(id(parameter), "one that is not the model's") for parameter in group["params"])
        lines.append((f"optimizer group {number}", trained))
        which = f" of group {number}" if number else ""
        flags = {key: value for key, value in group.items() if isinstance(value, bool) or value is None}
        lines += [(f"optimizer {key}{which}", str(value)) for key, value in flags.items()]
    same = ("accumulate", "autocast", "scheduler_interval", "metric_interval")
    lines += [(name, str(getattr(training, name))) for name in same]
    inputs, target = next(iter(epoch_batches(training.batches, 0, 0)))
    lines.append(("batch", f"inputs {_tree(inputs)}, target {_tree(target)}"))
    lines.append(("batches", str(length_hint(training.batches, 0) or "unknown")))
    return tuple(lines)


def unlike(first: Training, second: Training) -> str:
    """In words why the models of two trainings with one signature would not fuse, or nothing."""
    if not (layers := differing_layers(first.model, second.model)):
        return ""
    inputs, _ = next(iter(epoch_batches(first.batches, 0, 0)))
    with RandomState().active(), first.precision():
        found = differing_graph(layers, [each.model.train() for each in (first, second)], inputs)
    return found and f"forward: {found}"


def difference(first: Signature, second: Signature) -> str:
    """The first thing in which two signatures differ, in words. Empty where they agree.

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
    """The class of `hocket.optim` that trains B models as `optimizer` trains one, or None if there is none."""
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


def _tree(tree: Any) -> str:
    leaves, spec = pytree.tree_flatten(tree)
    shown = [f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    return shown[0] if len(shown) == 1 else f"{spec} of {', '.join(shown)}"


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if nn.parameter.is_lazy(tensor):
            raise InputError(f"Training.model: {name} has no shape yet; call the model once on a batch first")
    return named


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}{', trained' if tensor.requires_grad else ''}"


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_same_loss(first: Any, second: Any) -> bool:
    """True if two loss functions are provably the same."""
    return is_same(first, second, _is_like)


def _is_like(first: Any, second: Any) -> bool:
    """True if two functions, of one type, do the same."""
    if isinstance(first, types.FunctionType):
        same_code = first.__code__ is second.__code__ and first.__globals__ is second.__globals__
        return same_code and is_same_loss(held_by(first), held_by(second))
    if isinstance(first, functools.partial):
        mine, its = ((each.func, each.args, each.keywords) for each in (first, second))
        return is_same_loss(mine, its)
    if isinstance(first, types.MethodType):
        return first.__func__ is second.__func__ and is_same_loss(first.__self__, second.__self__)
    if isinstance(first, nn.Module) and type(first).__module__ == "torch.nn.modules.loss":
        return is_same_loss(vars(first), vars(second))
    return isinstance(first, set) and bool(first == second)


def reads_model(function: Any, model: nn.Module) -> bool:
    """True if a function holds a model, a layer or a tensor of it, in its closure, its defaults or an object of these.

    In a fused slot a trial's own model does not move, so a loss or a metric that reads it would see old weights.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> reads_model(lambda outputs, target: outputs.mean() + model.weight.norm(), model)
        False
        >>> def make(model):
        ...     return lambda outputs, target: outputs.mean() + model.weight.norm()
        >>> reads_model(make(model), model)
        True
    """
    held: dict[int, Any] = {}
    ahead = [function]
    while ahead:
        each = ahead.pop()
        if id(each) in held or isinstance(each, (type, types.ModuleType, str, bytes, int, float, types.NoneType)):
            continue
        held[id(each)] = each
        ahead += held_by(each) if isinstance(each, FUNCTIONS) else inside(each)
    if all(isinstance(each, types.FunctionType) for each in held.values()):
        return False
    return any(id(each) in held for each in (*model.modules(), *model.parameters(), *model.buffers()))


Train = Callable[[dict[str, Any]], Training]


@dataclass(frozen=True)
class Split:
    """The parameters of a space, in two parts."""

    fusible: tuple[str, ...]  # names of those that may differ inside a fused group
    infusible: tuple[str, ...]  # names of those that a group agrees on
    why: Mapping[str, str] = field(default_factory=dict)  # for each infusible one what differed, in words
    options: frozenset[str] = frozenset()  # names of the optimizer's numbers that the fusible ones change

    def key(self, params: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values that trials of one group share."""
        return tuple(_hashable(params.get(name)) for name in self.infusible)


def _hashable(value: Any) -> Any:
    return value if value.__hash__ is not None and not isinstance(value, tuple) else repr(value)


def built(train: Train, params: Mapping[str, Any], seed: int, device: str | None = None) -> Training:
    """The user's Training for these parameters, built with seeded generators that are put back after it."""
    given = params if isinstance(params, Hyperparameters) else Hyperparameters(params)
    with RandomState(seed).active():
        if device is None:
            made = train(given)
        else:
            with torch.device(device):
                made = train(given)
    if not isinstance(made, Training):
        raise InputError(
            f"train: expected it to return hocket.Training(...), got a value of type {type(made).__name__}"
        )
    if device is None and any(tensor.is_meta for _, tensor in _tensors(made.model)):
        raise InputError(
            "train: its tensors are on the meta device, where there is no data: it seems to keep what it made when it "
            "was called there to see what changes shapes; say which parameters do not, with fusible=[...]"
        )
    return made


def find_split(
    train: Train,
    space: Mapping[str, Any],
    base: Mapping[str, Any],
    seed: int = 0,
    declared: Sequence[str] | None = None,
) -> Split:
    """Find the fusible parameters of a space, or take the user's word for them.

    `base` is one set of parameters, which is built as it is. The others differ from it in one parameter. All names
    that are not `declared`, if some are, are infusible.
    """
    if declared is not None:
        unknown = [name for name in declared if name not in space]
        if unknown:
            raise InputError(f"fusible: expected names among {', '.join(space)}, got {unknown[0]!r}")
    first = built(train, base, seed)
    lines, numbers = signature(first), options_of(first)
    why: dict[str, str] = {}
    changed: set[str] = set()
    for name in space if declared is None else declared:
        for value in _values(space[name]):
            if value == base.get(name):
                continue
            found = _probe(train, {**base, name: value}, seed)
            if isinstance(found, str):
                why[name] = f"{name}={value!r} cannot be built: {found}"
            elif differs := difference(lines, found[0]):
                why[name] = differs
            else:
                changed |= {
                    key for mine, its in zip(numbers, found[1], strict=True) for key in mine if mine[key] != its[key]
                }
            if name in why:
                break
    for name in declared or ():
        if name in why:
            raise InputError(f"fusible: {name!r} was declared fusible, and is not: {why[name]}")
    fusible = tuple(name for name in (space if declared is None else declared) if name not in why)
    return Split(fusible, tuple(name for name in space if name not in fusible), why, frozenset(changed))


def fitting(train: Train, params: Mapping[str, Any], moved: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Parameters with the moved ones, but for those that change shapes beside them, as not beside all others."""
    known = _probe(train, params, seed)

    def fits(other: Mapping[str, Any]) -> bool:
        found = _probe(train, other, seed)  # a trial that cannot be built says so itself
        return isinstance(known, str) or isinstance(found, str) or not difference(known[0], found[0])

    if fits(moved):
        return dict(moved)
    found = dict(params)
    for name in moved:
        if fits(other := {**found, name: moved[name]}):
            found = other
    return found


def suggest_all(train: Train, proposal: Hyperparameters, seed: int) -> None:
    """Let a user's function ask for its parameters, without data where it can be built so."""
    try:
        built(train, proposal, seed, "meta")
    except Exception:  # noqa: BLE001 - what needs data cannot be built without; what is asked for already stays
        built(train, proposal, seed)


def _probe(train: Train, params: Mapping[str, Any], seed: int) -> tuple[Signature, list[dict[str, Any]]] | str:
    """The signature and the optimizer's numbers for these parameters, or why they cannot be built."""
    for device in ("meta", None):  # what needs data cannot be built without
        try:
            made = built(train, params, seed, device)
            return signature(made), options_of(made)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything, and a trial then fails alone
            problem = f"{type(error).__name__}: {error}"
    return problem


def _values(distribution: Any) -> list[Any]:
    """Values that show what a parameter changes: all choices, both ends, or floats between (0.0 may be a switch)."""
    choices = getattr(distribution, "choices", None)
    if choices is not None:
        return list(choices)
    low, high = distribution.low, distribution.high
    between = isinstance(low, float) and distribution.step is None
    return [low + (high - low) / 3, high - (high - low) / 3] if between else [low, high]
