"""Passes over a list of calls, each a plain function: drop dead calls, split joint ops, fold views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hocket.tracing.lowering import conv_backward
from hocket.tracing.lowering.calls import AnnotatedCall
from hocket.tracing.program import Call

__all__ = ["drop_dead", "fold_views", "split_conv_backward"]


def drop_dead(pieces: list[AnnotatedCall], kept: frozenset[int]) -> list[AnnotatedCall]:
    """Leave out what nobody reads, unless it writes what outlives it or draws random numbers."""
    needed = set(kept)
    alive: list[AnnotatedCall] = []
    for piece in reversed(pieces):
        call = piece.call
        if piece.note.writes or piece.note.random or needed.intersection(call.outs.values()):
            needed.update(call.reads)
            outs = {position: slot for position, slot in call.outs.items() if slot in needed}
            alive.append(replace(piece, call=replace(call, outs=outs)))
    return alive[::-1]


def split_conv_backward(
    pieces: list[AnnotatedCall], names: list[str], pays: Callable[[str, str], bool] | None
) -> list[AnnotatedCall]:
    """Take every backward of a convolution apart, but for the parts that do not pay; see `conv_backward`."""
    result: list[AnnotatedCall] = []
    for piece, name in zip(pieces, names, strict=True):
        if not conv_backward.is_joint(piece.call):
            result.append(piece)
            continue
        wanted = [p for p in piece.call.outs if p is not None and p < 2]
        worth = {part: pays is None or pays(name, part) for part in conv_backward.PARTS}
        for part, call in conv_backward.parts(piece.call, worth.__getitem__):
            returns = tuple(r if p in call.outs else None for p, r in enumerate(piece.note.returns))
            share = sum(p in call.outs for p in wanted) / max(1, len(wanted))
            size = piece.flops * share
            result.append(replace(piece, call=call, note=replace(piece.note, returns=returns), flops=size, part=part))
    return result


def _is_view(piece: AnnotatedCall) -> bool:
    """Whether the op only makes new tensors over memory of its one tensor argument, and computes nothing."""
    returns = [root for root in piece.note.returns if root is not None]
    return (
        bool(returns)
        and not piece.note.writes
        and not piece.note.random
        and piece.note.reads.issuperset(returns)
        and len(piece.call.reads) == 1
    )


def _reshaped(piece: AnnotatedCall) -> tuple[int, ...]:
    """The slot whose tensor gets another shape in place (``unsqueeze_``), if there is one."""
    tags = getattr(piece.call.func, "tags", ())
    return piece.call.reads[:1] if torch.Tag.inplace_view in tags else ()


def fold_views(pieces: list[AnnotatedCall], inputs: set[int]) -> tuple[list[AnnotatedCall], list[Call]]:
    """Views go where their argument is made: into that op, or into the prologue for views of inputs."""
    maker: dict[int, int] = {}
    early = set(inputs)
    prologue: list[Call] = []
    result: list[AnnotatedCall] = []
    for piece in pieces:
        slots = piece.call.outs.values()
        if _is_view(piece):
            (argument,) = piece.call.reads
            if argument in early:
                prologue.append(piece.call)
                early.update(slots)
                continue
            at = maker[argument]
            result[at] = replace(result[at], views=(*result[at].views, piece.call))
        else:
            at = len(result)
            result.append(piece)
            for changed in _reshaped(piece):
                # Views that are taken from now on see the new shape, so they come after this op.
                maker[changed] = at
                early.discard(changed)
        maker.update(dict.fromkeys(slots, at))
    return result, prologue
