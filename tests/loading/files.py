"""safetensors files in memory, and readers that are slow, broken or held back."""

import json
import threading
from collections.abc import Mapping

import torch
from safetensors.torch import save

from hocket.loading import open_weights

PATIENCE_S = 60.0


def stored(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """A file as safetensors writes it."""
    return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, metadata)


def raw(header: object, data: bytes = b"") -> bytes:
    """A file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def laid_out(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A file whose tensors lie in this order; safetensors would sort them."""
    header, data = {}, b""
    names = {torch.float32: "F32", torch.int64: "I64"}
    for name, tensor in tensors.items():
        part = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        shape, offsets = list(tensor.shape), [len(data), len(data) + len(part)]
        header[name] = {"dtype": names[tensor.dtype], "shape": shape, "data_offsets": offsets}
        data += part
    return raw(header, data)


def untied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A state dict as `safetensors.torch.save_model` writes it: of what is tied only one."""
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


class Memory:
    """A reader that notes what it is asked for, in tensors' names."""

    name = "memory"

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size = len(data)
        self.asked: list[tuple[int, int]] = []

    def read_at(self, offset: int, length: int) -> bytes:
        self.asked.append((offset, length))
        return self.data[offset : offset + length]

    def order(self) -> list[str]:
        """The tensors in the order in which their first bytes were read."""
        entries = open_weights(Memory(self.data)).tensors
        found = []
        for offset, length in self.asked:
            for name, tensor in entries.items():
                if offset <= tensor.entry.offset < offset + length and name not in found:
                    found.append(name)
        return found


class HeldBack(Memory):
    """Returns nothing of a tensor before it is let go; headers come at once."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.begin = 8 + int.from_bytes(data[:8], "little")
        self.permits = threading.Semaphore(0)
        self.asking = threading.Semaphore(0)

    def let_go(self, count: int = 1) -> None:
        self.permits.release(count)

    def is_asked(self) -> None:
        """Sleep until the next read has been asked for."""
        assert self.asking.acquire(timeout=PATIENCE_S)

    def read_at(self, offset: int, length: int) -> bytes:
        if offset >= self.begin:
            self.asking.release()
            assert self.permits.acquire(timeout=PATIENCE_S)
        return super().read_at(offset, length)


class Failing(Memory):
    """Raises once this number of bytes of tensors has been read."""

    def __init__(self, data: bytes, after: int) -> None:
        super().__init__(data)
        self.left = after
        self.begin = 8 + int.from_bytes(data[:8], "little")

    def read_at(self, offset: int, length: int) -> bytes:
        if offset >= self.begin:
            if self.left < length:
                raise ConnectionResetError("the peer has gone")
            self.left -= length
        return super().read_at(offset, length)


class OneWay:
    """A stream that only goes forward, a few bytes at a time."""

    name = "pipe"

    def __init__(self, data: bytes, step: int = 1000) -> None:
        self.data, self.at, self.step = data, 0, step

    def seekable(self) -> bool:
        return False

    def read(self, length: int) -> bytes:
        found = self.data[self.at : self.at + min(length, self.step)]
        self.at += len(found)
        return found
