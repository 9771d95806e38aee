r"""The tensors of B models, stacked, and the models on their parts of them.

models --tensors, stacked--> parameters (B, *shape), under the names that they have in a model
    \--copied--> templates: plain modules, whose tensors are their parts of the stacked ones
    \--blocks that differ--> B modules each, as they are

A template is a module like any other: its parameters have values, devices and gradients, and what its forward writes
into them is in the stacked tensors. Objects that all models hold, such as a config, are held by all templates, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import InputError
from hocket.fusion.gradients import GradientMemory, Parts
from hocket.fusion.rules.base import where
from hocket.fusion.shared_objects import Originals, attributes_of, held_in_common, named_tensors, reached, stray
from hocket.fusion.stacked import Stacked


class _Store(nn.Module):
    """Holds stacked tensors under the names they have in the models. The array saves and loads them."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        return


class Store:
    """The tensors of B models, and plain modules from them."""

    is_reshaped = False  # whether forwards have given buffers another shape, so that what was made of them is over

    def __init__(self, models: list[nn.Module], reasons: Mapping[str, str], seeds: Sequence[int] | None) -> None:
        self.num_models = len(models)
        self.reasons = dict(reasons)
        self.seeds = None if seeds is None else [int(seed) for seed in seeds]
        self.generators: dict[torch.device, tuple[torch.Generator, ...]] = {}
        self.memory = GradientMemory()  # for gradients of parameters, kept from step to step
        self.originals = Originals(models)
        self._fill(models)

    def _fill(self, models: list[nn.Module]) -> None:
        """Stack the tensors, and make templates that hold parts of them."""
        self._parts = Parts()
        self._common = held_in_common(models)
        self.fused: nn.Module = _Store()
        self.separate = nn.ModuleList()
        self.places: dict[str, tuple[nn.Module, str]] = {}
        self.separate_index: dict[str, int] = {}
        first_name: dict[int, str] = {}
        columns = [dict(named_tensors(model)) for model in models]
        for name, tensor in columns[0].items():
            if any(name.startswith(block + ".") for block in self.reasons):
                continue
            if id(tensor) in first_name:  # tied: one tensor under several names
                self.places[name] = self.places[first_name[id(tensor)]]
                continue
            first_name[id(tensor)] = name
            stacked = torch.stack([column[name].detach() for column in columns]).contiguous()
            store, leaf = self._store(name)
            if isinstance(tensor, nn.Parameter):
                param = nn.Parameter(stacked, requires_grad=tensor.requires_grad)
                param._hocket_models = len(models)  # type: ignore[attr-defined]
                store.register_parameter(leaf, param)
            else:
                store.register_buffer(leaf, stacked)
            self.places[name] = (store, leaf)
        memos: list[dict[int, Any]] = [{} for _ in models]  # a tensor of several blocks is one
        for name in self.reasons:
            if any(name.startswith(other + ".") for other in self.reasons):
                continue
            self.separate_index[name] = len(self.separate)
            own = [copy.deepcopy(model.get_submodule(name), memo) for model, memo in zip(models, memos, strict=True)]
            mark(own)
            self.separate.append(nn.ModuleList(own))
        self.templates = [self.template_of(model, index) for index, model in enumerate(models)]

    def template_of(self, model: nn.Module, index: int) -> nn.Module:
        """A copy of a model, or of a template, on the tensors of this slot."""
        parts = self._own_tensors()[index]
        memo: dict[int, Any] = {id(tensor): parts[name] for name, tensor in named_tensors(model) if name in parts}
        memo |= {id(each): each for each in self._common}
        for block, place in self.separate_index.items():
            memo[id(model.get_submodule(block))] = self.group(place)[index]
        return _copied(model, memo, index)

    def link(self) -> bool:
        """Move the templates to where the stacked tensors are now. Returns True if that made new templates."""
        wholes = self.all_tensors()
        if not wholes or self._parts.are_of(wholes):
            return False
        if self._parts.lie_as(wholes):  # some have been frozen, or train again
            for template, parts in zip(self.templates, self._own_tensors(), strict=True):
                for name, own in parts.items():
                    table, leaf = _table(template, name)
                    table[leaf] = own
                _match_flat_weights(template)
            return False
        self.templates = [self.template_of(template, index) for index, template in enumerate(self.templates)]
        return True

    def _own_tensors(self) -> list[dict[str, Tensor]]:
        """Each model's parts of the stacked tensors, by name."""
        wholes = self.all_tensors()
        return self._parts.of(wholes) if wholes else [{} for _ in range(self.num_models)]

    def settle(self) -> None:
        """Write tensors that forwards have bound anew into the stacked ones, and rebind the parts."""
        replaced = ""
        others: dict[str, list[Tensor]] = {}  # buffers of another shape or type, by name
        for index, (template, parts) in enumerate(zip(self.templates, self._own_tensors(), strict=True)):
            for name, own in parts.items():
                table, leaf = _table(template, name)
                if (new := table.get(leaf)) is not own:
                    replaced = name if isinstance(own, nn.Parameter) else replaced
                    if isinstance(new, Tensor) and (name == replaced or is_like(new, own)):
                        own.data.copy_(new.data)
                    elif isinstance(new, Tensor):
                        others.setdefault(name, []).append(new.detach())
                    table[leaf] = own
                row = self.whole(name).data[index]
                if own.data_ptr() != row.data_ptr():  # its data was bound anew
                    own.data = row.copy_(own.data)
        if replaced:
            raise InputError(
                f"{replaced}: the forward puts another parameter in its place, which fused models cannot follow; "
                "write into it, under torch.no_grad()"
            )
        for name, news in others.items():
            if len(news) < self.num_models or not all(is_like(each, news[0]) for each in news):
                raise InputError(f"{name}: the forward gives it another shape or type than in other models")
            store, leaf = self.places[name]
            store._buffers[leaf] = torch.stack(news)
            self.is_reshaped = True

    def _store(self, name: str) -> tuple[nn.Module, str]:
        """The container for a dotted name, and the last part of the name."""
        *path, leaf = name.split(".")
        store: nn.Module = self.fused
        for each in path:
            if each not in store._modules:
                store.add_module(each, _Store())
            store = store._modules[each]  # type: ignore[assignment]
        return store, leaf

    def set_attribute(self, name: str, value: Any, model: int | None) -> None:
        """Set an attribute of all models, or of one."""
        path, _, leaf = name.rpartition(".")
        if model is not None:
            self.check_slot(model)
        for template in self.templates if model is None else [self.templates[model]]:
            try:
                layer = template.get_submodule(path)
            except AttributeError as error:
                raise InputError(f"set_attribute: {name}: no layer is called {path!r}") from error
            if any(leaf in table for table in (layer._parameters, layer._buffers, layer._modules)):
                raise InputError(f"set_attribute: {name}: expected an attribute, got a parameter, buffer or layer")
            if not hasattr(layer, leaf):
                raise InputError(f"set_attribute: {name}: {type(layer).__name__} has no attribute {leaf!r}")
            setattr(layer, leaf, value)

    def whole(self, name: str) -> Tensor:
        """The stacked parameter or buffer of this name, ``(B, *shape)``."""
        store, leaf = self.places[name]
        found = store._parameters.get(leaf)
        return found if found is not None else store._buffers[leaf]  # type: ignore[return-value]

    def tensor(self, name: str) -> Stacked:
        """The same, as what an op of all models takes."""
        return Stacked(self.whole(name))

    def group(self, place: int) -> list[nn.Module]:
        """The models' own modules of the separate block at this place."""
        return list(self.separate[place].children())

    def generators_on(self, device: torch.device) -> tuple[torch.Generator, ...]:
        """One generator for each model on a device, or none where no seeds were given."""
        if self.seeds is None:
            return ()
        if device not in self.generators:
            made = tuple(torch.Generator(device=device).manual_seed(seed) for seed in self.seeds)
            self.generators[device] = made
        return self.generators[device]

    def parameters(self) -> list[Tensor]:
        return [*self.fused.parameters(), *self.separate.parameters()]

    def buffers(self) -> list[Tensor]:
        return [*self.fused.buffers(), *self.separate.buffers()]

    def all_tensors(self) -> dict[str, Tensor]:
        """Every stacked parameter and buffer, by each of its names."""
        return {  # in each step: written out, it takes half as long
            name: store._parameters[leaf] if leaf in store._parameters else store._buffers[leaf]  # type: ignore[misc]
            for name, (store, leaf) in self.places.items()
        }

    def tensors_of(self, model: int) -> dict[str, Tensor]:
        """Every parameter and buffer of one model, by each of its names: views of the stacked ones."""
        found = {name: whole[model] for name, whole in self.all_tensors().items()}
        for block, place in self.separate_index.items():
            found |= {f"{block}.{name}": own for name, own in named_tensors(self.group(place)[model])}
        return found

    def plain(self, index: int) -> nn.Module:
        """Model `index` as a plain module with tensors of its own."""
        template = self.templates[index]
        memo: dict[int, Any] = {id(each): each for each in self._common}
        for name, part in named_tensors(template):
            if id(part) not in memo and name in self.places:
                whole = self.whole(name)
                own = whole.detach()[index].clone()
                is_parameter = isinstance(part, nn.Parameter)
                memo[id(part)] = nn.Parameter(own, requires_grad=whole.requires_grad) if is_parameter else own
        for block, place in self.separate_index.items():
            memo[id(template.get_submodule(block))] = copy.deepcopy(self.group(place)[index], memo)
        plain = _copied(template, memo, index)
        for parameter in plain.parameters():
            if hasattr(parameter, "_hocket_model"):
                del parameter._hocket_model
        return plain

    def on_meta(self, index: int) -> nn.Module:
        """Model `index` on the meta device, without data."""
        memo: dict[int, Any] = {id(each): each for each in self._common}
        for _, tensor in named_tensors(self.templates[index]):
            hollow = torch.empty_like(tensor, device="meta", requires_grad=False)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(hollow, requires_grad=tensor.requires_grad) if is_parameter else hollow
        return _copied(self.templates[index], memo, index)

    def __getstate__(self) -> dict[str, Any]:
        """Templates without data, as parts would each be saved with the tensors of all models."""
        templates = [self.on_meta(index) for index in range(self.num_models)]
        return {**self.__dict__, "templates": templates, "_parts": Parts(), "memory": GradientMemory()}

    def mark(self) -> None:
        """Mark each parameter with the model it belongs to, or with B. Copies of parameters lose these attributes."""
        for parameter in self.fused.parameters():
            parameter._hocket_models = self.num_models  # type: ignore[attr-defined]
        for group in self.separate:
            mark(list(group.children()))

    def check_slot(self, model: int) -> None:
        """Check that a model is there."""
        if isinstance(model, bool) or not isinstance(model, int) or not 0 <= model < self.num_models:
            raise InputError(f"model: expected a slot from 0 to {self.num_models - 1}, got {model!r}")


