"""Passes over a list of calls, each a plain function: drop dead calls, split joint ops and updates, fold views."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hocket.tracing.lowering.calls import AnnotatedCall
from hocket.tracing.program import Call, Program, Slot, map_leaves, slots_in
from hocket.tracing.raising import is_foreign
from hocket.tracing.recording.exits import READ, WRITE

# Updates of many parameters by one call, each by itself.
_FUSED_UPDATES = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
# Size of parameters for a separate call: some 10 us of work.
_MIN_UPDATE_BYTES = 128 << 10

# The gradients that `aten.convolution_backward` computes at once, by its output mask. Split they are three ops.
PARTS = ("activation", "weight", "bias")
_MASK = 10

# Which of grad_output, input and weight a part's kernel looks at; it is handed all three, for their shapes.
_LOOKS_AT = ((0, 2), (0, 1), (0,))


def drop_dead(pieces: list[AnnotatedCall], kept: frozenset[int]) -> list[AnnotatedCall]:
    """Remove unread ops, unless they write memory that outlives them, draw random numbers or may raise."""
    needed = set(kept)
    alive: list[AnnotatedCall] = []
    for piece in reversed(pieces):
        call = piece.call
        has_effects = piece.note.writes or piece.note.random or piece.may_raise or is_foreign(call.func)
        if has_effects or needed.intersection(call.outs.values()):
            needed.update(call.reads)
            outs = {position: slot for position, slot in call.outs.items() if slot in needed}
            alive.append(replace(piece, call=replace(call, outs=outs)))
    return alive[::-1]


def drop_random_states(pieces: list[AnnotatedCall]) -> list[AnnotatedCall]:
    """Remove writes of the random state from a step that draws nothing, and let unread reads of it be removed."""
    if any(piece.note.random and piece.call.func not in (READ, WRITE) for piece in pieces):
        return pieces
    left = [piece for piece in pieces if piece.call.func is not WRITE]
    return [replace(p, note=replace(p.note, random=False)) if p.call.func is READ else p for p in left]


def split_conv_backward(
    pieces: list[AnnotatedCall], names: list[str], pays: Callable[[str, str], bool] | None
) -> list[AnnotatedCall]:
    """Split every backward of a convolution, except for parts that do not pay.

    The next layer waits for the activation gradient alone, and the update for the weight and bias gradients (TurboDL,
    section III). A split kernel can cost more than the joint one (on CPUs oneDNN computes the bias gradient along with
    the weight gradient), so the joint op can be kept, and the parts are joined again where that is faster.
    """
    result: list[AnnotatedCall] = []
    for piece, name in zip(pieces, names, strict=True):
        if not is_joint(piece.call):
            result.append(piece)
            continue
        wanted = [p for p in piece.call.outs if p is not None and p < 2]
        worth = {part: pays is None or pays(name, part) for part in PARTS}
        for part, call in parts(piece.call, worth.__getitem__):
            returns = tuple(r if p in call.outs else None for p, r in enumerate(piece.note.returns))
            share = sum(p in call.outs for p in wanted) / max(1, len(wanted))
            size = piece.flops * share
            result.append(replace(piece, call=call, note=replace(piece.note, returns=returns), flops=size, part=part))
    return result


def is_joint(call: Call) -> bool:
    """Return True if `call` is a convolution's backward that computes more than one gradient."""
    return call.func is torch.ops.aten.convolution_backward.default and len(call.outs) > 1


def has_joint_backward(program: Program) -> bool:
    """Return True if an op of the program can be split."""
    return any(is_joint(call) for action in program.actions for call in action.calls)


def parts(call: Call, pays: Callable[[str], bool] = lambda part: True) -> Iterator[tuple[str, Call]]:
    """Split `call` into ops, each with its name.

    `pays(part)` returns True if the part (one of `PARTS`) is worth an op of its own. The others stay together in one
    op with the name of its first part.
    """
    together = [position for position in call.outs if position is not None and not pays(PARTS[position])]
    groups = [[position] for position in call.outs if position is not None and position not in together]
    if together:
        groups.append(together)
    for group in sorted(groups):
        mask = [position in group for position in range(3)]
        args = (*call.args[:_MASK], mask)
        yield PARTS[group[0]], Call(call.func, args, call.kwargs, {p: call.outs[p] for p in group})


