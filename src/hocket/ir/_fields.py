"""Strict reading and whole writing of Hocket's JSON files.

A `Reader` walks a parsed document and remembers where it is, so that every complaint reads
``graph.json: ops[3].flops: expected a number >= 0, got -1``. A file is written beside its target and moved into
place, so nothing half-written stays.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.errors import FormatError

_MISSING: Any = object()
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)

# Files may be damaged or come from strangers. These bounds lie far above what Hocket writes (ten megabytes for a step
# of 20,000 ops), and keep the memory and time of a refusal small.
MAX_FILE_BYTES = 64 * 2**20
MAX_DIGITS = 100
# Sums and products of longer ones may be infinite. It is longer than the universe is old.
MAX_DURATION_US = 1e24


def load_document(path: str | os.PathLike[str], format_name: str) -> Reader:
    """Read `path` as JSON whose first key is ``"format": format_name``. Anything else is a `FormatError`."""
    source = os.fspath(path)
    reader = Reader(parse_json(read_file(path), source), source, "")
    found = reader.mapping().get("format", _MISSING)
    if found is _MISSING:
        raise FormatError(source, "format", f'missing; expected "format": "{format_name}"')
    if found != format_name:
        raise FormatError(source, "format", f'expected "{format_name}", got {found!r}')
    return reader


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Read a regular file within `MAX_FILE_BYTES`. A device or a pipe is refused: reading it might never end."""
    source = os.fspath(path)
    # A pipe without a writer would hold up `open` itself.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise FormatError(source, "", "expected a regular file")
        if found.st_size > MAX_FILE_BYTES:
            raise FormatError(source, "", f"expected at most {MAX_FILE_BYTES} bytes, got {found.st_size}")
        return file.read(MAX_FILE_BYTES)


def parse_json(text: bytes, source: str, where: str = "") -> Any:
    """Parse JSON in UTF-8 that may come from a stranger. What `FormatError` names is not JSON, or could do harm."""
    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_int=_integer)
        if b"\\ud" in text or b"\\uD" in text:  # perhaps half of a pair, which no file and no terminal takes
            json.dumps(document, ensure_ascii=False).encode()
    except RecursionError:
        raise FormatError(source, where, "not JSON: nested too deeply") from None
    except ValueError as error:
        raise FormatError(source, where, f"not JSON: {error}") from None
    return document


def save_document(path: str | os.PathLike[str], document: dict[str, Any]) -> None:
    """Write `document` as JSON, whole or not at all."""
    with written_whole(path) as file:
        json.dump(document, file, indent=1, allow_nan=False)
        file.write("\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8, whole or not at all."""
    with written_whole(path) as file:
        file.write(text)


@contextmanager
def written_whole(path: str | os.PathLike[str], *, binary: bool = False) -> Iterator[Any]:
    """Open a new file beside `path`, which takes its place at the end of the block and is deleted by an error."""
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    try:
        with (
            named_failures(path),
            os.fdopen(handle, "wb") if binary else os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file,
        ):
            yield file
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def named_failures(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name `path` in an error of the disk that it is on, which `torch.save` hides behind an error of its own."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        found = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(found, OSError) or found.errno not in _OF_DISKS or found.filename is not None:
            raise
        raise OSError(found.errno, found.strerror, os.fspath(path)) from error


def require_finite(value: float, source: str, where: str, about: str = "", *, positive: bool = False) -> None:
    """Raise a `FormatError` for a number that is negative, infinite or NaN, or 0 where it has to be `positive`."""
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        expected = "expected a finite number > 0" if positive else "expected a finite number >= 0"
        raise FormatError(source, where, f"{about}{expected}, got {value!r}")


@contextmanager
def read_from(source: str) -> Iterator[None]:
    """Name the file `source` in place of the noun in each `FormatError` that is raised inside."""
    try:
        yield
    except FormatError as error:
        raise FormatError(source, error.where, str(error).split(": ", 2)[-1]) from None


def require_duration(value: float, source: str, where: str) -> float:
    """Return `value` if it is a number of microseconds from 0 to `MAX_DURATION_US`, or raise `FormatError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_DURATION_US:
        expected = f"expected a duration in microseconds, from 0 to {MAX_DURATION_US:g}"
        raise FormatError(source, where, f"{expected}, got {value!r}")
    return float(value)


@dataclass(frozen=True)
class Reader:
    """One value of a parsed document, with the file it came from and the place where it stands."""

    value: Any
    source: str
    where: str

    def fail(self, message: str) -> FormatError:
        return FormatError(self.source, self.where, message)

    def _child(self, value: Any, step: str) -> Reader:
        return Reader(value, self.source, f"{self.where}{step}" if self.where else step.lstrip("."))

    def mapping(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self.fail(f"expected an object, got {_kind(self.value)}")
        return self.value

    def only(self, *allowed: str) -> None:
        """Raise for any other key, so that a misspelt optional field is not ignored."""
        for key in self.mapping():
            if key not in allowed:
                raise self.fail(f"unknown field {key!r}; expected one of {', '.join(allowed)}")

    def __contains__(self, key: str) -> bool:
        return key in self.mapping()

    def __getitem__(self, key: str) -> Reader:
        value = self.mapping().get(key, _MISSING)
        if value is _MISSING:
            raise self.fail(f"missing field {key!r}")
        return self._child(value, f".{key}")

    def get(self, key: str, default: Any) -> Reader:
        return self._child(self.mapping().get(key, default), f".{key}")

    def items(self) -> Iterator[tuple[str, Reader]]:
        for key, value in self.mapping().items():
            yield key, self._child(value, f"[{key!r}]")

    def elements(self, length: int | None = None) -> list[Reader]:
        if not isinstance(self.value, list):
            raise self.fail(f"expected a list, got {_kind(self.value)}")
        if length is not None and len(self.value) != length:
            raise self.fail(f"expected {length} elements, got {len(self.value)}")
        return [self._child(value, f"[{index}]") for index, value in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.fail(f"expected a string, got {_kind(self.value)}")
        return self.value

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.fail(f"expected true or false, got {_kind(self.value)}")
        return self.value

    def number(self, minimum: float = 0.0) -> float:
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(f"expected a number, got {_kind(value)}")
        if not math.isfinite(value) or value < minimum:
            raise self.fail(f"expected a finite number >= {minimum:g}, got {value!r}")
        return float(value)

    def optional_number(self) -> float | None:
        return None if self.value is None else self.number()

    def integer(self, minimum: int | None = 0) -> int:
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(f"expected a whole number, got {_kind(value)}")
        if minimum is not None and value < minimum:
            raise self.fail(f"expected a whole number >= {minimum}, got {value}")
        return value

    def duration_us(self) -> float:
        return require_duration(self.value, self.source, self.where)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {shortened(key)} appears twice in one object")
        result[key] = value
    return result


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"expected whole numbers of at most {MAX_DIGITS} digits, got one of {len(text)}")
    return int(text)


def shortened(value: Any) -> str:
    """Return `repr(value)`, or its beginning and end where it is long."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-60:]}"


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return f"the string {shortened(value)}"
    return {dict: "an object", list: "a list", type(None): "null"}.get(type(value)) or shortened(value)
