"""Batch norm with its neighbours as one op, where images have their channels last (see ``native/norms.cpp``).

    forward    norm [-> add] [-> relu]           ->  hocket::norm_forward
    backward   [add ->] threshold -> norm        ->  hocket::norm_backward

Torch makes a pass over memory for each of these ops, and its backward is slow where the number of channels is no
multiple of 16. The ops round otherwise than torch's, so only forms that need not be bitwise have them. A neighbour is
taken in where nothing else sees what lies between: no other op reads or writes that memory, and nothing that the norm
reads is written in the meantime.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hocket.tracing.lowering.calls import AnnotatedCall, StepCalls
from hocket.tracing.program import Call, Slot

_aten = torch.ops.aten
_DTYPES = (torch.float32, torch.bfloat16)


def fuse_norms(step: StepCalls) -> list[AnnotatedCall]:
    """Put the fused ops in place of batch norms over dense channels-last images, and of their neighbours."""
    known = _Fusing(step.pieces, step.values, step.roots, step.kept)
    for position, piece in enumerate(step.pieces):
        if piece.call.func is _aten.native_batch_norm.default:
            known.fuse_forward(position)
        elif piece.call.func is _aten.native_batch_norm_backward.default:
            known.fuse_backward(position)
    return [known.fused.get(n, piece) for n, piece in enumerate(step.pieces) if n in known.fused or n not in known.gone]


@dataclass
class _Fusing(StepCalls):
    """The calls of a step, and what is fused so far."""

    fused: dict[int, AnnotatedCall] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    @cached_property
    def maker(self) -> dict[int, int]:
        """The position of the call that makes each slot."""
        return {slot: position for position, piece in enumerate(self.pieces) for slot in piece.call.outs.values()}

    def fuse_forward(self, at: int) -> None:
        call = self.pieces[at].call
        x, weight, bias, mean, var, training, momentum, eps = call.args
        if training is not True or not self.can_run(x, weight, (bias, mean, var)) or 0 not in call.outs:
            return
        out, place, added, relu = call.outs[0], at, None, False
        follower = self.only_follower(out, at)
        if follower is not None and (other := self.added_to(follower, out)) is not None:
            own = [slot.index for slot in (x, weight, bias, mean, var)]
            own += [slot for position, slot in call.outs.items() if position]
            if not self.touched(own, at, follower, writes_only=own[:3]):
                self.gone.update((at, follower))
                out, place, added = self.result(follower, out), follower, other
                follower = self.only_follower(out, place)
        if follower is not None and self.is_relu(follower, out):
            self.gone.add(follower)
            out, relu = self.result(follower, out), True
        outs = {**call.outs, 0: out}
        args = (x, weight, bias, mean, var, momentum, eps, relu, added)
        fused, piece = Call(torch.ops.hocket.norm_forward.default, args, {}, outs), self.pieces[at]
        self.fused[place] = piece.made_by(fused, self.roots, piece.note.writes)

    def fuse_backward(self, at: int) -> None:
        call = self.pieces[at].call
        gradient, x, weight, _, _, mean, invstd, training, _, _ = call.args
        if training is not True or not self.can_run(x, weight, (mean, invstd)):
            return
        if not all(isinstance(slot, Slot) for slot in (gradient, x)) or not self.like(gradient, x):
            return
        place, second, result, outs = at, None, None, dict(call.outs)
        made = self.maker.get(gradient.index, -1)
        own = [slot.index for slot in (x, weight, mean, invstd)]
        if made >= 0 and self.is_threshold(made) and not self.changed([*own, gradient.index], made, at):
            others = [user for user in self.users(gradient.index, made) if user != at]
            early = all(self.maker.get(slot, -1) < made for slot in own)
            if early and made not in self.gone:
                self.gone.update((made, at))
                place = made
                masked, result, _ = self.pieces[made].call.args
                if others or gradient.index in self.kept:
                    outs[3] = gradient.index
                gradient = masked
                gradient, second = self.summands(gradient, place)
        args = (gradient, second, result, x, weight, mean, invstd, 3 in outs)
        fused = Call(torch.ops.hocket.norm_backward.default, args, {}, outs)
        self.fused[place] = self.pieces[at].made_by(fused, self.roots)

    def summands(self, gradient: Slot, at: int) -> tuple[Slot, Slot | None]:
        """The two that a gradient is the sum of, if only the op at `at` needs the sum."""
        made = self.maker.get(gradient.index, -1)
        if made < 0 or made in self.gone or self.users(gradient.index, made) != [at] or gradient.index in self.kept:
            return gradient, None
        call = self.pieces[made].call
        if not self.is_sum(call) or self.changed([slot.index for slot in call.args], made, at):
            return gradient, None
        self.gone.add(made)
        return call.args

    def can_run(self, x: Any, weight: Any, others: Iterable[Any]) -> bool:
        """Return True if the kernels support these: a channels-last image, and float32 for each channel."""
        vectors = (weight, *others)
        if not all(isinstance(slot, Slot) for slot in (x, *vectors)):
            return False
        image = self.values.get(x.index)
        if image is None or image.device.type != "cpu" or image.dtype not in _DTYPES or image.dim() != 4:
            return False
        dense = image.is_contiguous(memory_format=torch.channels_last)
        own = (self.values.get(slot.index) for slot in vectors)
        return dense and all(v is not None and v.dtype == torch.float32 and v.is_contiguous() for v in own)

    def like(self, first: Slot, second: Slot) -> bool:
        a, b = self.values.get(first.index), self.values.get(second.index)
        return a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype

    def users(self, slot: int, after: int) -> list[int]:
        """Return the positions of later calls that use the memory of a slot."""
        root = self.roots[slot]
        return [position for position in self.touching.get(root, ()) if position > after] if root is not None else [-1]

    def only_follower(self, slot: int, at: int) -> int | None:
        """The op that touches this value next, if what it makes of it is all that anybody sees."""
        users = self.users(slot, at)
        if not users or users[0] in self.gone or users[0] < 0:
            return None
        in_place = self.roots[slot] in self.pieces[users[0]].note.writes
        return users[0] if in_place or (len(users) == 1 and slot not in self.kept) else None

    def changed(self, slots: Iterable[int], first: int, last: int) -> bool:
        """Return True if an op between these two writes one of these slots."""
        roots = {self.roots[slot] for slot in slots}
        return any(roots & self.pieces[position].note.writes for position in range(first + 1, last))

    def touched(self, slots: Sequence[int], first: int, last: int, writes_only: Sequence[int]) -> bool:
        """Return True if an op between these two uses one of these slots. For some slots only writes count."""
        others = {self.roots[slot] for slot in slots if slot not in writes_only}
        between = (self.pieces[position].note for position in range(first + 1, last))
        return self.changed(slots, first, last) or any(others & (note.reads | note.writes) for note in between)

    def result(self, at: int, slot: int) -> int:
        """The slot of what an op makes of `slot`: its own, or the same where it writes in place."""
        return self.pieces[at].call.outs.get(None, slot)

    def is_relu(self, at: int, slot: int) -> bool:
        call = self.pieces[at].call
        return call.func in (_aten.relu.default, _aten.relu_.default) and call.args == (Slot(slot),)

    def is_threshold(self, at: int) -> bool:
        call = self.pieces[at].call
        if call.func is not _aten.threshold_backward.default or call.args[2] != 0 or len(call.args) != 3:
            return False
        return all(isinstance(each, Slot) for each in call.args[:2]) and self.like(call.args[0], call.args[1])

    def is_sum(self, call: Call) -> bool:
        """Return True if the call adds two values of one shape and dtype."""
        if call.func not in (_aten.add.Tensor, _aten.add_.Tensor) or call.kwargs or len(call.args) != 2:
            return False
        return all(isinstance(each, Slot) for each in call.args) and self.like(*call.args)

    def added_to(self, at: int, slot: int) -> Slot | None:
        """Return the other operand if the op at this position adds it to the value, and neither has further users."""
        call = self.pieces[at].call
        if not self.is_sum(call) or [each.index for each in call.args].count(slot) != 1:
            return None
        first, second = call.args
        if call.func is _aten.add_.Tensor and first.index != slot:
            return None  # the sum is in the other's memory
        return second if first.index == slot else first