def unread(call: Call) -> frozenset[int]:
    """Slots that a convolution's backward is handed, but whose content none of the gradients it computes needs."""
    if call.func is not torch.ops.aten.convolution_backward.default:
        return frozenset()
    looked_at = {argument for part in call.outs if part is not None for argument in _LOOKS_AT[part]}
    return frozenset(slots_in(call.args)) - {slot for at in looked_at for slot in slots_in(call.args[at])}


def split_updates(
    pieces: list[AnnotatedCall], size_bytes: Sequence[float], roots: Sequence[int | None]
) -> list[AnnotatedCall]:
    """Take updates by one call for all parameters apart, layer by layer.

    A layer's update then waits for the gradients of that layer alone: it reads them while they are in a cache, and its
    traffic with memory goes on beside the products of another lane.
    """
    result: list[AnnotatedCall] = []
    for piece in pieces:
        groups = list(_update_groups(piece, size_bytes))
        for group in groups:
            args = tuple(
                tuple(each[n] for n in group) if isinstance(each, tuple) and each else each for each in piece.call.args
            )
            call = replace(piece.call, args=args)
            own = {roots[slot] for slot in call.reads}
            note = replace(piece.note, reads=piece.note.reads & own, writes=piece.note.writes & own)
            result.append(replace(piece, call=call, note=note, flops=piece.flops / len(groups)))
        if not groups:
            result.append(piece)
    return result


def _update_groups(piece: AnnotatedCall, size_bytes: Sequence[float]) -> Iterator[list[int]]:
    """Group the numbers of parameters so that one call updates each group. Empty if the call stays as it is."""
    lists = [each for each in piece.call.args if isinstance(each, tuple) and each]
    if piece.kernel not in _FUSED_UPDATES or len({len(each) for each in lists}) != 1:
        return
    group: list[int] = []
    for number, parameter in enumerate(lists[0]):
        is_full = sum(size_bytes[lists[0][n].index] for n in group) >= _MIN_UPDATE_BYTES
        if is_full and size_bytes[parameter.index] >= _MIN_UPDATE_BYTES / 16:  # else it is a bias of the same layer
            yield group
            group = []
        group.append(number)
    yield group


def _is_view(piece: AnnotatedCall) -> bool:
    """Return True if the op only makes views of its one tensor argument."""
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


def share_views(pieces: list[AnnotatedCall], kept: frozenset[int]) -> list[AnnotatedCall]:
    """Take each view once: a cell that is called at 64 times of a sequence transposes its weight 128 times.

    Views that are handed back stay, and so do those of tensors that get another shape in place.
    """
    fixed = kept.union(*map(_reshaped, pieces))
    same: dict[int, int] = {}
    taken: dict[Any, dict[int | None, int]] = {}
    result: list[AnnotatedCall] = []
    for piece in pieces:
        if not same.keys().isdisjoint(piece.call.reads):
            piece = replace(piece, call=_renamed(piece.call, same))
        call = piece.call
        if _is_view(piece) and not is_foreign(call.func) and fixed.isdisjoint((*call.reads, *call.outs.values())):
            key = (call.func, call.args, tuple(sorted(call.kwargs.items())))
            first = taken.setdefault(key, call.outs)
            if first is not call.outs and call.outs.keys() <= first.keys():
                same.update({slot: first[position] for position, slot in call.outs.items()})
                continue
        result.append(piece)
    return result


def _renamed(call: Call, same: Mapping[int, int]) -> Call:
    def renamed(value: Any) -> Any:
        return Slot(same.get(value.index, value.index)) if isinstance(value, Slot) else value

    return replace(call, args=map_leaves(call.args, renamed), kwargs=map_leaves(call.kwargs, renamed))


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
