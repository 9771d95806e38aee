"""The order in which a model first uses its tensors, and files that have them in this order.

A file that is read from its beginning to its end (from a disk that seeks slowly, over HTTP, through a decompressor)
overlaps with the forward only if the tensors that are needed first are stored first. safetensors sorts tensors by dtype
and name, so the token embedding of a GPT-2 is stored last. The order is found once, by an observed forward, and written
into a copy of the file, which every reader of safetensors can read.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, BinaryIO

import torch

from hocket.errors import InputError
from hocket.ir._fields import written_whole
from hocket.loading.held import hold, release
from hocket.loading.landing import CHUNK_BYTES
from hocket.loading.loader import finish
from hocket.loading.targets import memory_key, named_tensors
from hocket.loading.weights import FIRST_USE_KEY, PREFIX_BYTES, File, StoredTensor, Weights, open_weights
from hocket.loading.whole import structure_reason

# As safetensors has it, the first tensor begins at a multiple of this.
ALIGNMENT = 8


@contextmanager
def recorded_first_use(model: torch.nn.Module) -> Iterator[list[str]]:
    """Record the order in which the tensors of a model are first used in the block.

    Yields:
        A list that is filled with their names. At the end of the block, tensors that were not used are added, each
        after the others of its module (`with_siblings`).

    Raises:
        InputError: the uses cannot be observed, as in a compiled model.

    Example:
        >>> model = torch.nn.ModuleDict({"last": torch.nn.Linear(2, 1), "first": torch.nn.Linear(1, 2)})
        >>> with recorded_first_use(model) as names:
        ...     _ = model["last"](model["first"](torch.ones(1)))
        >>> names
        ['first.weight', 'first.bias', 'last.weight', 'last.bias']
    """
    named = named_tensors(model)
    if reason := structure_reason(model, named):
        raise InputError(f"the order of first use cannot be observed: {reason}")
    finish(model)
    found: list[str] = []
    names: dict[Any, list[str]] = defaultdict(list)
    for name, tensor in named.items():
        names[memory_key(tensor)].append(name)

    def used(key: Any) -> None:
        found.extend(names.pop(key, ()))

    keys = {name: memory_key(tensor) for name, tensor in named.items()}
    try:
        for name, key in keys.items():
            hold(named[name], partial(used, key))
        yield found
    finally:
        for tensor in named.values():
            release(tensor)
        found[:] = with_siblings(found, named)


def with_siblings(order: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return all known names: those of the order, with the other tensors of a module after its last one.

    A tensor that one forward does not use (a batch norm's count in evaluation) may be used by another one.
    """
    left: dict[str, list[str]] = defaultdict(list)
    named = set(order)
    for name in known:
        if name not in named:
            left[name.rpartition(".")[0]].append(name)
    last_of = {name.rpartition(".")[0]: name for name in order}
    found: list[str] = []
    for name in order:
        found.append(name)
        module = name.rpartition(".")[0]
        if last_of[module] == name:
            found += left.pop(module, ())
    return [*found, *(name for names in left.values() for name in names)]


def first_use(model: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    """Return the names of a model's tensors in the order in which a forward first uses them.

    The forward runs once, without gradients. Buffers and the random state are restored afterwards.

    Args:
        model: with any values in its parameters.
        *args: of its forward.
        **kwargs: likewise.

    Raises:
        InputError: the uses cannot be observed, as in a compiled model.

    Example:
        >>> first_use(torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1)), torch.ones(1))
        ('0.weight', '0.bias', '1.weight', '1.bias')
    """
    finish(model)
    kept = [(module, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.no_grad(), torch.random.fork_rng():
        try:
            with recorded_first_use(model) as names:
                model(*args, **kwargs)
        finally:
            for module, buffers in kept:
                module._buffers.update(buffers)
            for buffer, old in values:
                if torch._debug_has_internal_overlap(buffer) != 1:  # nobody can have written an expanded one
                    buffer.copy_(old)
    return tuple(names)


def reorder(file: File | Sequence[File], target: str | os.PathLike[str], order: Sequence[str]) -> None:
    """Write the tensors of one or several files into one file, in this order, atomically.

    Alignment does not change the order: safetensors reads unaligned tensors, too, and moving a small one to the end
    would make its user wait for the whole file.

    Args:
        file: as for `hocket.load`.
        target: the new file.
        order: names, as `first_use` finds them. Names that no file has (other names of a tied weight) are ignored, and
            tensors that are not named come last.

    Raises:
        InputError: none of the names is in the file, or the file can only be read from its beginning to its end.
        FormatError: a file is no safetensors file, or truncated.
        OSError: a file cannot be read or written.
    """
    with closing(open_weights(file)) as weights:
        if weights.is_sequential:
            raise InputError(f"{weights.name}: it cannot seek, so its tensors cannot be put in another order")
        stored = _in_order(weights, order)
        with written_whole(target, binary=True) as out:
            out.write(_header(weights, stored))
            for tensor in stored:
                _copy(tensor, out)


def _in_order(weights: Weights, order: Sequence[str]) -> list[StoredTensor]:
    named = [name for name in dict.fromkeys(order) if name in weights.tensors]
    if not named and weights.tensors:
        raise InputError(f"reorder: {weights.name} has none of the tensors that the order names")
    return [weights.tensors[name] for name in dict.fromkeys((*named, *weights.tensors))]


def _header(weights: Weights, stored: Sequence[StoredTensor]) -> bytes:
    metadata = {key: value for found in weights.metadata for key, value in found.items()}
    document: dict[str, Any] = {"__metadata__": {**metadata, FIRST_USE_KEY: "yes"}}
    at = 0
    for tensor in stored:
        entry = tensor.entry
        document[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.size_bytes],
        }
        at += entry.size_bytes
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def _copy(tensor: StoredTensor, out: BinaryIO) -> None:
    buffer = memoryview(bytearray(min(CHUNK_BYTES, tensor.entry.size_bytes)))
    for at in range(tensor.entry.offset, tensor.entry.end, CHUNK_BYTES):
        part = buffer[: min(CHUNK_BYTES, tensor.entry.end - at)]
        tensor.source.fill(at, [part])
        out.write(part)
