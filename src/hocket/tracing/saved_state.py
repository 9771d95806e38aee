"""Copies of what a step reads and writes: to be put back after it, or to run its ops on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hocket.errors import CaptureError
from hocket.pystate.appended import AppendedList
from hocket.pystate.places import as_it_stands
from hocket.tracing.sources import Gradient
from hocket.tracing.state import Inventory

# torch's answer for a tensor whose elements share memory.
OVERLAPS = 1
# Kernels may compute other bits where memory is aligned otherwise.
_ALIGNED_BYTES = 64


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that share memory as these dense tensors do, without a graph.

    Only the part of each memory in which the tensors lie is copied: a batch may be a slice of a whole data set.

    Example:
        >>> data = torch.zeros(1000, 3)
        >>> one, other = copies_of([data[500:510], data[505]])
        >>> one.untyped_storage().nbytes() < 200, bool((one.add_(1)[5] == other).all())
        (True, True)
    """
    parts: dict[int, tuple[int, int]] = {}
    for each in tensors:
        key = each.untyped_storage()._cdata
        begin, end = (place * each.itemsize for place in span(each))
        known = parts.get(key, (begin, end))
        parts[key] = min(begin, known[0]) // _ALIGNED_BYTES * _ALIGNED_BYTES, max(end, known[1])
    memories: dict[int, torch.UntypedStorage] = {}
    copies = []
    for each in tensors:
        key = each.untyped_storage()._cdata
        begin, end = parts[key]
        if key not in memories:
            memories[key] = each.untyped_storage()[begin:end].clone()
        copy = torch.empty((), dtype=each.dtype, device=each.device)
        offset = each.storage_offset() - begin // each.itemsize
        copies.append(copy.set_(memories[key], offset, each.shape, each.stride()))
    return copies


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first element of its memory that a tensor may read, and the one after the last."""
    begin = int(tensor.storage_offset())
    if not tensor.numel():
        return begin, begin
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + int(reach) + 1


class RandomStates:
    """The states of torch's default generators, of the host and of devices in use, and of further ones."""

    def __init__(self, generators: Sequence[torch.Generator] = ()) -> None:
        of_devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        self._states = [(each, each.get_state()) for each in (torch.default_generator, *of_devices, *generators)]

    def restore(self) -> None:
        """Put all states back."""
        for generator, state in self._states:
            generator.set_state(state)


@contextmanager
def generators_kept(generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Let torch's default generators and these ones be as before afterwards."""
    states = RandomStates(generators)
    try:
        yield
    finally:
        states.restore()


class KnownState:
    """The random state of the host and of devices, and which state optimizers have."""

    def __init__(self, places: Inventory, tensors: Iterable[torch.Tensor]) -> None:
        self._states = [(o, {p: (s, _entries_of(s)) for p, s in o.state.items()}) for o in places.optimizers]
        self._random = RandomStates(places.generators)
        self.has_cuda = any(tensor.is_cuda for tensor in tensors)

    def restore(self) -> None:
        """Put the random state back, forget state that was made since, and put back what was forgotten since."""
        for optimizer, known in self._states:
            for parameter in optimizer.state.keys() - known.keys():
                del optimizer.state[parameter]
            for parameter, (state, entries) in known.items():
                now = optimizer.state.setdefault(parameter, state)
                for key in _entries_of(now).keys() - entries.keys():
                    del now[key]
                for key in entries.keys() - _entries_of(now).keys():
                    now[key] = entries[key]
        self._random.restore()


class Saved:
    """A copy of the values at some places, of further tensors, lists, and the random state. `restore` puts it back.

    A gradient of another type than its parameter (whose `data` was exchanged) is refused, since torch would not take it
    back.
    """

    def __init__(
        self, places: Inventory, further: Sequence[torch.Tensor] = (), lists: Sequence[AppendedList] = ()
    ) -> None:
        self._entries = [(e, e.get(), e.get().detach().clone()) for e in (*places.parameters, *places.tensors)]
        self._gradients = [(g, g.get(), _copy(g.get())) for g in map(Gradient, places.parameters)]
        for gradient, tensor, _ in self._gradients:
            if tensor is not None and tensor.dtype != (needed := gradient.parameter.get().dtype):
                raise CaptureError(f"{gradient.name} is of {tensor.dtype}, its parameter of {needed}: set it to None")
        made: dict[int, Any] = {}
        self._numbers = [(entry, as_it_stands(entry.get(), made)) for entry in (*places.numbers, *places.plain)]
        parts = [entry for entry in (*places.tensors, *places.numbers) if entry.path]
        self._containers = [(entry.table, entry.key, entry.whole()) for entry in parts]
        # A written tensor is often at a place, too. It is copied once, since a copy of the momenta is large.
        known = {id(tensor) for _, tensor, _ in (*self._entries, *self._gradients)}
        self._further = [(tensor, tensor.detach().clone()) for tensor in further if id(tensor) not in known]
        self.lists = [(each, each.content()) for each in lists]
        self._known = KnownState(places, (tensor for _, tensor, _ in self._entries))

    def restore(self) -> None:
        """Put every value back into the same tensors, and forget state that was made since."""
        for table, key, container in self._containers:
            if table[key] is not container:
                table[key] = container
        with torch.no_grad():
            for entry, tensor, value in self._entries:
                write_into(tensor, value)
                entry.put(tensor)
            for gradient, tensor, value in self._gradients:
                if tensor is not None and value is not None:
                    write_into(tensor, value)
                gradient.set(tensor)
            for tensor, value in self._further:
                write_into(tensor, value)
        made: dict[int, Any] = {}
        for entry, number in self._numbers:
            entry.put(as_it_stands(number, made))
        for each, content in self.lists:
            each.restore(content)
        self._known.restore()

    def values(self) -> Iterator[tuple[str, Any]]:
        """Every saved value by name: tensors, gradients (None where there is none) and numbers."""
        yield from ((entry.name, value) for entry, _, value in self._entries)
        yield from ((gradient.name, value) for gradient, _, value in self._gradients)
        yield from ((entry.name, number) for entry, number in self._numbers)
        yield from ((f"closed over {place}", value) for place, (_, value) in enumerate(self._further))

    def current(self) -> Iterator[tuple[str, Any]]:
        """Return the values at these places, by name and in the order of `values`, without copies."""
        yield from ((entry.name, entry.get().detach()) for entry, _, _ in self._entries)
        for gradient, _, _ in self._gradients:
            tensor = gradient.get()
            yield gradient.name, None if tensor is None else tensor.detach()
        yield from ((entry.name, as_it_stands(entry.get())) for entry, _ in self._numbers)
        yield from ((f"closed over {place}", tensor.detach()) for place, (tensor, _) in enumerate(self._further))


def _entries_of(state: Any) -> dict[Any, Any]:
    return dict(state) if isinstance(state, dict) else {}


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def write_into(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy into a tensor of any layout: elements of an expanded one share memory, which torch refuses to write."""
    if torch._debug_has_internal_overlap(tensor) == OVERLAPS:
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    # A tensor of inference mode may be written only there.
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        tensor.copy_(value)
