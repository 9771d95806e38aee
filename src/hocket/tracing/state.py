"""Places that a step reads and writes besides its batch: parameters, buffers, gradients, optimizer state and numbers.

Each is a source (see `hocket.tracing.sources`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hocket.errors import InputError
from hocket.pystate.places import Place, containers_in
from hocket.tracing.sources import Entry, Gradient, GroupOf, StateOf, ValueOf


@dataclass(frozen=True)
class Inventory:
    """All places of one model (or several) and its optimizers.

    Attributes:
        versioned: the dicts of those that count in ``_hocket_version`` how often something changed that no tensor shows
            (fused models do, and their optimizers: a model left, came, or is frozen).
        further: places outside of models and optimizers that a step writes, or whose number changes between steps.
        plain: those of them that hold any other value now, or none (`ABSENT`).
        twins: pairs of places that hold the same tensor object.
        follows: numbers of further places are among `numbers`, else among `plain`.
        leaves: those of `parameters` that belong to no model and no optimizer. The step gives them gradients.
    """

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    parameters: tuple[Entry, ...]
    tensors: tuple[Entry, ...]
    numbers: tuple[Entry, ...]
    modules: tuple[nn.Module, ...]
    paths: dict[nn.Module, str]
    versioned: tuple[dict[str, Any], ...]
    further: tuple[Place, ...] = ()
    plain: tuple[Entry, ...] = ()
    twins: tuple[tuple[Entry | Gradient, Entry | Gradient], ...] = ()
    follows: bool = True
    leaves: tuple[Entry, ...] = ()

    def again(self, leaves: Sequence[Entry] | None = None) -> Inventory:
        """The places of the same models and optimizers as they are now, and of the leaves."""
        kept = self.leaves if leaves is None else leaves
        return inventory(self.models, self.optimizers, self.further, self.follows, kept)

    def versions(self) -> tuple[int, ...]:
        """How often each of those that count has changed."""
        return tuple([attributes["_hocket_version"] for attributes in self.versioned])

    def state_keys(self) -> frozenset[tuple[str, Any]]:
        return frozenset((entry.name, entry.key) for entry in (*self.tensors, *self.numbers))


def as_tuple(value: Any, kind: type, what: str) -> tuple[Any, ...]:
    """`value` as a tuple of `kind`, or an `InputError` that says what was given."""
    if value is None:
        return ()
    found = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for element in found:
        if not isinstance(element, kind):
            name = "torch.nn.Module" if kind is torch.nn.Module else "torch.optim.Optimizer"
            hint = "; give the model itself, not model.parameters()" if isinstance(element, Iterator) else ""
            raise InputError(f"{what}: expected a {name}, got {type(element).__name__}{hint}")
    return found


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that has state and hooks: not one that hands all on to another one, as accelerate's does."""
    inner = optimizer
    while not hasattr(inner, "_optimizer_step_pre_hooks"):
        inner = getattr(inner, "optimizer", None)  # type: ignore[assignment]
        if not isinstance(inner, torch.optim.Optimizer):
            name = type(optimizer).__name__
            raise InputError(f"optimizer: {name} was made without torch.optim.Optimizer.__init__; call that first")
    return inner


