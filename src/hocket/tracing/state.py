"""Places that a step reads and writes besides its batch: parameters, buffers, gradients, optimizer state and numbers.

Each is a source (see `hocket.tracing.sources`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hocket.errors import InputError
from hocket.pystate.places import Place, containers_in
from hocket.tracing.sources import Entry, Gradient, GroupOf, StateOf, ValueOf


@dataclass(frozen=True)
class Inventory:
    """All places of one model (or several) and its optimizers."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    # places outside of models and optimizers that a step writes, or whose number changes between steps
    further: tuple[Place, ...] = ()
    follows: bool = True  # numbers of further places are among `numbers`, else among `plain`
    parameters: list[Entry] = field(default_factory=list)
    tensors: list[Entry] = field(default_factory=list)
    numbers: list[Entry] = field(default_factory=list)
    # those of the further places that hold any other value now, or none (`ABSENT`)
    plain: list[Entry] = field(default_factory=list)
    # pairs of places that hold the same tensor object
    twins: list[tuple[Entry | Gradient, Entry | Gradient]] = field(default_factory=list)
    # those of `parameters` that belong to no model and no optimizer. The step gives them gradients.
    leaves: list[Entry] = field(default_factory=list)
    paths: dict[nn.Module, str] = field(default_factory=dict)  # the path of each module
    generators: tuple[torch.Generator, ...] = ()  # of torch's, on the host, those that the step draws from
    # the dicts of those that count in ``_hocket_version`` how often something changed that no tensor shows (fused
    # models do, and their optimizers: a model left, came, or is frozen)
    versioned: list[dict[str, Any]] = field(default_factory=list)

    @cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(self.paths)

    def again(self, leaves: Sequence[Entry] | None = None) -> Inventory:
        """The places of the same models and optimizers as they are now, and of the leaves."""
        kept = self.leaves if leaves is None else leaves
        return inventory(self.models, self.optimizers, self.further, self.follows, kept, self.generators)

    def versions(self) -> tuple[int, ...]:
        return tuple([attributes["_hocket_version"] for attributes in self.versioned])

    def state_keys(self) -> frozenset[tuple[str, Any]]:
        return frozenset((entry.name, entry.key) for entry in (*self.tensors, *self.numbers))

    def _add_models(self) -> None:
        seen: dict[int, Entry] = {}
        for number, root in enumerate(self.models):
            prefix = f"model{number}" if len(self.models) > 1 else ""
            for path, module in root.named_modules():
                if module in self.paths:
                    continue
                self.paths[module] = full = _joined(prefix, path)
                for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
                    for key, value in table.items():
                        if value is None:
                            continue
                        name = _joined(full, key)
                        entry = Entry(kind, name, table, key, name if kind == "parameter" else "", full)
                        if id(value) in seen:
                            self.twins.append((seen[id(value)], entry))
                            continue
                        seen[id(value)] = entry
                        (self.parameters if kind == "parameter" else self.tensors).append(entry)

    def _add_optimizers(self) -> None:
        """Add what optimizers train besides the models' parameters, their groups' options and their state."""
        named = {id(entry.get()): entry for entry in self.parameters}
        for number, optimizer in enumerate(self.optimizers):
            prefix = f"optimizer{number}" if len(self.optimizers) > 1 else "optimizer"
            for position, group in enumerate(optimizer.param_groups):
                for place, parameter in enumerate(group["params"]):
                    if id(parameter) not in named:
                        # Trained, but in no model: a temperature, a latent code.
                        name = f"{prefix}.group{position}.{place}"
                        named[id(parameter)] = Entry("parameter", name, group["params"], place, name)
                        self.parameters.append(named[id(parameter)])
                self._sort_in(group, Entry("group", f"{prefix}.group{position}", GroupOf(optimizer, position), ""))
            for parameter, state in optimizer.state.items():
                if isinstance(state, dict):
                    owner = named.get(id(parameter))
                    name, layer = (owner.name, owner.layer) if owner else (prefix, "")
                    table = StateOf(optimizer, parameter)
                    self._sort_in(state, Entry("state", f"{prefix}.{name}", table, "", name, layer))

    def _add_further(self) -> None:
        """Add places outside of models and optimizers, by their elements where these hold tensors or numbers."""
        known = {id(entry.get()): entry for entry in (*self.parameters, *self.tensors)}
        inner = {id(container) for each in self.further for container in containers_in(each.get())}
        # All parts of a tuple that the step makes anew are in one table.
        self.numbers[:] = [entry for entry in self.numbers if not (entry.path and id(entry.whole()) in inner)]
        for each in self.further:
            if id(each.owner) in inner:
                continue  # a part of what stands at another one
            value, entry = each.get(), Entry("object", each.name, ValueOf(each), each.key)
            for path, element in [((), value)] if each.is_whole else _leaves(value, self.follows):
                one = replace(entry, name=entry.name + "".join(f"[{part!r}]" for part in path), path=path)
                if isinstance(element, torch.Tensor):
                    if id(element) in known:
                        self.twins.append((known[id(element)], one))
                    else:
                        known[id(element)] = one
                        self.tensors.append(one)
                elif self.follows and _is_number(element):
                    self.numbers.append(one)  # in a recording it is a live number
                elif not path:
                    self.plain.append(one)

    def _sort_in(self, values: dict[Any, Any], of: Entry) -> None:
        """Add the tensors and numbers of a group or a state, whose entries are as `of`, with keys and paths."""
        for key, value in values.items():
            if key == "params" and of.kind == "group":
                continue
            for path, element in _elements(value):
                entry = replace(of, name=f"{of.name}.{key}", key=key, path=path)
                if isinstance(element, torch.Tensor):
                    self.tensors.append(entry)
                elif _is_number(element):
                    # `foreach`, `maximize` and their like are bool or None and choose code, not values.
                    self.numbers.append(entry)


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
    generators: Sequence[torch.Generator] = (),
) -> Inventory:
    """List every place that belongs to `model` and `optimizer` (each one object or a list), and the `further` ones.

    Without `follows`, a number at a further place is a value like any other. `leaves` are trainable tensors that are
    neither the models' nor the optimizers', and `generators` those of torch's, besides the default one, that the step
    draws from.

    Raises:
        InputError: something that is not a module or not an optimizer.
    """
    given = as_tuple(optimizer, torch.optim.Optimizer, "optimizer")
    models, optimizers = as_tuple(model, nn.Module, "model"), tuple(map(_inner, given))
    found = Inventory(models, optimizers, tuple(further), follows, generators=tuple(generators))
    found._add_models()
    found._add_optimizers()
    known = {id(entry.get()) for entry in found.parameters}
    found.leaves.extend(leaf for leaf in leaves if id(leaf.get()) not in known)
    found.parameters.extend(found.leaves)
    found._add_further()
    parts = map(vars, (*found.paths, *found.optimizers))
    found.versioned.extend(attributes for attributes in parts if "_hocket_version" in attributes)
    return found


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))


def _is_number(value: Any) -> bool:
    """True of live numbers, too."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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


def _elements(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if type(value) in (tuple, list):
        yield from (((position,), element) for position, element in enumerate(value))
    else:
        yield (), value
