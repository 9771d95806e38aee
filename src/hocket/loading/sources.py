"""Sources of bytes: a file, an object that reads at an offset, or a stream that only goes forward.

All of them fill given memory. For a file, one system call (``preadv``) fills that of many tensors.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from hocket.errors import FormatError, InputError
from hocket.ir._fields import shortened

# The size of reads that skip bytes of a stream, or that read a file object which cannot fill memory.
PIECE_BYTES = 1 << 20


@runtime_checkable
class OffsetReader(Protocol):
    """Reads bytes of a file at an offset, such as a client of an object store.

    It is called from a separate thread, one call at a time, and may return fewer bytes than requested. No bytes mean
    the end of the file. An optional attribute `size` is the length of the file in bytes, so that a truncated file is
    refused before it is read.
    """

    def read_at(self, offset: int, length: int) -> bytes:
        """Return at most `length` bytes from `offset` on."""


class Source(ABC):
    """The bytes of one file."""

    is_sequential = False  # it can be read once, from the beginning to the end

    def __init__(self, name: str, size_bytes: int | None) -> None:
        self.name = name  # used in errors
        self.size_bytes = size_bytes  # None if unknown

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, none of them empty, in turn with the bytes from `offset` on, or raise `FormatError`."""
        left = list(buffers)
        while left:
            count = self._read(offset, left)
            if count <= 0:
                missing = sum(map(len, left))
                raise FormatError(self.name, f"byte {offset}", f"truncated: {missing} more bytes were expected")
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def close(self) -> None:  # noqa: B027 - files that the user opened stay open
        """Close what was opened here."""

    @abstractmethod
    def _read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill some of the buffers, and return the number of bytes, 0 at the end of the file."""


class DiskSource(Source):
    """A file by its path, read by ``preadv``."""

    def __init__(self, path: str | bytes | os.PathLike[Any]) -> None:
        name = os.fsdecode(path)
        if "\0" in name:
            got = f"{shortened(name)}; of a file's content pass io.BytesIO(content)"
            raise InputError(f"load: expected a path, got {got}")
        try:
            # Opening a pipe would wait for its writer.
            self._file: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            expected = "no such file; expected the path of a safetensors file, of an index or of their folder"
            raise FileNotFoundError(
                errno.ENOENT, f"{expected} (names of a model hub are not looked up)", name
            ) from None
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise FormatError(name, "", "expected a regular file; of a pipe pass the file object")
        super().__init__(name, found.st_size)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        if self._file is None:
            raise InputError(f"{self.name}: it was closed")
        return os.preadv(self._file, buffers, offset)

    def read_now(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers from their beginning with cached bytes, and return how many. None at all is an `OSError`."""
        if self._file is None or not (flag := getattr(os, "RWF_NOWAIT", 0)):
            return 0
        return os.preadv(self._file, buffers, offset, flag)


class ReaderSource(Source):
    """A `OffsetReader`."""

    def __init__(self, reader: OffsetReader) -> None:
        size = getattr(reader, "size", None)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            raise InputError(f"load: {_called(reader)}: size: expected a whole number, got {size!r}")
        super().__init__(_called(reader), size)
        self._reader = reader

    def _read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        asked = sum(map(len, buffers))
        found = _as_bytes(self._reader.read_at(offset, asked), f"{self.name}: read_at({offset}, {asked})")
        if len(found) > asked:
            raise InputError(f"{self.name}: read_at({offset}, {asked}) returned {len(found)} bytes")
        return _scattered(found, buffers)


class StreamSource(Source):
    """A file object, read from its current position on. One that cannot seek is read in order."""

    def __init__(self, file: Any) -> None:
        seekable = getattr(file, "seekable", None)
        self.is_sequential = not (seekable is not None and seekable())
        self._file = file
        self._fills = callable(getattr(file, "readinto", None))
        self._at = 0
        self._begin = 0
        size = None
        if not self.is_sequential:
            self._begin = file.tell()
            size = file.seek(0, io.SEEK_END) - self._begin
            file.seek(self._begin)
        super().__init__(_called(file), size)

    def _read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        if offset != self._at and not self.is_sequential:
            self._file.seek(self._begin + offset)
            self._at = offset
        if offset < self._at:
            raise InputError(f"{self.name}: it stands at byte {self._at} and cannot go back to {offset}")
        while self._at < offset:
            skipped = self._take(memoryview(bytearray(min(offset - self._at, PIECE_BYTES))))
            if not skipped:
                return 0
        return self._take(buffers[0])

    def _take(self, buffer: memoryview) -> int:
        if self._fills:
            count = self._file.readinto(buffer)
        else:
            found = self._file.read(asked := min(len(buffer), PIECE_BYTES))
            count = None if found is None else _scattered(_as_bytes(found, f"{self.name}: read({asked})"), [buffer])
        if count is None:
            raise InputError(f"{self.name}: it does not block, and has nothing to read yet")
        self._at += count
        return int(count)


def is_reader(file: object) -> bool:
    """Return True if this has methods to read it, and is no path."""
    return isinstance(file, OffsetReader) or hasattr(file, "readinto") or hasattr(file, "read")


def source_of(file: Any) -> Source:
    """Return the source for a path, an `OffsetReader`, or a file object opened in binary mode.

    Raises:
        InputError: it is none of these.
        OSError: there is no such file.
    """
    if isinstance(file, (str, bytes, os.PathLike)):
        return DiskSource(file)
    if isinstance(file, OffsetReader):
        return ReaderSource(file)
    if isinstance(file, io.TextIOBase):
        raise InputError(f"load: {_called(file)} is open as text; open it with mode 'rb'")
    if is_reader(file):
        return StreamSource(file)
    raise InputError(
        f"load: expected a path, a file object, or an object with read_at(offset, length), got {type(file).__name__}"
    )


def _called(reader: Any) -> str:
    name = getattr(reader, "name", None)
    return name if isinstance(name, str) and name else type(reader).__name__


def _as_bytes(found: Any, asked: str) -> memoryview:
    try:
        return memoryview(found).cast("B")
    except TypeError:
        raise InputError(f"{asked}: expected bytes, got {type(found).__name__}") from None


def _scattered(found: memoryview, buffers: Sequence[memoryview]) -> int:
    at = 0
    for buffer in buffers:
        part = found[at : at + len(buffer)]
        buffer[: len(part)] = part
        at += len(part)
    return at
