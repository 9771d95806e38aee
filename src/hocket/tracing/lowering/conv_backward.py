"""`aten.convolution_backward` computes up to three gradients at once. Split by its output mask they are three ops.

The next layer waits for the activation gradient alone, and the update for the weight and bias gradients (TurboDL,
section III). A split kernel can cost more than the joint one (on CPUs oneDNN computes the bias gradient
along with the weight gradient), so the joint op can be kept, and the parts are joined again where that is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hocket.tracing.program import Call, Program, slots_in

PARTS = ("activation", "weight", "bias")
_MASK = 10

# Which of grad_output, input and weight a part's kernel looks at; it is handed all three, for their shapes.
_LOOKS_AT = ((0, 2), (0, 1), (0,))


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
    """SlotTable that a convolution's backward is handed, but whose content none of the gradients it computes needs."""
    if call.func is not torch.ops.aten.convolution_backward.default:
        return frozenset()
    looked_at = {argument for part in call.outs if part is not None for argument in _LOOKS_AT[part]}
    return frozenset(slots_in(call.args)) - {slot for at in looked_at for slot in slots_in(call.args[at])}
