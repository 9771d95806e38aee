"""Streams with CUDA's caching allocator, watched: who may read a block, and who is given it next.

Ops run on the CPU when they are launched. For each stream a vector clock is kept (Fidge 1988, Mattern 1989), and events
carry clocks. A block belongs to the stream on which it was allocated. When it is freed, at the host's time, the next
allocation on that stream may get it. So

- two accesses to a block, one of which writes, must be ordered: else there is a *race*;
- all accesses to a freed block must come before the next allocation on its stream: else it is *reused* early.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hocket.execution.streams import StreamDevice

_STATISTICS = ("running_mean", "running_var")


@dataclass(eq=False)
class _Event:
    clock: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class _Stream:
    number: int
    clock: dict[int, int] = field(default_factory=dict)
    held_bytes: int = 0
    peak_bytes: int = 0

    def is_after(self, access: tuple[int, int]) -> bool:
        number, time = access
        return number == self.number or self.clock.get(number, 0) >= time


@dataclass(eq=False)
class _Block:
    stream: _Stream
    storage: StorageWeakRef
    size_bytes: int
    reads: list[tuple[int, int]] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)


class AllocatingStreams(StreamDevice):
    """Streams whose launches run at once.

    Args:
        left_out: the number of a wait that is not made, from 1.

    Attributes:
        num_waits: counted.
        problems: ``race`` or ``reuse``, and the op that it shows in.
    """

    def __init__(self, left_out: int | None = None) -> None:
        self.num_waits = 0
        self.problems: list[tuple[str, str]] = []
        self._left_out = left_out
        self._host = _Stream(0)
        self._streams: list[_Stream] = [self._host]
        self._blocks: dict[int, _Block] = {}
        self._freed: list[_Block] = []

    @property
    def pool_bytes(self) -> int:
        """The most that each stream of the lanes held, together."""
        return sum(stream.peak_bytes for stream in self._streams[1:])

    def stream(self, priority: int, number: int = 0) -> _Stream:
        self._streams.append(_Stream(len(self._streams)))
        return self._streams[-1]

    def current(self) -> _Stream:
        return self._host

    default = current

    def event(self, timed: bool = False) -> _Event:
        return _Event()

    def record(self, event: _Event, stream: _Stream) -> None:
        self._tick(stream)
        event.clock = dict(stream.clock)

    def wait(self, stream: _Stream, event: _Event) -> None:
        self.num_waits += 1
        if self.num_waits != self._left_out:
            for number, time in event.clock.items():
                stream.clock[number] = max(stream.clock.get(number, 0), time)

    def wait_on_host(self, event: _Event) -> None:
        """No-op: what was launched has run."""

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def launch(self, stream: _Stream, work: Callable[[], None]) -> None:
        self._tick(stream)
        self.collect()
        with _Watch(self, stream):
            work()
        self.collect()

    def elapsed_us(self, first: Any, second: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        """No-op: what was launched has run."""

    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("no graphs here")

    def collect(self) -> None:
        """Take back the blocks of tensors that are gone."""
        for key, block in list(self._blocks.items()):
            if block.storage.expired():
                del self._blocks[key]
                block.stream.held_bytes -= block.size_bytes
                if block.size_bytes:
                    self._freed.append(block)

    def allocates(self, stream: _Stream, name: str) -> None:
        """Blocks that this stream has freed may be given to what it allocates now."""
        for block in [block for block in self._freed if block.stream is stream]:
            self._freed.remove(block)
            if not all(map(stream.is_after, (*block.reads, *block.writes))):
                self.problems.append(("reuse", name))

    def born(self, stream: _Stream, tensor: torch.Tensor) -> None:
        """A stream has allocated this."""
        block = self._block(tensor, stream, tensor.untyped_storage().nbytes())
        stream.held_bytes += block.size_bytes
        stream.peak_bytes = max(stream.peak_bytes, stream.held_bytes)

    def access(self, stream: _Stream, tensor: torch.Tensor, writes: bool, name: str) -> None:
        """A stream reads or writes this."""
        block = self._blocks.get(tensor.untyped_storage()._cdata) or self._block(tensor, self._host, 0)
        if not all(map(stream.is_after, (*block.writes, *(block.reads if writes else ())))):
            self.problems.append(("race", name))
        (block.writes if writes else block.reads).append((stream.number, stream.clock[stream.number]))

    def _block(self, tensor: torch.Tensor, stream: _Stream, size_bytes: int) -> _Block:
        storage = tensor.untyped_storage()
        block = self._blocks[storage._cdata] = _Block(stream, StorageWeakRef(storage), size_bytes)
        return block

    @staticmethod
    def _tick(stream: _Stream) -> None:
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1


class _Watch(TorchDispatchMode):
    """Notes what the ops of one launch touch."""

    def __init__(self, device: AllocatingStreams, stream: _Stream) -> None:
        super().__init__()
        self._device, self._stream = device, stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        self._device.allocates(self._stream, name)
        result = func(*args, **kwargs)
        read = {id(leaf): leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written or (name == "aten::native_batch_norm" and argument.name in _STATISTICS):
                for leaf in tree_iter(value):
                    if isinstance(leaf, torch.Tensor) and read.pop(id(leaf), None) is not None:
                        self._device.access(self._stream, leaf, True, name)
        aliases = [returned.alias_info for returned in func._schema.returns]
        if not (aliases and all(alias is not None and not alias.is_write for alias in aliases)):  # no view
            for leaf in read.values():
                self._device.access(self._stream, leaf, False, name)
        known = {leaf.untyped_storage()._cdata for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = result
        if name == "aten::convolution_backward":  # the CPU's kernel makes a weight's gradient where a bias needs one
            made = [each for each, is_needed in zip(result, args[-1], strict=True) if is_needed]
        for leaf in tree_iter(made):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in known:
                self._device.born(self._stream, leaf)
                self._device.access(self._stream, leaf, True, name)
        return result
