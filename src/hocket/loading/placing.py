"""Memory for a model's tensors: those on the meta device have none, and others may move to another device."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from hocket.errors import InputError
from hocket.loading.targets import modules_by_path


def checked_device(device: str | torch.device | None) -> torch.device | None:
    """Return the device with its index (``cuda:0``, not ``cuda``).

    Raises:
        InputError: there is no such device here.
    """
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
    model: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    arriving: Collection[str],
    device: torch.device | None,
) -> None:
    """Give every tensor of the model memory, on `device` where one is given.

    Tensors on the meta device become new ones, as with `torch.nn.Module.to_empty`, and stay tied. Others that move stay
    the same objects, as with `torch.nn.Module.to`, and keep their values unless new ones are about to arrive.

    Args:
        model: changed in place.
        tensors: its parameters and persistent buffers by name.
        arriving: the names of what a file has.
        device: None leaves tensors where they are, and those of the meta device become the CPU's.

    Raises:
        InputError: a tensor on the meta device is in no file. Nothing has been changed.
    """
    tables = (table for _, module in modules_by_path(model) for table in (module._parameters, module._buffers))
    if not any(tensor is not None and _moves(tensor, device) for table in tables for tensor in table.values()):
        return
    arrives = {id(tensor) for name, tensor in tensors.items() if name in arriving}
    lost = [
        path
        for path, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_meta and id(tensor) not in arrives and not path.endswith("num_batches_tracked")
    ]
    if lost:
        raise InputError(
            f"load: on the meta device, and in no file: {', '.join(lost)}; give them values first, or make the model "
            "on the CPU"
        )
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not _moves(tensor, device):
                continue
            new = made.get(id(tensor))
            if new is None:
                new = made[id(tensor)] = _placed(tensor, device, id(tensor) in arrives)
            if new is not tensor:
                setattr(module, name, new)


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
