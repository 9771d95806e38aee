"""Models whose uses of tensors cannot all be observed, and which are loaded before `hocket.load` returns.

As in torch, all tensors of the files are read and passed to the model's ``load_state_dict``.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch.nn.modules.batchnorm import _NormBase

from hocket.errors import InputError
from hocket.loading.held import HOLDABLE, memory_of
from hocket.loading.landing import bytes_of
from hocket.loading.targets import memory_key, modules_by_path, named_tensors
from hocket.loading.weights import DTYPES, Weights

_PLAIN_LOADS = (torch.nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)
# An instance may override them, too.
_LOADING = frozenset(("_load_from_state_dict", "load_state_dict", "set_extra_state"))


def structure_reason(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return why this model must be loaded in whole because of its modules and tensors, or None."""
    for path, module in modules_by_path(model):
        kind = type(module)
        where = f"{path or 'the model'} ({kind.__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            return f"{where} is a script, which reads its parameters unseen"
        if _is_compiled(module):
            return f"{where} is compiled, and compiled code reads its parameters unseen"
        loads_itself = kind._load_from_state_dict not in _PLAIN_LOADS or kind.load_state_dict not in (
            torch.nn.Module.load_state_dict,
        )
        loads_itself |= kind.set_extra_state is not torch.nn.Module.set_extra_state
        if loads_itself or not _LOADING.isdisjoint(vars(module)):
            return f"{where} overrides how a state is loaded"
        if module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks:
            return f"{where} has hooks on loading a state"
    for name, tensor in tensors.items():
        if type(tensor) not in HOLDABLE:
            return f"{name} is a {type(tensor).__name__}"
        if tensor.layout != torch.strided or tensor.is_quantized:
            return f"{name} is no dense tensor"
    return None


def _is_compiled(module: torch.nn.Module) -> bool:
    # Nothing is compiled where the compiler has not been imported, which would take seconds.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return module._compiled_call_impl is not None or (
        compiler is not None and isinstance(module, compiler.OptimizedModule)
    )


def shared_memory_reason(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return why this model must be loaded in whole because other tensors share its memory, or None.

    A view of a parameter is another tensor, whose uses are not noticed. Each storage counts its references, and more of
    them than tensors of the model are views.
    """
    spans: dict[int, dict[int, tuple[int, int, str, object]]] = defaultdict(dict)
    storages = {}
    for name, own in tensors.items():
        tensor = memory_of(own)
        if tensor.is_meta or not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        begin = int(tensor.storage_offset()) * tensor.element_size()
        length = tensor.numel()
        if not tensor.is_contiguous():
            strides = tensor.stride()
            length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
            if 0 in strides:
                return f"{name} has several elements in one place"
        end = begin + int(length) * tensor.element_size()
        spans[storage._cdata][id(tensor)] = (begin, end, name, memory_key(tensor))
        storages[storage._cdata] = storage
    for key, found in spans.items():
        ordered = sorted(found.values(), key=lambda span: span[:2])
        for before, after in pairwise(ordered):
            if after[0] < before[1] and after[3] != before[3]:
                return f"{before[2]} and {after[2]} overlap in memory"
        # Each tensor holds its storage once, and so does what `untyped_storage` has returned.
        if torch._C._storage_Use_Count(key) > len(found) + 1:
            return f"the memory of {ordered[0][2]} is also that of a tensor that is not the model's"
    return None


def read_whole(weights: Weights) -> dict[str, torch.Tensor]:
    """Read all tensors of the files. A truncated one is a `FormatError`."""
    state: dict[str, torch.Tensor] = {}
    for name, stored in weights.tensors.items():
        made = torch.empty(stored.entry.shape, dtype=DTYPES[stored.entry.dtype])
        if made.numel():
            stored.source.fill(stored.entry.offset, [bytes_of(made)])
        state[name] = made
    return state


def load_whole(model: torch.nn.Module, name: str, state: dict[str, torch.Tensor], *, strict: bool) -> None:
    """Load what was read from the files of this name. Another model's is an `InputError`, as of ``load_state_dict``."""
    by_memory = defaultdict(list)
    for own, tensor in named_tensors(model).items():
        by_memory[memory_key(tensor)].append(own)
    for names in by_memory.values():
        found = [own for own in names if own in state]
        state |= {own: state[found[-1]] for own in names if found and own not in state}
    try:
        model.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        raise InputError(f"{name}: {error}") from error
