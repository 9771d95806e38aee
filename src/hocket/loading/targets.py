"""Match the tensors of a file with those of a model, by name, before any memory is written.

Names, ties and shapes are compared as `torch.nn.Module.load_state_dict` does, and errors have its text. Names of one
tensor, or of the same memory, are one target: a file need have only one of them (as `safetensors.torch.save_model`
writes tied weights), and if it has several the last one counts, as with ``load_state_dict``.

Then the model's tensors get memory: those on the meta device have none, and others may move to another device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from hocket.errors import InputError
from hocket.loading.held import memory_of
from hocket.loading.weights import DTYPES, StoredTensor, Weights


@dataclass(frozen=True, eq=False)
class Destination:
    """A tensor of the model, and the tensor of a file that it is loaded from."""

    names: tuple[str, ...]  # its names in the model, several if it is tied
    stored: StoredTensor  # the tensor of a file


def modules_by_path(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every module by each path, in the order of ``state_dict``, three times as fast as `named_modules`."""
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
    """Match each tensor of the model with one of the files, in the order of registration, or refuse.

    With `strict`, both sides have the same names. The model's parameters may be on the meta device.
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
    # As torch has it, what a file has for a module that is None now is no error.
    gone = tuple(
        f"{path}.{name}.".removeprefix(".")
        for path, module in modules_by_path(model)
        for name, child in module._modules.items()
        if child is None
    )
    unexpected = [name for name in weights.tensors if name not in tensors and not name.startswith(gone)]
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
    if is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
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


def checked_device(device: str | torch.device | None) -> torch.device | None:
    """Return the device with its index (``cuda:0``, not ``cuda``), or raise `InputError` if there is none here."""
    if device is None:
        return None
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError) as error:
        raise InputError(f"load: device: {device!r}: {error}") from error
    if found.type == "meta":
        raise InputError("load: device: expected one that has memory, got 'meta'")
    return found


def place(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], arriving: Collection[str], device: torch.device | None
) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Give every tensor of the model memory, on `device` where one is given.

    Tensors on the meta device become new ones, as with `torch.nn.Module.to_empty`, and stay tied. Others that move stay
    the same objects, as with `torch.nn.Module.to`, and keep their values unless new ones are about to arrive.

    `arriving` has the names of what a file has. Without a device tensors stay where they are, and those of the meta
    device become the CPU's. One on the meta device that is in no file is refused before anything has changed.

    Returns what was replaced: each module, the name there, and the tensor on the meta device.
    """
    tables = (table for _, module in modules_by_path(model) for table in (module._parameters, module._buffers))
    if not any(tensor is not None and _moves(tensor, device) for table in tables for tensor in table.values()):
        return []
    arrives = {id(tensor) for name, tensor in tensors.items() if name in arriving}
    lost = [
        path
        for path, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_meta and id(tensor) not in arrives and not _counts_batches(model, path)
    ]
    if lost:
        raise InputError(
            f"load: on the meta device, and in no file: {', '.join(lost)}; give them values first, or make the model "
            "on the CPU"
        )
    made: dict[int, torch.Tensor] = {}
    replaced = []
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not _moves(tensor, device):
                continue
            new = made.get(id(tensor))
            if new is None:
                new = made[id(tensor)] = _placed(tensor, device, id(tensor) in arrives)
            if new is not tensor:
                setattr(module, name, new)
                replaced.append((module, name, tensor))
    return replaced


def _moves(tensor: torch.Tensor, device: torch.device | None) -> bool:
    return tensor.is_meta or (device is not None and tensor.device != device)


def _placed(tensor: torch.Tensor, device: torch.device | None, arrives: bool) -> torch.Tensor:
    with torch.no_grad():
        if not tensor.is_meta:
            tensor.data = torch.empty_like(tensor, device=device) if arrives else tensor.to(device)
            return tensor
        where = device or torch.device("cpu")
        values = torch.empty_like(tensor, device=where) if arrives else torch.zeros_like(tensor, device=where)
    made = torch.nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else values
    made.__dict__.update(tensor.__dict__)
    return made
