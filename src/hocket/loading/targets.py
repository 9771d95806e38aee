"""Match the tensors of a file with those of a model, by name, before any memory is written.

Names, ties and shapes are compared as `torch.nn.Module.load_state_dict` does, and errors have its text. Names of one
tensor, or of the same memory, are one target: a file need have only one of them (as `safetensors.torch.save_model`
writes tied weights), and if it has several the last one counts, as with ``load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from hocket.errors import InputError
from hocket.loading.header import DTYPES
from hocket.loading.held import memory_of
from hocket.loading.weights import StoredTensor, Weights


@dataclass(frozen=True, eq=False)
class Destination:
    """A tensor of the model, and the tensor of a file that it is loaded from.

    Attributes:
        names: its names in the model, several if it is tied.
        stored: the tensor of a file.
    """

    names: tuple[str, ...]
    stored: StoredTensor


def modules_by_path(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every module by each of its paths, in the order of ``state_dict``, three times as fast as `named_modules`.

    Example:
        >>> [path for path, _ in modules_by_path(torch.nn.Sequential(torch.nn.Sequential(torch.nn.ReLU())))]
        ['', '0', '0.0']
    """
    todo = [("", model)]
    while todo:
        path, module = todo.pop()
        yield path, module
        prefix = f"{path}." if path else ""
        children = reversed(module._modules.items())
        todo += [(prefix + name, child) for name, child in children if child is not None]


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by their names in a state dict, tied ones by every name.

    The order is that of registration, those of a module before those of its children.

    Example:
        >>> list(named_tensors(torch.nn.BatchNorm1d(3)))
        ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    found: dict[str, torch.Tensor] = {}
    for path, module in modules_by_path(model):
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found[prefix + name] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[prefix + name] = buffer
    return found


def find_targets(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], weights: Weights, *, strict: bool = True
) -> list[Destination]:
    """Match each tensor of the model with one of the files, in the order of registration.

    Args:
        model: its parameters may be on the meta device.
        tensors: its `named_tensors`.
        weights: the opened files.
        strict: require the same names on both sides.

    Raises:
        InputError: names are missing or unexpected, shapes differ, or a dtype cannot become the model's.
    """
    by_memory: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        by_memory.setdefault(memory_key(tensor), []).append(name)
    targets, missing, problems = [], [], []
    for names in by_memory.values():
        tensor = tensors[names[0]]
        found = [name for name in names if name in weights.tensors]
        if found:
            problems += [text for name in found if (text := _misfit(name, tensor, weights.tensors[name]))]
            targets.append(Destination(tuple(names), weights.tensors[found[-1]]))
        elif not _counts_batches(model, names[0]):
            missing += names
    unexpected = [name for name in weights.tensors if name not in tensors]
    if strict and unexpected:
        problems.insert(0, f"Unexpected key(s) in state_dict: {_quoted(unexpected)}.")
    if strict and missing:
        problems.insert(0, f"Missing key(s) in state_dict: {_quoted(missing)}.")
    if problems:
        lines = "".join(f"\n\t{problem}" for problem in problems)
        raise InputError(f"{weights.name}: Error(s) in loading state_dict for {type(model).__name__}:{lines}")
    return targets


def memory_key(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors that are the same elements in memory."""
    tensor = memory_of(tensor)
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _misfit(name: str, tensor: torch.Tensor, stored: StoredTensor) -> str | None:
    entry = stored.entry
    shape = torch.Size(entry.shape)
    # A checkpoint of torch 0.3 had numbers as vectors of one element, and torch still takes them.
    if shape != tensor.shape and not (tensor.shape == () and shape == (1,)):
        return (
            f"size mismatch for {name}: copying a param with shape {shape} from checkpoint, the shape in current "
            f"model is {tensor.shape}."
        )
    if not torch.can_cast(DTYPES[entry.dtype], tensor.dtype):
        return f"dtype mismatch for {name}: {entry.dtype} in {stored.source.name} cannot become {tensor.dtype}."
    return None


def _counts_batches(model: torch.nn.Module, name: str) -> bool:
    """Return True for the count of a batch norm, which files from before torch 0.4.1 do not have."""
    path, _, own = name.rpartition(".")
    return own == "num_batches_tracked" and isinstance(model.get_submodule(path), _NormBase)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
