"""The tensors of one or several files, by name.

A file is eight bytes that say how long the header is, the header as JSON, and the tensors' bytes one after another
(https://github.com/huggingface/safetensors, "Format"). Files may come from untrusted sources, so every number is
checked: accepted tensors lie inside the file and do not overlap. The parser of the library `safetensors` reads whole
files only, from a path or from memory, and says neither where a tensor lies nor which one is wrong.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch

from hocket.errors import FormatError, InputError
from hocket.ir._fields import parse_json, read_file, shortened
from hocket.loading.sources import OffsetReader, Source, is_reader, source_of

# The length of the header comes first, as one number of eight bytes, little-endian.
PREFIX_BYTES = 8
# As the reference implementation has it.
MAX_HEADER_BYTES = 100_000_000
# The most that ops of torch take, and a bound on the time that their product takes.
MAX_AXES = 64

DTYPES: Mapping[str, torch.dtype] = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu},
    **{"F8_E5M2": torch.float8_e5m2, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16},
    **{"BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32},
    **{"I64": torch.int64, "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64},
}

# In the metadata of a file whose tensors lie in the order of their first use.
FIRST_USE_KEY = "hocket.first_use"


@dataclass(frozen=True)
class TensorEntry:
    """Position and type of a tensor in its file."""

    name: str
    dtype: str  # by the name that safetensors has for it, a key of `DTYPES`
    shape: tuple[int, ...]
    offset: int  # its first byte, counted from the beginning of the file
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
    """Return the number of bytes of header that follow the first eight, or raise `FormatError` if it cannot be true."""
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        cure = "; read a checkpoint of torch.save by torch.load" if prefix[:2] in (b"PK", b"\x80\x02") else ""
        got = f"{prefix!r}{cure}"
        raise FormatError(source, "", f"expected a safetensors file, whose first 8 bytes are a length, got {got}")
    if size_bytes is not None and PREFIX_BYTES + length > size_bytes:
        raise FormatError(source, "header", f"truncated: expected {length} bytes, the file ends after {size_bytes}")
    return length


def parse_header(source: str, text: bytes, size_bytes: int | None = None) -> Header:
    """Read the header of a file from its JSON. The size of the whole file is None where it is not known.

    Raises:
        FormatError: names the tensor, and what is wrong with it: an unknown dtype, offsets that do not fit its shape,
            tensors that overlap or leave a hole, a name that stands twice, or a file that ends too soon.
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


