"""The result of the compiling process: values, events, and a library of kernels, as checked data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hocket.cache_folder import is_sealed
from hocket.errors import CaptureError
from hocket.ir._fields import parse_json, read_file
from hocket.tracing.compiling.arguments import dtype_of

FORMAT = "hocket-compiled/3"
LISTING, LIBRARY = "listing.json", "kernels.so"


@dataclass(frozen=True)
class ListedTensor:
    """Size and stride of a tensor, its dtype, and the first value of the same memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    root: int


@dataclass(frozen=True)
class ListedCall:
    """A call of a kernel, or of an op of torch."""

    op: str  # name of the op, or symbol of a kernel
    args: Sequence[Any]  # of an op, as text (see `hocket.tracing.compiling.arguments`)
    kwargs: Mapping[str, Any]
    given: tuple[int, ...]  # the values that it reads or writes, and those of them that it writes
    written: tuple[int, ...]
    outs: tuple[tuple[int, int], ...]  # position in the result (-1: the whole) and value that it is
    # of a kernel: its arguments as places in `given`, or as -1 - place in `outs`. None for an op.
    order: tuple[int, ...] | None = None
    offsets: tuple[int, ...] = ()  # of a kernel's arguments, in elements behind the first one of that tensor


@dataclass(frozen=True)
class Listing:
    """A compiled step."""

    values: tuple[ListedTensor, ...]  # all tensors. The first ones are the request's inputs and its numbers.
    events: tuple[ListedCall, ...]  # in their order
    outputs: tuple[int, ...]  # the values that stand for the request's outputs
    library: Path  # of the kernels


def load_listings(folder: Path) -> tuple[Listing, Listing]:
    """Read what was compiled into a folder, undamaged and by this torch: the step, and the same in float64."""
    # Kernels write where the list says, so neither is read unless it is as it was made.
    if not is_sealed(folder / LISTING) or not is_sealed(folder / LIBRARY):
        raise CaptureError(f"the compiled list or library in {folder.name} is missing or damaged")
    try:
        document = parse_json(read_file(folder / LISTING), folder.name)
        if document["format"] != FORMAT or document["torch"] != torch.__version__:
            raise CaptureError(f"{folder.name} is a list of {document['format']}, torch {document['torch']}")
        own, wide = (_listing(document[key], folder / LIBRARY) for key in ("own", "wide"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CaptureError(f"the compiled list in {folder.name} cannot be read: {what}") from None
    return own, wide


def _listing(text: Mapping[str, Any], library: Path) -> Listing:
    values = tuple(
        ListedTensor(tuple(size), tuple(stride), dtype_of(name), root)
        for (size, stride, name), root in zip(text["values"], text["roots"], strict=True)
    )
    return Listing(values, tuple(_event(each) for each in text["events"]), tuple(text["outputs"]), library)


def _event(text: Mapping[str, Any]) -> ListedCall:
    order = tuple(text["order"]) if "kernel" in text else None
    outs = tuple((position, value) for position, value in text["outs"])
    op = text["kernel"] if "kernel" in text else text["op"]
    given, written = tuple(text["given"]), tuple(text["written"])
    return ListedCall(
        op, text.get("args", ()), text.get("kwargs", {}), given, written, outs, order, tuple(text.get("offsets", ()))
    )
