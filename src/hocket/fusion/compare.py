"""Comparison of models, layer by layer. Blocks that differ stay separate, and models that cannot fuse are refused.

root classes, root's own parameters    must agree, or there is nothing to fuse around
a block of another class or options    stays separate
a parameter of another shape           its container stays separate (the layers next to it have to match it), and
                                       directly below the root it is an error
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from hocket.errors import InputError
from hocket.fusion.record import recorded
from hocket.fusion.rules.base import where
from hocket.fusion.shared_objects import attributes_of, check_memory, held, named_tensors, reached
from hocket.fusion.stacked import is_same
from hocket.fusion.traced import merged

MAX_NAMED = 8
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
MACHINERY = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}
PER_MODEL_OPTIONS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((nn.modules.dropout._DropoutNd,), "p"),
    ((nn.LSTM, nn.GRU, nn.RNN, nn.MultiheadAttention), "dropout"),
)


def compare(models: Sequence[Any], separate: Sequence[str] = ()) -> dict[str, str]:
    """Compare all models with the first one. Return the blocks that do not fuse, each with the reason."""
    if not isinstance(models, (list, tuple, nn.ModuleList)):
        raise InputError(f"models: expected a list of modules, got {type(models).__name__}")
    if len(models) == 0:
        raise InputError("models: expected at least one module, got an empty list")
    for index, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise InputError(f"model {index}: expected an nn.Module, got {type(model).__name__}")
    _check_shared(models)
    check_layers(models)
    check_memory(models)
    names = dict(models[0].named_modules())
    for name in separate:
        if name == "" or name not in names:
            raise InputError(f"separate: no block is called {name!r}; blocks are {', '.join(filter(None, names))}")
    reasons = dict.fromkeys(separate, "as asked for")
    if errors := _compared("", list(models), reasons):
        raise InputError("models differ: " + _listed(errors))
    _separate_tied(models[0], reasons)
    _check_ties(models, reasons)
    params = [name for name, _ in models[0].named_parameters()]
    if params and all(_inside(name, reasons) for name in params):
        named = [f"{name}: {reason}" for name, reason in reasons.items()]
        raise InputError("models differ in every layer that has parameters: " + _listed(named))
    return reasons


def _inside(name: str, blocks: dict[str, str]) -> bool:
    return any(name.startswith(block + ".") for block in blocks)


def _listed(reasons: Sequence[str]) -> str:
    more = len(reasons) - MAX_NAMED
    return "; ".join(reasons[:MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _check_shared(models: Sequence[nn.Module]) -> None:
    """No module and no tensor may belong to two models."""
    owners: dict[int, tuple[int, str]] = {}
    for index, model in enumerate(models):
        own: dict[int, tuple[int, str]] = {}
        everything: list[tuple[str, Any]] = [*model.named_modules(), *named_tensors(model)]
        for name, thing in everything:
            if id(thing) in owners:
                other, other_name = owners[id(thing)]
                raise InputError(
                    f"model {index}, {where(name)}: shared with model {other} ({where(other_name)}): "
                    "every model needs its own"
                )
            own[id(thing)] = (index, name)
        owners |= own


def _separate_tied(model: nn.Module, separate: dict[str, str]) -> None:
    """A layer stays separate if one of its tensors is in a block that does, too."""

    def split() -> tuple[str, str] | None:
        for names in sorted(tied(model)):
            inside = [name for name in names if _inside(name, separate)]
            outside = [name for name in names if name not in inside]
            if inside and outside:
                return inside[0], outside[0]
        return None

    while found := split():
        inside, name = found
        block = next(block for block in separate if inside.startswith(block + "."))
        path, _, leaf = name.rpartition(".")
        reason = f"{leaf} is {inside}, and {block} stays separate"
        if not path:
            raise InputError(f"models differ: {reason}: {separate[block]}")
        separate[path] = reason


def _check_ties(models: Sequence[nn.Module], separate: dict[str, str]) -> None:
    """A tensor that stands under several names in one model has to stand under them in all."""
    first = tied(models[0])
    for index, model in enumerate(models[1:], 1):
        for names in first ^ tied(model):
            if all(_inside(name, separate) for name in names):
                continue
            where = (0, index) if names in first else (index, 0)
            raise InputError(f"models differ: {' and '.join(names)}: one tensor in model {where[0]}, not in {where[1]}")


def tied(model: nn.Module) -> set[tuple[str, ...]]:
    """The names of each tensor that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    return {tuple(own) for own in names.values() if len(own) > 1}