def inventory(
    model: Any,
    optimizer: Any,
    further: Sequence[Place] = (),
    follows: bool = True,
    leaves: Sequence[Entry] = (),
) -> Inventory:
    """List every place that belongs to `model` and `optimizer` (each one object or a list), and the `further` ones.

    Without `follows`, a number at a further place is a value like any other. `leaves` are trainable tensors that are
    neither the models' nor the optimizers'.

    Raises:
        InputError: something that is not a module or not an optimizer.
    """
    models: tuple[nn.Module, ...] = as_tuple(model, nn.Module, "model")
    optimizers = tuple(map(_inner, as_tuple(optimizer, torch.optim.Optimizer, "optimizer")))
    parameters: list[Entry] = []
    tensors: list[Entry] = []
    paths: dict[nn.Module, str] = {}
    seen: dict[int, Entry] = {}
    twins: list[tuple[Entry, Entry]] = []
    plain: list[Entry] = []
    for number, root in enumerate(models):
        prefix = f"model{number}" if len(models) > 1 else ""
        for path, module in root.named_modules():
            if module in paths:
                continue
            full = ".".join(part for part in (prefix, path) if part)
            paths[module] = full
            for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
                for key, value in table.items():
                    if value is None:
                        continue
                    name = ".".join(part for part in (full, key) if part)
                    entry = Entry(kind, name, table, key, name if kind == "parameter" else "", full)
                    if id(value) in seen:
                        twins.append((seen[id(value)], entry))
                        continue
                    seen[id(value)] = entry
                    (parameters if kind == "parameter" else tensors).append(entry)
    names = {id(entry.get()): entry for entry in parameters}
    numbers: list[Entry] = []
    for number, opt in enumerate(optimizers):
        prefix = f"optimizer{number}" if len(optimizers) > 1 else "optimizer"
        for position, group in enumerate(opt.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    # Trained, but in no model: a temperature, a latent code.
                    name = f"{prefix}.group{position}.{place}"
                    names[id(parameter)] = Entry("parameter", name, group["params"], place, name)
                    parameters.append(names[id(parameter)])
            place_of = GroupOf(opt, position)
            _sort_in(group, place_of, f"{prefix}.group{position}", "group", "", "", tensors, numbers)
        for parameter, state in opt.state.items():
            if isinstance(state, dict):
                owner = names.get(id(parameter))
                name = owner.name if owner else prefix
                layer = owner.layer if owner else ""
                _sort_in(state, StateOf(opt, parameter), f"{prefix}.{name}", "state", name, layer, tensors, numbers)
    kept = tuple([leaf for leaf in leaves if id(leaf.get()) not in names])
    parameters += kept
    known = {id(entry.get()): entry for entry in (*parameters, *tensors)}
    inner = {id(container) for each in further for container in containers_in(each.get())}
    for each in further:
        if id(each.owner) in inner:
            continue  # a part of what stands at another one
        value, entry = each.get(), Entry("object", each.name, ValueOf(each), each.key)
        for path, element in [((), value)] if each.is_whole else _leaves(value, follows):
            one = replace(entry, name=entry.name + "".join(f"[{part!r}]" for part in path), path=path)
            if isinstance(element, torch.Tensor):
                if id(element) in known:
                    twins.append((known[id(element)], one))
                else:
                    known[id(element)] = one
                    tensors.append(one)
            elif follows and isinstance(element, (int, float)) and not isinstance(element, bool):
                numbers.append(one)  # in a recording it is a live number
            elif not path:
                plain.append(one)
    versioned = tuple(vars(each) for each in (*paths, *optimizers) if "_hocket_version" in vars(each))
    return Inventory(
        models,
        optimizers,
        tuple(parameters),
        tuple(tensors),
        tuple(numbers),
        tuple(paths),
        paths,
        versioned,
        tuple(further),
        tuple(plain),
        tuple(twins),
        follows,
        kept,
    )


def leaf_of(tensor: torch.Tensor, name: str) -> Entry:
    """The place of a trainable tensor that belongs to no model and no optimizer."""
    return Entry("parameter", name, {"tensor": tensor}, "tensor", name)


def _leaves(value: Any, follows: bool, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The elements of nested tuples, lists and dicts with their paths, where tensors or numbers are among them."""
    kinds = (torch.Tensor, int, float) if follows else (torch.Tensor,)
    is_container = isinstance(value, (tuple, list, dict)) and type(value) is not torch.Size
    if is_container and any(isinstance(each, kinds) and type(each) is not bool for each in tree_leaves(value)):
        for key, element in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(element, follows, (*path, key))
    else:
        yield path, value


def _sort_in(
    values: dict[Any, Any],
    table: StateOf | GroupOf,
    name: str,
    kind: str,
    owner: str,
    layer: str,
    tensors: list[Entry],
    numbers: list[Entry],
) -> None:
    for key, value in values.items():
        if key == "params" and kind == "group":
            continue
        for path, element in _elements(value):
            entry = Entry(kind, f"{name}.{key}", table, key, owner, layer, path)
            if isinstance(element, torch.Tensor):
                tensors.append(entry)
            elif isinstance(element, (int, float)) and not isinstance(element, bool):
                # `foreach`, `maximize` and their like are bool or None and choose code, not values.
                numbers.append(entry)


def _elements(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if type(value) in (tuple, list):
        yield from (((position,), element) for position, element in enumerate(value))
    else:
        yield (), value
