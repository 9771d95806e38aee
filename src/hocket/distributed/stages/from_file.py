"""Values of parameters and buffers from a safetensors file, of which each rank reads what its part uses.

A model that fits into no process's memory has its values nowhere but in a file. Then every rank begins on the meta
device, captures on fake tensors, and reads the tensors that it keeps::

    header, beginnings --digest--> alike at all ranks    capture | divide | memory for a part | read the part

Names and shapes are compared with the model's before anything else, in the words of ``load_state_dict``. That ranks on
several machines read the same file is told by its header and by the first bytes of each tensor; no more is compared.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hocket.distributed.setup import captured_for
from hocket.distributed.state import begin_from_zeros
from hocket.errors import InputError
from hocket.loading import open_weights
from hocket.loading.landing import bytes_of
from hocket.loading.targets import DTYPES, find_targets, named_tensors
from hocket.loading.weights import StoredTensor
from hocket.tracing.captured import Captured
from hocket.tracing.state import Entry, as_tuple, inventory

__all__ = ["ModelFile", "check_fresh", "check_optimizers_begin_from_zeros"]

# Of each tensor so many bytes tell one checkpoint from another.
BEGINNING_BYTES = 4096


class ModelFile:
    """The file that a model's values are in, opened.

    Args:
        model: the module; it may be on the meta device.
        file: a safetensors file, the index of several, or a folder with either.

    Attributes:
        stored: where the value of each place is, by the place's name.
        digest: other for files with other tensors, or with tensors that begin otherwise.

    Raises:
        InputError: several models, or names, shapes or dtypes that are not the model's; names them.
        FormatError: a header that cannot be right.
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
            self.stored: Mapping[str, StoredTensor] = {name: each.stored for each in targets for name in each.names}
            self.digest = self._digested()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Read no more."""
        self._weights.close()

    def read(self, entries: Iterable[Entry]) -> int:
        """Read the values of these places into their memory; those that are not in the file stay as they are.

        Returns:
            How many bytes were read.

        Raises:
            FormatError: the file ends before.
        """
        size_bytes = 0
        for entry in entries:
            stored = self.stored.get(entry.name)
            if stored is None or not stored.entry.size_bytes:
                continue
            tensor = entry.get().detach()
            dtype = DTYPES[stored.entry.dtype]
            is_direct = tensor.dtype == dtype and tensor.is_contiguous()
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
    """Return if no optimizer has a state yet: one whose parameters have no values has none that can be told.

    Raises:
        InputError: one has; names it.
    """
    found = next((e for e in inventory(model, optimizer).tensors if e.kind == "state"), None)
    if found is not None:
        raise InputError(
            f"distribute: with weights= a training begins, and {found.name!r} is there already; load the optimizer's "
            "state after the first step (load_state_dict)"
        )


def check_optimizers_begin_from_zeros(captured: Captured) -> None:
    """Return if the captured step makes of a state of zeros what each optimizer makes in its first step.

    No rank has the values of the model, so optimizers of the same class and options are tried on a small one.

    Raises:
        InputError: it does not, or no other optimizer can be made of these options.
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
    """Of values that are not drawn: the generator stays as it is."""
    model = nn.utils.skip_init(nn.Linear, 3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.6, parameter.numel()).view_as(parameter))
    return model