def check_layers(models: Sequence[nn.Module]) -> None:
    """Refuse hooks and averages over all batches, which rules would pass over."""
    for index, model in enumerate(models):
        for name, module in model.named_modules():
            place = f"model {index}, {where(name)}"
            lazy: Any = module if isinstance(module, nn.modules.lazy.LazyModuleMixin) else None
            if lazy is not None and lazy.has_uninitialized_params():
                raise InputError(f"{place}: not initialised yet; run the model once")
            if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
                raise InputError(f"{place}: is compiled; fuse the module that it was made from")
            for kind in HOOKS:
                if getattr(module, kind, None):
                    raise InputError(f"{place}: has a hook ({kind[1:]}); remove it before fusing")
            is_norm = isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm))
            if is_norm and module.momentum is None and module.track_running_stats:
                raise InputError(
                    f"{place}: momentum: expected a number, got None "
                    "(a running average over all batches so far cannot be fused)"
                )
        for name, tensor in named_tensors(model):
            if any(getattr(tensor, kind, None) for kind in HOOKS_OF_TENSORS):
                raise InputError(f"model {index}: {name}: has a hook on its gradient; remove it before fusing")
        own = set(map(id, (*model.modules(), *model.parameters(), *model.buffers())))
        for path, value in attributes_of(model):
            if any(id(inner) in own for each in reached(value, set()) for inner in held(each)):
                raise InputError(
                    f"model {index}: {path}: a function or weak reference that holds the model or a part of it, which "
                    "no copy of the model would take along; make it a method, or hand it the model"
                )


def _compared(path: str, modules: list[nn.Module], separate: dict[str, str]) -> list[str]:
    """Compare one layer of all models and its children. Returns the differences that make the container separate."""
    if path in separate:
        return []
    found = _tensors(path, modules)
    reason = _structure(modules) or (None if found else _options(modules))
    if reason is not None:
        found = [f"{where(path)}: {reason}"]
    else:
        for name, _ in modules[0].named_children():
            below = [getattr(module, name) for module in modules]
            found += _compared(f"{path}.{name}" if path else name, below, separate)
    if found and path and (reason is not None or modules[0]._modules):
        separate[path] = reason or "; ".join(found)
        return []
    return found


def _structure(modules: list[nn.Module]) -> str | None:
    """Another class, or other names below."""
    first = modules[0]
    for index, module in enumerate(modules[1:], 1):
        if type_before_parametrizations(module) is not type_before_parametrizations(first):  # each has its own class
            is_made_anew = type(first).__qualname__ == type(module).__qualname__
            cure = ", a class of its own: define it once, outside of functions" if is_made_anew else ""
            return f"{type(first).__name__} in model 0, {type(module).__name__} in model {index}{cure}"
        if list(module._modules) != list(first._modules):
            other = sorted(set(module._modules) ^ set(first._modules)) or list(module._modules)
            return f"model {index} has other layers than model 0: {', '.join(other)}"
        if any((module._modules[name] is None) != (first._modules[name] is None) for name in first._modules):
            return f"model {index} lacks layers that model 0 has"
    return None


def _tensors(path: str, modules: list[nn.Module]) -> list[str]:
    """Parameters and buffers of this very layer that are of another shape or kind."""
    first, found = modules[0], []
    for kind in ("_parameters", "_buffers"):
        mine: dict[str, Tensor | None] = getattr(first, kind)
        for index, module in enumerate(modules[1:], 1):
            theirs: dict[str, Tensor | None] = getattr(module, kind)
            for name in dict.fromkeys((*mine, *theirs)):
                a, b = mine.get(name), theirs.get(name)
                place = f"{where(path)}: {name}"
                if a is None or b is None:
                    if a is not b:
                        found.append(f"{place}: only one of model 0 and model {index} has it")
                elif a.shape != b.shape:
                    found.append(f"{place}: {tuple(a.shape)} in model 0, {tuple(b.shape)} in model {index}")
                elif (a.dtype, a.device) != (b.dtype, b.device):
                    found.append(f"{place}: {a.dtype} on {a.device} in model 0, {b.dtype} on {b.device} in {index}")
                elif a.requires_grad != b.requires_grad:
                    found.append(f"{place}: trained in one of model 0 and model {index} only (requires_grad)")
    return found


