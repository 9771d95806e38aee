"""A CUDA device that is none and as strict as one: graphs repeat what the device does, and nothing else.

Ops run on the CPU. Tensors that a test has put on the host (`StrictCuda.on_host`) and what is made of them alone stand
for tensors on the CPU; all others for tensors on the device. A capture

- runs ops on the host's tensors at once, and its replays do not run them;
- bakes in what a device's op reads of the host, such as a number in a tensor without dimensions;
- refuses what CUDA refuses: a number that the host reads of a tensor, copies between host and device;
- leaves all that it was to write as it was, and makes the new tensors NaN until a replay fills them. Those that nothing
  but the graph holds any more are NaN after it, too: other tensors of the graph have their memory.

A launch takes a microsecond, which only events show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from hocket.execution.base import below_autograd
from hocket.execution.streams import StreamDevice
from hocket.execution.streams.graphs import num_holders

HOST = torch.device("cpu:0")  # that of tensors on the CPU, where "cpu" stands for the device
_READ_BY_HOST = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::equal", "aten::is_nonzero"}
_WRITES_STATISTICS = {"aten::native_batch_norm": (3, 4)}


class CaptureRefusedError(RuntimeError):
    """An op that may not be captured, as torch says it."""


class StrictCuda(StreamDevice):
    """Streams that run at once, and graphs.

    Args:
        fail_capture: called with the number of each capture and of each op in it; it may raise.
        fail_replay: called with the number of each replay before any op of it; it may raise.

    Attributes:
        num_captures, num_replays: counted.
        graph_bytes, peak_graph_bytes: held by the graphs that are there, and the most that it was.
        fail_replay: as given.
    """

    def __init__(
        self,
        fail_capture: Callable[[int, int], None] = lambda capture, op: None,
        fail_replay: Callable[[int], None] = lambda replay: None,
    ) -> None:
        self.num_captures = self.num_replays = self.peak_graph_bytes = 0
        self._graphs: WeakSet[_Capture] = WeakSet()
        self._fail_capture = fail_capture
        self.fail_replay = fail_replay
        self._host: dict[int, torch.UntypedStorage] = {}
        self._graph: _Capture | None = None
        self._current = "caller's"
        self._clock_us = 0.0
        self._marks: list[_Event] = []  # events of the capture under way

    @property
    def graph_bytes(self) -> int:
        return sum(graph.size_bytes for graph in self._graphs)

    def on_host(self, *tensors: torch.Tensor) -> None:
        """From now on these stand for tensors on the CPU."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._host[storage._cdata] = storage

    def note_host(self, result: Any) -> None:
        """The host has made this."""
        self.on_host(*(leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)))

    def stream(self, priority: int, number: int = 0) -> str:
        return f"stream of priority {priority}"

    def current(self) -> str:
        return self._current

    def default(self) -> str:
        return "caller's"

    def event(self, timed: bool = False) -> _Event:
        return _Event()

    def record(self, event: _Event, stream: Any) -> None:
        event.at_us = self._clock_us
        self._marks.append(event)

    def wait(self, stream: Any, event: Any) -> None:
        """There is nothing to order: all ops run when they are launched."""

    def wait_on_host(self, event: _Event) -> None:
        self.synchronize()

    def pinned(self, size_bytes: int) -> torch.Tensor:
        memory = torch.empty(size_bytes, dtype=torch.uint8)
        self.on_host(memory)
        return memory

    def launch(self, stream: Any, work: Callable[[], None]) -> None:
        self._clock_us += 1.0
        if self._graph is None:
            work()
            return
        with self._graph:
            work()

    def elapsed_us(self, first: _Event, second: _Event) -> float:
        return second.at_us - first.at_us

    def owns(self, where: torch.Tensor | torch.device) -> bool:
        return where != HOST if isinstance(where, torch.device) else where.untyped_storage()._cdata not in self._host

    def synchronize(self) -> None:
        if self._graph is not None:
            raise CaptureRefusedError("CUDA error: operation not permitted when stream is capturing")

    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        graph = self._graph = _Capture(self, lambda op, number=self.num_captures: self._fail_capture(number, op))
        self._current = "capturing"
        self._marks = []
        start_us = self._clock_us
        try:
            work()
        finally:
            self._graph, self._current = None, "caller's"
            graph.end()
        self._graphs.add(graph)
        self.peak_graph_bytes = max(self.peak_graph_bytes, self.graph_bytes)
        marks = [(event, event.at_us - start_us) for event in self._marks]
        took_us = self._clock_us - start_us

        def replay() -> None:
            for event, after_us in marks:
                event.at_us = self._clock_us + after_us
            self._clock_us += took_us
            self.num_replays += 1
            self.fail_replay(self.num_replays)
            graph.replay()

        return replay


