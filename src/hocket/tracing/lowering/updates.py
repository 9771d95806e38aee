"""Torch's fused kernels for updates, which take all parameters of a group, as several ops on some of them each.

As one op the update waits for the last gradient, and one lane makes all of it. Parameters are independent, and each
kernel computes them one after another, so any division gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from hocket.tracing.lowering.calls import AnnotatedCall
from hocket.tracing.program import slots_in
from hocket.tracing.recording.recorder import written_arguments

__all__ = ["is_update", "split_updates"]

# Torch's kernels that make the update of a group of parameters.
_UPDATES = frozenset(f"aten::_fused_{name}_" for name in ("sgd", "adam", "adamw", "adagrad"))
# An op on less is not worth its call.
MIN_CHUNK_BYTES = 2**18


def is_update(func: Any) -> bool:
    """Whether an op is such a kernel, and writes in place."""
    return getattr(getattr(func, "_schema", None), "name", "") in _UPDATES


def split_updates(
    pieces: list[AnnotatedCall], size_bytes: Sequence[float], roots: Sequence[int | None], chunks: int
) -> list[AnnotatedCall]:
    """Put up to `chunks` ops of about as many bytes in place of each fused update.

    Args:
        pieces: the calls of a step.
        size_bytes: of each slot.
        roots: by slot the memory.
        chunks: how many at most.
    """
    result: list[AnnotatedCall] = []
    for piece in pieces:
        result += _chunks(piece, size_bytes, roots, chunks) if is_update(piece.call.func) else [piece]
    return result


def _chunks(
    piece: AnnotatedCall, size_bytes: Sequence[float], roots: Sequence[int | None], chunks: int
) -> list[AnnotatedCall]:
    call = piece.call
    sizes = [size_bytes[slot.index] for slot in call.args[0]]
    chunks = min(chunks, len(sizes), int(sum(sizes) // MIN_CHUNK_BYTES))
    if (
        chunks < 2
        or call.outs
        or any(isinstance(each, tuple) and len(each) not in (0, len(sizes)) for each in call.args)
    ):
        return [piece]
    share = sum(sizes) / chunks
    # The chunk of a parameter is told by where its middle lies.
    of = [min(chunks - 1, int((end - size / 2) // share)) for end, size in zip(accumulate(sizes), sizes, strict=True)]
    found: list[AnnotatedCall] = []
    for number in sorted(set(of)):
        args = tuple(
            tuple(one for one, chunk in zip(each, of, strict=True) if chunk == number)
            if isinstance(each, tuple) and each
            else each
            for each in call.args
        )
        own = replace(call, args=args)
        reads, writes = (
            frozenset(root for slot in slots_in(values) if (root := roots[slot]) is not None)
            for values in ((args, call.kwargs), tuple(written_arguments(call.func, args, call.kwargs)))
        )
        note = replace(piece.note, reads=reads, writes=writes)
        flops = piece.flops * sum(size for size, chunk in zip(sizes, of, strict=True) if chunk == number) / sum(sizes)
        found.append(replace(piece, call=own, note=note, flops=flops))
    return found
