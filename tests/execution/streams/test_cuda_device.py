"""`CudaDevice` on a `torch.cuda` without a device, whose calls are noted. The real one is for `tests/gpu`."""

import inspect
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hocket.autotune.options import backend_of, unplannable
from hocket.backends import CudaBackend
from hocket.execution.streams import CudaDevice
from hocket.tracing.state import inventory
from hocket.tracing.switches import obstacle


class FakeCuda:
    """One device. Captures and replays fail on demand, and a replay draws before it does."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fails, self.current, self.offset = "", "caller's", 0
        self.default_generators = [SimpleNamespace(get_offset=lambda: self.offset, set_offset=self._set_offset)]
        self.signatures = {name: inspect.signature(getattr(torch.cuda, name)) for name in ("graph", "Event")}
        for name, value in {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "default_generators": self.default_generators,
            "current_stream": lambda device: self.current,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "synchronize": lambda device: None,
            "graph_pool_handle": lambda: (0, 1),
            "device": self._device,
            "graph": self._graph,
            "CUDAGraph": lambda: SimpleNamespace(replay=self._replay),
            "Stream": FakeStream,
        }.items():
            patch.setattr(torch.cuda, name, value)

    def _set_offset(self, offset: int) -> None:
        self.offset = offset

    def _replay(self) -> None:
        self.offset += 8
        if self.fails == "replay":
            raise torch.OutOfMemoryError("CUDA out of memory")

    @contextmanager
    def _device(self, index: int) -> Any:
        yield

    @contextmanager
    def _graph(self, *given: Any, **named: Any) -> Any:
        self.signatures["graph"].bind(*given, **named)
        before, self.current = self.current, given[2]
        yield
        if self.fails == "capture":
            raise RuntimeError("operation not permitted when stream is capturing")
        self.current = before


class FakeStream:
    def __init__(self, device: int, priority: int) -> None:
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -3


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_replay_that_fails_has_drawn_nothing(cuda: FakeCuda) -> None:
    replay = CudaDevice().graph(lambda: None)
    replay()
    assert cuda.offset == 8
    cuda.fails = "replay"
    with pytest.raises(torch.OutOfMemoryError):
        replay()
    assert cuda.offset == 8, "ops that are launched in its place draw what eager would"


def test_a_capture_that_fails_leaves_the_callers_stream(cuda: FakeCuda) -> None:
    cuda.fails = "capture"
    with pytest.raises(RuntimeError, match="not permitted"):
        CudaDevice().graph(lambda: None)
    assert cuda.current == "caller's"


def test_priorities_are_those_of_the_device(cuda: FakeCuda) -> None:
    device = CudaDevice()
    assert [device.stream(level).priority for level in range(5)] == [0, -1, -2, -3, -3]
    assert device.stream(1) is device.stream(1)
    assert device.stream(1) is not device.stream(1, 1)


def test_a_step_is_eager_while_the_caller_captures_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not obstacle()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert obstacle() == "the current stream captures a CUDA graph"


def on_gpus(*devices: str) -> torch.nn.Module:
    """A module with a parameter on each of these devices, which has no values."""
    with FakeTensorMode():
        return torch.nn.ParameterList([torch.empty(2, device=device) for device in devices])


def test_a_step_on_two_devices_is_refused_by_their_names() -> None:
    assert "on cuda:0, cuda:1; a step is planned on" in unplannable(inventory(on_gpus("cuda:0", "cuda:1"), ()))
    assert not unplannable(inventory(on_gpus("cuda:1", "cuda:1"), ()))


def test_the_variants_of_a_schedule_share_the_streams_of_a_gpu(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="NVIDIA A100", multi_processor_count=108, total_memory=40e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    config: Any = SimpleNamespace(backend=None, places=inventory(on_gpus("cuda:0"), ()), gpus={})
    first, second = backend_of(config), backend_of(config)
    assert isinstance(first, CudaBackend)
    assert first.device is second.device