def _options(modules: list[nn.Module]) -> str | None:
    """The difference in options between torch's own layers, except those that rules take per model."""
    first = modules[0]
    allowed = per_model_options(first)
    for index, module in enumerate(modules[1:], 1):
        if module.training != first.training:
            return f"training is {first.training} in model 0, {module.training} in model {index}"
        is_of_torch = type(first).__module__.startswith("torch.")
        if is_of_torch and (name := differing_attribute(first, module, allowed)) is not None:
            a, b = vars(first).get(name), vars(module).get(name)
            return f"{name}: {_short(a)} in model 0, {_short(b)} in model {index}"
    return None


def differing_attribute(one: nn.Module, other: nn.Module, allowed: Collection[str] = ()) -> str | None:
    """The first attribute of a module that is no tensor and not the same in another one, or None."""
    mine, theirs = vars(one), vars(other)
    for name in dict.fromkeys((*mine, *theirs)):
        a, b = mine.get(name), theirs.get(name)
        if name in MACHINERY or name in allowed:
            continue
        if (name in mine) != (name in theirs) or not is_same(a, b):
            return name
    return None


def per_model_options(layer: nn.Module) -> set[str]:
    """The names of a layer's options that rules take for each model."""
    return {name for classes, name in PER_MODEL_OPTIONS if isinstance(layer, classes)}


def own_options(model: nn.Module) -> list[Any]:
    """The options of a model's layers in which models may differ that fuse."""
    return [getattr(layer, name) for layer in model.modules() for name in per_model_options(layer)]


def differing_layers(one: nn.Module, other: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """The paths and pairs of layers that differ in attributes, but for those that rules take for each model."""
    pairs = zip(one.named_modules(), other.modules(), strict=True)
    return [(path, [a, b]) for (path, a), b in pairs if differing_attribute(a, b, per_model_options(a)) is not None]


def differing_graph(layers: list[tuple[str, list[nn.Module]]], models: Sequence[nn.Module], inputs: Any) -> str:
    """In words why two models that differ in the attributes of layers would not fuse. Empty if they do or may do.

    A layer of torch with parameters would stay separate where its options differ. Code of the user's may call other ops
    where attributes differ, so copies of both models are called, and their graphs compared.
    """
    for path, pair in layers:
        if next(pair[0].parameters(), None) is not None and (reason := _options(pair)):
            return f"{where(path)}: {reason}"
    graphs = []
    for model in models:
        try:
            own = copy.deepcopy(model)
        except Exception:  # noqa: BLE001 - what a forward has left behind cannot be copied by anybody
            return ""
        known = frozenset(id(each) for _, value in attributes_of(own) for each in reached(value, set()))
        try:
            graph = recorded(own, (inputs,), {}, frozenset(), known, {}).traced
        except Exception as error:  # noqa: BLE001 - the user's code; it fails by itself, and no other model with it
            return f"{type(error).__name__}: {error}"
        if graph is None:
            return ""
        graphs.append(graph)
    try:
        merged(graphs)
    except InputError as error:
        return str(error)
    shapes = zip(*([node.meta.get("shape") for node in graph.graph.nodes] for graph in graphs), strict=True)
    return next((f"{a} in model 0, {b} in model 1" for a, b in shapes if a != b), "")


def differ_in_values(first: nn.Module, second: nn.Module) -> bool:
    """True if two models differ only in the values of their tensors, as far as can be compared."""
    check_layers([second])
    pairs = zip_longest(*(each.named_modules(remove_duplicate=False) for each in (first, second)), fillvalue=("", None))
    return tied(first) == tied(second) and all(
        path == other_path
        and _structure([one, other]) is None
        and not _tensors(path, [one, other])
        and one.training == other.training
        and differing_attribute(one, other) is None
        for (path, one), (other_path, other) in pairs
    )


def _short(value: Any) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
