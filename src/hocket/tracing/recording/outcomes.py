"""Branches on what a step computes, followed as assertions: ``if not torch.isfinite(loss): return``.

Programs check their loss, their outputs and the norm of their gradients, and `torch.distributions` checks all that it
is given. Such a check nearly always turns out as it did before. Its outcome in the recorded step becomes an op of the
graph that raises in a step with the other outcome, which is then made again by eager::

    recorded:  loss -> isfinite -> _assert_async -> (all that is written or drawn later waits for it)
    later:     the outcome is another one: put back what was written and drawn before, call the user's own step

An op that may raise is such a check, too, where the user's step may catch what it raises. So is one behind what a
planned step does after its ops: calls of sinks, and numbers that are late.

For a check of a device's tensor the host waits, as it does in the user's own step.

What a step writes and draws before the check has to be small enough to be kept in each step (`MAX_KEPT_BYTES`): the
random state, buffers such as those of a BatchNorm, gradients that it adds to, and what an update has written. A check
after the update of a larger model stays what it was, a reason not to capture the step.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from hocket.pystate.handlers import may_catch
from hocket.pystate.origins import user_line
from hocket.tracing.raising import OTHER_BRANCH
from hocket.tracing.recording.op_recorder import OpRecorder
from hocket.tracing.saved_state import RandomStates
from hocket.tracing.scalars.late import LateTape
from hocket.tracing.scalars.live import Late, Live, plain_of
from hocket.tracing.scalars.tape import TapeRef
from hocket.tracing.sources import BatchLeaf, Gradient
from hocket.tracing.standing import value_now

# The limit for the values that are kept in each step before a check.
MAX_KEPT_BYTES = 2**20
# Whole numbers up to here are floats.
_MAX_WHOLE = 2**53
_COMPARISONS = {getattr(operator, name): getattr(torch, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_PREDICATES = {math.isfinite: torch.isfinite, math.isnan: torch.isnan, math.isinf: torch.isinf, bool: torch.Tensor.bool}


def _chosen(is_better: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`max` or `min` of tensors of no dimensions: as Python's, the first of those that no other one is better than."""
    return lambda *values: functools.reduce(lambda a, b: torch.where(is_better(b, a), b, a), values)


def _root(number: torch.Tensor) -> torch.Tensor:
    """`math.sqrt`, as whose result that of `torch.sqrt` is not rounded, and that of complex numbers is."""
    return number.to(torch.complex128).sqrt().real


# Functions of tensors in float64 that have the bits of Python's.
_ARITHMETIC: dict[Any, Callable[..., torch.Tensor]] = {
    **{getattr(operator, name): getattr(torch, name) for name in ("add", "sub", "mul", "neg", "abs", "pow")},
    operator.truediv: torch.true_divide,
    operator.pos: torch.positive,
    float: torch.positive,
    max: _chosen(torch.gt),
    min: _chosen(torch.lt),
    math.sqrt: _root,
}