@dataclass(eq=False)
class _Event:
    at_us: float = 0.0


class _Capture(TorchDispatchMode):
    """One graph: the device's ops with the tensors that they were captured with."""

    def __init__(self, device: StrictCuda, check: Callable[[int], None]) -> None:
        super().__init__()
        self._owns, self._note_host, self._check = device.owns, device.note_host, check
        self._ops: list[tuple[Any, Any, Any, dict[int, torch.Tensor]]] = []
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._drawn = torch.get_rng_state()
        self._reused: list[torch.Tensor] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._check(len(self._ops))
        name = func._schema.name
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        owned = [self._owns(tensor) for tensor in tensors]
        if tensors and not any(owned):
            result = func(*args, **kwargs)  # the host runs it, once
            self._note_host(result)
            return result
        copies = name in ("aten::copy_", "aten::_to_copy")
        if name in _READ_BY_HOST or (copies and (not all(owned) or kwargs.get("device") == HOST)):
            raise CaptureRefusedError(f"CUDA error: operation not permitted when stream is capturing ({name})")
        args, kwargs = tree_map(self._baked, (args, kwargs))
        written = list(_written(func, args, kwargs))
        self._before += [(tensor, tensor.clone()) for tensor in written]
        result = func(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        fresh = {n: tensor for n, tensor in enumerate(made) if tensor.untyped_storage()._cdata not in known}
        # By tensors of the graph's own: so it shows which of the step's are still there.
        self._ops.append((func, *tree_map_only(torch.Tensor, lambda leaf: leaf.data, (args, kwargs, fresh))))
        return result

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for *_, fresh in self._ops for tensor in fresh.values())

    def end(self) -> None:
        """Undo what the capture wrote."""
        with torch.no_grad():
            for tensor, content in reversed(self._before):
                tensor.copy_(content)
            for *_, fresh in self._ops:
                for tensor in fresh.values():
                    if tensor.is_floating_point():
                        tensor.fill_(float("nan"))
        self._before.clear()
        torch.set_rng_state(self._drawn)

    def replay(self) -> None:
        """Run the device's ops again on the same tensors."""
        with below_autograd():
            for func, args, kwargs, fresh in self._ops:
                result = func(*args, **kwargs)
                found = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
                for place, tensor in fresh.items():
                    tensor.copy_(found[place])
            if self._reused is None:
                self._reused = list(self._find_reused())
            for tensor in self._reused:
                tensor.fill_(float("nan"))

    def _find_reused(self) -> Iterator[torch.Tensor]:
        """Yield new tensors whose memory is held by tensors of the ops alone."""
        own: dict[int, set[int]] = {}
        for _, args, kwargs, fresh in self._ops:
            for leaf in tree_flatten((args, kwargs, list(fresh.values())))[0]:
                if isinstance(leaf, torch.Tensor):
                    own.setdefault(leaf.untyped_storage()._cdata, set()).add(id(leaf))
        alone = num_holders(torch.ones(1)) - 1
        for *_, fresh in self._ops:
            for tensor in fresh.values():
                held = num_holders(tensor) - alone - len(own[tensor.untyped_storage()._cdata])
                if not held and tensor.is_floating_point():
                    yield tensor

    def _baked(self, value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) and not self._owns(value) else value


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    statistics = _WRITES_STATISTICS.get(func._schema.name, ())
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if (argument.alias_info is not None and argument.alias_info.is_write) or place in statistics:
            yield from (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor))
