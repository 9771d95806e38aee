"""The header of a safetensors file, parsed and checked.

A file is eight bytes that say how long the header is, the header as JSON, and the tensors' bytes one after another
(https://github.com/huggingface/safetensors, "Format"). Files may come from untrusted sources, so every number is
checked: accepted tensors lie inside the file and do not overlap. The parser of the library `safetensors` reads whole
files only, from a path or from memory, and says neither where a tensor lies nor which one is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.errors import FormatError
from hocket.ir._fields import parse_json, shortened

# The length of the header comes first, as one number of eight bytes, little-endian.
PREFIX_BYTES = 8
# As the reference implementation has it.
MAX_HEADER_BYTES = 100_000_000
# The most that ops of torch take, and a bound on the time that their product takes.
MAX_AXES = 64

DTYPES: Mapping[str, torch.dtype] = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn},
    **{"F8_E5M2": torch.float8_e5m2, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16},
    **{"BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32},
    **{"I64": torch.int64, "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64},
}

# In the metadata of a file whose tensors lie in the order of their first use.
FIRST_USE_KEY = "hocket.first_use"


@dataclass(frozen=True)
class TensorEntry:
    """Position and type of a tensor in its file.

    Attributes:
        name: its key.
        dtype: by the name that safetensors has for it, a key of `DTYPES`.
        shape: sizes of its axes.
        offset: its first byte, counted from the beginning of the file.
        size_bytes: how many bytes it has.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.offset + self.size_bytes


@dataclass(frozen=True)
class Header:
    """The tensors of a file in the order in which they lie there, and its metadata."""

    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)


def header_size(source: str, prefix: bytes, size_bytes: int | None) -> int:
    """Return the number of bytes of header that follow the first eight.

    Raises:
        FormatError: the number cannot be true.
    """
    if len(prefix) < PREFIX_BYTES:
        raise FormatError(source, "", f"expected a safetensors file, got {len(prefix)} bytes")
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise FormatError(source, "", f"expected a safetensors file, whose first 8 bytes are a length, got {prefix!r}")
    if size_bytes is not None and PREFIX_BYTES + length > size_bytes:
        raise FormatError(source, "header", f"truncated: expected {length} bytes, the file ends after {size_bytes}")
    return length


def parse_header(source: str, text: bytes, size_bytes: int | None = None) -> Header:
    """Read the header of a file.

    Args:
        source: what errors call the file.
        text: the header's JSON.
        size_bytes: of the whole file, where that is known.

    Raises:
        FormatError: names the tensor, and what is wrong with it: an unknown dtype, offsets that do not fit its shape,
            tensors that overlap or leave a hole, a name that stands twice, or a file that ends too soon.

    Example:
        >>> parse_header("w", b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}').entries
        (TensorEntry(name='a', dtype='F32', shape=(2,), offset=69, size_bytes=8),)
    """
    document = parse_json(text, source, "header")
    if not isinstance(document, dict):
        raise FormatError(source, "header", f"expected an object, got {type(document).__name__}")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(source, "__metadata__", "expected an object of strings")
    begin = PREFIX_BYTES + len(text)
    entries = sorted(
        (_entry(source, name, value, begin) for name, value in document.items()),
        key=lambda entry: (entry.offset, entry.end),
    )
    at, before = begin, ""
    for entry in entries:
        if entry.offset != at:
            kind = "overlaps" if entry.offset < at else "leaves a hole after"
            raise FormatError(source, entry.name, f"{kind} {repr(before) if before else 'the header'}")
        at, before = entry.end, entry.name
    if size_bytes is not None and at != size_bytes:
        what = "truncated" if at > size_bytes else "too long"
        raise FormatError(source, before, f"{what}: expected the file to end after {at} bytes, it has {size_bytes}")
    return Header(tuple(entries), metadata)


def _entry(source: str, name: str, value: Any, begin: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(source, name, "expected dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(source, name, f"expected a dtype of {', '.join(DTYPES)}, got {shortened(dtype)}")
    if not _are_sizes(shape) or len(shape) > MAX_AXES:
        raise FormatError(
            source, name, f"expected a shape of at most {MAX_AXES} whole numbers from 0 on, got {shortened(shape)}"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(source, name, f"expected data_offsets [begin, end], got {shortened(offsets)}")
    size_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != size_bytes:
        got = offsets[1] - offsets[0]
        raise FormatError(
            source, name, f"{dtype} of shape {shortened(shape)} has {size_bytes} bytes, data_offsets have {got}"
        )
    return TensorEntry(name, dtype, tuple(shape), begin + offsets[0], size_bytes)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 2**63 for number in value)
