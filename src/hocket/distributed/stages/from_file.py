"""`ModelFile`: values of parameters and buffers in a safetensors file, of which each rank reads those of its part.

If no process can hold a model, its values are only in a file. Every rank begins on the meta device, captures on fake
tensors, and reads the tensors that it keeps::

    header, beginnings --digest--> alike at all ranks    capture | divide | memory for a part | read the part

Names and shapes are compared with the model's before anything else, with the messages of ``load_state_dict``. Ranks on
several machines compare the headers of their files and the first bytes of each tensor, and no more.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hocket.distributed.job import captured_for
from hocket.distributed.staging import device_of
from hocket.distributed.state import begin_from_zeros
from hocket.errors import InputError
from hocket.loading import open_weights
from hocket.loading.landing import bytes_of
from hocket.loading.targets import find_targets, named_tensors
from hocket.loading.weights import DTYPES, StoredTensor
from hocket.tracing.captured import Captured
from hocket.tracing.sources import Entry
from hocket.tracing.state import as_tuple, inventory

# Bytes at the start of each tensor that tell one checkpoint from another.
BEGINNING_BYTES = 4096


class ModelFile:
    """An open file, index of several, or folder, with the values of a module, which may be on the meta device.

    Raises:
        InputError: several models, or names, shapes or dtypes that are not the model's. They are named.
        FormatError: a malformed header.
        OSError: there is no such file.
    """

    def __init__(self, model: Any, file: str | os.PathLike[str]) -> None:
        models = as_tuple(model, nn.Module, "model")
        if len(models) != 1:
            raise InputError(
                f"distribute: weights={os.fspath(file)!r} are of one model, and the step has {len(models)}"
            )
        self._weights = open_weights(file)
        try:
            targets = find_targets(models[0], named_tensors(models[0]), self._weights)
            # the stored tensor of each place, by the name of the place
            self.stored: Mapping[str, StoredTensor] = {name: each.stored for each in targets for name in each.names}
            self.digest = self._digested()  # hash of the header and of the start of each tensor
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._weights.close()

    def read(self, entries: Iterable[Entry]) -> int:
        """Read the values of these places that the file has into their memory. Return the number of bytes read."""
        size_bytes = 0
        for entry in entries:
            stored = self.stored.get(entry.name)
            if stored is None or not stored.entry.size_bytes:
                continue
            tensor = entry.get().detach()
            dtype = DTYPES[stored.entry.dtype]
            is_direct = tensor.dtype == dtype and tensor.is_contiguous() and device_of(tensor) is None
            memory = tensor if is_direct else torch.empty(stored.entry.shape, dtype=dtype)
            stored.source.fill(stored.entry.offset, [bytes_of(memory)])
            if not is_direct:
                tensor.copy_(memory.reshape(tensor.shape))
            size_bytes += stored.entry.size_bytes
        return size_bytes

    def _digested(self) -> str:
        found = hashlib.sha256()
        for name, stored in sorted(self._weights.tensors.items()):
            entry = stored.entry
            found.update(repr((name, entry.dtype, entry.shape)).encode())
            beginning = bytearray(min(entry.size_bytes, BEGINNING_BYTES))
            if beginning:
                stored.source.fill(entry.offset, [memoryview(beginning)])
            found.update(beginning)
        return found.hexdigest()[:16]


def check_fresh(model: Any, optimizer: Any) -> None:
    """Raise an `InputError` that names an optimizer with state."""
    found = next((e for e in inventory(model, optimizer).tensors if e.kind == "state"), None)
    if found is not None:
        raise InputError(
            f"distribute: with weights= a training begins, and {found.name!r} is there already; load the optimizer's "
            "state after the first step (load_state_dict)"
        )


def check_optimizers_begin_from_zeros(captured: Captured) -> None:
    """Refuse optimizers whose first step differs from a planned step from zero state.

    No rank has the values of the model, so optimizers of the same class and options are tried on a small one.
    """
    for optimizer in captured.trace.places.optimizers:
        models = [_small_model() for _ in optimizer.param_groups]
        options = [{key: group[key] for key in optimizer.defaults if key in group} for group in optimizer.param_groups]
        groups = [{"params": list(m.parameters()), **given} for m, given in zip(models, options, strict=True)]
        try:
            kind: Any = type(optimizer)
            tried = kind(groups)
        except Exception as error:
            raise InputError(
                f"distribute: whether {type(optimizer).__name__} begins from zeros cannot be tried: {error}; let "
                "rank 0 have the model's values"
            ) from error

        def step(batch: torch.Tensor, models: Any = models, tried: Any = tried) -> torch.Tensor:
            tried.zero_grad()
            loss: torch.Tensor = sum((model(batch).square().mean() for model in models), torch.zeros(()))
            loss.backward()
            tried.step()
            return loss

        batch = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)
        begin_from_zeros(captured_for(step, models, tried, batch))


def _small_model() -> nn.Module:
    """A model with fixed values, which leaves the random generator alone."""
    model = nn.utils.skip_init(nn.Linear, 3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.6, parameter.numel()).view_as(parameter))
    return model