def _copied(model: nn.Module, memo: dict[int, Any], index: int) -> nn.Module:
    """A copy of a model in which the objects in `memo` are replaced."""
    for _, value in attributes_of(model):
        for each in reached(value, set()):  # what a forward has left behind
            if isinstance(each, Tensor) and each.grad_fn is not None and id(each) not in memo:
                memo[id(each)] = each.detach().clone()
    try:
        found = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"model {index}: cannot be copied: {error}") from error
    _check_copy(model, found, memo, index)
    _match_flat_weights(found)
    return found


def _check_copy(model: nn.Module, copied: nn.Module, memo: dict[int, Any], index: int) -> None:
    """Check that a copy has parts of its own, all of them: a class of the user's may say how it is copied."""
    kept = [module for module in model.modules() if memo.get(id(module)) is module]  # separate blocks, as they are
    same = {id(part) for each in kept for part in (*each.modules(), *each.parameters(), *each.buffers())}
    own: dict[str, Any] = dict([*copied.named_modules(remove_duplicate=False), *named_tensors(copied)])
    for name, part in (*model.named_modules(remove_duplicate=False), *named_tensors(model)):
        found = own.get(name)
        is_shared = found is part and id(part) not in same
        if found is None or is_shared or found is not memo.get(id(part), found):
            raise stray(index, where(name))