class Outcomes:
    """Follows the branches of one recorded step.

    Args:
        ops: those recorded so far.
        late: numbers computed of what they compute.
        gradients: those that there were before the step.
        waits: asks whether the step has done what a planned one does after its ops.
    """

    def __init__(
        self,
        ops: OpRecorder,
        late: LateTape,
        gradients: Iterable[tuple[Gradient, torch.Tensor]],
        waits: Callable[[], bool],
    ) -> None:
        self.ops = ops
        self.late = late
        self.waits = waits
        self.undo: Undo | None = None
        self._gradients = tuple(gradients)
        self._num_seen = 0
        self._draws = False
        self._written: dict[Any, int] = {}  # source -> bytes
        self._replaced: dict[Gradient, None] = {}
        self._outside: FrameType | None = None

    def follow(self, outside: FrameType) -> None:
        """Let the recorders ask about a step that is called in this frame."""
        self._outside = outside
        self.ops.may_undo = self.may_undo
        self.ops.outcome_of, self.late.asked, self.late.operand = self.of, self.asked, self.operand

    def of(self, tensor: torch.Tensor) -> bool | None:
        """The outcome of ``bool(tensor)``, or None where it cannot be followed."""
        if tensor.numel() != 1 or tensor.is_complex() or isinstance(tensor, FakeTensor) or not self._can_be_undone():
            return None
        with _disable_current_modes():
            outcome = bool(tensor)
        self._assert(tensor, outcome)
        return outcome

    def asked(self, function: Callable[..., Any], operands: tuple[Any, ...], *, early: bool = False) -> bool | None:
        """The outcome of a comparison or a predicate of late numbers, or None where it cannot be followed.

        With `early` nor behind a write into a parameter, which would have to be kept in each step.
        """
        compute = _COMPARISONS.get(function) or _PREDICATES.get(function)
        if compute is None or not all(self._is_followed(operand) for operand in operands):
            return None
        outcome = bool(function(*map(plain_of, operands)))
        if not self._can_be_undone() or (early and any(each.kind == "parameter" for each in self._written)):
            return None
        with torch.no_grad():
            found = [self._as_tensor(operand) for operand in operands]
            if any(each is None for each in found):
                return None
            # Their order is of no concern to torch, which takes no number first.
            if not isinstance(found[0], torch.Tensor):
                found[0] = _full(found[0])
            self._assert(compute(*found), outcome)
        return outcome

    def operand(self, number: Late) -> torch.Tensor | None:
        """A tensor in float64 of no dimensions that computes a late number as Python does, or None."""
        with torch.no_grad():
            found: torch.Tensor | None = self._as_tensor(number)
        return found

    def _assert(self, tensor: torch.Tensor, outcome: bool) -> None:
        with torch.no_grad():
            holds = tensor.detach() if outcome else torch.logical_not(tensor.detach())
            torch.ops.aten._assert_async.msg(_on_host(holds), f"{OTHER_BRANCH} at {user_line()}")
        self._keep()

    def may_undo(self) -> bool:
        """Return whether the step is undone if the op raises that runs next."""
        catches = self.catches()
        if not (catches or self.waits()):
            return False
        if not self._can_be_undone():
            if catches:
                self.ops.reasons.add("catches an error")
            return False
        self._keep()
        return True

    def may_branch(self, first: bool = False) -> bool:
        """Return True if the step can be undone where the op that runs next finds that it takes another branch.

        With `first` the step may not have written or drawn anything before.
        """
        if not self._can_be_undone() or (first and (self._draws or self._written)):
            return False
        self._keep()
        return True

    def catches(self) -> bool:
        """Return whether the user's code may catch what is raised now."""
        return may_catch(sys._getframe(1), self._outside)

    def _keep(self) -> None:
        """All that was written and drawn so far is kept in each step."""
        self._replaced |= dict.fromkeys(each for each, value in self._gradients if each.get() is value)
        if self._draws or self._written or self._replaced:
            generators = self.ops.generators if self._draws else None
            self.undo = Undo(tuple(self._written), generators, tuple(self._replaced))

    def _can_be_undone(self) -> bool:
        """True if all that the step has written and drawn so far can be kept in each step."""
        for node in self.ops.order[self._num_seen :]:
            note = self.ops.notes[node]
            self._draws = self._draws or note.random
            for root in note.writes & self.ops.outside.keys():
                self._written |= dict.fromkeys(self._sources(root), self.ops.outside[root].nbytes)
        self._num_seen = len(self.ops.order)
        are_kept = not any(isinstance(source, BatchLeaf) for source in self._written)
        return are_kept and sum(self._written.values()) <= MAX_KEPT_BYTES

    def _sources(self, root: int) -> list[Any]:
        return [source for node, source in self.ops.sources.items() if self.ops.roots[node] == root]

    def _is_followed(self, operand: Any) -> bool:
        if isinstance(operand, Late):
            return True
        if isinstance(operand, Live) and type(operand.plain) in (int, float):
            return type(operand.plain) is float or bool(operand.tape.guard(_is_exact, operand))
        return type(operand) in (float, bool) or (type(operand) is int and _is_exact(operand))

    def _as_tensor(self, operand: Any) -> Any:
        """A tensor in float64 that computes a late number as Python does, or a plain number as it is."""
        if isinstance(operand, Late) and operand.entry is not None:
            return self._computed(operand.entry)
        if not isinstance(operand, Late):
            return operand
        if isinstance(operand.tensor, FakeTensor):
            return None
        return self._exact(operand.tensor.detach().to(torch.float64).reshape(()), isinstance(operand, int))

    def _computed(self, entry: TapeRef) -> Any:
        function, operands = self.late.entries[entry.index]
        if function is None:
            number = self.late.inputs[operands]
            return self._as_tensor(number) if self._is_followed(number) else None
        compute = _ARITHMETIC.get(function)
        found = [self._computed(each) if isinstance(each, TapeRef) else each for each in operands]
        if compute is None or any(each is None for each in found):
            return None
        if any(type(each) is int and not _is_exact(each) for each in found):
            return None
        found = [each if isinstance(each, torch.Tensor) else _full(each) for each in found]
        return self._exact(compute(*found), self._is_whole(entry))

    def _is_whole(self, operand: Any) -> bool:
        if not isinstance(operand, TapeRef):
            return isinstance(operand, int)
        function, operands = self.late.entries[operand.index]
        if function is None:
            return isinstance(self.late.inputs[operands], int)
        return function not in (operator.truediv, float, math.sqrt) and all(map(self._is_whole, operands))

    def _exact(self, tensor: torch.Tensor, is_whole: bool) -> torch.Tensor | None:
        """The tensor. A whole number has to be one that a float holds, in later steps as well."""
        if is_whole:
            holds = tensor.abs() < _MAX_WHOLE
            with _disable_current_modes():
                is_exact = bool(holds)
            if not is_exact or not self._can_be_undone():
                return None
            self._assert(holds, True)
        return tensor


def _is_exact(number: int) -> bool:
    return abs(number) <= _MAX_WHOLE


def _full(number: Any) -> torch.Tensor:
    value: Any = number if isinstance(number, Live) else float(number)
    return torch.full((), value, dtype=torch.float64)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy for which the host waits: an assertion on a device would be its end."""
    return tensor.cpu()


@dataclass(frozen=True)
class Undo:
    """The places and draws to keep in each step (see `hocket.tracing.recording.outcomes`)."""

    written: tuple[Any, ...]  # places of tensors that are written before the last branch
    # that numbers may be drawn from before it, besides torch's default one. None where no numbers are.
    generators: tuple[torch.Generator, ...] | None
    # those exchanged for others after the first branch. A planned step drops them when it begins.
    gradients: tuple[Gradient, ...]

    def keep(self) -> Callable[[], None]:
        """Keep the content of all of it now. Return a function that puts it back."""
        tensors = [value_now(source) for source in self.written]
        contents = [(tensor, tensor.detach().clone()) for tensor in tensors if isinstance(tensor, torch.Tensor)]
        random = None if self.generators is None else RandomStates(self.generators)
        gradients = [(gradient, gradient.get()) for gradient in self.gradients]

        def put_back() -> None:
            with torch.no_grad():
                for tensor, content in contents:
                    tensor.copy_(content)
            if random is not None:
                random.restore()
            for gradient, value in gradients:
                gradient.set(value)

        return put_back
