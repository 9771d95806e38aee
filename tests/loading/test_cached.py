"""Bytes in the system's memory are loaded when the call returns, and the rest streams."""

import errno
import os

import pytest
import torch
from torch import nn

from hocket.loading import finish, load, stream
from hocket.loading.held import is_held
from hocket.loading.sources import DiskSource
from loading.files import laid_out, stored


class FromMemory(DiskSource):
    """Has the first bytes of the file in memory, as far as `limit`; what it was asked for is noted."""

    limit = 1 << 40
    error: int | None = None

    def read_now(self, offset, buffers):
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        left = max(0, self.limit - offset)
        return sum(self._read(offset + at, [b[:n]]) for at, b, n in within(buffers, left) if n)


def within(buffers, left):
    """For each buffer where it begins, and how much of it lies within `left`."""
    at = 0
    for buffer in buffers:
        yield at, buffer, min(len(buffer), max(0, left - at))
        at += len(buffer)


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4), nn.Linear(5, 4, bias=False))
    model[3].weight = model[2].weight
    return model


@pytest.fixture
def file(tmp_path):
    tensors = {name: value for name, value in net(1).state_dict().items() if name != "3.weight"}
    path = tmp_path / "model.safetensors"
    path.write_bytes(laid_out(tensors))
    return path


def from_memory(monkeypatch, **settings):
    monkeypatch.setattr("hocket.loading.sources.DiskSource", type("Fake", (FromMemory,), settings))
    monkeypatch.setattr(stream, "DiskSource", FromMemory)


def equals_the_file(model):
    expected = net(1).state_dict()
    return all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_all_of_it_is_there_without_a_thread_or_a_hook(file, monkeypatch):
    from_memory(monkeypatch)
    model = net(2)
    versions = [tensor._version for tensor in model.parameters()]
    assert load(model, file) is model
    assert not any(is_held(tensor) for tensor in (*model.parameters(), *model.buffers()))
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(tensor._version > before for tensor, before in zip(model.parameters(), versions, strict=True))
    assert equals_the_file(model)


@pytest.mark.parametrize("missing", [1, 60, 200])
def test_what_is_not_there_streams(file, monkeypatch, missing):
    monkeypatch.setattr(stream, "CHUNK_BYTES", 40)  # few tensors at a time
    from_memory(monkeypatch, limit=file.stat().st_size - missing)
    held = []
    hold = load.__globals__["hold"]
    monkeypatch.setitem(load.__globals__, "hold", lambda tensor, wait: (held.append(tensor), hold(tensor, wait)))
    model = net(2)
    total = len({id(tensor) for tensor in (*model.parameters(), *model.buffers())})
    load(model, file)
    assert 0 < len(held) < total
    finish(model)
    assert equals_the_file(model)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EOPNOTSUPP, errno.EIO])
def test_where_nobody_can_tell_all_of_it_streams(file, monkeypatch, code):
    from_memory(monkeypatch, error=code)
    model = net(2)
    load(model, file)
    finish(model)
    assert equals_the_file(model)


def test_other_dtypes_and_strides_are_converted(tmp_path, monkeypatch):
    from_memory(monkeypatch)
    weight = torch.arange(24.0).reshape(2, 3, 2, 2)
    (tmp_path / "w").write_bytes(stored({"weight": weight.half(), "bias": torch.ones(2)}))
    model = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)
    load(model, tmp_path / "w")
    assert not is_held(model.weight)
    assert not model.weight.is_contiguous()
    assert torch.equal(model.weight, weight)


def test_more_than_a_call_may_take_streams(file, monkeypatch):
    from_memory(monkeypatch)
    monkeypatch.setattr(stream, "MAX_BYTES", 10)
    monkeypatch.setattr(FromMemory, "read_now", lambda *_: pytest.fail("it was read at once"))
    model = net(2)
    load(model, file)
    finish(model)
    assert equals_the_file(model)


def test_a_real_file_is_read_up_to_what_the_system_has(file):
    model = net(2)
    file.read_bytes()
    load(model, file)
    finish(model)
    assert equals_the_file(model)
