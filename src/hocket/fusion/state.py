"""Saving and loading: the states of B plain modules, as of a list of modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import InputError
from hocket.fusion.slots import MutableStore

__all__ = ["StatefulStore"]


class StatefulStore(MutableStore):
    """A store that can be saved and loaded."""

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        model: int | None = None,
    ) -> dict[str, Any]:
        """The states of the plain modules: ``"0.fc.weight"``, ``"1.fc.weight"``, ..., as of a list of modules.

        Args:
            args: as of `torch.nn.Module.state_dict`.
            destination: as there.
            prefix: as there.
            keep_vars: as there.
            model: give the state of this model alone, with its own names.
        """
        if args:
            given: Any = (*args, *(destination, prefix, keep_vars)[len(args) :])
            destination, prefix, keep_vars = given
        found: dict[str, Any] = OrderedDict() if destination is None else destination
        if model is not None:
            self._check_slot(model)
        for index in range(self.num_models) if model is None else [model]:
            own = f"{prefix}{index}." if model is None else prefix
            for name, tensor in self._state_of(index):
                # A view would be saved with the tensors of all models.
                plain = tensor.detach().clone() if model is not None else tensor.detach()
                found[own + name] = tensor if keep_vars else plain
        return found

    def _state_of(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors (views of the stacked ones) that a plain module's state holds."""
        for name in self._templates[index].state_dict(keep_vars=True):
            if name in self._places:
                yield name, self.tensor(name).tensor[index]
                continue
            for block, place in self._separate_index.items():
                if name.startswith(block + "."):
                    own = self._group(place)[index].state_dict(keep_vars=True)
                    yield name, own[name.removeprefix(block + ".")]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        expected = set()
        with torch.no_grad():
            for index in range(self.num_models):
                for name, tensor in self._state_of(index):
                    key = f"{prefix}{index}.{name}"
                    expected.add(key)
                    if key not in state_dict:
                        missing_keys.append(key)
                    elif state_dict[key].shape != tensor.shape:
                        given = tuple(state_dict[key].shape)
                        error_msgs.append(f"{key}: expected shape {tuple(tensor.shape)}, got {given}")
                    else:
                        tensor.copy_(state_dict[key])
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in expected]
        if isinstance(state_dict, dict):  # a module around this one goes on to the separate blocks, which are loaded
            state_dict |= {f"{prefix}separate.{name}": each for name, each in self.separate.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` gave.

        Raises:
            InputError: `assign` is True (stacked parameters keep their identity).
            RuntimeError: keys or shapes do not match, as of any module.
        """
        if assign:
            raise InputError("load_state_dict: assign=True is not possible: the models' tensors are stacked")
        missing: list[str] = []
        unexpected: list[str] = []
        errors: list[str] = []
        self._load_from_state_dict(state_dict, "", {}, strict, missing, unexpected, errors)
        if strict:
            errors += [f"missing: {', '.join(missing)}"] * bool(missing)
            errors += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
        if errors:
            raise RuntimeError("while loading the states of fused models: " + "; ".join(errors))
        return nn.modules.module._IncompatibleKeys(missing, unexpected)
