"""The contents of tensors, modules and optimizers besides attributes: hooks, tables of parameters, groups."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from hocket.pystate.layout import instance_dict, origin_of
from hocket.pystate.origins import origin
from hocket.pystate.places import KIND_NAMES, Path, is_a, is_number, kind_of
from hocket.pystate.walk import Walk

HOOK_TABLES = frozenset(
    (
        "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
    )
)  # fmt: skip
_MODULE_SLOTS = HOOK_TABLES | {
    "training", "_parameters", "_buffers", "_modules", "_is_full_backward_hook", "_hocket_version",
}  # fmt: skip
# Attributes of a module for saving and loading.
_MODULE_SKIPPED = frozenset(
    (
        "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )
)  # fmt: skip
_OPTIMIZER_SLOTS = frozenset(("param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))
_OPTIMIZER_SKIPPED = frozenset(("state", "_step_count", "_opt_called", "defaults"))
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class TorchKinds(Walk):
    """A method for each of torch's kinds of objects. See `hocket.pystate.kinds`."""

    def tensor(self, value: torch.Tensor, path: Path) -> None:
        tables = [getattr(value, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]
        hooks = [list(table.values()) if table else [] for table in tables]
        names = (*KIND_NAMES, "hooks", "post-accumulate hooks")
        self.add("tensor", value, path, names, (*kind_of(value), *(tuple(map(id, each)) for each in hooks)), ".")
        for found in hooks:
            for hook in found:
                self.todo.append((hook, (path, "hook of {}", None)))
        if not is_a(value, FakeTensor):  # that has torch's own notes
            self.attributes(value, path)

    def klass(self, kind: type, path: Path) -> None:
        """The attributes of a class. Methods of tensors that are exchanged for Python code cannot be recorded.

        Where such code calls the method that was there before, torch calls the code again under a mode.
        """
        super().klass(kind, path)
        for name, method in vars(torch.Tensor).items() if issubclass(kind, torch.Tensor) else ():
            is_exchanged = is_a(method, FunctionType) and hasattr(torch._C.TensorBase, name)
            if is_exchanged and name in self.executed.names and origin(method.__code__.co_filename) != "torch":
                found = f"torch.Tensor.{name} is exchanged for a function: call that by its own name"
                self.found.opaque[found] = None

    def module(self, value: nn.Module, path: Path) -> None:
        if type(value).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            found = f"is a {type(value).__name__}, whose communication cannot be captured"
            self.refuse(path, f'{found}: compile the model with backend="hocket" instead')
        is_own = id(value) in self.own
        if is_ours(value):
            self.names(vars(value), path, _MODULE_SLOTS.__contains__)
        else:
            self.attributes(value, path, _MODULE_SLOTS, _MODULE_SKIPPED)
        # A layer of torch's own looks up the entries it was made with; containers go over all they have.
        fixed = origin_of(type(value)) == "torch" and not is_a(value, _CONTAINERS)
        for name in ("_parameters", "_buffers", "_modules"):
            table = (instance_dict(value) or {}).get(name)
            if type(table) is dict and id(table) not in self.done:
                self.done.add(id(table))
                if fixed and not table:
                    continue
                if name == "_buffers" and is_own:
                    self._constants(table, path)
                # Spelled as the user spells it: model.fc.weight.
                rebindable = name == "_buffers" and is_own
                self.add("dict", table, path, list(table), list(table.values()), ".", rebindable=rebindable)

    def _constants(self, buffers: dict[str, Any], path: Path) -> None:
        """Buffers out of reach of autograd, and so of hooks: of these only attributes count."""
        for name, tensor in buffers.items():
            if is_a(tensor, torch.Tensor) and not tensor.requires_grad:
                self.done.add(id(tensor))
                if not is_a(tensor, FakeTensor):
                    self.own_attributes(tensor, (path, ".", name), self.named_or(frozenset()))
                    for kind, owner in (("type", tensor), ("slots", tensor), ("dict", instance_dict(tensor))):
                        if (group := self.found.groups.get((id(owner), kind))) is not None:
                            group.is_passing = True

    def optimizer(self, value: torch.optim.Optimizer, path: Path) -> None:
        if id(value) not in self.own:
            self.attributes(value, path)
            return
        self.done.add(id(value.state))
        self.done.update(id(value.__dict__.get(key)) for key in _OPTIMIZER_SKIPPED)
        if is_ours(value):
            self.names(value.__dict__, path, (_OPTIMIZER_SLOTS | {"_hocket_version"}).__contains__)
        else:
            self.own_attributes(value, path, self.named_or(_OPTIMIZER_SLOTS, _OPTIMIZER_SKIPPED))
        self.class_of(type(value))
        for number, group in enumerate(value.param_groups):
            # Numbers of a group are read anew by every planned step.
            self.done.add(id(group))
            numeric = frozenset(key for key in group if key != "params" and _is_numeric(group[key]))
            keys = [key for key in group if key not in numeric]
            group_path = (path, f"{{}}.param_groups[{number}]", None)
            values = [group[key] for key in keys]
            others = lambda key, left=numeric: key not in left  # noqa: E731
            self.add("dict", group, group_path, keys, values, "[]", counts=others)


def is_ours(value: Any) -> bool:
    """True if it is an object of Hocket's own, such as a fused model: what it remembers is no part of the step."""
    return type(value).__module__.startswith("hocket.") and origin_of(type(value)) == "torch"


def _is_numeric(value: Any) -> bool:
    """True if a captured step reads it anew: a number, a tensor, or a pair of such (a rate, betas)."""
    parts = value if type(value) in (tuple, list) else [value]
    return all(is_a(each, torch.Tensor) or is_number(each) for each in parts)