def _match_flat_weights(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


def is_like(one: Tensor, other: Tensor) -> bool:
    """True if two tensors have one shape and type."""
    return one.shape == other.shape and one.dtype == other.dtype


def _table(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dict that holds a parameter or buffer of a model, and its name there."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if leaf in module._parameters else module._buffers), leaf


def mark(modules: list[nn.Module]) -> None:
    """Say of each parameter of separate modules which model it belongs to."""
    for index, module in enumerate(modules):
        for param in module.parameters():
            param._hocket_model = index  # type: ignore[attr-defined]


class Snapshot:
    """The contents of tensors and the states of random generators now."""

    def __init__(self, tensors: Sequence[Tensor], generators: dict[torch.device, tuple[torch.Generator, ...]]) -> None:
        self._contents = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._generators = generators
        self._before = dict(generators)
        self._states = [(each, each.get_state()) for group in generators.values() for each in group]
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back(self) -> None:
        """Restore them. Generators that were made meanwhile are gone."""
        with torch.no_grad():
            for tensor, content in self._contents:
                tensor.copy_(content)
        self._generators.clear()
        self._generators.update(self._before)
        for generator, state in self._states:
            generator.set_state(state)
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


@contextmanager
def restored(tensors: Sequence[Tensor], generators: dict[torch.device, tuple[torch.Generator, ...]]) -> Iterator[None]:
    """Put tensors and random generators back to their former state after an error."""
    snapshot = Snapshot(tensors, generators)
    try:
        yield
    except BaseException:
        snapshot.put_back()
        raise
