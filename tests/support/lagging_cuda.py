"""CUDA devices that are none, as late as they may be: what is launched runs when the host waits for it, not before.

Ops compute on the CPU. Tensors that a test gives to a device (`LaggingCuda.own`), and what is made of them, stand for
tensors on it. An op on them is queued on the current stream of its thread, and its results are NaN until then. The host

- runs a stream up to an event that it waits for, or all of it where it reads a number or makes a blocking copy;
- is refused what CUDA refuses: one op on tensors of two places, the bytes of a tensor of a device;
- is refused what CUDA makes a race of: a copy without waiting from or to memory that is not pinned.

`Lagging` has the devices, and puts them in the place of CUDA's in all threads of this process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from hocket.distributed import agent, job, packets, staging
from hocket.distributed.stages import from_file
from hocket.execution import channels, threads
from hocket.execution.base import below_autograd
from hocket.execution.streams import StreamDevice

_WRITES_STATISTICS = {"aten::native_batch_norm": (3, 4)}


class StrictError(RuntimeError):
    """Something that CUDA refuses, or makes a race of."""


@dataclass(eq=False)
class _Event:
    stream: _Stream | None = None
    recorded: int = 0
    happened: int = 0
    at_us: float = 0.0


@dataclass(eq=False)
class _Stream:
    queue: list[Callable[[], None]] = field(default_factory=list)


class LaggingCuda(StreamDevice):
    """One device of `Lagging`. It draws from the CPU's random generator."""

    def __init__(self, all_devices: Lagging, number: int) -> None:
        self._all, self.number = all_devices, number
        self._default = self.stream(0)

    def own(self, *values: Any) -> None:
        """From now on the tensors in these stand for tensors of this device."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor):
                self._all.give(leaf, self)

    def owns(self, where: torch.Tensor | torch.device) -> bool:
        return not isinstance(where, torch.Tensor) or self._all.owner(where) is self

    def stream(self, priority: int, number: int = 0) -> _Stream:
        made = _Stream()
        self._all.streams.append(made)
        return made

    def default(self) -> _Stream:
        return self._default

    def current(self) -> _Stream:
        found: _Stream = self._all.here.__dict__.get(self, self._default)
        return found

    def event(self, timed: bool = False) -> _Event:
        return _Event()

    def record(self, event: _Event, stream: _Stream) -> None:
        with self._all.lock:
            event.stream, event.recorded = stream, event.recorded + 1
            stream.queue.append(partial(self._happens, event, event.recorded))

    def wait(self, stream: _Stream, event: _Event) -> None:
        with self._all.lock:
            stream.queue.append(partial(self._all.run_to, event, event.recorded))

    def wait_on_host(self, event: _Event) -> None:
        self._all.run_to(event, event.recorded)

    def launch(self, stream: _Stream, work: Callable[[], None]) -> None:
        here = self._all.here.__dict__
        before, making = here.get(self), here.get("making")
        here[self], here["making"] = stream, self
        try:
            with self._all.noted():
                work()
        finally:
            here[self], here["making"] = before or self._default, making

    def pinned(self, size_bytes: int) -> torch.Tensor:
        with _disable_current_modes():
            memory = torch.full((size_bytes,), 255, dtype=torch.uint8)
        self._all.pinned[memory.untyped_storage()._cdata] = StorageWeakRef(memory.untyped_storage())
        return memory

    def elapsed_us(self, first: _Event, second: _Event) -> float:
        self.wait_on_host(first)
        self.wait_on_host(second)
        return second.at_us - first.at_us

    def synchronize(self) -> None:
        self._all.synchronize()

    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("no graphs here")

    def _happens(self, event: _Event, number: int) -> None:
        event.happened, event.at_us = max(event.happened, number), self._all.clock_us


class Lagging:
    """Devices whose work is done when it is waited for."""

    def __init__(self, num_devices: int = 2) -> None:
        self.lock = threading.RLock()
        self.here = threading.local()
        self.clock_us = 0.0
        self.pinned: dict[int, StorageWeakRef] = {}
        self._owned: dict[int, tuple[StorageWeakRef, LaggingCuda]] = {}
        self.streams: list[_Stream] = []
        self.devices = [LaggingCuda(self, number) for number in range(num_devices)]

    def owner(self, tensor: torch.Tensor) -> LaggingCuda | None:
        found = self._owned.get(tensor.untyped_storage()._cdata)
        return found[1] if found is not None and not found[0].expired() else None

    def give(self, tensor: torch.Tensor, device: LaggingCuda) -> None:
        storage = tensor.untyped_storage()
        self._owned[storage._cdata] = (StorageWeakRef(storage), device)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.pinned

    def run_to(self, event: _Event, number: int) -> None:
        """Run a stream until this record of an event has happened."""
        with self.lock:
            if event.stream is not None:
                self.run(event.stream, lambda: event.happened >= number)

    def run(self, stream: _Stream, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run what a stream was given, in its order."""
        with self.lock, _disable_current_modes(), below_autograd():
            while stream.queue and not is_over():
                self.clock_us += 1.0
                stream.queue.pop(0)()

    def synchronize(self) -> None:
        with self.lock:
            for stream in list(self.streams):
                self.run(stream)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Queue the ops of this thread on tensors of the devices."""
        if self.here.__dict__.get("is_noted"):
            yield
            return
        self.here.is_noted = True
        try:
            with _Queueing(self):
                yield
        finally:
            self.here.is_noted = False

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Make all ops at once, after those before: the watch of a step would take what is queued for its state."""
        self.synchronize()
        noted, self.here.is_noted = self.here.__dict__.get("is_noted", False), True
        try:
            with _disable_current_modes():
                yield
        finally:
            self.here.is_noted = noted

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of `func` at its launch."""
        name = func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = list(dict.fromkeys(found for tensor in tensors if (found := self.owner(tensor)) is not None))
        if not devices:
            result = func(*args, **kwargs)
            making = self.here.__dict__.get("making")
            if not tensors and making is not None:
                making.own(result)
            return result
        with self.lock:
            if _is_read_by_host(func) or len(devices) > 1:
                for device in devices:
                    self.run(device.current())
                return func(*args, **kwargs)
            device, stream = devices[0], devices[0].current()
            if name == "aten::copy_" and None in map(self.owner, args[:2]):
                return self._copied(stream, func, args, kwargs)
            of_host = [tensor for tensor in tensors if self.owner(tensor) is None]
            if any(tensor.ndim for tensor in of_host):
                raise StrictError(f"{name}: expected all tensors to be on the same device")
            baked = {id(tensor): tensor.clone() for tensor in of_host}
            args, kwargs = tree_map_only(torch.Tensor, lambda leaf: baked.get(id(leaf), leaf), (args, kwargs))
            return self._queued(device, stream, func, args, kwargs, tensors)

    def _copied(self, stream: _Stream, func: Any, args: Any, kwargs: Any) -> Any:
        """A copy between host and device."""
        host = next(tensor for tensor in args[:2] if self.owner(tensor) is None)
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if not waits and not self.is_pinned(host):
            raise StrictError("aten::copy_: a copy that is not waited for, and the host's memory is not pinned")
        self._put(stream, func, args, kwargs)
        if waits:
            self.run(stream)
        return args[0]

    def _queued(
        self, device: LaggingCuda, stream: _Stream, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]
    ) -> Any:
        """Queue an op. What it returns and writes is found by running it on what is there now."""
        written = list(_written(func, args, kwargs))
        before = [tensor.clone() for tensor in written]
        drawn = torch.get_rng_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        result = func(*args, **kwargs)
        for tensor, content in zip(written, before, strict=True):
            tensor.data.copy_(content)
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        fresh = {n: tensor for n, tensor in enumerate(made) if tensor.untyped_storage()._cdata not in known}
        if not fresh and not written:
            return result  # a view
        for tensor in fresh.values():
            device.own(tensor)
            if tensor.is_floating_point():
                tensor.data.fill_(float("nan"))
        self._put(stream, func, args, kwargs, fresh, drawn)
        return result

    def _put(
        self, stream: _Stream, func: Any, args: Any, kwargs: Any, fresh: Any = None, drawn: torch.Tensor | None = None
    ) -> None:
        # Data without the tensors' counters of versions, which the launch has moved.
        args, kwargs = tree_map_only(torch.Tensor, lambda leaf: leaf.data, (args, kwargs))
        grad_mode = torch.is_grad_enabled()

        def work() -> None:
            torch._C._set_grad_enabled(grad_mode)
            after = torch.get_rng_state()
            if drawn is not None:
                torch.set_rng_state(drawn)
            found = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for place, tensor in (fresh or {}).items():
                tensor.data.copy_(found[place])
            if drawn is not None:
                torch.set_rng_state(after)

        stream.queue.append(work)

    def put_in_place(self, of: LaggingCuda, patch: Callable[[Any, str, Any], object] = setattr) -> None:
        """Let ranks of this process find these devices. Ops of lanes make tensors on the device `of`."""
        compile_action, tensor_of = threads.compile_action, channels.ChannelOps._tensor
        started, guard = threading.Thread.run, job.StepGuard.__init__
        numpy, cpu, to_list = torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.tolist

        def compiled(*given: Any) -> Any:
            run = compile_action(*given)
            return lambda values, numbers: of.launch(of.current(), partial(run, values, numbers))

        def made_for_channel(ops: Any, op: str, host: Any) -> Any:
            found: list[torch.Tensor] = []
            of.launch(of.current(), lambda: found.append(tensor_of(ops, op, host)))
            return found[0]

        def noted(thread: threading.Thread) -> None:
            with self.noted():
                started(thread)

        def watched(*given: Any) -> None:
            with self.apart():
                guard(*given)

        def captured(capture: Any, *given: Any) -> Any:
            with self.apart():
                found = capture(*given)
            of.own([value for value in found.stand_ins.values() if value.ndim])
            return found

        def as_array(tensor: torch.Tensor, *given: Any) -> Any:
            if self.owner(tensor) is not None:
                raise TypeError("can't convert cuda device type tensor to numpy")
            return numpy(tensor, *given)

        def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
            if (device := self.owner(tensor)) is None:
                return cpu(tensor)
            with self.lock, _disable_current_modes():
                self.run(device.current())
                return tensor.detach().clone()

        patch(threads, "compile_action", compiled)
        patch(channels.ChannelOps, "_tensor", made_for_channel)
        patch(threading.Thread, "run", noted)
        patch(job.StepGuard, "__init__", watched)
        for module in (job, agent):
            patch(module, "capture", partial(captured, module.capture))
        patch(torch.Tensor, "numpy", as_array)
        patch(torch.Tensor, "cpu", to_cpu)
        patch(torch.Tensor, "tolist", lambda tensor: to_list(to_cpu(tensor)))
        for module in (staging, packets, from_file):
            patch(module, "device_of", self.owner)


class _Queueing(TorchDispatchMode):
    def __init__(self, devices: Lagging) -> None:
        super().__init__()
        self._devices = devices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._devices.called(func, args, kwargs or {})


def _is_read_by_host(func: Any) -> bool:
    """True of an op that returns a number, or tensors whose size depends on values."""
    numbers = [returned for returned in func._schema.returns if "Tensor" not in str(returned.type)]
    return bool(numbers) or torch.Tag.dynamic_output_shape in func.tags


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    statistics = _WRITES_STATISTICS.get(func._schema.name, ())
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if (argument.alias_info is not None and argument.alias_info.is_write) or place in statistics:
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
