"""The tensors of one or several files, by name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from hocket.errors import FormatError, InputError
from hocket.ir._fields import parse_json, read_file, shortened
from hocket.loading.header import FIRST_USE_KEY, PREFIX_BYTES, Header, TensorEntry, header_size, parse_header
from hocket.loading.sources import OffsetReader, Source, is_reader, source_of

File: TypeAlias = "str | bytes | os.PathLike[Any] | OffsetReader | Any"

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file.

    Attributes:
        entry: where it lies there.
        source: the file's bytes.
        number: of its file, among those that were opened together.
    """

    entry: TensorEntry
    source: Source
    number: int

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
    expected: Mapping[str, str] | None = None
    files: list[File]
    path = Path()
    if isinstance(file, (str, bytes, os.PathLike)):
        path = _in_folder(Path(os.fsdecode(file)))
        files = [path]
        if path.suffix == ".json":
            expected = _index(path)
            files = [path.parent / name for name in sorted(set(expected.values()))]
    else:
        given: Any = file
        if isinstance(given, Mapping):
            raise InputError("load: expected files, got a dict; of tensors in memory, call model.load_state_dict")
        is_one = is_reader(file) or isinstance(file, (bytearray, memoryview))
        files = list(given) if isinstance(file, Iterable) and not is_one else [given]
    if not files:
        raise InputError("load: expected at least one file, got none")
    with ExitStack() as opened:
        weights = _opened(files, opened)
        if expected is not None:
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
    for tensor, stored in weights.tensors.items():
        if tensor not in expected:
            raise FormatError(str(path), "weight_map", f"{tensor!r} of {stored.source.name} is missing")
