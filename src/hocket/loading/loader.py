"""`hocket.load`: weights stream into a model while its first forward runs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from hocket.errors import InputError
from hocket.loading.held import add_gate, asked_about, hold, is_held, mark_changed, memory_of, release, use, waiting_for
from hocket.loading.landing import Landing
from hocket.loading.stream import PendingTensor, WeightStream, read_cached
from hocket.loading.targets import Destination, checked_device, find_targets, named_tensors, place
from hocket.loading.weights import File, StoredTensor, Weights, open_weights
from hocket.loading.whole import load_whole, read_whole, shared_memory_reason, structure_reason

ORDERS = ("auto", "registration", "file")

_Model = TypeVar("_Model", bound=torch.nn.Module)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Awaiting:
    """Waits for a tensor at its first use."""

    stream: WeightStream
    arrival: PendingTensor

    def __call__(self) -> None:
        self.stream.wait(self.arrival)


def load(
    model: _Model,
    file: File | Sequence[File],
    *,
    order: str | Sequence[str] = "auto",
    device: str | torch.device | None = None,
    strict: bool = True,
) -> _Model:
    """Load weights into a model while its first forward runs.

    The call returns at once, and each op waits for the parameters that it uses. If a file on disk is in the page cache,
    up to a gigabyte of it is read before the call returns, because that is faster than waiting.

    The results are those after ``model.load_state_dict(...)``. If that cannot be guaranteed (a compiled or scripted
    model, a module that overrides the loading of its state, memory that is shared with other tensors), all weights are
    read before the call returns, and the log gives the reason. When all weights have arrived, no thread or hook is
    left, and tensors have their ordinary class. `hocket.loading.finish` waits for that.

    The default order needs no trial run. A forward runs one op after another, and then no order is better than that of
    first use (each op's work also waits for all ops before it, see `hocket.planning.transfers` for other steps).
    Modules are mostly registered in this order. If the forward needs another tensor, it is read next, and reading
    continues after it.

    Args:
        model: changed in place. Parameters on the meta device become new ones, as with ``to_empty``.
        file: a safetensors file: its path, a file object, or an object with ``read_at(offset, length)``. Or the index
            of several files (``*.json``), the folder they are in, or a list of files.
        order: ``"auto"`` (the file's if `hocket.loading.reorder` has written it, else ``"registration"``),
            ``"registration"``, ``"file"``, or names of tensors, as `hocket.loading.first_use` finds them, which are
            followed by all others. A file object that cannot seek is read in its order.
        device: the device of the model. If None, the model stays where it is, except that one on the meta device goes
            to the CPU.
        strict: require the same names on both sides. If False, only names that are on both sides are loaded.

    Returns:
        The model.

    Raises:
        InputError: the file is of another model (with the text of ``load_state_dict``), or an argument is invalid.
        FormatError: the file is no safetensors file, or truncated. Nothing has been changed.
        OSError: there is no such file.
        ExecutionError: raised in the forward if reading has failed since. Names the tensor.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_model
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trained, model = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        ...     save_model(trained, f"{folder}/linear.safetensors")
        ...     model = load(model, f"{folder}/linear.safetensors")
        ...     same = torch.equal(model(torch.ones(3)), trained(torch.ones(3)))
        >>> same
        True
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"load: expected a torch.nn.Module, got {type(model).__name__}")
    if order not in ORDERS if isinstance(order, str) else not isinstance(order, Iterable):
        raise InputError(f"load: order: expected one of {', '.join(ORDERS)}, or a list of names, got {order!r}")
    where = checked_device(device)
    weights = open_weights(file)
    try:
        stream = _begun(model, weights, order if isinstance(order, str) else list(order), where, strict)
    except BaseException:
        weights.close()
        raise
    if stream is None:
        weights.close()
    else:
        stream.start()
    return model


def finish(model: torch.nn.Module) -> None:
    """Wait until everything that `hocket.load` reads for a model has arrived.

    Raises:
        ExecutionError: reading has failed. Names a tensor that has not arrived.

    Example:
        >>> finish(torch.nn.Linear(3, 2))  # one that nothing is read for
    """
    tensors = named_tensors(model)
    for stream in _streams(tensors):
        stream.join()  # asleep until the end, and not woken by each tensor
    for tensor in tensors.values():
        if is_held(tensor):
            use(tensor)


def _begun(
    model: torch.nn.Module, weights: Weights, order: str | Sequence[str], device: torch.device | None, strict: bool
) -> WeightStream | None:
    """Prepare the model and the stream, which is not started. Returns None if nothing is left to stream."""
    tensors = named_tensors(model)
    for stream in _streams(tensors):
        stream.join()
    reason = structure_reason(model, tensors)
    targets = [] if reason else find_targets(model, tensors, weights, strict=strict)
    ordered = _ordered(targets, weights, order)
    reason = reason or shared_memory_reason(tensors)
    state = read_whole(weights) if reason else {}
    replaced = place(model, tensors, weights.tensors.keys(), device)
    if reason:
        _log.info("%s is loaded in whole: %s", weights.name, reason)
        # Reading for these has failed before. Others of that file stay as they are, since their values are lost.
        held = [(tensor, waiting_for(tensor)) for name, tensor in tensors.items() if name in state]
        for tensor, _ in held:
            release(tensor)
        try:
            load_whole(model, weights.name, state, strict=strict)
        except BaseException:
            for tensor, wait in held:
                if wait is not None:
                    hold(tensor, wait)
            for module, name, tensor in replaced:
                setattr(module, name, tensor)
            raise
        return None
    return _held_back(model, weights, ordered)


def _held_back(model: torch.nn.Module, weights: Weights, targets: Sequence[Destination]) -> WeightStream | None:
    """Read cached tensors, hold the others until they arrive, and return the stream that reads them, if any."""
    tensors = named_tensors(model)
    landings: dict[str, tuple[StoredTensor, Landing]] = {}
    for target in targets:
        # An alias for the thread that writes, which must not wait. Readers use the tensor itself.
        memory = memory_of(tensors[target.names[0]]).detach()
        if memory.numel():
            landings[target.names[-1]] = target.stored, Landing(memory, target.stored)
    there = read_cached(landings)
    arrivals: dict[str, PendingTensor] = {}
    for target in targets:
        name = target.names[-1]
        if name in there:
            for tensor in {id(tensors[alias]): tensors[alias] for alias in target.names}.values():
                mark_changed(tensor)
        elif name in landings:
            arrivals |= dict.fromkeys(target.names, PendingTensor(name, *landings[name]))
    if not arrivals:
        return None
    stream = WeightStream(weights, list(dict.fromkeys(arrivals.values())))
    awaited: dict[int, PendingTensor] = {}
    for name, arrival in arrivals.items():
        tensor = tensors[name]
        if id(tensor) not in awaited:
            awaited[id(tensor)] = arrival
            arrival.on_arrival.append(partial(release, tensor))
            hold(tensor, _Awaiting(stream, arrival))
    for module in model.modules():
        needed = [awaited[id(tensor)] for tensor in asked_about(module) if id(tensor) in awaited]
        if needed:
            stream.at_end.append(add_gate(module, [partial(stream.wait, arrival) for arrival in needed]))
    return stream


def _ordered(targets: Sequence[Destination], weights: Weights, order: str | Sequence[str]) -> list[Destination]:
    """Sort tensors into the order in which they are read as long as no thread waits for one."""
    by_file = weights.is_sequential or order == "file" or (order == "auto" and weights.is_in_first_use_order)
    if not isinstance(order, str):
        known = {name for target in targets for name in target.names}
        unknown = [name for name in order if name not in known]
        if unknown and targets:
            raise InputError(f"load: order: not in the model and the file: {', '.join(map(str, unknown))}")
        place_of = {name: at for at, name in reversed(list(enumerate(order)))}
        last = len(place_of)
        targets = sorted(targets, key=lambda target: min(place_of.get(name, last) for name in target.names))
    if by_file:
        return sorted(targets, key=lambda target: target.stored.place)
    return list(targets)


def _streams(tensors: Mapping[str, torch.Tensor]) -> list[WeightStream]:
    """Return the streams that read into these tensors."""
    waits = map(waiting_for, tensors.values())
    return list(dict.fromkeys(wait.stream for wait in waits if isinstance(wait, _Awaiting)))