File: TypeAlias = "str | bytes | os.PathLike[Any] | OffsetReader | Any"

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file."""

    entry: TensorEntry  # where it lies there
    source: Source  # the file's bytes
    number: int  # of its file, among those that were opened together

    @property
    def place(self) -> tuple[int, int, int]:
        """Sort key for the order of the files. An empty tensor comes before the one that begins at its offset."""
        return self.number, self.entry.offset, self.entry.end

    def touches(self, after: StoredTensor) -> bool:
        """Return True if `after` begins in the same file where this tensor ends."""
        return self.source is after.source and self.entry.end == after.entry.offset


@dataclass(frozen=True)
class Weights:
    """Files that were opened together, and have to be closed.

    Attributes:
        sources: the files' bytes.
        tensors: all their tensors by name, in the order of the files.
        metadata: the metadata in the header of each file.
    """

    sources: tuple[Source, ...]
    tensors: Mapping[str, StoredTensor]
    metadata: tuple[Mapping[str, str], ...]

    @property
    def name(self) -> str:
        """The name of these files in errors."""
        return self.sources[0].name if len(self.sources) == 1 else f"{self.sources[0].name} and others"

    @cached_property
    def is_in_first_use_order(self) -> bool:
        """True if tensors are stored in the order of first use, as `hocket.loading.reorder` writes them."""
        return all(FIRST_USE_KEY in found for found in self.metadata)

    @property
    def is_sequential(self) -> bool:
        """True if a file can only be read from its beginning to its end."""
        return any(source.is_sequential for source in self.sources)

    @property
    def size_bytes(self) -> int:
        """The size of all tensors together."""
        return sum(tensor.entry.size_bytes for tensor in self.tensors.values())

    def close(self) -> None:
        """Give up what was opened here."""
        for source in self.sources:
            source.close()


def open_weights(file: File | Sequence[File]) -> Weights:
    """Open one or several safetensors files and check their headers, without reading tensors.

    Args:
        file: a path, a folder with a ``model.safetensors`` or an index, the index of several files (``*.json``), an
            `OffsetReader`, a file object, or a list of files.

    Raises:
        FormatError: a header or an index is invalid. Names the file and the tensor.
        InputError: this is no file, or a tensor stands in two of them.
        OSError: there is no such file.
    """
    if isinstance(file, Mapping):
        raise InputError("load: expected files, got a dict; of tensors in memory, call model.load_state_dict")
    is_one = is_reader(file) or isinstance(file, (str, bytes, bytearray, memoryview, os.PathLike))
    files: list[File] = []
    indices: list[tuple[Path, Mapping[str, str]]] = []
    for one in file if isinstance(file, Iterable) and not is_one else [file]:
        path = _in_folder(Path(os.fsdecode(one))) if isinstance(one, (str, bytes, os.PathLike)) else None
        if path is not None and path.suffix == ".json":
            indices.append((path, _index(path)))
            files += [path.parent / name for name in sorted(set(indices[-1][1].values()))]
        else:
            files.append(path or one)
    if not files:
        raise InputError("load: expected at least one file, got none")
    with ExitStack() as opened:
        weights = _opened(files, opened)
        for path, expected in indices:
            _check_index(path, expected, weights)
        opened.pop_all()
    return weights


def _opened(files: Sequence[File], opened: ExitStack) -> Weights:
    sources: list[Source] = []
    tensors: dict[str, StoredTensor] = {}
    headers: list[Header] = []
    for number, one in enumerate(files):
        source = source_of(one)
        opened.callback(source.close)
        header = _header(source)
        for entry in header.entries:
            if entry.name in tensors:
                first = tensors[entry.name].source.name
                raise InputError(f"load: tensor {entry.name!r} is in {first} and in {source.name}")
            tensors[entry.name] = StoredTensor(entry, source, number)
        sources.append(source)
        headers.append(header)
    return Weights(tuple(sources), tensors, tuple(header.metadata for header in headers))


def _header(source: Source) -> Header:
    if source.size_bytes is not None and source.size_bytes < PREFIX_BYTES:
        raise FormatError(source.name, "", f"expected a safetensors file, got {source.size_bytes} bytes")
    prefix = bytearray(PREFIX_BYTES)
    source.fill(0, [memoryview(prefix)])
    text = bytearray(header_size(source.name, bytes(prefix), source.size_bytes))
    source.fill(PREFIX_BYTES, [memoryview(text)])
    return parse_header(source.name, bytes(text), source.size_bytes)


def _in_folder(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in (INDEX_NAME, SINGLE_NAME):
        if (path / name).is_file():
            return path / name
    raise InputError(f"load: the folder {path} has neither {INDEX_NAME} nor {SINGLE_NAME}")


def _index(path: Path) -> Mapping[str, str]:
    """Map each tensor to the name of its file, which lies beside the index."""
    document = parse_json(read_file(path), str(path))
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found:
        raise FormatError(str(path), "weight_map", "expected an object with a file's name for each tensor")
    for tensor, name in found.items():
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
            got = shortened(name)
            raise FormatError(str(path), f"weight_map: {tensor}", f"expected a file beside the index, got {got}")
    return found


def _check_index(path: Path, expected: Mapping[str, str], weights: Weights) -> None:
    for tensor, name in expected.items():
        stored = weights.tensors.get(tensor)
        if stored is None or os.path.basename(stored.source.name) != name:
            raise FormatError(str(path), f"weight_map: {tensor}", f"{name} has no such tensor")
    files = {str(path.parent / name) for name in expected.values()}
    for tensor, stored in weights.tensors.items():
        if tensor not in expected and stored.source.name in files:
            raise FormatError(str(path), "weight_map", f"{tensor!r} of {stored.source.name} is missing")
